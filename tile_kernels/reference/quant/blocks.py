"""What the casts with blocks of rows, the casts back and the plain conversions mean, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant.stochastic import round_at_random
from tile_kernels.reference.quant.tokens import (
    _block_amax,
    _divide,
    _load_sf,
    _power_of_two,
    _quantise,
    _round_to_fp8,
    _scale_factors,
    _spread,
    _store_sf,
    per_token_cast,
    unpack_from_e2m1fn_x2,
)

FP8_NAMES = {torch.float8_e4m3fn: 'e4m3', torch.float8_e5m2: 'e5m2'}


# e5m6 ---------------------------------------------------------------------------------------


def _unpack_e5m6(data: Tensor) -> Tensor:
    """The codes of packed bytes."""
    stream = data.contiguous().view(torch.uint8).int().unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
    high, middle, low = stream.unflatten(-1, (-1, 3)).unbind(-1)
    return torch.stack((high << 4 | middle >> 4, (middle & 15) << 8 | low), -1).flatten(-2)


def cast_to_e5m6(
    x: Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """TileKernels' reference of the e5m6 cast: one scale factor for each row of `num_per_channels` channels."""
    block = (1, 0 if num_per_channels == x.shape[1] else num_per_channels)
    fmt = QuantFormat.from_flags('e5m6', block, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return per_token_cast(x, fmt)


def cast_back_from_e5m6(x: tuple[Tensor, Tensor], fmt: str, x_block_size: tuple[int, int]) -> Tensor:
    """TileKernels' reference of the way back, to 'fp32' or 'bf16'."""
    data, sf = x
    packed = sf.dtype is torch.int32
    layout = QuantFormat.from_flags('e5m6', x_block_size, round_sf=packed, use_packed_ue8m0=packed)
    return dequantise(QuantTensor(data, sf, layout), torch.float32 if fmt == 'fp32' else torch.bfloat16)


# Per block ----------------------------------------------------------------------------------


def per_block_cast(x: Tensor, fmt: QuantFormat, amax_floor: float | None = None) -> QuantTensor:
    """Quantise `x` in blocks of `fmt.sf_block` rows and channels."""
    sf, sf_inv = _scale_factors(x, fmt, amax_floor)
    return QuantTensor(_quantise(x, sf_inv, fmt), _store_sf(sf, fmt, *x.shape), fmt)


def per_block_cast_with_sf_only(x: Tensor, fmt: QuantFormat, amax_floor: float | None = None) -> Tensor:
    """The scale factors of `per_block_cast`."""
    return _store_sf(_scale_factors(x, fmt, amax_floor)[0], fmt, *x.shape)


def per_block_cast_with_precomputed_sf(x: Tensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    """Quantise `x` with given scale factors."""
    return _quantise(x, _divide(1.0, _load_sf(sf, fmt, fmt.blocks(*x.shape))), fmt)


# Per channel --------------------------------------------------------------------------------


def _gather(x: Tensor, pos_to_token: Tensor | None) -> Tensor:
    """Rows of `x` by number; a number that is no row gives zeros."""
    if pos_to_token is None:
        return x
    exists = (pos_to_token >= 0) & (pos_to_token < x.shape[0])
    padded = torch.cat((x, x.new_zeros(1, x.shape[1])))
    return padded[torch.where(exists, pos_to_token, x.shape[0]).long()]


def per_channel_cast(x: Tensor, fmt: QuantFormat, pos_to_token: Tensor | None = None) -> QuantTensor:
    """Quantise each channel of `x`, or of rows gathered from it, in groups of rows."""
    x = _gather(x, pos_to_token)
    sf, sf_inv = _scale_factors(x, fmt, None)
    return QuantTensor(_quantise(x, sf_inv, fmt), _store_sf(sf, fmt, *x.shape), fmt)


def per_channel_recast(x: QuantTensor, fmt: QuantFormat, pos_to_token: Tensor | None = None) -> QuantTensor:
    """`per_channel_cast` of a quantised `x`."""
    return per_channel_cast(dequantise(x, torch.float32), fmt, pos_to_token)


def per_channel_cast_and_transpose(x: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """Quantise each channel of `x` in groups of rows and store the codes transposed."""
    y, y_sf = per_channel_cast(x, fmt)
    return y.t().clone(memory_format=torch.contiguous_format), y_sf


# Back ---------------------------------------------------------------------------------------


def _values(data: Tensor, fmt: QuantFormat) -> Tensor:
    """The numbers that codes stand for, in float32."""
    if fmt.data.name == 'e2m1':
        return unpack_from_e2m1fn_x2(data)
    if fmt.data.name == 'e5m6':
        return (_unpack_e5m6(data) << 4).to(torch.uint16).view(torch.float16).float()
    return data.float()


def dequantise(x: QuantTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Codes times scale factors in float32, rounded to `dtype`."""
    values = _values(x.data, x.fmt)
    sf = _load_any_sf(x.sf, x.fmt, *values.shape)
    return (values * _spread(sf, x.fmt, *values.shape)).to(dtype)


def _dense(x: Tensor) -> Tensor:
    """A copy with the strides of a fresh tensor: those of one row or column may be anything."""
    return x.clone(memory_format=torch.contiguous_format)


def _load_any_sf(sf: Tensor, fmt: QuantFormat, rows: int, cols: int) -> Tensor:
    """Scale factors of any format as float32, one for each block."""
    blocks = fmt.blocks(rows, cols)
    if fmt.column_packed:
        exponents = _dense(sf).view(torch.uint8).unflatten(1, (-1, 4)).transpose(1, 2).flatten(0, 1)
        return _power_of_two(exponents[: blocks[0]])
    return _load_sf(sf, fmt, blocks)


# Lossless -----------------------------------------------------------------------------------


def _exponents(sf: Tensor, fmt: QuantFormat, rows: int, cols: int) -> Tensor:
    """Biased exponents of power-of-two scale factors, one for each block."""
    if fmt.sf == 'ue8m0x4':
        return _dense(sf).view(torch.uint8)[:, : fmt.blocks(rows, cols)[1]].int()
    return (_dense(sf).view(torch.int32) >> 23) & 0xFF


def per_block_cast_lossless(x: QuantTensor, fmt: QuantFormat) -> QuantTensor:
    """Turn fp4 into fp8 with larger scale blocks without changing a value."""
    values = _values(x.data, x.fmt)
    rows, cols = values.shape
    exponent = _spread(_exponents(x.sf, x.fmt, rows, cols), x.fmt, rows, cols)
    top = (_block_amax(exponent.float(), fmt).int() - 6).clamp(min=1)
    shift = exponent - _spread(top, fmt, rows, cols)
    codes = _round_to_fp8(torch.ldexp(values.double(), shift).float(), fmt)
    sf = top.to(torch.uint8) if fmt.sf == 'ue8m0x4' else _power_of_two(top)
    return QuantTensor(codes, _store_sf(sf, fmt, rows, cols), fmt)


# In place -----------------------------------------------------------------------------------


def per_token_cast_and_cast_back(x: Tensor, fmt: QuantFormat) -> None:
    """Replace every number of `x` by what quantising it per token and dequantising it again gives."""
    x.copy_(dequantise(per_token_cast(x, fmt), x.dtype))


# Conversions --------------------------------------------------------------------------------


def _round_to(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest number of a dtype, ties to even; fp8 saturates."""
    for fmt in (QuantFormat.parse('e4m3_1x1_f32'), QuantFormat.parse('e5m2_1x1_f32')):
        if dtype is fmt.data.torch:
            return _round_to_fp8(v, fmt)
    return v.to(dtype, copy=True)


def convert(x: Tensor, dtype: torch.dtype, stochastic: bool = False) -> Tensor:
    """Convert every number of `x` to another dtype."""
    v = x.float().reshape(-1)
    if stochastic:
        v = round_at_random(v, 'bf16' if dtype is torch.bfloat16 else FP8_NAMES[dtype])
    return _round_to(v, dtype).view(x.shape)


# Scale factors of weights -------------------------------------------------------------------


def _pack_rows(sf: Tensor, block: int) -> Tensor:
    """Exponents of (batch, rows / block, cols) scale factors, four columns to a word: (batch, cols / 4, rows)."""
    exponents = torch.nn.functional.pad(sf.contiguous().view(torch.int32) >> 23 & 0xFF, (0, -sf.shape[2] % 4))
    first, second, third, fourth = exponents.unflatten(2, (-1, 4)).unbind(-1)
    words = first | second << 8 | third << 16 | fourth << 24
    return words.repeat_interleave(block, 1).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def transpose_weight_sf(sf: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Pack the scale factors of weights along k and along n."""
    return _pack_rows(sf, block), _pack_rows(sf.transpose(1, 2), block)


def batched_transpose_weight_sf(
    sf: Sequence[Tensor],
    block_size: int,
    transpose_sf1s: Sequence[bool],
    outs: Sequence[tuple[Tensor, Tensor] | None] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Packed scale factors of weights for both of their GEMM operands; see `tile_kernels.quant`."""
    results = []
    for weight_sf, transposed, out in zip(sf, transpose_sf1s, outs or [None] * len(sf), strict=True):
        batched = weight_sf if weight_sf.dim() == 3 else weight_sf.unsqueeze(0)
        row_sf, col_sf = (
            side.view(*weight_sf.shape[:-2], *side.shape[1:]) for side in transpose_weight_sf(batched, block_size)
        )
        pair = row_sf.mT, col_sf if transposed else col_sf.mT
        results.append(pair if out is None else (out[0].copy_(pair[0]), out[1].copy_(pair[1])))
    return results


# Friendly names -----------------------------------------------------------------------------


def per_block_cast_fp8(
    w: Tensor, block_size: int | tuple[int, int] = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Blocks of fp8 codes and their float32 scale factors."""
    block = (block_size, block_size) if isinstance(block_size, int) else block_size
    return tuple(per_block_cast(w, QuantFormat.from_flags(FP8_NAMES[dtype], block)))


def per_channel_cast_fp8(
    x: Tensor, group_size: int | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Columns of fp8 codes and float32 scale factors, one for each column or for each `group_size` rows of it."""
    return tuple(per_channel_cast(x, QuantFormat.from_flags(FP8_NAMES[dtype], (group_size or 0, 1))))
