"""What the casts mean, in plain PyTorch.

Every function cuts a matrix into blocks that share a scale factor, finds the factor of each block and rounds. Nothing
here knows how a kernel works: values are compared with the midpoints of a format, not built from bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant.stochastic import round_at_random

FLOAT_MAX = torch.finfo(torch.float32).max

#: Magnitudes of e2m1 by code, and the midpoints between neighbours.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


# Codes --------------------------------------------------------------------------------------


def _round_to_fp8(v: Tensor, fmt: QuantFormat) -> Tensor:
    """Nearest fp8 number, ties to even, saturating; a NaN is 0x7F whatever its sign."""
    codes = v.clamp(-fmt.data.max, fmt.data.max).to(fmt.data.torch)
    nan = torch.tensor(0x7F, dtype=torch.uint8, device=v.device)
    return torch.where(v.isnan(), nan, codes.view(torch.uint8)).view(fmt.data.torch)


def _round_to_e2m1(v: Tensor, negative: Tensor) -> Tensor:
    """Nearest e2m1 code, ties to the even code, saturating; a NaN has the largest magnitude."""
    magnitude = v.abs()
    code = torch.zeros_like(v, dtype=torch.uint8)
    for below, midpoint in enumerate(E2M1_MIDPOINTS):
        above = magnitude > midpoint if below % 2 == 0 else magnitude >= midpoint
        code += above.to(torch.uint8)
    code = torch.where(v.isnan(), 7, code).to(torch.uint8)
    return code + 8 * negative.to(torch.uint8)


def _pack_e2m1(code: Tensor) -> Tensor:
    """Two codes to a byte, the even channel in the lower nibble."""
    return (code[..., 0::2] + 16 * code[..., 1::2]).view(torch.int8)


def _round_to_e5m6(v: Tensor) -> Tensor:
    """12-bit codes, the upper bits of a float16; saturating, a NaN is 0x7FF.

    The float16 is the one towards zero. Its upper bits are rounded to nearest even by the bits that a float32 has below
    them, which is only right for normal numbers; smaller ones are specified to use the same bits.
    """
    v = v.clamp(-65024.0, 65024.0)
    nearest = v.half()
    towards_zero = nearest.view(torch.int16).int() - (nearest.abs().float() > v.abs()).int()
    code = (towards_zero & 0xFFFF) >> 4
    rest = v.view(torch.int32) & 0x1FFFF
    return torch.where(v.isnan(), 0x7FF, code + (code % 2 + rest > 0x10000).int())


def _pack_e5m6(code: Tensor) -> Tensor:
    """Eight codes to twelve bytes: one string of bits, the first code first, in three little-endian words."""
    first, second = code.unflatten(-1, (-1, 2)).unbind(-1)
    stream = torch.stack((first >> 4, (first & 15) << 4 | second >> 8, second & 0xFF), -1).to(torch.uint8)
    return stream.flatten(-2).unflatten(-1, (-1, 4)).flip(-1).flatten(-2).contiguous()


def unpack_from_e2m1fn_x2(x: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of packed e2m1 bytes: (..., n) int8 or uint8 -> (..., 2n), lower nibble first."""
    if x.dim() == 0:
        raise ValueError('unpack_from_e2m1fn_x2: x must have at least one dimension, got a scalar')
    bytes_ = x.view(torch.uint8)
    code = torch.stack((bytes_ % 16, bytes_ // 16), dim=-1).flatten(-2).long()
    values = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), device=x.device)
    return values[code].to(out_dtype)


# Scale factors ------------------------------------------------------------------------------


def _divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """IEEE division. Both operands must be tensors: torch multiplies by a reciprocal when one is a Python number."""
    like = a if isinstance(a, Tensor) else b
    a, b = (side if isinstance(side, Tensor) else torch.full_like(like, side) for side in (a, b))
    return a / b


def _exponent_byte(sf: Tensor) -> Tensor:
    """Biased exponent of the least power of two that is not below `sf` (a positive normal number)."""
    return (((sf.view(torch.int32) - 1) >> 23) + 1).to(torch.uint8)


def _power_of_two(exponent_byte: Tensor) -> Tensor:
    """2^(byte - 127); 2^-127, for the byte 0, is subnormal."""
    return torch.ldexp(torch.ones_like(exponent_byte, dtype=torch.float64), exponent_byte.int() - 127).float()


