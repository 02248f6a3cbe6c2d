"""Sums and maxima over the lanes of a group, a warp or a row.

`T.max` returns the other operand for a NaN, so a NaN never reaches a maximum. Sums have one order, whatever the number
of warps. The upper half of the values is added to the lower half until one is left; lanes are summed last.
"""

import functools
import math
from typing import Any

from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.device.bits import float_of
from tile_kernels.device.vectors import LANE, lane_pairs

# Of a lane ----------------------------------------------------------------------------------


def lane_max(x_local: Any, *rows: Any) -> Any:
    """Largest magnitude of the channels of rows of a lane, NaN if none is a number; 16-bit channels two at a time."""
    if x_local.dtype == 'float32':
        return functools.reduce(T.max, (T.abs(x_local[i, j]) for i in rows for j in range(LANE)))
    pairs = (lane_pairs(x_local)[i, j] for i in rows for j in range(LANE // 2))
    words = (T.abs2(T.reinterpret(pair, f'{x_local.dtype}x2')) for pair in pairs)
    both = T.reinterpret(functools.reduce(T.max2, words), T.uint32)
    if x_local.dtype == 'bfloat16':
        return T.max(float_of(both << T.uint32(16)), float_of(both & T.uint32(0xFFFF0000)))
    halves = (T.reinterpret(T.cast(both >> T.uint32(shift), T.uint16), T.float16) for shift in (0, 16))
    return functools.reduce(T.max, (T.cast(half, T.float32) for half in halves))


@macro
def lane_amax(x_local, i, amax):
    """`amax[i] = max(amax[i], |x|)` over the channels of one lane."""
    amax[i] = T.max(amax[i], lane_max(x_local, i))


def lane_dot(a: Any, b: Any) -> Any:
    """Sum of the products of two lanes, one rounding for each step, in the order of the channels."""
    first = T.ieee_mul(a[0], b[0])
    return functools.reduce(lambda total, e: T.ieee_fmaf(a[e], b[e], total), range(1, LANE), first)


# Over lanes and warps -----------------------------------------------------------------------


def shuffle_steps(lanes: int) -> int:
    """Butterfly steps that reduce over `lanes` neighbouring lanes."""
    return int(math.log2(lanes))


@macro
def scatter_max(amax, count, lane, step, lanes):
    """Maxima over `lanes` neighbouring lanes of `count` rows, each row to be known by some lanes only.

    While a lane holds several rows it keeps every second one and hands its partner the others; from then on both keep
    the same. In the end `amax[k]` of a lane is the maximum of row k * lanes + lane % lanes (modulo `count`).
    """
    if step < lanes and count > 1:
        for m in T.unroll(count // 2):
            odd = lane // step % 2 == 1
            kept = T.if_then_else(odd, amax[2 * m + 1], amax[2 * m])
            given = T.if_then_else(odd, amax[2 * m], amax[2 * m + 1])
            amax[m] = T.max(kept, T.shfl_xor(given, step))
        scatter_max(amax, count // 2, lane, 2 * step, lanes)
    elif step < lanes:
        amax[0] = T.max(amax[0], T.shfl_xor(amax[0], step))
        scatter_max(amax, count, lane, 2 * step, lanes)


def folded(combine: Any, values: list) -> Any:
    """Combine the upper half of the values with the lower half until one is left; the upper half may be shorter."""
    while len(values) > 1:
        half = 1 << (len(values) - 1).bit_length() - 1
        values = [combine(a, b) for a, b in zip(values, values[half:], strict=False)] + values[
            len(values) - half : half
        ]
    return values[0]


@macro
def over_team(partial, op, shared, buffer, team, warp, lane, warps):
    """`partial[0]` = the sum or maximum (`op`) over a row of what its lanes hold in `partial`."""
    vectors = int(partial.shape[0])
    combine = T.max if op == 'max' else (lambda a, b: a + b)
    partial[0] = folded(combine, [partial[i] for i in range(vectors)])
    if warps > 1:
        shared[buffer, team, warp, lane] = partial[0]
        T.sync_threads()
        partial[0] = folded(combine, [shared[buffer, team, w, lane] for w in range(warps)])
    for step in T.unroll(shuffle_steps(WARP)):
        partial[0] = combine(partial[0], T.shfl_xor(partial[0], 1 << step))
