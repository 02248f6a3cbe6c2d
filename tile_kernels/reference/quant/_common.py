"""What the twins of the casts share.

A matrix is cut into blocks that share a scale factor; the factor of each block is found, and its numbers are rounded.
Nothing here knows how a kernel works: numbers are compared with the midpoints of a format, not built from bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant.unpack_from_e2m1fn_x2 import unpack_from_e2m1fn_x2

FP8_NAMES = {torch.float8_e4m3fn: 'e4m3', torch.float8_e5m2: 'e5m2'}
FLOAT_MAX = torch.finfo(torch.float32).max

#: Midpoints between neighbouring magnitudes of e2m1.
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


# Codes --------------------------------------------------------------------------------------


def round_to_fp8(v: Tensor, fmt: QuantFormat) -> Tensor:
    """Nearest fp8 number, ties to even, saturating; a NaN is 0x7F whatever its sign."""
    codes = v.clamp(-fmt.data.max, fmt.data.max).to(fmt.data.torch)
    nan = torch.tensor(0x7F, dtype=torch.uint8, device=v.device)
    return torch.where(v.isnan(), nan, codes.view(torch.uint8)).view(fmt.data.torch)


def round_to_e2m1(v: Tensor, negative: Tensor) -> Tensor:
    """Nearest e2m1 code, ties to the even code, saturating; a NaN has the largest magnitude."""
    magnitude = v.abs()
    code = torch.zeros_like(v, dtype=torch.uint8)
    for below, midpoint in enumerate(E2M1_MIDPOINTS):
        above = magnitude > midpoint if below % 2 == 0 else magnitude >= midpoint
        code += above.to(torch.uint8)
    code = torch.where(v.isnan(), 7, code).to(torch.uint8)
    return code + 8 * negative.to(torch.uint8)


def pack_e2m1(code: Tensor) -> Tensor:
    """Two codes to a byte, the even channel in the lower nibble."""
    return (code[..., 0::2] + 16 * code[..., 1::2]).view(torch.int8)


def round_to_e5m6(v: Tensor) -> Tensor:
    """12-bit codes, the upper bits of a float16; saturating, a NaN is 0x7FF.

    The float16 is the one towards zero. Its upper bits are rounded to nearest even by the bits that a float32 has below
    them. This is only right for normal numbers; smaller ones are specified to use the same bits.
    """
    v = v.clamp(-65024.0, 65024.0)
    nearest = v.half()
    towards_zero = nearest.view(torch.int16).int() - (nearest.abs().float() > v.abs()).int()
    code = (towards_zero & 0xFFFF) >> 4
    rest = v.view(torch.int32) & 0x1FFFF
    return torch.where(v.isnan(), 0x7FF, code + (code % 2 + rest > 0x10000).int())


def pack_e5m6(code: Tensor) -> Tensor:
    """Eight codes to twelve bytes: one string of bits, the first code first, in three little-endian words."""
    first, second = code.unflatten(-1, (-1, 2)).unbind(-1)
    stream = torch.stack((first >> 4, (first & 15) << 4 | second >> 8, second & 0xFF), -1).to(torch.uint8)
    return stream.flatten(-2).unflatten(-1, (-1, 4)).flip(-1).flatten(-2).contiguous()


def unpack_e5m6(data: Tensor) -> Tensor:
    """The codes of packed bytes."""
    stream = data.contiguous().view(torch.uint8).int().unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
    high, middle, low = stream.unflatten(-1, (-1, 3)).unbind(-1)
    return torch.stack((high << 4 | middle >> 4, (middle & 15) << 8 | low), -1).flatten(-2)


def encode(v: Tensor, negative: Tensor, fmt: QuantFormat, stochastic: bool = False) -> Tensor:
    """Codes of scaled numbers; `negative` gives fp4 its signs."""
    if stochastic:
        v = round_at_random(v, fmt.data.name)
    if fmt.data.name == 'e2m1':
        return pack_e2m1(round_to_e2m1(v, negative))
    if fmt.data.name == 'e5m6':
        return pack_e5m6(round_to_e5m6(v))
    return round_to_fp8(v, fmt)


def values_of(data: Tensor, fmt: QuantFormat) -> Tensor:
    """The numbers that codes stand for, in float32."""
    if fmt.data.name == 'e2m1':
        return unpack_from_e2m1fn_x2(data)
    if fmt.data.name == 'e5m6':
        return (unpack_e5m6(data) << 4).to(torch.uint16).view(torch.float16).float()
    return data.float()


# Stochastic rounding ------------------------------------------------------------------------


#: Mantissa bits, least positive and largest number of what can be rounded to.
ELEMENTS = {
    'bf16': (7, 2.0**-133, float('inf')),
    'e4m3': (3, 2.0**-9, 448.0),
    'e5m2': (2, 2.0**-16, 57344.0),
    'e2m1': (1, 2.0**-1, 6.0),
}


def random_words(v: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit hashes (as int64) of each four numbers of a row and of their place in it."""
    mask = 0xFFFFFFFF
    bits = torch.nn.functional.pad(v, (0, -v.shape[-1] % 4)).view(torch.int32).long().unflatten(-1, (-1, 4)) & mask
    factors = (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D)
    products = sum(_times(bits[..., i], factor) for i, factor in enumerate(factors))
    h = (products + torch.arange(bits.shape[-2], device=v.device)) & mask
    h = _times(h ^ (h >> 23), 0x7FEB352D)
    h = _times(h ^ (h >> 16), 0x846CA68B)
    second = _times(h, 0xD35A2D97)
    return h ^ (h >> 11), second ^ (second >> 11)


