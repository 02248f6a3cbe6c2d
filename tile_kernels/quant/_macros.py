"""Device code shared by the casts: the channels of a lane, scale factors from an amax, codes, scale factor layouts.

A lane owns `LANE` neighbouring channels of a row: 16 bytes of bf16 in, 8 bytes of fp8 or 4 bytes of fp4 out. Its rows
are a local buffer `x_local[rows, LANE]`; 16-bit channels are also read as words of two (`pairs`).

Everything is exact, so results can be compared bit for bit:
- `T.max` and `T.min` return the other operand for a NaN, so a NaN never reaches an amax;
- divisions are correctly rounded, those by a clamped amax without branches for rare numbers;
- a power-of-two scale factor is found in the bits of the amax, without a division;
- fp4 codes come from fused multiply-adds that round once.
"""

import functools
import math
import struct
from typing import Any

from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.lang import T, byte_perm, macro, pick_bytes

LANE = 8
FLOAT_MAX = 3.4028234663852886e38


def _float_bits(value: float) -> int:
    return struct.unpack('<I', struct.pack('<f', value))[0]


#: The bits of 1.0.
_ONE = _float_bits(1.0)

#: What the code 0 of fp4 looks like before it is told apart: the bits of 2^23 - 2.
_E2M1_ZERO = _float_bits(2.0**23 - 2)


def bits_of(value: Any) -> Any:
    """The bits of a float32 as uint32."""
    return T.reinterpret(value, T.uint32)


def float_of(bits: Any) -> Any:
    """The float32 with these bits."""
    return T.reinterpret(bits, T.float32)


# Channels -----------------------------------------------------------------------------------


