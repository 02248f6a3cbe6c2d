"""Groups of neighbouring experts, by one warp: the sums of their best scores, their ranks, and who drops out."""

from __future__ import annotations

from tile_kernels.core.lang import T, macro
from tile_kernels.moe._keys import LOWEST, from_order_key, order_key, rank_key
from tile_kernels.moe._macros import WARP, Place, RowLayout


@macro
def sum_groups(layout: RowLayout, num_groups: int, num_summed: int, at: Place, keys, totals):
    """The sum of the `num_summed` (1 or 2) best scores of every group: as keys, from the keys of a row, or as floats.

    Neighbouring lanes share a group, and groups lie so far apart in shared memory that they read different banks.
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


@macro
def keep_best_groups(layout: RowLayout, num_groups: int, num_topk_groups: int, at: Place, keys):
    """Drop experts outside the `num_topk_groups` groups whose two best scores have the largest sum."""
    group_size = layout.num_experts // num_groups
    totals = T.alloc_shared((at.num_warps, num_groups), 'int32')
    kept = T.alloc_shared((at.num_warps, num_groups), 'int32')
    sum_groups(layout, num_groups, min(group_size, 2), at, keys, totals)
    for i in T.serial(-(-num_groups // WARP)):
        if i * WARP + at.lane < num_groups:
            rank = rank_of_group(i * WARP + at.lane, num_groups, at, totals)
            kept[at.warp, i * WARP + at.lane] = T.Select(rank < num_topk_groups, 1, 0)
    T.sync_warp()
    for s in T.unroll(layout.num_slots):
        expert = layout.expert(s, at.lane)
        if expert < layout.num_experts and kept[at.warp, expert // group_size] == 0:
            keys[s] = LOWEST


@macro
def keep_best_estimates(layout: RowLayout, num_groups: int, num_topk_groups: int, error: float, at: Place, x):
    """The same for the first row of `x`, whose scores are off by `error`: those that drop out become -inf.

    Returns whether that is certain: as many groups are kept as shall be, and the last sum kept and the first one
    dropped differ by more than both can be off.
    """
    group_size = layout.num_experts // num_groups
    totals = T.alloc_shared((at.num_warps, num_groups), 'float32')
    kept = T.alloc_shared((at.num_warps, num_groups), 'int32')
    scores = T.alloc_local((layout.num_slots,), 'float32')
    last_kept = T.alloc_var('float32')
    first_dropped = T.alloc_var('float32')
    num_kept = T.alloc_var('int32')
    rank = T.alloc_var('uint32')
    for s in T.unroll(layout.num_slots):
        scores[s] = T.max(x[0, s], -T.infinity('float32'))  # a NaN is no number to choose from
    sum_groups(layout, num_groups, min(group_size, 2), at, scores, totals)
    last_kept = T.infinity('float32')
    first_dropped = -T.infinity('float32')
    num_kept = 0
    for i in T.serial(-(-num_groups // WARP)):
        if i * WARP + at.lane < num_groups:
            total = totals[at.warp, i * WARP + at.lane]
            rank = T.uint32(0)
            for g in T.unroll(num_groups, unroll_factor=16):  # the sign of a difference is cheaper than a comparison
                rank = rank + (T.reinterpret(total - totals[at.warp, g], 'uint32') >> T.uint32(31))
            kept[at.warp, i * WARP + at.lane] = 0
            if rank < T.uint32(num_topk_groups):
                kept[at.warp, i * WARP + at.lane] = 1
                num_kept = num_kept + 1
                last_kept = T.min(last_kept, total)
            else:
                first_dropped = T.max(first_dropped, total)
    T.sync_warp()
    for s in T.unroll(layout.num_slots):
        expert = layout.expert(s, at.lane)
        if expert < layout.num_experts and kept[at.warp, expert // group_size] == 0:
            x[0, s] = -T.infinity('float32')
    level = from_order_key(T.warp_reduce_min(order_key(last_kept)))
    gap = level - from_order_key(T.warp_reduce_max(order_key(first_dropped)))
    is_wide = gap > T.float32(4 * error) + T.abs(level) * T.float32(2**-19)
    return is_wide and T.warp_reduce_sum(num_kept) == num_topk_groups
