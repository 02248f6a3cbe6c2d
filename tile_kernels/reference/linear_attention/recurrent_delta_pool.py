"""The delta rule token by token on a pool of states."""

import torch
from torch import Tensor

from tile_kernels.reference.linear_attention.causal_conv1d import sequences_of
from tile_kernels.reference.linear_attention.recurrent_delta import prepare, run_sequence, view_of


def recurrent_delta_pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    state_indices: Tensor,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    form: int = 0,
    normalize: bool = False,
    lower_bound: float = 0.0,
    v_first: bool = False,
    intermediate_states: Tensor | None = None,
) -> Tensor:
    """Every sequence from its state in the pool, where the final one replaces it."""
    prepared = prepare(q, k, g, beta, a_log, dt_bias, form, normalize, lower_bound, v.shape[2])
    snapshots = view_of(intermediate_states, v_first)
    o = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    for (b, own), index in zip(sequences_of(cu_seqlens, v), state_indices.tolist(), strict=True):
        if not 0 <= index < pool.shape[0]:
            continue
        state = (pool[index].transpose(1, 2) if v_first else pool[index]).float()
        qs, ks, decay, factors = (x[b, own] for x in prepared)
        after = None if snapshots is None else snapshots[b, own]
        results, state = run_sequence(qs, ks, v[b, own], decay, factors, state, scale, after)
        o[b, own] = results.to(v.dtype)
        pool[index] = (state.transpose(1, 2) if v_first else state).to(pool.dtype)
    return o
