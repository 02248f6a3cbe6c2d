"""Twin of a few tokens of linear attention with a decay."""

import torch
from torch import Tensor

from tile_kernels.reference.linear_attention.chunk_simple_gla import recurrence, run, sequences


def token_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    weight: Tensor | None,
    initial_state: Tensor | None,
    pool: Tensor | None,
    state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    v_first: bool,
    after: Tensor,
) -> None:
    """Write the state after every token; sequences without a state in the pool are skipped."""
    (heads, value_dim), dim = v.shape[2:], q.shape[3]
    wide_q, wide_k = (x.float().repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    for n, (b, start, end) in enumerate(sequences(cu_seqlens, q.shape[0], q.shape[1])):
        slot = n if state_indices is None else int(state_indices[n])
        source = initial_state if pool is None else pool
        if pool is not None and not 0 <= slot < len(pool):
            continue
        state = torch.zeros(heads, dim, value_dim, device=q.device)
        if source is not None:
            state = source[slot].float().mT if v_first else source[slot].float()
        for t in range(start, end):
            rows = (b, slice(t, t + 1))
            gates, weights = (None if x is None else x[rows].float() for x in (g, weight))
            _, state = recurrence(wide_q[rows], wide_k[rows], v[rows].float(), gates, weights, state, 1.0)
            after[b, t] = state.mT if v_first else state


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    weight: Tensor | None = None,
    initial_state: Tensor | None = None,
    pool: Tensor | None = None,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    output_final_state: bool = False,
    state_v_first: bool = False,
    intermediate_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence in float32; states of a pool are gathered before and scattered after it."""
    if intermediate_states is not None:
        token_by_token(
            q, k, v, g, weight, initial_state, pool, state_indices, cu_seqlens, state_v_first, intermediate_states
        )
    if pool is None:
        return run(q, k, v, g, weight, initial_state, cu_seqlens, scale, output_final_state, state_v_first)
    if state_indices is None:
        state_indices = torch.arange(q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1, device=q.device)
    taken = [i for i, slot in enumerate(state_indices.tolist()) if 0 <= slot < len(pool)]
    slots = state_indices.long().clamp(0, max(len(pool) - 1, 0))
    states = pool[slots] if len(pool) else pool.new_zeros(len(slots), *pool.shape[1:])
    o, final = run(q, k, v, g, weight, states, cu_seqlens, scale, True, state_v_first)
    for i, (b, start, end) in enumerate(sequences(cu_seqlens, q.shape[0], q.shape[1])):
        if i in taken:
            pool[slots[i]] = final[i].to(pool.dtype)
        else:
            o[b, start:end] = 0.0
    return o, q.new_empty(0, dtype=torch.float32)
