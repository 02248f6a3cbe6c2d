"""Unique indices: of equal indices in a row keep the first and set the others to -1, in place.

    x[t, k] = -1                                            if x[t, k] >= 0 and x[t, k] = x[t, j] for some j < k

A block reads a tile of rows into shared memory once. Every slot then compares itself with the slots before it in its
row. Only changed slots are written. Memory bound: the floor is reading x.
"""

import torch

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op

MAX_TOPK = 4096

# Config -------------------------------------------------------------------------------------


def choose(num_topk: int, dtype: torch.dtype, num_tokens: int) -> dict:
    """About four slots per thread, with all loads in flight."""
    return dict(num_threads=256, slots=4)


# Kernel -------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(num_threads=(128, 256, 512), slots=(1, 2, 4, 8)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def inplace_unique_group_indices_kernel(num_topk: int, dtype: torch.dtype, *, num_threads: int, slots: int):
    """Rows of `num_topk` indices."""
    rows = max(1, num_threads * slots // num_topk)
    tile = rows * num_topk
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def inplace_unique_group_indices(group_indices: T.Tensor((num_tokens, num_topk), T.dtype(dtype))):
        with T.Kernel(T.ceildiv(num_tokens, rows), threads=num_threads) as pid:
            tile_shared = T.alloc_shared((tile,), T.dtype(dtype))
            seen = T.alloc_var(T.int32)
            tx = T.get_thread_binding()
            left = T.min(num_tokens - pid * rows, rows) * num_topk  # slots of this tile that exist

            for i in T.unroll(T.ceildiv(tile, num_threads), unroll_factor=8):
                slot = i * num_threads + tx
                if slot < left:
                    tile_shared[slot] = group_indices[pid * rows + slot // num_topk, slot % num_topk]
            T.sync_threads()

            for i in T.serial(T.ceildiv(tile, num_threads)):
                slot = i * num_threads + tx
                if slot < left:
                    seen = 0
                    for j in T.serial(slot % num_topk):
                        if tile_shared[slot - 1 - j] == tile_shared[slot]:
                            seen = 1
                    if seen == 1 and tile_shared[slot] >= 0:
                        group_indices[pid * rows + slot // num_topk, slot % num_topk] = -1

    return inplace_unique_group_indices


# Op -----------------------------------------------------------------------------------------


@op()
def inplace_unique_group_indices(group_indices: Mut, num_groups: int) -> None:
    """Keep the first of equal indices in a row and set the others to -1, in place.

    Args:
        group_indices: (num_tokens, num_topk) int64 or int32, contiguous; negative numbers stay.
        num_groups: number of groups, any.
    """
    _, num_topk = check.shape(group_indices, 'group_indices', 'num_tokens num_topk', dtype=(torch.int64, torch.int32))
    check.contiguous(group_indices, 'group_indices')
    check.at_least(num_groups, 1, 'num_groups')
    check.at_least(num_topk, 1, 'num_topk')
    check.at_most(num_topk, MAX_TOPK, 'num_topk')
    launch(inplace_unique_group_indices_kernel, (num_topk, group_indices.dtype), group_indices)


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, num_topk: int, num_groups: int, dtype: torch.dtype = torch.int64) -> dict:
    indices = torch.randint(-2, num_groups, (num_tokens, num_topk), dtype=dtype)
    return dict(group_indices=indices, num_groups=num_groups)


inplace_unique_group_indices.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1, 301], num_topk=[9], num_groups=[8])
    + grid(num_tokens=[20], num_topk=[1, 64], num_groups=[200], dtype=[torch.int64, torch.int32])
    + grid(num_tokens=[2], num_topk=[1500], num_groups=[1000]),  # a row longer than a tile
    full=grid(num_tokens=[4001, 100003], num_topk=[2, 6, 8, 9], num_groups=[8, 16, 72]),
    bench=grid(num_tokens=[64, 4096, 23223], num_topk=[9], num_groups=[16]),
)
