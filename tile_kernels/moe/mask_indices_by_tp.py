"""Mask indices by tensor-parallel rank: local numbers of the experts of a rank, -1 for all others.

Ranks hold runs of `per_gpu = n // num_ep_ranks` experts. Consecutive runs go round the tensor-parallel ranks:

    q = v // per_gpu                                        the run of expert v
    y = q // num_tp_ranks * per_gpu + v % per_gpu           if v >= 0 and q % num_tp_ranks = tp_rank
    y = -1                                                  otherwise

The kernel works element by element, in 32 bits. Memory bound: the floor is reading the indices and writing the result.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

INT32_MAX = 2**31 - 1

# Config -------------------------------------------------------------------------------------


def choose(dtype: torch.dtype, width: int, size: int) -> dict:
    """One access per thread, and many blocks."""
    return dict(num_threads=256)


# Kernel -------------------------------------------------------------------------------------


@macro
def local_index(index, per_gpu, tp_rank, num_tp_ranks):
    """Local number of an expert, -1 if another rank holds it."""
    v = T.cast(index, T.int32)
    run = T.truncdiv(v, per_gpu)
    cycle = T.truncdiv(run, num_tp_ranks)
    is_mine = index >= 0 and run - cycle * num_tp_ranks == tp_rank
    return T.cast(T.if_then_else(is_mine, cycle * per_gpu + v - run * per_gpu, -1), index.dtype)


@kernel(
    choose=choose,
    space=dict(num_threads=(128, 256, 512)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def mask_indices_by_tp_kernel(dtype: torch.dtype, width: int, *, num_threads: int):
    """`width` indices per access."""
    num_indices = T.dynamic('num_indices')

    @T.prim_func
    def mask_indices_by_tp(
        indices: T.Tensor((num_indices,), T.dtype(dtype)),
        masked: T.Tensor((num_indices,), T.dtype(dtype)),
        per_gpu: T.int32,
        tp_rank: T.int32,
        num_tp_ranks: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_indices, num_threads * width), threads=num_threads) as pid:
            index_local = T.alloc_local((width,), T.dtype(dtype))
            first = (pid * num_threads + T.get_thread_binding()) * width

            if first + width <= num_indices:
                for e in T.vectorized(width):
                    index_local[e] = indices[first + e]
                for e in T.unroll(width):
                    index_local[e] = local_index(index_local[e], per_gpu, tp_rank, num_tp_ranks)
                for e in T.vectorized(width):
                    masked[first + e] = index_local[e]
            else:
                for e in T.unroll(width - 1):
                    if first + e < num_indices:
                        masked[first + e] = local_index(indices[first + e], per_gpu, tp_rank, num_tp_ranks)

    return mask_indices_by_tp


# Op -----------------------------------------------------------------------------------------


@op(outputs='masked')
def mask_indices_by_tp(indices: Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int) -> Tensor:
    """Turn global expert numbers into local ones of a tensor-parallel rank; -1 if another rank holds the expert.

    Args:
        indices: int64 or int32 of any shape, contiguous; expert numbers below 2^31, negative ones give -1.
        n: number of experts.
        num_ep_ranks: number of ranks that hold the experts, `n // num_ep_ranks` each.
        tp_rank: the tensor-parallel rank.
        num_tp_ranks: number of tensor-parallel ranks.

    Returns:
        The local numbers, shape and dtype of `indices`.
    """
    check.dtype(indices, 'indices', (torch.int64, torch.int32))
    check.contiguous(indices, 'indices')
    check.at_least(num_ep_ranks, 1, 'num_ep_ranks')
    check.at_least(num_tp_ranks, 1, 'num_tp_ranks')
    check.at_least(n, num_ep_ranks, 'n')
    check.at_most(n * num_tp_ranks, INT32_MAX, 'n * num_tp_ranks')
    check.at_least(tp_rank, 0, 'tp_rank')
    check.at_most(tp_rank, num_tp_ranks - 1, 'tp_rank')
    masked = torch.empty_like(indices)
    flat, flat_masked = indices.view(-1), masked.view(-1)
    static = (indices.dtype, check.vector_bytes(flat, flat_masked) // indices.element_size())
    scalars = (n // num_ep_ranks, tp_rank, num_tp_ranks)
    launch(mask_indices_by_tp_kernel, static, flat, flat_masked, *scalars)
    return masked


# Cases --------------------------------------------------------------------------------------


def _make(shape: tuple[int, ...], n: int, num_ep_ranks: int, num_tp_ranks: int, dtype: torch.dtype) -> dict:
    return dict(
        indices=torch.randint(-1, n, shape, dtype=dtype),
        n=n,
        num_ep_ranks=num_ep_ranks,
        tp_rank=num_tp_ranks // 2,
        num_tp_ranks=num_tp_ranks,
    )


mask_indices_by_tp.cases(
    make=_make,
    match='bitwise',
    smoke=grid(
        shape=[(0, 6), (1, 1), (37, 6), (37, 3)], n=[72], num_ep_ranks=[8], num_tp_ranks=[1, 4], dtype=[torch.int64]
    )
    + grid(shape=[(5, 7, 8)], n=[256], num_ep_ranks=[32], num_tp_ranks=[8], dtype=[torch.int32]),
    full=grid(
        shape=[(4001, 9), (100003, 9)],
        n=[72, 256],
        num_ep_ranks=[8],
        num_tp_ranks=[2, 4, 8],
        dtype=[torch.int64, torch.int32],
    ),
    bench=grid(
        shape=[(64, 8), (18569, 6), (18569, 7)], n=[256], num_ep_ranks=[32], num_tp_ranks=[4], dtype=[torch.int64]
    ),
)
