"""`Mamba2`: a whole Mamba-2 layer, in chunks for training and token by token for decoding.

    in_proj -> z, xBC, dt        xBC -> causal convolution, silu -> x, B, C
    scan of x, dt, A, B, C, D -> multiplied by silu(z) -> RMS norm -> out_proj

Parameters have the names and shapes of mamba_ssm. The norm and the gates around the scan are PyTorch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tile_kernels.core import check
from tile_kernels.linear_attention import (
    causal_conv1d,
    causal_conv1d_update,
    mamba_chunk_scan_combined,
    selective_state_update,
)


@dataclass
class Mamba2State:
    """What a `Mamba2` layer keeps of the tokens so far."""

    conv: Tensor  # (sequences, d_conv - 1, channels): the last inputs of the convolution
    ssm: Tensor  # (sequences, heads, headdim, d_state) float32


class Mamba2(nn.Module):
    """A Mamba-2 layer from hidden states to hidden states. It is differentiable and may be compiled."""

    def __init__(
        self,
        hidden_size: int,
        *,
        d_state: int = 128,
        headdim: int = 64,
        expand: int = 2,
        ngroups: int = 1,
        d_conv: int = 4,
        eps: float = 1e-5,
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer with random weights.

        Args:
            hidden_size: extent of hidden states.
            d_state: extent of B and C, a multiple of 16 up to 256.
            headdim: extent of a head, a multiple of 16 up to 256.
            expand: inner extent, in multiples of hidden_size.
            ngroups: groups of heads that share B and C.
            d_conv: taps of the convolution.
            eps: added to the mean square of the norm.
            dtype: of the parameters; A_log, D and dt_bias are float32.
            device: where they live.
        """
        super().__init__()
        sizes = dict(hidden_size=hidden_size, d_state=d_state, headdim=headdim, expand=expand, ngroups=ngroups)
        for name, value in sizes.items():
            check.integer(value, name, least=1)
        for name, value in (('d_state', d_state), ('headdim', headdim)):
            check.multiple(value, 16, name)
            check.at_most(value, 256, name)
        inner = expand * hidden_size
        check.multiple(inner, headdim, 'expand * hidden_size')
        heads = inner // headdim
        check.multiple(heads, ngroups, 'heads')
        self.hidden_size, self.inner, self.heads, self.headdim = hidden_size, inner, heads, headdim
        self.ngroups, self.d_state, self.eps = ngroups, d_state, eps
        channels = inner + 2 * ngroups * d_state
        dtype = check.to_dtype(dtype, 'dtype')
        factory: dict[str, Any] = dict(dtype=dtype, device=device)
        wide: dict[str, Any] = dict(dtype=torch.float32, device=device)
        self.in_proj = nn.Linear(hidden_size, inner + channels + heads, bias=False, **factory)
        self.conv1d = nn.Conv1d(channels, channels, d_conv, groups=channels, bias=True, **factory)
        steps = torch.exp(torch.rand(heads, **wide) * math.log(100.0) + math.log(1e-3))  # 0.001 to 0.1
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus gives the steps
        self.A_log = nn.Parameter(torch.empty(heads, **wide).uniform_(1.0, 16.0).log())
        self.D = nn.Parameter(torch.ones(heads, **wide))
        self.norm = nn.RMSNorm(inner, eps=eps, **factory)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False, **factory)

    def forward(
        self,
        x: Tensor,
        *,
        state: Mamba2State | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, Mamba2State]:
        """Run the layer.

        Args:
            x: (batch, tokens, hidden_size); batch is 1 with `cu_seqlens`.
            state: of the tokens before, from an earlier call; no gradient flows through it. A call with one token and
                without gradients changes it in place.
            cu_seqlens: (sequences + 1,) int32 or int64: 0, and where every packed sequence ends.
            return_state: also return the state behind the last token, as a call with a state does.

        Returns:
            The same shape as x, or this and the state.
        """
        check.shape(x, 'x', 'batch tokens hidden_size', hidden_size=self.hidden_size)
        gathered = self.in_proj(x)
        z, xbc, dt = gathered.split([self.inner, self.conv1d.in_channels, self.heads], dim=-1)
        if gathered.shape[-1] % 8:
            xbc = xbc.contiguous()
        recording = torch.is_grad_enabled() and (x.requires_grad or self.in_proj.weight.requires_grad)
        if state is not None and x.shape[1] == 1 and cu_seqlens is None and not recording:
            return self._finish(self._step(xbc, dt, state), z), state
        wanted = return_state or state is not None
        y, conv = causal_conv1d(
            xbc,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            initial_state=None if state is None else state.conv,
            output_final_state=wanted,
            cu_seqlens=cu_seqlens,
        )
        values, B, C = self._parts(y)
        scanned = mamba_chunk_scan_combined(
            values,
            dt,
            -self.A_log.float().exp(),
            B,
            C,
            D=self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            initial_states=None if state is None else state.ssm,
            cu_seqlens=cu_seqlens,
            return_final_states=wanted,
        )
        if not wanted:
            return self._finish(cast('Tensor', scanned), z)
        return self._finish(scanned[0], z), Mamba2State(cast('Tensor', conv), scanned[1].detach())

    def _parts(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x, B and C by heads and groups."""
        values, B, C = y.split([self.inner, *[self.ngroups * self.d_state] * 2], dim=-1)
        groups = (self.ngroups, self.d_state)
        return values.unflatten(-1, (self.heads, self.headdim)), B.unflatten(-1, groups), C.unflatten(-1, groups)

    def _step(self, xbc: Tensor, dt: Tensor, state: Mamba2State) -> Tensor:
        """One token; the state changes in place."""
        weight = self.conv1d.weight.squeeze(1)
        y = causal_conv1d_update(xbc[:, 0].contiguous(), state.conv, weight, self.conv1d.bias)
        values, B, C = self._parts(y)
        A = -self.A_log.float().exp()
        o = selective_state_update(state.ssm, values, dt[:, 0], A, B, C, self.D, None, self.dt_bias, True)
        return o.unsqueeze(1)

    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        """Gate, norm and last projection."""
        gated = y.flatten(-2).float() * F.silu(z.float())
        return self.out_proj(self.norm(gated.to(z.dtype)))