def _times(a: Tensor, b: int) -> Tensor:
    """Product of 32-bit numbers modulo 2^32; the halves of `a` keep int64 from overflowing."""
    return ((a & 0xFFFF) * b + (((a >> 16) * b & 0xFFFF) << 16)) & 0xFFFFFFFF


def round_at_random(v: Tensor, element: str) -> Tensor:
    """Each number of float32 rows, rounded up or down to one of `element`; what is not finite stays as it is.

    It goes up from the number below |v| if what is above it, as a part of a step, and a random fraction reach 1. A step
    has as many parts as a float32 just below 1 has in it; of smaller numbers only whole parts count, to nearest even.
    """
    mantissa, least, largest = ELEMENTS[element]
    parts = 2.0 ** (23 - mantissa)
    first, second = random_words(v)
    if element == 'bf16':
        random = torch.stack((first >> 16, first & 0xFFFF, second >> 16, second & 0xFFFF), -1)
    else:
        turned = [((first << 8 * e | first >> (32 - 8 * e)) & 0xFFFFFFFF) >> (9 + mantissa) for e in range(4)]
        random = torch.stack(turned, -1)
    fraction = random.flatten(-2)[..., : v.shape[-1]].double() / parts
    magnitude = v.abs().double()
    exponent = torch.frexp(magnitude.clamp(min=2.0**-200)).exponent - 1
    step = torch.ldexp(torch.ones_like(magnitude), exponent - mantissa).clamp(min=least)
    magnitude = (magnitude / step * parts).round() / parts  # in steps; nothing is lost unless the step is the least
    below = magnitude.floor()
    rounded = ((below + (magnitude - below + fraction >= 1)) * step).clamp(max=largest).float().copysign(v)
    return torch.where(v.isfinite(), rounded, v)


# Scale factors ------------------------------------------------------------------------------


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """IEEE division. Both operands must be tensors: torch multiplies by a reciprocal when one is a Python number."""
    if not isinstance(a, Tensor):
        return torch.full_like(torch.as_tensor(b), a) / b
    return a / (b if isinstance(b, Tensor) else torch.full_like(a, b))


def exponent_byte(sf: Tensor) -> Tensor:
    """Biased exponent of the least power of two that is not below `sf` (a positive normal number)."""
    return (((sf.view(torch.int32) - 1) >> 23) + 1).to(torch.uint8)


def power_of_two(exponent_byte: Tensor) -> Tensor:
    """2^(byte - 127); 2^-127, for the byte 0, is subnormal."""
    return torch.ldexp(torch.ones_like(exponent_byte, dtype=torch.float64), exponent_byte.int() - 127).float()