def _sf_of_amax(amax: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """The scale factor of each block as the format stores it (bytes if packed), and the multiplier that quantises."""
    exact = _divide(amax, fmt.data.max)
    if fmt.sf == 'f32':
        return exact, _divide(fmt.data.max, amax)
    if fmt.sf == 'e4m3':
        sf = _round_to_fp8(exact, QuantFormat.parse('e4m3_1x1_f32'))
        return sf, _divide(1.0, sf.float())
    exponent = _exponent_byte(exact)
    sf = _power_of_two(exponent)
    return exponent if fmt.sf == 'ue8m0x4' else sf, _divide(1.0, sf)


def _store_sf(sf: Tensor, fmt: QuantFormat, rows: int, cols: int) -> Tensor:
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


def _load_sf(sf: Tensor, fmt: QuantFormat, num_blocks: tuple[int, int]) -> Tensor:
    """Block scale factors of a stored tensor as float32."""
    if fmt.sf == 'ue8m0x4':
        dense = sf.clone(memory_format=torch.contiguous_format)
        sf = _power_of_two(dense.view(torch.uint8))[:, : num_blocks[1]]
    return sf.float()


# Blocks -------------------------------------------------------------------------------------


def _block_extent(fmt: QuantFormat, rows: int, cols: int) -> tuple[int, int]:
    return fmt.sf_block[0] or max(rows, 1), fmt.sf_block[1] or max(cols, 1)


def _block_amax(x: Tensor, fmt: QuantFormat) -> Tensor:
    """Largest magnitude in each block; a NaN does not count, blocks at the edge use what they have."""
    rows, cols = x.shape
    height, width = _block_extent(fmt, rows, cols)
    magnitude = torch.where(x.isnan(), 0.0, x.abs())
    magnitude = torch.nn.functional.pad(magnitude, (0, -cols % width, 0, -rows % height))
    return magnitude.unflatten(1, (-1, width)).unflatten(0, (-1, height)).amax(dim=(1, 3))


def _spread(per_block: Tensor, fmt: QuantFormat, rows: int, cols: int) -> Tensor:
    """The value of its block for every element."""
    height, width = _block_extent(fmt, rows, cols)
    return per_block.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols]


def _encode(v: Tensor, negative: Tensor, fmt: QuantFormat, stochastic: bool = False) -> Tensor:
    """Codes of scaled numbers; `negative` gives fp4 its signs."""
    if stochastic:
        v = round_at_random(v, fmt.data.name)
    if fmt.data.name == 'e2m1':
        return _pack_e2m1(_round_to_e2m1(v, negative))
    if fmt.data.name == 'e5m6':
        return _pack_e5m6(_round_to_e5m6(v))
    return _round_to_fp8(v, fmt)


def _quantise(x: Tensor, sf_inv: Tensor, fmt: QuantFormat, stochastic: bool = False) -> Tensor:
    """Codes of `x` with one multiplier per block."""
    return _encode(x.float() * _spread(sf_inv, fmt, *x.shape), x.signbit(), fmt, stochastic)


def _requantise(x: QuantTensor, sf_inv: Tensor, fmt: QuantFormat, stochastic: bool = False) -> Tensor:
    """Codes of `x` with one multiplier per block, which the scale factors of `x` are multiplied by first.

    The product is beyond all floats only in a block of zeros, which stay zeros.
    """
    codes, factors = _codes_and_factors(x)
    multiplier = (factors * _spread(sf_inv, fmt, *codes.shape)).clamp(max=FLOAT_MAX)
    return _encode(codes * multiplier, codes.signbit(), fmt, stochastic)


def _codes_and_factors(x: QuantTensor) -> tuple[Tensor, Tensor]:
    """The numbers of fp8 or fp4 codes, and for each the scale factor of its block."""
    codes = unpack_from_e2m1fn_x2(x.data) if x.fmt.data.name == 'e2m1' else x.data.float()
    return codes, _spread(_load_sf(x.sf, x.fmt, x.fmt.blocks(*codes.shape)), x.fmt, *codes.shape)


def _scale_factors(x: Tensor, fmt: QuantFormat, amax_floor: float | None) -> tuple[Tensor, Tensor]:
    floor = fmt.amax_floor if amax_floor is None else amax_floor
    return _sf_of_amax(_block_amax(x.float(), fmt).clamp(floor, FLOAT_MAX), fmt)


# Per token ----------------------------------------------------------------------------------


def per_token_cast(
    x: Tensor, fmt: QuantFormat, amax_floor: float | None = None, stochastic: bool = False
) -> QuantTensor:
    """Quantise each row of `x` in groups of `fmt.sf_block[1]` channels."""
    sf, sf_inv = _scale_factors(x, fmt, amax_floor)
    return QuantTensor(_quantise(x, sf_inv, fmt, stochastic), _store_sf(sf, fmt, *x.shape), fmt)


def per_token_cast_with_sf_only(x: Tensor, fmt: QuantFormat, amax_floor: float | None = None) -> Tensor:
    """The scale factors of `per_token_cast`."""
    return _store_sf(_scale_factors(x, fmt, amax_floor)[0], fmt, *x.shape)


