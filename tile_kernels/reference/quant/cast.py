"""What conversions mean, and TileKernels' reference of the casts, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant._common import (
    FP8_NAMES,
    divide,
    quantize,
    requantize,
    round_at_random,
    round_to_fp8,
    scale_factors,
    store_sf,
)
from tile_kernels.reference.quant.cast_back import cast_back, with_format


def _round_to(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest number of a dtype, ties to even; fp8 saturates."""
    for fmt in (QuantFormat.parse('e4m3_1x1_f32'), QuantFormat.parse('e5m2_1x1_f32')):
        if dtype is fmt.data.torch:
            return round_to_fp8(v, fmt)
    return v.to(dtype, copy=True)


def convert(x: Tensor, dtype: torch.dtype, stochastic_rounding: bool = False) -> Tensor:
    """Convert every number of `x` to another dtype."""
    v = x.float().reshape(-1)
    if stochastic_rounding:
        v = round_at_random(v, 'bf16' if dtype is torch.bfloat16 else FP8_NAMES[dtype])
    return _round_to(v, dtype).view(x.shape)


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
    """Quantize a matrix in blocks of any extent; with `sf` given (row-major), return the data alone.

    Args:
        x: (rows, cols) tensor, or a quantized pair with blocks of `x_block_size`.
        fmt: 'e4m3', 'e5m2' or 'e2m1'.
        block_size: rows and columns that share a scale factor.
        sf: scale factors to use instead of those of the data.
        x_block_size: blocks of a quantized `x`.
        round_sf: scale factors are powers of two.
        use_tma_aligned_col_major_sf: column-major scale factors with 16-byte aligned columns.
        use_packed_ue8m0: four exponent bytes in an int32.
        use_e4m3_sf: scale factors are e4m3.
    """
    layout = QuantFormat.from_flags(
        fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    )
    quantized = None
    if isinstance(x, tuple):
        if x_block_size is None:
            check.fail('x_block_size', 'must be given for a quantized x', 'None')
        quantized, x = with_format(x, x_block_size), cast_back(x, 'fp32', x_block_size)
    if sf is not None:
        check.shape(sf, 'sf', 'rows cols', rows=layout.blocks(*x.shape)[0], cols=layout.blocks(*x.shape)[1])
        sf_inv = divide(1.0, sf.float())
    else:
        block_sf, sf_inv = scale_factors(x, layout, None)
    if quantized is not None and block_size[0] == 1:  # only then the two factors are multiplied first
        data = requantize(quantized, sf_inv, layout)
    else:
        data = quantize(x, sf_inv, layout)
    return data if sf is not None else QuantTensor(data, store_sf(block_sf, layout, *x.shape), layout)