def sf_of_amax(amax: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """The scale factor of each block as the format stores it (bytes if packed), and the multiplier that quantizes."""
    exact = divide(amax, fmt.data.max)
    if fmt.sf == 'f32':
        return exact, divide(fmt.data.max, amax)
    if fmt.sf == 'e4m3':
        sf = round_to_fp8(exact, QuantFormat.parse('e4m3_1x1_f32'))
        return sf, divide(1.0, sf.float())
    exponent = exponent_byte(exact)
    sf = power_of_two(exponent)
    return exponent if fmt.sf == 'ue8m0x4' else sf, divide(1.0, sf)


def store_sf(sf: Tensor, fmt: QuantFormat, rows: int, cols: int) -> Tensor:
    """Block scale factors in the layout of the format; packed bytes without a block are 0."""
    stored = fmt.empty_sf(rows, cols, sf.device)
    if stored.numel() == 0:  # bytes of no extent cannot be viewed as words
        return stored
    if fmt.column_packed:  # a word holds four blocks of rows of one channel
        groups = torch.nn.functional.pad(sf, (0, 0, 0, -sf.shape[0] % 4)).unflatten(0, (-1, 4))
        dense = groups.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        sf = dense.view(torch.int32).squeeze(-1)
    elif fmt.sf == 'ue8m0x4':
        sf = torch.nn.functional.pad(sf, (0, -sf.shape[1] % 4)).view(torch.int32)
    return stored.copy_(sf)


def dense(x: Tensor) -> Tensor:
    """A copy with the strides of a fresh tensor: those of one row or column may be anything."""
    return x.clone(memory_format=torch.contiguous_format)


def load_sf(sf: Tensor, fmt: QuantFormat, num_blocks: tuple[int, int]) -> Tensor:
    """Block scale factors of a stored tensor as float32."""
    if fmt.column_packed:
        exponents = dense(sf).view(torch.uint8).unflatten(1, (-1, 4)).transpose(1, 2).flatten(0, 1)
        return power_of_two(exponents[: num_blocks[0]])
    if fmt.sf == 'ue8m0x4':
        return power_of_two(dense(sf).view(torch.uint8))[:, : num_blocks[1]]
    return sf.float()


# Blocks -------------------------------------------------------------------------------------


def block_extent(fmt: QuantFormat, rows: int, cols: int) -> tuple[int, int]:
    return fmt.sf_block[0] or max(rows, 1), fmt.sf_block[1] or max(cols, 1)


def block_amax(x: Tensor, fmt: QuantFormat) -> Tensor:
    """Largest magnitude in each block; a NaN does not count, blocks at the edge use what they have."""
    rows, cols = x.shape
    height, width = block_extent(fmt, rows, cols)
    magnitude = torch.where(x.isnan(), 0.0, x.abs())
    magnitude = torch.nn.functional.pad(magnitude, (0, -cols % width, 0, -rows % height))
    return magnitude.unflatten(1, (-1, width)).unflatten(0, (-1, height)).amax(dim=(1, 3))


def spread(per_block: Tensor, fmt: QuantFormat, rows: int, cols: int) -> Tensor:
    """The value of its block for every element."""
    height, width = block_extent(fmt, rows, cols)
    return per_block.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols]


def scale_factors(x: Tensor, fmt: QuantFormat, amax_floor: float | None) -> tuple[Tensor, Tensor]:
    floor = fmt.amax_floor if amax_floor is None else amax_floor
    return sf_of_amax(block_amax(x.float(), fmt).clamp(floor, FLOAT_MAX), fmt)


def cast_blocks(x: Tensor, fmt: QuantFormat, amax_floor: float | None = None, stochastic: bool = False) -> QuantTensor:
    """Quantize a matrix in the blocks of a format."""
    sf, sf_inv = scale_factors(x, fmt, amax_floor)
    return QuantTensor(quantize(x, sf_inv, fmt, stochastic), store_sf(sf, fmt, *x.shape), fmt)


def quantize(x: Tensor, sf_inv: Tensor, fmt: QuantFormat, stochastic: bool = False) -> Tensor:
    """Codes of `x` with one multiplier per block."""
    return encode(x.float() * spread(sf_inv, fmt, *x.shape), x.signbit(), fmt, stochastic)


def requantize(x: QuantTensor, sf_inv: Tensor, fmt: QuantFormat, stochastic: bool = False) -> Tensor:
    """Codes of `x` with one multiplier per block, which the scale factors of `x` are multiplied by first.

    The product is beyond all floats only in a block of zeros, which stay zeros.
    """
    codes, factors = codes_and_factors(x)
    multiplier = (factors * spread(sf_inv, fmt, *codes.shape)).clamp(max=FLOAT_MAX)
    return encode(codes * multiplier, codes.signbit(), fmt, stochastic)


def codes_and_factors(x: QuantTensor) -> tuple[Tensor, Tensor]:
    """The numbers of codes, and for each the scale factor of its block."""
    codes = values_of(x.data, x.fmt)
    return codes, spread(load_sf(x.sf, x.fmt, x.fmt.blocks(*codes.shape)), x.fmt, *codes.shape)
