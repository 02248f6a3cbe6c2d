"""Stochastic rounding: random bits from the numbers themselves, and codes that they round up or down.

|v| between neighbours a <= |v| < b of the target goes to b if (|v| - a) / (b - a) + u >= 1, else to a, with u in [0, 1)
made of random bits; on average nothing is lost. Random bits are a hash of four consecutive numbers and their index q in
the row. A plain conversion has one row. So equal tensors round equally on every GPU:

    h  = 0x5671D42B b[0] + 0x9995E499 b[1] + 0xACE1B8A5 b[2] + 0xE153538D b[3] + q           b: float32 bits
    h ^= h >> 23;  h *= 0x7FEB352D;  h ^= h >> 16;  h *= 0x846CA68B
    r  = h ^ (h >> 11);  s = 0xD35A2D97 h;  s ^= s >> 11                                      all modulo 2^32

For number `4 q + e`, fp8 and fp4 take the top bits of r rotated left by `8 e`: as many as a float32 has more mantissa
bits. A bfloat16 takes the upper and lower halves of r, then of s. A float32 times a power of two has the exponent of a
smaller format, subnormal numbers included. Then the code is the truncated sum of its bits and the random bits.
Infinities saturate and NaN are converted as usual.
"""

from typing import Any

from tile_kernels.core.formats import Element
from tile_kernels.core.lang import T, macro
from tile_kernels.device.bits import bits_of, bytes_of, choose_bits, float_of, pick_bytes
from tile_kernels.device.vectors import LANE, sign_bytes

#: Mantissa bits and bias of the exponent of what can be rounded to.
MANTISSA = {'e4m3': (3, 7), 'e5m2': (2, 15), 'e2m1': (1, 1)}

#: The code of the largest number, by element.
_TOP = {'e4m3': 0x7E, 'e5m2': 0x7B, 'e2m1': 0x7}


@macro
def mix(v_local, first, place, word):
    """`word[0]` = the hash of four numbers, before its last step. A statement for each step: none is done twice."""
    word[0] = place
    for e, factor in ((0, 0x5671D42B), (1, 0x9995E499), (2, 0xACE1B8A5), (3, 0xE153538D)):
        word[0] = word[0] + bits_of(v_local[first + e]) * T.uint32(factor)
    for shift, factor in ((23, 0x7FEB352D), (16, 0x846CA68B)):
        word[0] = (word[0] ^ (word[0] >> T.uint32(shift))) * T.uint32(factor)


@macro
def finish(word):
    """The last step of the hash."""
    word[0] = word[0] ^ (word[0] >> T.uint32(11))


def _to_bf16(v: Any, random: Any) -> Any:
    """`v` rounded stochastically to a bfloat16, with 16 random bits at the top of a word; as float32."""
    rounded = (bits_of(v) + (random >> T.uint32(16))) & T.uint32(0xFFFF0000)
    return T.Select((bits_of(v) & T.uint32(0x7F800000)) != T.uint32(0x7F800000), float_of(rounded), v)


@macro
def round_four_to_bf16(v_local, first, place):
    """Round four consecutive numbers; the results are exact in bfloat16."""
    word = T.alloc_local((1,), T.uint32)
    second = T.alloc_local((1,), T.uint32)
    mix(v_local, first, place, word)
    second[0] = word[0] * T.uint32(0xD35A2D97)
    finish(word)
    finish(second)
    for e in T.unroll(2):
        v_local[first + e] = _to_bf16(v_local[first + e], word[0] << T.cast(16 * e, T.uint32))
        v_local[first + 2 + e] = _to_bf16(v_local[first + 2 + e], second[0] << T.cast(16 * e, T.uint32))


@macro
def add_random(v_local, first, place, element, sums, at):
    """Four words from `sums[at]` on: the bits of consecutive |v|, with exponents of the element, plus random bits."""
    mantissa, bias = MANTISSA[element.name]
    word = T.alloc_local((1,), T.uint32)
    mix(v_local, first, place, word)
    finish(word)
    for e in T.unroll(4):
        bits = bits_of(T.abs(v_local[first + e]) * T.float32(2.0 ** (bias - 127)))
        sums[at + e] = bits + (word[0] >> T.uint32(9 + mantissa))
        word[0] = pick_bytes(word[0], word[0], 3, 0, 1, 2)  # rotated left by 8


