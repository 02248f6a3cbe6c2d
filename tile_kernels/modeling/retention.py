"""`Retention`: a whole retention layer, in chunks for training and token by token for decoding.

    q_proj, k_proj, v_proj, g_proj -> rotary embedding of q and k -> retention -> RMS norm of every head
    -> multiplied by silu(g) -> o_proj

Rotary angles are those of Llama.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tile_kernels.core import check
from tile_kernels.linear_attention import chunk_retention, fused_recurrent_simple_gla, gated_norm
from tile_kernels.linear_attention.chunk_retention import retention_gates
from tile_kernels.transform import rotary_embedding

#: Calls with a state and at most so many tokens use the recurrent form.
FEW_TOKENS = 8


@dataclass
class RetentionState:
    """What a `Retention` layer keeps of the tokens so far."""

    kv: Tensor  # (sequences, heads, dim, value_dim) float32
    lengths: Tensor  # (sequences,) int64: the tokens so far


class Retention(nn.Module):
    """A retention layer from hidden states to hidden states. It is differentiable and may be compiled."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        expand_v: int = 1,
        rope_theta: float = 1e4,
        eps: float = 1e-5,
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer with random weights.

        Args:
            hidden_size: extent of hidden states; hidden_size / num_heads is a multiple of 16 up to 256.
            num_heads: heads; head h decays by 1 - 2^(-5 - h).
            expand_v: extent of the values of a head, in multiples of that of its keys.
            rope_theta: base of the rotary angles.
            eps: added to the mean square of the norm.
            dtype: of the parameters.
            device: where they live.
        """
        super().__init__()
        for name, value in (('hidden_size', hidden_size), ('num_heads', num_heads), ('expand_v', expand_v)):
            check.integer(value, name, least=1)
        check.multiple(hidden_size, num_heads, 'hidden_size')
        self.hidden_size, self.num_heads, self.rope_theta, self.eps = hidden_size, num_heads, rope_theta, eps
        self.head_dim = hidden_size // num_heads
        self.value_dim = self.head_dim * expand_v
        for name, value in (('hidden_size / num_heads', self.head_dim), ('the extent of values', self.value_dim)):
            check.multiple(value, 16, name)
            check.at_most(value, 256, name)
        dtype = check.to_dtype(dtype, 'dtype')
        factory: dict[str, Any] = dict(bias=False, dtype=dtype, device=device)
        self.q_proj = nn.Linear(hidden_size, hidden_size, **factory)
        self.k_proj = nn.Linear(hidden_size, hidden_size, **factory)
        self.v_proj = nn.Linear(hidden_size, hidden_size * expand_v, **factory)
        self.g_proj = nn.Linear(hidden_size, hidden_size * expand_v, **factory)
        self.g_norm = nn.RMSNorm(self.value_dim, eps=eps, dtype=dtype, device=device)
        self.o_proj = nn.Linear(hidden_size * expand_v, hidden_size, **factory)

    def forward(
        self,
        x: Tensor,
        *,
        state: RetentionState | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, RetentionState]:
        """Run the layer.

        Args:
            x: (batch, tokens, hidden_size); batch is 1 with `cu_seqlens`.
            state: of the tokens before, from an earlier call; no gradient flows through it.
            cu_seqlens: (sequences + 1,) int32 or int64: 0, and where every packed sequence ends.
            return_state: also return the state behind the last token, as a call with a state does.

        Returns:
            The same shape as x, or this and the state.
        """
        batch, tokens, _ = check.shape(x, 'x', 'batch tokens hidden_size', hidden_size=self.hidden_size)
        q, k, v, gate = (
            proj(x).unflatten(-1, (self.num_heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        )
        counted = torch.arange(tokens, device=x.device)
        if cu_seqlens is None:
            before = counted.new_zeros(batch) if state is None else state.lengths
            positions, lengths = counted + before.unsqueeze(1), before + tokens
        else:
            own = torch.searchsorted(cu_seqlens, counted.to(cu_seqlens.dtype), right=True) - 1
            own = own.clamp(max=max(cu_seqlens.shape[0] - 2, 0))
            before = counted.new_zeros(cu_seqlens.shape[0] - 1) if state is None else state.lengths
            positions = (counted - cu_seqlens[own] + before[own]).unsqueeze(0)
            lengths = before + cu_seqlens.diff()
        q, k = self._rotate(q, k, positions)
        wanted = return_state or state is not None
        options: dict[str, Any] = dict(output_final_state=wanted, cu_seqlens=cu_seqlens)
        options['initial_state'] = None if state is None else state.kv
        recording = torch.is_grad_enabled() and (x.requires_grad or self.q_proj.weight.requires_grad)
        if state is not None and tokens <= FEW_TOKENS and not recording:
            gates = retention_gates(self.num_heads, x.device)
            o, kv = fused_recurrent_simple_gla(q, k, v, g_gamma=gates, **options)
        else:
            o, kv = chunk_retention(q, k, v, **options)
        rows = (o.reshape(-1, self.value_dim), gate.reshape(-1, self.value_dim))
        y = self.o_proj(
            gated_norm(*rows, self.g_norm.weight, self.eps).view(batch, tokens, self.num_heads * self.value_dim)
        )
        return (y, RetentionState(cast('Tensor', kv).detach(), lengths)) if wanted else y

    def _rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated: every token has its own row of angles."""
        exponent = torch.arange(0, self.head_dim, 2, device=q.device, dtype=torch.float32) / self.head_dim
        angles = positions.reshape(-1, 1).float() * self.rope_theta**-exponent
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        q2, k2 = rotary_embedding(q.flatten(0, -3), table, k.flatten(0, -3))
        return q2.view_as(q), k2.view_as(k)