def per_token_cast_with_precomputed_sf(x: Tensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    """Quantise each row of `x` with given scale factors."""
    return _quantise(x, _divide(1.0, _load_sf(sf, fmt, fmt.blocks(*x.shape))), fmt)


def per_token_recast(
    x: QuantTensor, fmt: QuantFormat, amax_floor: float | None = None, stochastic: bool = False
) -> QuantTensor:
    """`per_token_cast` of a quantised `x`."""
    codes, factors = _codes_and_factors(x)
    sf, sf_inv = _scale_factors(codes * factors, fmt, amax_floor)
    return QuantTensor(_requantise(x, sf_inv, fmt, stochastic), _store_sf(sf, fmt, *codes.shape), fmt)


def per_token_recast_with_sf_only(x: QuantTensor, fmt: QuantFormat, amax_floor: float | None = None) -> Tensor:
    """The scale factors of `per_token_recast`."""
    return per_token_recast(x, fmt, amax_floor).sf


def per_token_recast_with_precomputed_sf(x: QuantTensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    """Quantise each row of a quantised `x` with given scale factors."""
    return _requantise(x, _divide(1.0, _load_sf(sf, fmt, fmt.blocks(*x.shape))), fmt)


def per_token_cast_fp8(
    x: Tensor, group_size: int | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Row-wise fp8 codes and float32 scale factors, one for each row or for each `group_size` channels."""
    name = {torch.float8_e4m3fn: 'e4m3', torch.float8_e5m2: 'e5m2'}[dtype]
    return tuple(per_token_cast(x, QuantFormat.from_flags(name, (1, group_size or 0))))


def fake_quantise(x: Tensor, fmt: QuantFormat) -> Tensor:
    """Every number of `x` as it comes back from being quantised per token."""
    codes, factors = _codes_and_factors(per_token_cast(x, fmt))
    return (codes * factors).to(x.dtype)


# TileKernels' references --------------------------------------------------------------------


def cast(
    x: Tensor | tuple[Tensor, Tensor],
    fmt: str,
    block_size: tuple[int, int] = (32, 32),
    sf: Tensor | None = None,
    x_block_size: tuple[int, int] | None = None,
    round_sf: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
) -> QuantTensor | Tensor:
    """Quantise a matrix in blocks of any extent; with `sf` given (row-major), return the data alone.

    Args:
        x: (rows, cols) tensor, or a quantised pair with blocks of `x_block_size`.
        fmt: 'e4m3', 'e5m2' or 'e2m1'.
        block_size: rows and columns that share a scale factor.
        sf: scale factors to use instead of those of the data.
        x_block_size: blocks of a quantised `x`.
        round_sf: scale factors are powers of two.
        use_tma_aligned_col_major_sf: column-major scale factors with 16-byte aligned columns.
        use_packed_ue8m0: four exponent bytes in an int32.
        use_e4m3_sf: scale factors are e4m3.
    """
    layout = QuantFormat.from_flags(
        fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    )
    quantised = None
    if isinstance(x, tuple):
        if x_block_size is None:
            check.fail('x_block_size', 'must be given for a quantised x', 'None')
        quantised, x = _with_format(x, x_block_size), cast_back(x, 'fp32', x_block_size)
    if sf is not None:
        check.shape(sf, 'sf', 'rows cols', rows=layout.blocks(*x.shape)[0], cols=layout.blocks(*x.shape)[1])
        sf_inv = _divide(1.0, sf.float())
    else:
        block_sf, sf_inv = _scale_factors(x, layout, None)
    per_token = quantised is not None and block_size[0] == 1  # only then the two factors are multiplied first
    data = _requantise(quantised, sf_inv, layout) if per_token else _quantise(x, sf_inv, layout)
    return data if sf is not None else QuantTensor(data, _store_sf(block_sf, layout, *x.shape), layout)


def _with_format(x: tuple[Tensor, Tensor], block_size: tuple[int, int]) -> QuantTensor:
    """A pair of data and scale factors with the format that their dtypes tell."""
    data, sf = x
    name, packed = 'e2m1' if data.dtype in (torch.int8, torch.uint8) else 'e4m3', sf.dtype is torch.int32
    return QuantTensor(data, sf, QuantFormat.from_flags(name, block_size, False, packed, packed))


def cast_back(x: tuple[Tensor, Tensor], fmt: str, block_size: tuple[int, int] = (32, 32)) -> Tensor:
    """Dequantise a pair of data and scale factors (any layout): code * sf, as 'fp32' or 'bf16'."""
    values, factors = _codes_and_factors(_with_format(x, block_size))
    out = values * factors
    return out if fmt == 'fp32' else out.bfloat16()
