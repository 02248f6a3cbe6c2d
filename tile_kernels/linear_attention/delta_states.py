"""The state of the delta rule before every chunk, from what `delta_rule` saves for its gradient.

The kernel is the one with which the gradient computes these states. It runs once more over the chunks, so a caller who
does not ask for states pays nothing. See `delta_rule` for the recurrence.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.linear_attention._checks import check_vectors
from tile_kernels.linear_attention.delta_rule import check_delta, count_chunks, make_bwd
from tile_kernels.linear_attention.delta_rule_kernels import delta_states_kernel
from tile_kernels.linear_attention.delta_rule_sm90_kernels import WHOLE


@op(outputs='h')
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
    """The state before every chunk.

    Args:
        k: as in `delta_rule`, as all that is not said here.
        v: as there.
        g_sum: third result of `delta_rule`.
        beta: as there.
        inverse: fourth result.
        initial_state: as there.
        cu_seqlens: as there.
        form: as there.
        v_first: the layout of `initial_state`; the result has dim before value_dim.

    Returns:
        (chunks, value_heads, dim, value_dim) of the dtype of k. Chunk c of packed sequence n has number
        cu_seqlens[n] // chunk_size + n + c; numbers of no chunk hold 0.
    """
    chunk_size = check.tensor(inverse, 'inverse').shape[-1]
    number = check_delta(k, k, v, g_sum, beta, initial_state, cu_seqlens, chunk_size, form, v_first, 'g_sum')
    tokens, (value_heads, value_dim), dim = k.shape[1], v.shape[2:], k.shape[3]
    packed = cu_seqlens is not None
    chunks = count_chunks(tokens, number, chunk_size, packed)
    square = {'chunks': chunks, 'heads': value_heads, 'chunk': chunk_size}
    check.packed(inverse, 'inverse', 'chunks heads chunk chunk', v.dtype, **square)
    check.same_device(k=k, inverse=inverse)
    check_vectors(inverse=inverse)
    make = torch.zeros if packed else torch.empty
    h = make(chunks, value_heads, dim, value_dim, dtype=k.dtype, device=k.device)
    u = torch.empty(v.shape, dtype=k.dtype, device=k.device)
    initial = None if initial_state is None else initial_state.dtype
    static = (dim, value_dim, k.dtype, chunk_size, packed, form, g_sum.dim() == 4, initial, v_first, False, True, WHOLE)
    operands = (k, k, v, g_sum, beta, None, inverse, initial_state, cu_seqlens, None, None, h, u, number, 1.0)
    launch(delta_states_kernel, static, *operands, None, None, None, 1, size=number * v.numel())
    return h


def states_of_chunks(
    h: Tensor, batch: int, tokens: int, chunk_size: int, cu_seqlens: Tensor | None, v_first: bool
) -> Tensor:
    """(batch, chunks, ...) from the result of `delta_states`; chunks of packed sequences follow one another.

    Packed sequences have tokens // chunk_size + sequences chunks at most; those that do not exist come last and hold 0.
    """
    if cu_seqlens is None:
        states = h.view(batch, -(-tokens // chunk_size), *h.shape[1:])
    else:
        counts = (cu_seqlens.diff() + (chunk_size - 1)) // chunk_size
        ends, number = counts.cumsum(0), counts.shape[0]
        places = torch.arange(tokens // chunk_size + number, device=h.device)
        sequence = torch.searchsorted(ends, places, right=True)
        last = sequence.clamp(max=max(number - 1, 0))
        index = (cu_seqlens[last] // chunk_size + last + places - (ends - counts)[last]) if number else places
        exists = (sequence < number)[:, None, None, None]
        states = torch.where(exists, h[index.clamp(max=h.shape[0] - 1)], torch.zeros_like(h[:1]))[None]
    return states.transpose(-1, -2).contiguous() if v_first else states


# Cases --------------------------------------------------------------------------------------


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _make(**case: Any) -> dict:
    made = make_bwd(**case)
    return {name: x for name, x in made.items() if name not in ('do', 'dfinal_state', 'q', 'scale', 'chunk_size')}


delta_states.cases(
    make=_make,
    match=dict(rtol=2e-2, rms=5e-2),
    smoke=grid(tokens=[0, 20], heads=[(1, 2)], dims=[(16, 48)], dtype=[F16], form=[2], state=[F32])
    + grid(tokens=[(0, 1, 0, 35)], channels=[True], chunk=[32], state=[BF16], v_first=[True], behind=[3]),
    full=grid(tokens=[(0, 1, 0, 130)], heads=[(2, 6)], dims=[(128, 128)], chunk=[64], channels=[False, True]),
    bench=grid(tokens=[8192], heads=[(96, 96)], dims=[(128, 128)], chunk=[64], channels=[True]),
)
