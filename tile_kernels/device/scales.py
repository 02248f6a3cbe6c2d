"""Scale factors: from an amax, to memory and back, in every layout of a `QuantFormat`.

Everything is exact, so results can be compared bit for bit. Divisions are correctly rounded, those by a clamped amax
without branches for rare numbers. A power-of-two factor is found in the bits of the amax, without a division.
"""

from typing import Any

from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.lang import T, macro
from tile_kernels.device.bits import bits_of, float_bits, float_of
from tile_kernels.device.vectors import LANE

FLOAT_MAX = 3.4028234663852886e38

#: The bits of 1.0.
_ONE = float_bits(1.0)

# From an amax -------------------------------------------------------------------------------


def clamp_amax(amax: Any, amax_floor: Any) -> Any:
    """An amax that can be divided by: at least the floor, and an infinity counts as the largest finite float."""
    return T.min(T.max(amax, amax_floor), T.float32(FLOAT_MAX))


@macro
def amax_to_sf(amax, fmt, sf, sf_inv, i):
    """The stored scale factor of an amax (exponent byte if packed) and the float32 multiplier that quantizes.

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


def _rceil_exponent(amax: Any, fmt: QuantFormat) -> Any:
    """Biased exponent of the least power of two that is not below amax / max(fmt).

    With `max(fmt) = m * 2^k` and `amax = f * 2^e` (1 <= f, m < 2) it is e - k, plus one if f > m. Adding the distance
    from m to the end of the binade carries into the exponent exactly then.
    """
    top = float_bits(fmt.data.max)
    carry, exponent = 0x7FFFFF - (top & 0x7FFFFF), (top >> 23) - 127
    return ((bits_of(amax) + T.uint32(carry)) >> T.uint32(23)) - T.uint32(exponent)


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


# In memory ----------------------------------------------------------------------------------


def group_lanes(width: int, fmt: QuantFormat) -> int:
    """Lanes that share a scale factor of a row of `width` channels; a whole row counts as its next power of two."""
    group = fmt.sf_block[1]
    return group // LANE if group else 1 << (-(-width // LANE) - 1).bit_length()


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
    """The float32 multiplier that quantizes with a given scale factor; the exponent byte 0 stands for 2^-127."""
    if fmt.sf == 'ue8m0x4':
        packed = sf_bytes(sf)
        exponent = T.cast(packed[row, group // 4, group % 4], T.uint32)
        sf_inv[i] = T.ieee_fdiv(T.float32(1.0), float_of(T.max(exponent << T.uint32(23), T.uint32(1 << 22))))
    else:
        sf_inv[i] = T.ieee_fdiv(T.float32(1.0), T.cast(sf[row, group], T.float32))


def sf_value(sf: Any, fmt: QuantFormat, row: Any, group: Any) -> Any:
    """The scale factor of a block as float32; the exponent byte 0 stands for 2^-127."""
    if fmt.sf == 'ue8m0x4':
        bits = T.cast(_sf_byte(sf, fmt, row, group), T.uint32) << T.uint32(23)
        return float_of(T.max(bits, T.uint32(1 << 22)))
    return T.cast(sf[row, group], T.float32)


def sf_exponent(sf: Any, fmt: QuantFormat, row: Any, group: Any) -> Any:
    """The biased exponent of a power-of-two scale factor."""
    if fmt.sf == 'ue8m0x4':
        return T.cast(_sf_byte(sf, fmt, row, group), T.uint32)
    return (bits_of(sf[row, group]) >> T.uint32(23)) & T.uint32(0xFF)


def _sf_byte(sf: Any, fmt: QuantFormat, row: Any, group: Any) -> Any:
    if fmt.column_packed:
        return sf_bytes(sf)[row // 4, group, row % 4]
    return sf_bytes(sf)[row, group // 4, group % 4]