def lane_pairs(x_local: Any) -> Any:
    """A lane's rows as words of two 16-bit channels, the even one in the lower half; wider channels have none."""
    rows, lane = x_local.shape
    return T.view(x_local, (rows, lane // 2), T.uint32) if x_local.dtype in ('bfloat16', 'float16') else None


@macro
def load_lane(x, x_local, i, row, slot, piece, hidden, first=0):
    """Read the channels (or containers of codes) of lane `slot` of a row in pieces that alignment allows.

    Those of the row begin at column `first`, and there are `hidden` (None if the lane is known to be within the row).
    """
    lane = x_local.shape[1]
    for p in T.unroll(lane // piece):
        if hidden is None or slot * lane + p * piece < hidden:
            for e in T.vectorized(piece):
                x_local[i, p * piece + e] = x[row, first + slot * lane + p * piece + e]


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


def _e2m1_halves(word: Any, j: int) -> Any:
    """The float16 of byte `j` of eight fp4 codes: nothing but the upper byte, which is looked up, and the sign."""
    uppers = byte_perm(T.uint32(0x3E3C3800), T.uint32(0x46444240), word >> T.uint32(j // 2 * 16))  # of four codes
    signs = pick_bytes(word << T.uint32(4), word, j, j, j + 4, j + 4)
    first = j % 2 * 2
    return pick_bytes(uppers, T.uint32(0), 4, first, 4, first + 1) | signs & T.uint32(0x80008000)


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


# Codes --------------------------------------------------------------------------------------


def _e2m1_code(v: Any) -> Any:
    """fp4 magnitude of `v`, round to nearest even and saturating, plus `_E2M1_ZERO`; a NaN has the largest magnitude.

    Codes count in steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6: code(v) = min(2v, v + 2, v/2 + 4), rounded. Floats
    below 2^23 count in halves and those above in ones, so the bits of v + (2^23 - 2) count as the first two pieces do;
    those of v/2 + 2^23 count as the third. Both sums round once. Rounding keeps order, and positive floats (NaN last)
    order like their bits, so the smaller bits are the rounded smaller piece.
    """
    v = T.abs(v)
    halves_and_ones = bits_of(T.ieee_add(v, T.float32(2.0**23 - 2)))
    twos = bits_of(T.ieee_fmaf(v, T.float32(0.5), T.float32(2.0**23)))
    return T.min(T.min(halves_and_ones, twos), T.uint32(_E2M1_ZERO + 7))


def _sign_bytes(x_local: Any, i: Any, half: int) -> Any:
    """The bytes of four channels that hold the sign (even -0 and NaN have one) as their upper bit."""
    if x_local.dtype == 'float32':
        bits = [bits_of(x_local[i, 4 * half + index]) for index in range(4)]
        return pick_bytes(pick_bytes(bits[0], bits[2], 3, 7), pick_bytes(bits[1], bits[3], 3, 7), 0, 1, 4, 5)
    pairs = lane_pairs(x_local)
    return pick_bytes(pairs[i, 2 * half], pairs[i, 2 * half + 1], 1, 5, 3, 7)


def _e2m1_magnitudes(v_local: Any, half: int) -> Any:
    """Four fp4 magnitudes, each in the upper nibble of a byte."""
    code = [_e2m1_code(v_local[4 * half + index]) for index in range(4)]
    shifts = (4, 20, 12, 28)
    zeros = sum(_E2M1_ZERO << shift for shift in shifts)
    return sum((c * T.uint32(1 << s) for c, s in zip(code, shifts, strict=True)), T.uint32(-zeros % 2**32))


def _bf16_pair(value: float) -> Any:
    """Two bf16 of the same value."""
    return T.reinterpret(T.uint32((_float_bits(value) >> 16) * 0x00010001), 'bfloat16x2')


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
    zero = (_float_bits(2.0**7 - 2) >> 16) * 0x00010001
    return (words[0] + words[1] * T.uint32(1 << 8)) * T.uint32(16) - T.uint32(zero * 0x1010 % 2**32)


@macro
def encode_e2m1(x_local, i, sf_inv, power_of_two, v_local, y_word):
    """Eight fp4 codes in one word, the even channel of a pair in the lower nibble.

    On the way a code is the upper nibble of a byte, four channels to a word in the order 0, 2, 1, 3.
    """
    if x_local.dtype == 'bfloat16' and power_of_two:
        low = _e2m1_magnitudes_bf16(x_local, i, sf_inv, 0) | _sign_bytes(x_local, i, 0) & T.uint32(0x80808080)
        high = _e2m1_magnitudes_bf16(x_local, i, sf_inv, 1) | _sign_bytes(x_local, i, 1) & T.uint32(0x80808080)
    else:
        scale_lane(x_local, i, sf_inv, v_local)
        low = _e2m1_magnitudes(v_local, 0) | _sign_bytes(x_local, i, 0) & T.uint32(0x80808080)
        high = _e2m1_magnitudes(v_local, 1) | _sign_bytes(x_local, i, 1) & T.uint32(0x80808080)
    even = pick_bytes(low, high, 0, 1, 4, 5)
    odd = pick_bytes(low, high, 2, 3, 6, 7)
    y_word[0] = (even >> T.uint32(4)) + odd


@macro
def store_lane(y, y_local, row, slot, piece, stored, width, first=0):
    """Write the `width` container elements of lane `slot` in pieces that alignment allows, within the row.

    The `stored` elements of the row begin at column `first`.
    """
    for p in T.unroll(width // piece):
        if slot * width + p * piece < stored:
            for e in T.vectorized(piece):
                y[row, first + slot * width + p * piece + e] = y_local[p * piece + e]


# Scale factors ------------------------------------------------------------------------------


def _rceil_exponent(amax: Any, fmt: QuantFormat) -> Any:
    """Biased exponent of the least power of two that is not below amax / max(fmt).

    With max(fmt) = m * 2^k and amax = f * 2^e (1 <= f, m < 2) it is e - k, plus one if f > m: adding the distance from
    m to the end of the binade carries into the exponent exactly then.
    """
    top = _float_bits(fmt.data.max)
    carry, exponent = 0x7FFFFF - (top & 0x7FFFFF), (top >> 23) - 127
    return ((bits_of(amax) + T.uint32(carry)) >> T.uint32(23)) - T.uint32(exponent)


def clamp_amax(amax: Any, amax_floor: Any) -> Any:
    """An amax that can be divided by: at least the floor, and an infinity counts as the largest finite float."""
    return T.min(T.max(amax, amax_floor), T.float32(FLOAT_MAX))


@macro
def _over_top(amax, top):
    """`amax / top`, correctly rounded: the quotient is corrected by its remainder, which is exact."""
    inverse = T.float32(1.0 / top)
    quotient = T.ieee_mul(amax, inverse)
    return T.ieee_fmaf(T.ieee_fmaf(-quotient, T.float32(top), amax), inverse, quotient)


@macro
def _inverse(value):
    """`1 / value`, correctly rounded for e4m3 numbers: a Newton step from a guess that may be two units off."""
    guess = T.fast_rcp(value)
    return T.ieee_fmaf(T.ieee_fmaf(-value, guess, T.float32(1.0)), guess, guess)


@macro
def _top_over(amax, top):
    """`top / amax`, correctly rounded for the largest number of every format.

    The significand is divided by, so that nothing overflows, the quotient corrected by its exact remainder, and the
    exponent subtracted.
    """
    significand = float_of(bits_of(amax) & T.uint32(0x7FFFFF) | T.uint32(_ONE))
    inverse = _inverse(significand)
    quotient = T.ieee_mul(T.float32(top), inverse)
    rounded = T.ieee_fmaf(T.ieee_fmaf(-significand, quotient, T.float32(top)), inverse, quotient)
    return float_of(bits_of(rounded) - (bits_of(amax) & T.uint32(0x7F800000)) + T.uint32(_ONE))


@macro
def amax_to_sf(amax, fmt, sf, sf_inv, i):
    """The stored scale factor of an amax (exponent byte if packed) and the float32 multiplier that quantises.

    `amax` must be clamped: finite and at least top * 2^-126, so that factor and multiplier are normal numbers.
    """
    if fmt.power_of_two:
        exponent = _rceil_exponent(amax, fmt)
        sf[i] = T.cast(exponent, T.uint8) if fmt.sf == 'ue8m0x4' else float_of(exponent << T.uint32(23))
        sf_inv[i] = float_of((T.uint32(254) - exponent) << T.uint32(23))
    elif fmt.sf == 'e4m3':
        sf[i] = T.cast(_over_top(amax, fmt.data.max), T.float8_e4m3fn)
        sf_inv[i] = _inverse(T.cast(sf[i], T.float32))
    else:
        sf[i] = _over_top(amax, fmt.data.max)
        sf_inv[i] = _top_over(amax, fmt.data.max)


def sf_register_dtype(fmt: QuantFormat) -> Any:
    """Type of one scale factor in a register: what is stored, a byte for each exponent of a packed format."""
    return T.uint8 if fmt.sf == 'ue8m0x4' else T.dtype(fmt.sf_dtype)


def sf_tensor(fmt: QuantFormat, num_tokens: Any, num_groups: int) -> Any:
    """Parameter type of per-token scale factors: row-major, or column-major with a pitch known at run time."""
    shape = (num_tokens, -(-num_groups // fmt.sf_pack))
    if fmt.col:
        return T.StridedTensor(shape, (1, T.dynamic('sf_pitch')), T.dtype(fmt.sf_dtype))
    return T.Tensor(shape, T.dtype(fmt.sf_dtype))


def sf_bytes(sf: Any) -> Any:
    """Packed scale factors as bytes [row, word, byte of the word]."""
    rows, words = sf.shape
    row_pitch, word_pitch = sf.strides if len(sf.strides) else (words, 1)
    return T.view(sf, (rows, words, 4), T.uint8, strides=(4 * row_pitch, 4 * word_pitch, 1))


@macro
def store_sf(y_sf, fmt, num_groups, row, group, value, first=0):
    """Write the scale factor of one group; the last group also clears the bytes of groups that do not exist.

    The groups of the row begin at column `first`.
    """
    if fmt.sf == 'ue8m0x4':
        packed = sf_bytes(y_sf)
        packed[row, first + group // 4, group % 4] = value
        if group == num_groups - 1:
            for b in T.unroll(-num_groups % 4):
                packed[row, first + group // 4, num_groups % 4 + b] = T.uint8(0)
    else:
        y_sf[row, first + group] = value


@macro
def load_sf_inv(sf, fmt, row, group, sf_inv, i):
    """The float32 multiplier that quantises with a given scale factor; the exponent byte 0 stands for 2^-127."""
    if fmt.sf == 'ue8m0x4':
        packed = sf_bytes(sf)
        exponent = T.cast(packed[row, group // 4, group % 4], T.uint32)
        sf_inv[i] = T.ieee_fdiv(T.float32(1.0), float_of(T.max(exponent << T.uint32(23), T.uint32(1 << 22))))
    else:
        sf_inv[i] = T.ieee_fdiv(T.float32(1.0), T.cast(sf[row, group], T.float32))


def shuffle_steps(lanes: int) -> int:
    """Butterfly steps that reduce over `lanes` neighbouring lanes."""
    return int(math.log2(lanes))


def group_lanes(width: int, fmt: QuantFormat) -> int:
    """Lanes that share a scale factor of a row of `width` channels; a whole row counts as its next power of two."""
    group = fmt.sf_block[1]
    return group // LANE if group else 1 << (-(-width // LANE) - 1).bit_length()


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
