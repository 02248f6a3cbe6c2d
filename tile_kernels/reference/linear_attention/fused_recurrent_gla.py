"""Twin of a few tokens of linear attention with a decay."""

import torch
from torch import Tensor

from tile_kernels.reference.linear_attention.chunk_simple_gla import run, sequences


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
) -> tuple[Tensor, Tensor]:
    """The recurrence in float32; states of a pool are gathered before and scattered after it."""
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
