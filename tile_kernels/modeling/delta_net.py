"""`GatedDeltaNet` and `KimiDeltaAttention`: whole layers of linear attention with a state of fixed size.

    qkv_proj -> short convolution -> delta rule -> norm times gate -> o_proj

q and k are divided by their norms. The decay is one number for a head (GatedDeltaNet) or for every channel of k
(KimiDeltaAttention, whose gates come from projections of low rank). Long inputs run in chunks, one token by a step that
changes the state in place.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tile_kernels.core import check
from tile_kernels.linear_attention import (
    causal_conv1d,
    causal_conv1d_update,
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    gated_norm,
)


@dataclass
class DeltaState:
    """What a layer remembers of its sequences: tensors on the device, of a size that does not depend on their length.

    Steps of one token change both tensors in place, so they may be captured in a CUDA graph.
    """

    conv: Tensor  #: (sequences, conv_size - 1, channels), the last inputs of the convolution
    recurrent: Tensor  #: (sequences, num_v_heads, head_k_dim, head_v_dim) float32
    rows: Tensor  #: (sequences,) int32, 0, 1, 2, ...

    def reset(self, sequence: int | None = None) -> None:
        """Forget one sequence, or all."""
        own = slice(None) if sequence is None else sequence
        self.conv[own] = 0
        self.recurrent[own] = 0


class _DeltaLayer(nn.Module, ABC):
    """What both layers share; they differ in the gates."""

    #: The gate of the output.
    activation = 'silu'

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None = None,
        head_k_dim: int = 128,
        head_v_dim: int = 128,
        *,
        conv_size: int = 4,
        allow_neg_eigval: bool = False,
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer with random weights.

        Args:
            hidden_size: extent of hidden states.
            num_heads: heads of q and k.
            num_v_heads: heads of v, a multiple of num_heads; as many unless given.
            head_k_dim: extent of a head of q and k, a multiple of 16 up to 256.
            head_v_dim: extent of a head of v, the same.
            conv_size: taps of the short convolution, 2 to 8.
            allow_neg_eigval: factors beta lie in 0...2 instead of 0...1.
            dtype: of the parameters, except A_log and dt_bias, which are float32.
            device: where they live.
        """
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        for name, value in (('hidden_size', hidden_size), ('num_heads', num_heads), ('num_v_heads', num_v_heads)):
            check.integer(value, name, least=1)
        check.multiple(num_v_heads, num_heads, 'num_v_heads')
        for name, value in (('head_k_dim', head_k_dim), ('head_v_dim', head_v_dim)):
            check.integer(value, name, least=16)
            check.multiple(value, 16, name)
            check.at_most(value, 256, name)
        check.integer(conv_size, 'conv_size', least=2)
        check.at_most(conv_size, 8, 'conv_size')
        self.hidden_size, self.num_heads, self.num_v_heads = hidden_size, num_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.conv_size, self.allow_neg_eigval = conv_size, allow_neg_eigval
        self.key_dim, self.value_dim = num_heads * head_k_dim, num_v_heads * head_v_dim
        dtype = check.to_dtype(dtype, 'dtype')
        self.factory: dict[str, Any] = dict(dtype=dtype, device=device)
        channels = 2 * self.key_dim + self.value_dim
        self.qkv_proj = nn.Linear(hidden_size, channels, bias=False, **self.factory)
        self.conv_weight = nn.Parameter(torch.empty(channels, conv_size, **self.factory))
        self.b_proj = nn.Linear(hidden_size, num_v_heads, bias=False, **self.factory)
        self.A_log = nn.Parameter(torch.empty(num_v_heads, dtype=torch.float32, device=device))
        self.dt_bias = nn.Parameter(torch.empty(self._gate_size(), dtype=torch.float32, device=device))
        self.norm_weight = nn.Parameter(torch.ones(head_v_dim, **self.factory))
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False, **self.factory)
        self._make_gates()
        self.reset_parameters()

    @abstractmethod
    def _gate_size(self) -> int:
        """Numbers of `dt_bias`."""

    @abstractmethod
    def _make_gates(self) -> None:
        """Add the projections of decay and output gate."""

    @abstractmethod
    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the decay, and of the gate of the output (rows, head_v_dim)."""

    @abstractmethod
    def _run(self, recurrent: bool, *operands: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The delta rule, in chunks or token by token."""

    def reset_parameters(self) -> None:
        """Rates between 1 and 16, steps between 1e-3 and 1e-1, as in Mamba-2."""
        with torch.no_grad():
            nn.init.uniform_(self.conv_weight, -(self.conv_size**-0.5), self.conv_size**-0.5)
            self.A_log.uniform_(1.0, 16.0).log_()
            steps = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
            self.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is the step

    def new_state(self, sequences: int) -> DeltaState:
        """The state of sequences that have no tokens yet."""
        check.integer(sequences, 'sequences', least=0)
        weight = self.qkv_proj.weight
        shape = (sequences, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        return DeltaState(
            weight.new_zeros(sequences, self.conv_size - 1, weight.shape[0]),
            torch.zeros(shape, dtype=torch.float32, device=weight.device),
            torch.arange(sequences, dtype=torch.int32, device=weight.device),
        )

    def forward(
        self,
        x: Tensor,
        *,
        state: DeltaState | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, DeltaState]:
        """Run the layer.

        Args:
            x: (batch, tokens, hidden_size); batch is 1 with `cu_seqlens`.
            state: of the sequences, from `new_state` or from an earlier call. Without gradients it is changed in place
                and returned; a call that records gradients leaves it and returns a new one. Gradients pass through
                its `recurrent`, not through its `conv`.
            cu_seqlens: (sequences + 1,) int32 or int64: 0, and where every packed sequence ends.
            return_state: also return the state without a given one.

        Returns:
            y like x; with a state, (y, state).
        """
        batch, tokens, _ = check.shape(x, 'x', 'batch tokens hidden_size', hidden_size=self.hidden_size)
        sequences = batch if cu_seqlens is None else check.tensor(cu_seqlens, 'cu_seqlens').shape[0] - 1
        if state is not None and state.recurrent.shape[0] != sequences:
            check.fail('state', f'must have {sequences} sequences', str(state.recurrent.shape[0]))
        records = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters()))
        wanted = state is not None or return_state
        projected = self.qkv_proj(x)
        step = state is not None and tokens == 1 and cu_seqlens is None and not records
        conv, final = None, None
        if step and state is not None:
            mixed = causal_conv1d_update(projected[:, 0], state.conv, self.conv_weight)[:, None]
        else:
            mixed, conv = causal_conv1d(
                projected,
                self.conv_weight,
                initial_state=None if state is None else state.conv,
                output_final_state=wanted,
                cu_seqlens=cu_seqlens,
            )
        q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        q, k = q.unflatten(-1, (self.num_heads, -1)), k.unflatten(-1, (self.num_heads, -1))
        v = v.unflatten(-1, (self.num_v_heads, -1))
        decay, gate = self._gates(x)
        options: dict[str, Any] = dict(
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
        )
        if step and state is not None:
            options |= dict(initial_state=state.recurrent, state_indices=state.rows)
        else:
            options |= dict(initial_state=None if state is None else state.recurrent, cu_seqlens=cu_seqlens)
            options['output_final_state'] = wanted
        o, final = self._run(step, q, k, v, decay, self.b_proj(x), **options)
        y = gated_norm(o.reshape(-1, self.head_v_dim), gate, self.norm_weight, activation=self.activation)
        y = self.o_proj(y.view(batch, tokens, self.value_dim))
        if not wanted:
            return y
        if step and state is not None:
            return y, state
        if conv is None or final is None:
            raise AssertionError('a state was asked for')
        if state is None or records:
            return y, DeltaState(conv, final, torch.arange(sequences, dtype=torch.int32, device=x.device))
        state.conv.copy_(conv)
        state.recurrent.copy_(final)
        return y, state


