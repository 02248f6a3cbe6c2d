"""Count how often each group (or expert) was chosen.

    count[g] = number of slots with group_idx = g           negative numbers are not counted

Each block counts a run of slots in shared memory and writes its counts. A second launch, which overlaps the first
(PDL), adds them up. Few slots need one block and one launch. Nothing is cleared beforehand. Integer sums do not depend
on their order, so the result is deterministic. `aux_fi` uses the same kernel.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.moe._samples import random_choice

MAX_BLOCKS = 128
MAX_GROUPS = 8192
MAX_SLOTS = 2**31 - 2**20  # slots of the last, partial step must fit into int32

#: Loads that a thread has in flight.
ROUNDS = 8

#: Warps of a block that adds up the counts of all blocks.
SUM_WARPS = 16

# Config -------------------------------------------------------------------------------------


def choose(num_groups: int, num_topk: int, index_dtype: torch.dtype, fraction: bool, num_slots: int) -> dict:
    """Eight slots per thread. More blocks mean more counts to add up."""
    num_blocks = next((n for n in (1, 16, 64) if num_slots <= n * 4096), 128)
    return dict(num_blocks=min(num_blocks, 128 if num_groups <= 512 else 16), num_threads=512)


# Kernel -------------------------------------------------------------------------------------


@macro
def write_count(out, group, count, fraction, even):
    """Write the result of a group: its count, or the fraction with `even` slots per group as 1 (0: no tokens)."""
    if fraction:
        load = T.cast(count, T.float32) * T.float32(out.shape[0])
        out[group] = T.ieee_fdiv(load, T.cast(T.max(even, 1), T.float32))
    else:
        out[group] = count


@macro
def load_indices(group_idx, first, stride, index_local):
    """Groups of the slots first, first + stride, ...; -1 where there is none."""
    num_topk = group_idx.shape[1]
    for i in T.unroll(index_local.shape[0]):
        slot = first + i * stride
        index_local[i] = -1
        if slot < group_idx.shape[0] * num_topk:
            index_local[i] = group_idx[slot // num_topk, slot % num_topk]


@macro
def count_indices(index_local, count_shared):
    """Count the indices that are groups."""
    for i in T.unroll(index_local.shape[0]):
        if index_local[i] >= 0 and index_local[i] < count_shared.shape[0]:
            T.atomic_add(count_shared[T.cast(index_local[i], T.int32)], 1)


@kernel(
    choose=choose,
    space=dict(num_blocks=(1, 16, 32, 64, 128), num_threads=(256, 512, 1024)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def group_count_kernel(
    num_groups: int, num_topk: int, index_dtype: torch.dtype, fraction: bool, *, num_blocks: int, num_threads: int
):
    """Counts of `num_groups` groups; `partial` is scratch."""
    sum_warps = min(SUM_WARPS, num_blocks)
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def group_count(
        group_idx: T.Tensor((num_tokens, num_topk), T.dtype(index_dtype)),
        partial: T.Tensor((MAX_BLOCKS, num_groups), T.int32),
        out: T.Tensor((num_groups,), T.float32 if fraction else T.int32),
        num_aux_topk: T.int32,
    ):
        num_slots = num_tokens * num_topk
        with T.Kernel(num_blocks, threads=num_threads) as pid:
            count_shared = T.alloc_shared((num_groups,), T.int32)
            index_local = T.alloc_local((ROUNDS,), T.dtype(index_dtype))
            tx = T.get_thread_binding()
            first = pid * num_threads + tx

            if num_blocks > 1:
                T.pdl_trigger()
            load_indices(group_idx, first, num_blocks * num_threads, index_local)
            for i in T.serial(T.ceildiv(num_groups, num_threads)):
                if i * num_threads + tx < num_groups:
                    count_shared[i * num_threads + tx] = 0
            T.sync_threads()
            count_indices(index_local, count_shared)
            for step in T.serial(1, T.ceildiv(num_slots, num_blocks * num_threads * ROUNDS)):
                stride = num_blocks * num_threads
                load_indices(group_idx, step * (ROUNDS * stride) + first, stride, index_local)
                count_indices(index_local, count_shared)
            T.sync_threads()
            for i in T.serial(T.ceildiv(num_groups, num_threads)):
                group = i * num_threads + tx
                if group < num_groups:
                    if num_blocks == 1:
                        write_count(out, group, count_shared[group], fraction, num_tokens * num_aux_topk)
                    else:
                        partial[pid, group] = count_shared[group]

        if num_blocks > 1:
            with T.Kernel(T.ceildiv(num_groups, 32), threads=sum_warps * 32) as pid:  # a lane for each group
                sum_shared = T.alloc_shared((sum_warps, 32), T.int32)
                tx = T.get_thread_binding()
                lane, warp = tx % 32, tx // 32
                group = pid * 32 + lane
                count = T.alloc_var(T.int32, init=0)
                T.pdl_sync()
                for i in T.unroll(num_blocks // sum_warps):
                    if group < num_groups:
                        count += partial[warp * (num_blocks // sum_warps) + i, group]
                sum_shared[warp, lane] = count
                T.sync_threads()
                if tx < 32 and group < num_groups:
                    for w in T.unroll(1, sum_warps):
                        count += sum_shared[w, lane]
                    write_count(out, group, count, fraction, num_tokens * num_aux_topk)

    return group_count


# Op -----------------------------------------------------------------------------------------


def launch_count(index: Tensor, name: str, num_groups: int, num_aux_topk: int = 0) -> Tensor:
    """Counts of the groups of (num_tokens, num_topk) indices, or fractions if `num_aux_topk` is given."""
    num_tokens, num_topk = check.shape(index, name, 'num_tokens num_topk', dtype=(torch.int64, torch.int32))
    check.at_least(num_topk, 1, 'num_topk')
    check.contiguous(index, name)
    counted = 'num_experts' if num_aux_topk else 'num_groups'
    check.at_least(num_groups, 1, counted)
    check.at_most(num_groups, MAX_GROUPS, counted)
    check.at_most(num_tokens * num_topk, MAX_SLOTS, 'number of slots')
    fraction = num_aux_topk > 0
    out = torch.empty(num_groups, dtype=torch.float32 if fraction else torch.int32, device=index.device)
    partial = torch.empty((MAX_BLOCKS, num_groups), dtype=torch.int32, device=index.device)
    static = (num_groups, num_topk, index.dtype, fraction)
    size = torch.sym_max(num_tokens * num_topk, 1)  # without slots the kernel still writes zeros
    launch(group_count_kernel, static, index, partial, out, num_aux_topk, size=size)
    return out


@op(outputs='count')
def group_count(group_idx: Tensor, num_groups: int) -> Tensor:
    """Count how often each group occurs.

    Args:
        group_idx: (num_tokens, num_topk) int64 or int32, contiguous; numbers that are no group are ignored.
        num_groups: up to 8192.

    Returns:
        (num_groups,) int32.
    """
    return launch_count(group_idx, 'group_idx', num_groups)


# Cases --------------------------------------------------------------------------------------


def make_choice(num_tokens: int, num_topk: int, num_groups: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Groups of every token; 30 % of the slots have none."""
    return random_choice(num_tokens, num_topk, num_groups, unrouted=0.3).to(dtype)


SMOKE = grid(num_tokens=[0, 1, 77], num_topk=[6], num_groups=[8]) + grid(
    num_tokens=[900], num_topk=[9], num_groups=[72, 600], dtype=[torch.int64, torch.int32]
)
FULL = grid(num_tokens=[4001, 100003], num_topk=[2, 9], num_groups=[8, 72, 8192])
BENCH = grid(num_tokens=[64, 18483, 21839], num_topk=[8], num_groups=[32, 256])

group_count.cases(
    make=lambda num_groups, **case: dict(group_idx=make_choice(num_groups=num_groups, **case), num_groups=num_groups),
    match='bitwise',
    smoke=SMOKE,
    full=FULL,
    bench=BENCH,
)
