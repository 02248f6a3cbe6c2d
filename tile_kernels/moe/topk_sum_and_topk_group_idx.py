"""Best groups of experts: those with the largest sum of their one or two best scores.

    total[t, g] = sum of the num_topk_sum largest scores[t, g, :]
    group_idx[t, :] = the num_topk_groups groups g of largest total[t, g], best first, the smaller g first among equals

One warp owns one token. `topk_gating` sums and ranks its groups with the same macros. Memory bound for many tokens: the
floor is reading scores and writing group_idx.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.moe._checks import DTYPES, MAX_EXPERTS
from tile_kernels.moe._macros import (
    LOWEST,
    WARP_PASS_CONFIGS,
    Place,
    RowLayout,
    choose_warps,
    from_order_key,
    load_rows,
    rank_key,
)

# Kernel -------------------------------------------------------------------------------------


@macro
def sum_groups(layout: RowLayout, num_groups: int, num_summed: int, at: Place, keys, totals):
    """The sum of the `num_summed` (1 or 2) best scores of every group, as keys or floats, whichever `keys` holds.

    Neighboring lanes read one group. The pitch of groups in shared memory avoids bank conflicts.
    """
    warp, lane, group_size = at.warp, at.lane, layout.num_experts // num_groups
    sharing = max(WARP // (1 << (num_groups - 1).bit_length()), 1)
    are_keys = keys.dtype == 'int32'
    lowest = LOWEST if are_keys else -T.infinity('float32')
    row = T.alloc_shared((at.num_warps, num_groups * (group_size + sharing)), keys.dtype)
    first = T.alloc_var(keys.dtype)
    second = T.alloc_var(keys.dtype)
    total = T.alloc_var('float32')
    for s in T.unroll(layout.num_slots):
        expert = layout.expert(s, lane)
        if expert < layout.num_experts:
            row[warp, expert + expert // group_size * sharing] = keys[s]
    T.sync_warp()
    for i in T.serial(-(-num_groups * sharing // WARP)):
        group = i * (WARP // sharing) + lane // sharing
        first = lowest
        second = lowest
        if group < num_groups:
            for j in T.unroll(-(-group_size // sharing), unroll_factor=16):
                if j * sharing + lane % sharing < group_size:
                    key = row[warp, group * (group_size + sharing) + j * sharing + lane % sharing]
                    second = T.max(second, T.min(first, key))
                    first = T.max(first, key)
        for step in T.unroll(sharing.bit_length() - 1):
            other_first = T.shfl_xor(first, 1 << step)
            other_second = T.shfl_xor(second, 1 << step)
            second = T.max(T.max(second, other_second), T.min(first, other_first))
            first = T.max(first, other_first)
        if group < num_groups and lane % sharing == 0:
            total = from_order_key(first) if are_keys else first
            if num_summed > 1:
                total = total + (from_order_key(second) if are_keys else second)
            totals[warp, group] = rank_key(total) if are_keys else total
    T.sync_warp()


@macro
def rank_of_group(group, num_groups: int, at: Place, totals):
    """How many groups have a larger total, or an equal one and a smaller number."""
    rank = T.alloc_var('int32')
    rank = 0
    for g in T.unroll(num_groups, unroll_factor=16):
        if totals[at.warp, g] > totals[at.warp, group] or (totals[at.warp, g] == totals[at.warp, group] and g < group):
            rank = rank + 1
    return rank


@kernel(choose=choose_warps, space=dict(num_warps=(1, 2, 4, 8)), pass_configs=WARP_PASS_CONFIGS)
def topk_sum_and_topk_group_idx_kernel(
    num_groups: int,
    group_size: int,
    num_topk_sum: int,
    num_topk_groups: int,
    dtype: torch.dtype,
    vector_bytes: int,
    *,
    num_warps: int,
):
    """Groups of one token per warp."""
    layout = RowLayout.of(num_groups * group_size, dtype.itemsize, vector_bytes)
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def topk_sum_and_topk_group_idx(
        scores: T.Tensor((num_tokens, num_groups * group_size), T.dtype(dtype)),
        group_idx: T.Tensor((num_tokens, num_topk_groups), 'int64'),
    ):
        with T.Kernel(T.ceildiv(num_tokens, num_warps), threads=num_warps * WARP) as pid:
            totals_shared = T.alloc_shared((num_warps, num_groups), 'int32')
            x_local = T.alloc_local((1, layout.num_slots), 'float32')
            key_local = T.alloc_local((layout.num_slots,), 'int32')
            tokens_local = T.alloc_local((1,), 'int32')
            tx = T.get_thread_binding()
            tokens_local[0] = pid * num_warps + tx // WARP
            at = Place(num_warps, 1, tx, tokens_local, tokens_local[0])

            if at.token < num_tokens:
                load_rows(scores, at, layout, x_local)
                for s in T.unroll(layout.num_slots):
                    key_local[s] = rank_key(x_local[0, s])
                sum_groups(layout, num_groups, num_topk_sum, at, key_local, totals_shared)
                for i in T.serial(-(-num_groups // WARP)):
                    group = i * WARP + at.lane
                    if group < num_groups:
                        rank = rank_of_group(group, num_groups, at, totals_shared)
                        if rank < num_topk_groups:
                            group_idx[at.token, rank] = T.cast(group, 'int64')

    return topk_sum_and_topk_group_idx


# Op -----------------------------------------------------------------------------------------


@op(outputs='group_idx')
def topk_sum_and_topk_group_idx(scores: Tensor, num_topk_sum: int, num_topk_groups: int) -> Tensor:
    """The groups of experts with the largest sum of their best scores, best first.

    Of equal sums the smaller group comes first. NaN ranks below everything, both in scores and in sums.

    Args:
        scores: (num_tokens, num_groups, group_size) float32, bfloat16 or float16, contiguous; up to 4096 experts.
        num_topk_sum: how many scores of a group are summed, in float32: 1 or 2.
        num_topk_groups: groups per token, from 1 to num_groups.

    Returns:
        int64 (num_tokens, num_topk_groups).
    """
    num_tokens, num_groups, group_size = check.shape(scores, 'scores', 'num_tokens num_groups group_size', dtype=DTYPES)
    check.contiguous(scores, 'scores')
    check.at_least(num_groups, 1, 'num_groups')
    check.at_least(group_size, 1, 'group_size')
    check.at_most(num_groups * group_size, MAX_EXPERTS, 'num_groups * group_size')
    check.one_of(num_topk_sum, (1, 2), 'num_topk_sum')
    check.at_most(num_topk_sum, group_size, 'num_topk_sum')
    check.at_least(num_topk_groups, 1, 'num_topk_groups')
    check.at_most(num_topk_groups, num_groups, 'num_topk_groups')
    group_idx = scores.new_empty(num_tokens, num_topk_groups, dtype=torch.int64)
    rows = scores.view(num_tokens, num_groups * group_size)
    static = (num_groups, group_size, num_topk_sum, num_topk_groups, scores.dtype, check.vector_bytes(rows))
    launch(topk_sum_and_topk_group_idx_kernel, static, rows, group_idx)
    return group_idx


# Cases --------------------------------------------------------------------------------------


def make(
    num_tokens: int, shape: tuple[int, int], num_topk_sum: int, num_topk_groups: int, dtype: torch.dtype = torch.float32
) -> dict:
    """Normal scores, rounded to steps of 1/8, so that some sums tie."""
    scores = torch.randn(num_tokens, *shape).mul(8).round().div(8).to(dtype)
    return dict(scores=scores, num_topk_sum=num_topk_sum, num_topk_groups=num_topk_groups)


topk_sum_and_topk_group_idx.cases(
    make=make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1, 9], shape=[(8, 32)], num_topk_sum=[1, 2], num_topk_groups=[4])
    + grid(num_tokens=[5], shape=[(12, 6), (40, 3)], num_topk_sum=[2], num_topk_groups=[2, 12], dtype=DTYPES)
    + grid(num_tokens=[3], shape=[(1, 50), (50, 1)], num_topk_sum=[1], num_topk_groups=[1]),
    full=grid(
        num_tokens=[4001],
        shape=[(4, 18), (8, 9), (12, 6), (4, 64), (8, 32), (16, 16), (64, 64)],
        num_topk_sum=[1, 2],
        num_topk_groups=[2, 4],
        dtype=DTYPES,
    ),
    bench=grid(num_tokens=[64, 4096, 8001], shape=[(8, 32)], num_topk_sum=[2], num_topk_groups=[4])
    + grid(num_tokens=[8001], shape=[(12, 6)], num_topk_sum=[1], num_topk_groups=[2]),
)