def _two_codes(low: Any, high: Any, element: Element) -> Any:
    """The codes at the top of two sums in the halves of a word, at bit 7 - mantissa of each; lower bits mean nothing.

    Sums above that of the largest number are cut, a NaN counts as infinity.
    """
    top = ((_TOP[element.name] + 1) << (7 - MANTISSA[element.name][0])) - 1
    return T.call_extern(T.uint32, '__vminu2', pick_bytes(low, high, 2, 3, 6, 7), T.uint32(top * 0x00010001))


def top_bytes(v_local: Any, first: Any) -> Any:
    """The bytes of four numbers that hold the sign as their upper bit."""
    return bytes_of([bits_of(v_local[first + e]) for e in (0, 1, 2, 3)], 3)


@macro
def four_codes(v_local, first, place, signs, element, codes, at):
    """`codes[at]` = a word of the fp8 codes of four consecutive numbers, a byte each with the sign at its top."""
    mantissa, _ = MANTISSA[element.name]
    sums = T.alloc_local((4,), T.uint32)
    add_random(v_local, first, place, element, sums, 0)
    even = _two_codes(sums[0], sums[2], element) >> T.uint32(7 - mantissa)
    odd = _two_codes(sums[1], sums[3], element) << T.uint32(1 + mantissa)
    codes[at] = pick_bytes(even, odd, 0, 5, 2, 7) | signs & T.uint32(0x80808080)
    total = v_local[first] + v_local[first + 1] + v_local[first + 2] + v_local[first + 3]
    if T.isnan(total):  # rare: a NaN, or infinities of both signs
        fp8 = T.view(codes, (codes.shape[0] * 4,), T.uint8)
        for e in T.unroll(4):
            if T.isnan(v_local[first + e]):
                fp8[at * 4 + e] = T.uint8(0x7F)


@macro
def eight_e2m1_codes(v_local, place, low_signs, high_signs, element, y_word):
    """A word of the fp4 codes of eight consecutive numbers; signs are at the top of a byte for each."""
    sums = T.alloc_local((LANE,), T.uint32)
    pair = T.alloc_local((4,), T.uint32)  # numbers k and k + 4
    for half in T.unroll(2):
        add_random(v_local, half * 4, place + T.cast(half, T.uint32), element, sums, half * 4)
    for k in T.unroll(4):
        pair[k] = _two_codes(sums[k], sums[k + 4], element)
    low = choose_bits(0x000F000F, pair[0] >> T.uint32(6), pair[1] >> T.uint32(2))
    high = choose_bits(0x0F000F00, pair[2] << T.uint32(2), pair[3] << T.uint32(6))
    even_signs = pick_bytes(low_signs, high_signs, 0, 2, 4, 6) >> T.uint32(4)
    signs = choose_bits(0x08080808, even_signs, pick_bytes(low_signs, high_signs, 1, 3, 5, 7))
    y_word[0] = choose_bits(0x77777777, pick_bytes(low, high, 0, 5, 2, 7), signs)


@macro
def encode_at_random(x_local, i, v_local, slot, element, y_local):
    """The codes of the eight numbers of lane `slot` of a row: `v_local`, which are row `i` of `x_local`, scaled."""
    place = T.cast(slot * (LANE // 4), T.uint32)
    if element.name == 'e2m1':
        signs = (sign_bytes(x_local, i, 0), sign_bytes(x_local, i, 1))
        eight_e2m1_codes(v_local, place, *signs, element, y_local)
    else:
        codes = T.view(y_local, (2,), T.uint32)
        for half in (0, 1):
            four_codes(v_local, half * 4, place + T.uint32(half), sign_bytes(x_local, i, half), element, codes, half)