class GatedDeltaNet(_DeltaLayer):
    """The gated delta rule as a layer from hidden states to hidden states; differentiable."""

    def _gate_size(self) -> int:
        return self.num_v_heads

    def _make_gates(self) -> None:
        self.a_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False, **self.factory)
        self.g_proj = nn.Linear(self.hidden_size, self.value_dim, bias=False, **self.factory)

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a_proj(x), self.g_proj(x).view(-1, self.head_v_dim)

    def _run(self, recurrent: bool, *operands: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        return (fused_recurrent_gated_delta_rule if recurrent else chunk_gated_delta_rule)(*operands, **options)


class KimiDeltaAttention(_DeltaLayer):
    """The delta rule with a decay for every channel, as a layer; gates come from projections of rank head_v_dim."""

    activation = 'sigmoid'

    def _gate_size(self) -> int:
        return self.num_v_heads * self.head_k_dim

    def _make_gates(self) -> None:
        rank, factory = self.head_v_dim, self.factory
        self.f_a_proj = nn.Linear(self.hidden_size, rank, bias=False, **factory)
        self.f_b_proj = nn.Linear(rank, self._gate_size(), bias=False, **factory)
        self.g_a_proj = nn.Linear(self.hidden_size, rank, bias=False, **factory)
        self.g_b_proj = nn.Linear(rank, self.value_dim, bias=True, **factory)

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        decay = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (self.num_v_heads, self.head_k_dim))
        return decay, self.g_b_proj(self.g_a_proj(x)).view(-1, self.head_v_dim)

    def _run(self, recurrent: bool, *operands: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        return (fused_recurrent_kda if recurrent else chunk_kda)(*operands, **options)[:2]
