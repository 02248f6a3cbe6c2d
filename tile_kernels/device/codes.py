"""Codes of fp8, fp4 (e2m1) and the 12-bit e5m6: encode and store the vector of a lane, decode codes.

fp4 codes come from fused multiply-adds that round once. An e5m6 code is the upper 12 bits of a float16, eight to three
words, the first code in the top bits. A lane's eight codes are 12 bytes: four neighbouring lanes pass words on so that
three of them write 16 bytes each. Rows that are no multiple of 32 channels are not aligned for that and are written in
words.
"""

import functools
import math
from typing import Any

from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.lang import T, macro
from tile_kernels.device.bits import bits_of, byte_perm, float_bits, float_of, pick_bytes
from tile_kernels.device.stochastic import encode_at_random
from tile_kernels.device.vectors import LANE, lane_pairs, scale_lane, sign_bytes, store_lane

#: What the code 0 of fp4 looks like before it is told apart: the bits of 2^23 - 2.
_E2M1_ZERO = float_bits(2.0**23 - 2)

#: float32 bits of 65024, the largest e5m6 number, and of infinity.
_MAX_BITS, _INFINITY_BITS = 0x477E0000, 0x7F800000

#: float32 bits of 2^-14, the least normal float16, and of 65280, the least number that would round to infinity.
_NORMAL_BITS, _OVERFLOW_BITS = 0x38800000, 0x477F0000

#: Words of a lane, and of what a lane stores at a time.
WORDS, STORED = 3, 4

# All formats --------------------------------------------------------------------------------


def code_registers(fmt: QuantFormat) -> tuple:
    """Shape and type of the registers that hold the codes of a lane."""
    words = {'e2m1': 1, 'e5m6': WORDS}.get(fmt.data.name)
    return ((words,), T.uint32) if words else ((LANE,), T.dtype(fmt.data.torch))


@macro
def encode_and_store(x_local, i, fmt, task, sf_inv, v_local, y_local, y, row, slot, hidden):
    """Quantize the channels of a lane with `sf_inv` and, if the row exists, write their codes."""
    width, stored = fmt.data.stored(LANE), fmt.data.stored(hidden)
    if task == 'stochastic':
        scale_lane(x_local, i, sf_inv, v_local)
        encode_at_random(x_local, i, v_local, slot, fmt.data, y_local)
    elif fmt.data.name == 'e2m1':
        # a caller's float32 factors may be any number, whatever the format says
        power_of_two = fmt.power_of_two and (task != 'data' or fmt.sf == 'ue8m0x4')
        encode_e2m1(x_local, i, sf_inv, power_of_two, v_local, y_local)
    elif fmt.data.name == 'e5m6':
        scale_lane(x_local, i, sf_inv, v_local)
        encode_e5m6(v_local, y_local)
        store_e5m6(y, y_local, row, slot, hidden)
    else:
        scale_lane(x_local, i, sf_inv, v_local)
        for e in T.vectorized(LANE):
            y_local[e] = T.cast(v_local[e], T.dtype(fmt.data.torch))
    if fmt.data.name != 'e5m6' and row < y.shape[0]:
        codes = T.view(y_local, (width,), T.int8) if fmt.data.name == 'e2m1' else y_local
        store_lane(y, codes, row, slot, math.gcd(width, stored), stored, width)


