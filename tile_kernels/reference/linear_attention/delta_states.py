"""The state of the delta rule before every chunk, token by token."""

import torch
from torch import Tensor

from tile_kernels.reference.linear_attention.causal_conv1d import sequences_of
from tile_kernels.reference.linear_attention.recurrent_delta import run_sequence


def delta_states(
    k: Tensor,
    v: Tensor,
    g_sum: Tensor,
    beta: Tensor,
    inverse: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: int = 0,
    v_first: bool = False,
) -> Tensor:
    """Gates are differences of their sums; the inverses are not needed."""
    chunk, heads = inverse.shape[-1], v.shape[2]
    h = torch.zeros(inverse.shape[0], heads, k.shape[3], v.shape[3], dtype=k.dtype, device=k.device)
    wide = k.float().repeat_interleave(heads // k.shape[2], 2)
    factors = beta.float() if form == 0 else form * torch.sigmoid(beta.float())
    for n, (b, own) in enumerate(sequences_of(cu_seqlens, v)):
        state = torch.zeros(h.shape[1:], device=k.device)
        if initial_state is not None:
            state = (initial_state[n].mT if v_first else initial_state[n]).float()
        keys, values, sums, weights = wide[b, own], v[b, own], g_sum[b, own], factors[b, own]
        first = n * -(-v.shape[1] // chunk) if cu_seqlens is None else own.start // chunk + n
        for c in range(-(-keys.shape[0] // chunk)):
            h[first + c] = state.to(h.dtype)
            rows = slice(c * chunk, (c + 1) * chunk)
            gates = torch.diff(sums[rows], dim=0, prepend=torch.zeros_like(sums[:1]))
            decay = (gates if sums.dim() == 3 else gates.unsqueeze(-1)).exp()
            _, state = run_sequence(keys[rows], keys[rows], values[rows], decay, weights[rows], state, 1.0, None)
    return h
