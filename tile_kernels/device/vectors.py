"""Vectors of a lane: a thread owns `LANE` neighbouring channels of a row, 16 bytes of bfloat16.

Its rows are a local buffer `x_local[rows, LANE]`; 16-bit channels are also read as words of two (`lane_pairs`). Loads
and stores take pieces as large as alignment allows.

A vector of float32 is two pieces of 16 bytes. If each lane read both of its own, a warp would access every second piece
at a time. Stores would fill half sectors, and copies past the L1 cache would fetch each sector twice. With `halves`,
lanes of the lower half warp take first pieces and those of the upper half second ones, and swap what is not theirs.
"""

from typing import Any

import torch

from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.device.bits import bits_of, bytes_of, float_of, pick_bytes

LANE = 8


# Loads and stores ---------------------------------------------------------------------------


def _at(row: Any, column: Any) -> Any:
    """An index of a matrix, or of a vector if there is no row."""
    return column if row is None else (row, column)


def piece_column(slot: Any, p: Any, piece: int, lane: int, halves: bool) -> Any:
    """First channel of piece p that lane `slot` reads or writes; with `halves` it may belong to another lane."""
    if not halves:
        return slot * lane + p * piece
    own = slot % WARP
    owner = slot - own + p * (WARP // 2) + own % (WARP // 2)
    return owner * lane + own // (WARP // 2) * piece


@macro
def load_lane(x, x_local, i, row, slot, piece, hidden, first=0, halves=False):
    """Read the channels (or containers of codes) of lane `slot` of a row; `row` is None if x has but one.

    Those of the row begin at column `first`, and there are `hidden` (None if the lane is known to be within the row).
    With `halves`, `swap_pieces` has to follow.
    """
    lane = x_local.shape[1]
    for p in T.unroll(lane // piece):
        if hidden is None or piece_column(slot, p, piece, lane, halves) < hidden:
            for e in T.vectorized(piece):
                x_local[i, p * piece + e] = x[_at(row, first + piece_column(slot, p, piece, lane, halves) + e)]


@macro
def store_lane(y, y_local, row, slot, piece, stored, width, first=0, i=None, halves=False):
    """Write the `width` container elements of lane `slot`, of row `i` of `y_local` if it has rows.

    The `stored` elements of the row begin at column `first`. With `halves`, `swap_pieces` has to come before.
    """
    for p in T.unroll(width // piece):
        if piece_column(slot, p, piece, width, halves) < stored:
            for e in T.vectorized(piece):
                y[row, first + piece_column(slot, p, piece, width, halves) + e] = y_local[_at(i, p * piece + e)]


def apart(dtype: torch.dtype, piece: int) -> bool:
    """Whether a lane reads and writes its vectors in two pieces that are not both its own: `halves`."""
    return LANE * dtype.itemsize == 32 and piece * dtype.itemsize == 16


@macro
def swap_pieces(x_local, i, y_local, k):
    """Vector k of a lane from the pieces it read, or the pieces it writes from its vector i: the same exchange."""
    mine = T.alloc_var(x_local.dtype)
    upper = T.get_thread_binding() % WARP >= WARP // 2
    for e in T.unroll(LANE // 2):
        mine = T.if_then_else(upper, x_local[i, e], x_local[i, LANE // 2 + e])
        mine = T.shfl_xor(mine, WARP // 2)
        y_local[k, e] = T.if_then_else(upper, mine, x_local[i, e])
        y_local[k, LANE // 2 + e] = T.if_then_else(upper, x_local[i, LANE // 2 + e], mine)


# Conversions --------------------------------------------------------------------------------


def lane_pairs(x_local: Any) -> Any:
    """A lane's rows as words of two 16-bit channels, the even one in the lower half; wider channels have none."""
    rows, lane = x_local.shape
    return T.view(x_local, (rows, lane // 2), T.uint32) if x_local.dtype in ('bfloat16', 'float16') else None


def sign_bytes(x_local: Any, i: Any, half: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    """The bytes of four channels that hold the sign (even -0 and NaN have one) as their upper bit."""
    if x_local.dtype == 'float32':
        return bytes_of([bits_of(x_local[i, 4 * half + e]) for e in order], 3)
    pairs = lane_pairs(x_local)
    return pick_bytes(pairs[i, 2 * half], pairs[i, 2 * half + 1], *(2 * e + 1 for e in order))


@macro
def widen_lane(x_local, i, v_local, factor=None):
    """Channels of a lane as float32, codes times `factor[i]`.

    A bf16 is the upper half of its float32, so it needs no conversion.
    """
    lane = x_local.shape[1]
    if x_local.dtype == 'bfloat16':
        pairs = lane_pairs(x_local)
        for j in T.unroll(lane // 2):
            v_local[2 * j] = float_of(pairs[i, j] << T.uint32(16))
            v_local[2 * j + 1] = float_of(pairs[i, j] & T.uint32(0xFFFF0000))
    else:
        for e in T.vectorized(lane):
            v_local[e] = T.cast(x_local[i, e], T.float32)
    if factor is not None:
        for e in T.unroll(lane):
            v_local[e] = v_local[e] * factor[i]


@macro
def scale_lane(x_local, i, sf_inv, v_local):
    """`v = x * sf_inv` in float32. A bf16 is the upper half of its float32, so it needs no conversion."""
    pairs = lane_pairs(x_local)
    if x_local.dtype == 'bfloat16':
        for j in T.unroll(LANE // 2):
            v_local[2 * j] = float_of(pairs[i, j] << T.uint32(16)) * sf_inv
            v_local[2 * j + 1] = float_of(pairs[i, j] & T.uint32(0xFFFF0000)) * sf_inv
    else:
        for j in T.unroll(LANE):
            v_local[j] = T.cast(x_local[i, j], T.float32) * sf_inv


@macro
def round_lane(v_local, i, y_local):
    """Channels of a lane in the dtype of `y_local`."""
    for e in T.vectorized(LANE):
        y_local[e] = T.cast(v_local[i, e], y_local.dtype)


@macro
def clear_lane(x_local):
    """Zeros for all channels of a lane, as words: fp8 zeros would be converted one by one."""
    words = T.view(x_local, (x_local.shape[0], LANE * x_local.dtype.bits // 32), T.uint32)
    T.clear(words)