@macro
def decode(codes, i, element, v_local):
    """The numbers of a row of codes of the named element, in float32."""
    channels = v_local.shape[0]
    if element == 'e2m1':
        pairs = T.view(codes, codes.shape, T.uint8)
        for j in T.unroll(channels // 2):
            v_local[2 * j] = e2m1_value(T.cast(pairs[i, j], T.uint32))
            v_local[2 * j + 1] = e2m1_value(T.cast(pairs[i, j], T.uint32) >> T.uint32(4))
    elif element == 'e5m6':
        words = T.view(codes, (codes.shape[0], 3), T.uint32)
        v_local[0] = _e5m6_value(words[i, 0] >> T.uint32(20))
        v_local[1] = _e5m6_value(words[i, 0] >> T.uint32(8))
        v_local[2] = _e5m6_value(words[i, 0] << T.uint32(4) | words[i, 1] >> T.uint32(28))
        v_local[3] = _e5m6_value(words[i, 1] >> T.uint32(16))
        v_local[4] = _e5m6_value(words[i, 1] >> T.uint32(4))
        v_local[5] = _e5m6_value(words[i, 1] << T.uint32(8) | words[i, 2] >> T.uint32(24))
        v_local[6] = _e5m6_value(words[i, 2] >> T.uint32(12))
        v_local[7] = _e5m6_value(words[i, 2])
    else:
        for e in T.vectorized(channels):
            v_local[e] = T.cast(codes[i, e], T.float32)


@macro
def decode_halves(codes, element, x_local):
    """The numbers of fp8 or fp4 codes as float16, which holds every one of them."""
    for i in T.unroll(x_local.shape[0]):
        if element == 'e2m1':
            words, pairs = T.view(codes, (codes.shape[0], 1), T.uint32), lane_pairs(x_local)
            for j in (0, 1, 2, 3):
                pairs[i, j] = _e2m1_halves(words[i, 0], j)
        else:
            for e in T.vectorized(LANE):
                x_local[i, e] = T.cast(codes[i, e], T.float16)


# e2m1 ---------------------------------------------------------------------------------------


def _e2m1_code(v: Any) -> Any:
    """fp4 magnitude of `v`, round to nearest even and saturating, plus `_E2M1_ZERO`; a NaN has the largest magnitude.

    Codes count in steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6. So `code(v) = min(2v, v + 2, v/2 + 4)`, rounded.
    Floats below 2^23 have steps of 1/2 and those above have steps of 1. So the bits of `v + (2^23 - 2)` count as the
    first two terms do, and those of `v/2 + 2^23` as the third. Both sums round once. Rounding keeps order, and positive
    floats (NaN last) order like their bits, so the smaller bits are the rounded smaller piece.
    """
    v = T.abs(v)
    halves_and_ones = bits_of(T.ieee_add(v, T.float32(2.0**23 - 2)))
    twos = bits_of(T.ieee_fmaf(v, T.float32(0.5), T.float32(2.0**23)))
    return T.min(T.min(halves_and_ones, twos), T.uint32(_E2M1_ZERO + 7))


def _e2m1_signs(x_local: Any, i: Any, half: int) -> Any:
    """The signs of four channels, each the upper bit of a byte, in the order 0, 2, 1, 3."""
    return sign_bytes(x_local, i, half, (0, 2, 1, 3)) & T.uint32(0x80808080)


def _e2m1_magnitudes(v_local: Any, half: int) -> Any:
    """Four fp4 magnitudes, each in the upper nibble of a byte."""
    code = [_e2m1_code(v_local[4 * half + index]) for index in range(4)]
    shifts = (4, 20, 12, 28)
    zeros = sum(_E2M1_ZERO << shift for shift in shifts)
    return sum((c * T.uint32(1 << s) for c, s in zip(code, shifts, strict=True)), T.uint32(-zeros % 2**32))


def _bf16_pair(value: float) -> Any:
    """Two bf16 of the same value."""
    return T.reinterpret(T.uint32((float_bits(value) >> 16) * 0x00010001), 'bfloat16x2')


def _e2m1_magnitudes_bf16(x_local: Any, i: Any, sf_inv: Any, half: int) -> Any:
    """The same, two channels at a time: a bf16 times a power of two is exact, and bf16 turn from halves to ones at 2^7.

    Here a product and a sum round together, because the product needs no rounding.
    """
    factor = T.reinterpret((bits_of(sf_inv) >> T.uint32(16)) * T.uint32(0x00010001), 'bfloat16x2')
    words = []
    for j in (2 * half, 2 * half + 1):
        x = T.abs2(T.reinterpret(lane_pairs(x_local)[i, j], 'bfloat16x2'))
        halves_and_ones = T.fma2(x, factor, _bf16_pair(2.0**7 - 2))
        twos = T.fma2(x, T.mul2(factor, _bf16_pair(0.5)), _bf16_pair(2.0**7))
        words.append(T.reinterpret(T.min2(T.min2(halves_and_ones, twos), _bf16_pair(2.0**7 + 3)), T.uint32))
    zero = (float_bits(2.0**7 - 2) >> 16) * 0x00010001
    return (words[0] + words[1] * T.uint32(1 << 8)) * T.uint32(16) - T.uint32(zero * 0x1010 % 2**32)


@macro
def encode_e2m1(x_local, i, sf_inv, power_of_two, v_local, y_word):
    """Eight fp4 codes in one word, the even channel of a pair in the lower nibble.

    On the way a code is the upper nibble of a byte, four channels to a word in the order 0, 2, 1, 3.
    """
    if x_local.dtype == 'bfloat16' and power_of_two:
        low = _e2m1_magnitudes_bf16(x_local, i, sf_inv, 0) | _e2m1_signs(x_local, i, 0)
        high = _e2m1_magnitudes_bf16(x_local, i, sf_inv, 1) | _e2m1_signs(x_local, i, 1)
    else:
        scale_lane(x_local, i, sf_inv, v_local)
        low = _e2m1_magnitudes(v_local, 0) | _e2m1_signs(x_local, i, 0)
        high = _e2m1_magnitudes(v_local, 1) | _e2m1_signs(x_local, i, 1)
    even = pick_bytes(low, high, 0, 1, 4, 5)
    odd = pick_bytes(low, high, 2, 3, 6, 7)
    y_word[0] = (even >> T.uint32(4)) + odd


def e2m1_value(code: Any) -> Any:
    """float32 of an fp4 code in the low bits: as the top of a subnormal float32 it is 2^126 times too small."""
    bits = (code & T.uint32(7)) << T.uint32(22) | (code & T.uint32(8)) << T.uint32(28)
    return float_of(bits) * T.float32(2.0**126)


def _e2m1_halves(word: Any, j: int) -> Any:
    """The float16 of byte `j` of eight fp4 codes: nothing but the upper byte, which is looked up, and the sign."""
    uppers = byte_perm(T.uint32(0x3E3C3800), T.uint32(0x46444240), word >> T.uint32(j // 2 * 16))  # of four codes
    signs = pick_bytes(word << T.uint32(4), word, j, j, j + 4, j + 4)
    first = j % 2 * 2
    return pick_bytes(uppers, T.uint32(0), 4, first, 4, first + 1) | signs & T.uint32(0x80008000)


# e5m6 ---------------------------------------------------------------------------------------


def _code(v: Any) -> Any:
    """12 bits of any `v`, saturating; a NaN is 0x7FF.

    Times 2^-112 a float32 has the exponent of a float16, so its upper bits are the code, truncated. The lower bits are
    cleared first, which makes the product exact, or 0 below 2^-31. The code counts up if what was cut off is more than
    half of its last bit, or half and it is odd. Numbers below 2^-14 have wider steps but are specified to be rounded by
    the same bits.
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
    whose nibbles 3 and 7 from the top are zero. Without these nibbles the codes are its upper three bytes.
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


def _e5m6_value(code: Any) -> Any:
    """float32 of a 12-bit code in the low bits: the upper bits of a float16."""
    half = T.reinterpret(T.cast((code & T.uint32(0xFFF)) << T.uint32(4), T.uint16), T.float16)
    return T.cast(half, T.float32)
