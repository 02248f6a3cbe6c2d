"""12-bit codes, e5m6: the upper 12 bits of a float16, eight to three words, the first code in the top bits.

A lane's eight codes are 12 bytes. Four neighbouring lanes pass words on so that three of them write 16 bytes each and
a warp writes whole sectors; rows that are no multiple of 32 channels are not aligned for that and are written in words.
"""

import functools
from typing import Any

from tile_kernels.core.lang import T, macro
from tile_kernels.quant._macros import LANE, bits_of, float_of, pick_bytes

#: float32 bits of 65024, the largest e5m6 number, and of infinity.
_MAX_BITS, _INFINITY_BITS = 0x477E0000, 0x7F800000

#: float32 bits of 2^-14, the least normal float16, and of 65280, the least number that would round to infinity.
_NORMAL_BITS, _OVERFLOW_BITS = 0x38800000, 0x477F0000

#: Words of a lane, and of what a lane stores at a time.
WORDS, STORED = 3, 4


def _code(v: Any) -> Any:
    """12 bits of any `v`, saturating; a NaN is 0x7FF.

    Times 2^-112 a float32 has the exponent of a float16, so its upper bits are the code, truncated; the lower bits are
    cleared first, which makes the product exact (or, below 2^-31, nothing). The code counts up if what was cut off is
    more than half of its last bit, or half and it is odd. Numbers below 2^-14 have wider steps but are specified to be
    rounded by the same bits.
    """
    bits = bits_of(v) & T.uint32(0x7FFFFFFF)
    magnitude = T.min(bits, T.uint32(_MAX_BITS))
    code = bits_of(float_of(magnitude & T.uint32(0xFFFE0000)) * T.float32(2.0**-112)) >> T.uint32(17)
    rest = (code & T.uint32(1)) + (magnitude & T.uint32(0x1FFFF))
    code = code + ((rest + T.uint32(0xFFFF)) >> T.uint32(17))  # 1 if rest > 2^16
    signed = code | (bits_of(v) >> T.uint32(20)) & T.uint32(0x800)
    return T.Select(bits > T.uint32(_INFINITY_BITS), T.uint32(0x7FF), signed)


def _are_plain(v_local: Any) -> Any:
    """Whether every number of a lane is 0 or becomes a normal number without saturating."""
    twice = [bits_of(v_local[e]) * T.uint32(2) for e in range(LANE)]  # without the sign
    largest = functools.reduce(T.max, twice)
    least = functools.reduce(T.min, (t - T.uint32(1) for t in twice))  # 0 becomes the largest
    return T.And(least >= T.uint32(2 * _NORMAL_BITS - 1), largest < T.uint32(2 * _OVERFLOW_BITS))


def _round_plain(v: Any) -> Any:
    """A plain `v`, rounded to nearest even with seven significant bits.

    Beside 1.5 * 2^17 times its power of two, a float32 has just these bits left.
    """
    aside = float_of(bits_of(v) & T.uint32(0x7F800000)) * T.float32(1.5 * 2.0**17)
    rounded = T.ieee_sub(T.ieee_add(v, aside), aside)
    return float_of(bits_of(rounded) | bits_of(v) & T.uint32(0x80000000))  # -0 has lost its sign


@macro
def encode_e5m6(v_local, words):
    """The three words of eight numbers.

    Plain numbers, which is nearly all there are, become float16 exactly once they are rounded. Two of them make a word
    whose nibbles 3 and 7 counted from the top are zero; closed up, the codes are its upper three bytes.
    """
    if _are_plain(v_local):
        rounded = T.alloc_local((LANE,), T.float32)
        halves = T.alloc_local((LANE,), T.float16)
        codes = T.alloc_local((LANE // 2,), T.uint32)
        for e in T.unroll(LANE):
            rounded[e] = _round_plain(v_local[e ^ 1])  # the first of two belongs into the upper half
        for e in T.vectorized(LANE):
            halves[e] = T.cast(rounded[e], T.float16)
        pairs = T.view(halves, (LANE // 2,), T.uint32)
        for j in T.unroll(LANE // 2):
            codes[j] = (pairs[j] & T.uint32(0xFFF00000)) | ((pairs[j] << T.uint32(4)) & T.uint32(0x000FFFFF))
        words[0] = pick_bytes(codes[1], codes[0], 3, 5, 6, 7)
        words[1] = pick_bytes(codes[2], codes[1], 2, 3, 5, 6)
        words[2] = pick_bytes(codes[3], codes[2], 1, 2, 3, 5)
    else:
        code = T.alloc_local((LANE,), T.uint32)
        for e in T.unroll(LANE):
            code[e] = _code(v_local[e])
        words[0] = code[0] << T.uint32(20) | code[1] << T.uint32(8) | code[2] >> T.uint32(4)
        words[1] = code[2] << T.uint32(28) | code[3] << T.uint32(16) | code[4] << T.uint32(4) | code[5] >> T.uint32(8)
        words[2] = code[5] << T.uint32(24) | code[6] << T.uint32(12) | code[7]


@macro
def store_e5m6(y, words, row, slot, hidden):
    """Write the words of a lane to its row of bytes, if there is such a row."""
    if hidden % (STORED * LANE):
        own = T.view(words, (WORDS * 4,), T.uint8)
        if row < y.shape[0] and slot * LANE < hidden:
            for p in T.unroll(WORDS):
                for e in T.vectorized(4):
                    y[row, (slot * WORDS + p) * 4 + e] = own[p * 4 + e]
    else:
        # of the twelve words of four lanes, lane q of the first three stores those from 4 q on
        passed = T.alloc_local((WORDS,), T.uint32)
        moved = T.alloc_local((STORED,), T.uint32)
        for w in T.unroll(WORDS):
            passed[w] = T.shfl_down(words[w], 1)
        q = slot % STORED
        moved[0] = T.if_then_else(q == 0, words[0], T.if_then_else(q == 1, words[1], words[2]))
        moved[1] = T.if_then_else(q == 0, words[1], T.if_then_else(q == 1, words[2], passed[0]))
        moved[2] = T.if_then_else(q == 0, words[2], T.if_then_else(q == 1, passed[0], passed[1]))
        moved[3] = T.if_then_else(q == 0, passed[0], T.if_then_else(q == 1, passed[1], passed[2]))
        bytes_ = T.view(moved, (STORED * 4,), T.uint8)
        if row < y.shape[0] and slot * LANE < hidden and q < WORDS:
            for e in T.vectorized(STORED * 4):
                y[row, slot // STORED * (STORED * WORDS * 4) + q * (STORED * 4) + e] = bytes_[e]
