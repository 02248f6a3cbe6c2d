"""What the RMS norm kernels share: a row in the registers of a team of warps, and sums that have one order.

A lane owns vectors of `LANE` channels. Vector j * 32 + lane of a row belongs to that lane of warp j % warps, as its
vector j // warps. A sum over the row folds the upper half of the j onto the lower half until one is left, first within
a lane, then over warps, and adds up the lanes last. So its order depends on hidden alone: however many warps share a
row and however many rows there are, every bit of a result is the same.

A lane's vector of float32 is two pieces of 16 bytes. Were each read or written where it belongs, a warp would touch
every second piece at a time: stores would fill half sectors, and copies past the L1 cache fetch each sector twice. So
lanes of the lower half warp take the first pieces and those of the upper half the second ones, of half the vectors at a
time, and swap what is not theirs.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.quant._macros import LANE, shuffle_steps

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Bytes of the longest row that fits into the registers of a team.
MAX_ROW_BYTES = 128 << 10


# Config -------------------------------------------------------------------------------------


def row_warps(hidden: int) -> int:
    """Vectors of a row that a whole warp takes at a time, rounded up."""
    return -(-hidden // (LANE * WARP))


def team_warps(hidden: int, vectors: int, most: int = 16) -> int:
    """Warps that share a row so that a lane has about `vectors` of its vectors: a power of two."""
    wanted = -(-row_warps(hidden) // vectors)
    return min(most, 1 << (wanted - 1).bit_length())


# Checks -------------------------------------------------------------------------------------


def check_rows(x: Tensor, name: str = 'x') -> tuple[int, int]:
    """Shape of rows that can be normalised."""
    num_tokens, hidden = check.shape(x, name, 'num_tokens hidden', dtype=DTYPES)
    check.unit_stride(x, name)
    check.at_least(hidden, 1, 'hidden')
    check.at_most(hidden, MAX_ROW_BYTES // x.dtype.itemsize, 'hidden')
    return num_tokens, hidden


def check_like(like: Tensor, **tensors: Tensor | None) -> None:
    """Tensors (given by keyword; None is skipped) must have the shape, dtype and device of `like`, and dense rows."""
    num_tokens, hidden = like.shape
    for name, x in tensors.items():
        if x is not None:
            check.shape(x, name, 'num_tokens hidden', dtype=like.dtype, num_tokens=num_tokens, hidden=hidden)
            check.unit_stride(x, name)
            check.same_device(x=like, **{name: x})


def check_weight(x: Tensor, weight: Tensor | None) -> torch.dtype | None:
    """Dtype of the weight of each channel, if there is one."""
    if weight is None:
        return None
    check.shape(weight, 'weight', 'hidden', dtype=DTYPES, hidden=x.shape[1])
    check.contiguous(weight, 'weight')
    check.same_device(x=x, weight=weight)
    return weight.dtype


# Device code --------------------------------------------------------------------------------


@macro
def load_weight(weight, weight_local, i, slot, piece, hidden):
    """Read the weights of the channels of lane `slot`."""
    for p in T.unroll(LANE // piece):
        if slot * LANE + p * piece < hidden:
            for e in T.vectorized(piece):
                weight_local[i, p * piece + e] = weight[slot * LANE + p * piece + e]


def apart(dtype: torch.dtype, piece: int) -> bool:
    """Whether a lane reads and writes its vectors in two pieces that are not both its own."""
    return LANE * dtype.itemsize == 32 and piece * dtype.itemsize == 16


def owner_of_piece(slot: Any, p: Any) -> Any:
    """Lane to which piece p of two that lane `slot` reads or writes belongs; the upper half warp has second pieces."""
    lane = slot % WARP
    return slot - lane + p * (WARP // 2) + lane % (WARP // 2)


def piece_column(slot: Any, p: Any, piece: int, halves: bool) -> Any:
    """First channel of piece p that lane `slot` reads or writes; `halves`: see `apart`."""
    if halves:
        return owner_of_piece(slot, p) * LANE + slot % WARP // (WARP // 2) * piece
    return slot * LANE + p * piece


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


@macro
def load_pieces(x, x_local, i, row, slot, piece, hidden, halves):
    """Read vector i of a lane, or pieces that `swap_pieces` makes it from."""
    for p in T.unroll(LANE // piece):
        if piece_column(slot, p, piece, halves) < hidden:
            for e in T.vectorized(piece):
                x_local[i, p * piece + e] = x[row, piece_column(slot, p, piece, halves) + e]


@macro
def store_pieces(y, y_local, i, row, slot, piece, hidden, halves):
    """Write vector i of a lane, or the pieces that `swap_pieces` made of it, which every lane of a warp must do."""
    for p in T.unroll(LANE // piece):
        if piece_column(slot, p, piece, halves) < hidden:
            for e in T.vectorized(piece):
                y[row, piece_column(slot, p, piece, halves) + e] = y_local[i, p * piece + e]


def folded(combine: Any, values: list) -> Any:
    """Combine the upper half of the values with the lower half until one is left; the upper half may be shorter."""
    while len(values) > 1:
        half = 1 << (len(values) - 1).bit_length() - 1
        values = [combine(a, b) for a, b in zip(values, values[half:], strict=False)] + values[
            len(values) - half : half
        ]
    return values[0]


def lane_dot(a: Any, b: Any) -> Any:
    """Sum of the products of two lanes, one rounding for each step, in the order of the channels."""
    first = T.ieee_mul(a[0], b[0])
    return functools.reduce(lambda total, e: T.ieee_fmaf(a[e], b[e], total), range(1, LANE), first)


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
