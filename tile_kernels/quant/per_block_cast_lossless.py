"""Lossless per-block cast: fp4 with small blocks becomes fp8 with larger ones, and no value changes.

    E[i, j]  = exponent of x.sf[i, j]                       x.sf are powers of two
    F[k, l]  = max(max E over the blocks in (k, l) - 6, 1)  biased exponents; 6 * 2^6 still fits e4m3
    y[t, h]  = x[t, h] * 2^(E[t, h] - F[t, h])              exact while the exponents of a block differ by at most 14
    sf[k, l] = 2^F[k, l]

Memory bound: the floor is reading x and writing y once.
"""

from itertools import product

import torch

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.quant._checks import GROUPS, Block, Pair, check_block, check_quantized, with_format
from tile_kernels.quant._macros import HEIGHTS
from tile_kernels.quant.per_block_cast_lossless_kernels import (
    per_block_cast_lossless_kernel,
    per_block_cast_lossless_row_kernel,
)

#: Channels of the blocks of x and of the result, and rows of those of the result.
WIDTHS, ROWS = GROUPS, (1, *HEIGHTS)


# Op -----------------------------------------------------------------------------------------


@op(outputs='y y_sf')
def _per_block_cast_lossless(x: QuantTensor, fmt: QuantFormat) -> QuantTensor:
    """Turn fp4 into e4m3 with the larger blocks of `fmt`, multiples of those of `x`.

    Values too small for the scale factor of their block are rounded to nearest even. Of float32 scale factors of `x`
    only the exponent counts; those of the result are never below 2^-126.
    """
    check.equal(x.fmt.data.name, 'e2m1', 'x.fmt.data')
    check.one_of(x.fmt.sf, ('f32', 'f32p2', 'ue8m0x4'), 'x.fmt.sf')
    check.one_of(x.fmt.sf_block[1], WIDTHS, 'x.fmt.sf_block[1]')
    check.equal(fmt.data.name, 'e4m3', 'fmt.data')
    check.one_of(fmt.sf, ('f32', 'f32p2', 'ue8m0x4'), 'fmt.sf')
    check.one_of(fmt.sf_block[0], ROWS, 'fmt.sf_block[0]')
    check.one_of(fmt.sf_block[1], WIDTHS, 'fmt.sf_block[1]')
    check.at_least(x.fmt.sf_block[0], 1, 'x.fmt.sf_block[0]')
    check.multiple(fmt.sf_block[0], x.fmt.sf_block[0], 'fmt.sf_block[0]')
    check.multiple(fmt.sf_block[1], x.fmt.sf_block[1], 'fmt.sf_block[1]')
    num_tokens, hidden = check_quantized(x)
    y = fmt.empty(num_tokens, hidden, x.device)
    static = (hidden, x.fmt, fmt, check.vector_bytes(x.data))
    flat = fmt.sf_block[0] == 1
    launch(per_block_cast_lossless_row_kernel if flat else per_block_cast_lossless_kernel, static, x.data, x.sf, *y, 0)
    return y


@_per_block_cast_lossless.public
def per_block_cast_lossless(
    x: Pair,
    fmt: str,
    x_block_size: Block | None,
    out_block_size: Block,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Turn fp4 into fp8 with larger scale blocks without changing a value.

    Args:
        x: e2m1 data and power-of-two scale factors, float32 or packed.
        fmt: 'e4m3'.
        x_block_size: scale blocks of `x`; None if `x` carries its format.
        out_block_size: scale blocks of the result, multiples of those of `x`.
        use_tma_aligned_col_major_sf: column-major scale factors with 16-byte aligned columns.
        round_sf: accepted for symmetry; the factors are powers of two anyway.
        use_packed_ue8m0: four exponent bytes in an int32.

    Returns:
        `QuantTensor` with the values of `x`, if the factors within a block differ by at most 2^14.
    """
    check.equal(fmt, 'e4m3', 'fmt')
    del round_sf
    check.one_of(out_block_size, tuple(product(ROWS, WIDTHS)), 'out_block_size')
    check_block(out_block_size, 'out_block_size')
    x = with_format(x, x_block_size)
    for extent, part in zip(out_block_size, x.fmt.sf_block, strict=True):
        check.multiple(extent, part or 1, 'out_block_size')
    layout = QuantFormat.from_flags('e4m3', out_block_size, use_tma_aligned_col_major_sf, True, use_packed_ue8m0)
    return per_block_cast_lossless.call(x, layout)


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, hidden: int, source: str, fmt: str, base: int = 100) -> dict:
    """Random codes, and scale factors whose exponents spread over 12 from `base` on."""
    x_fmt = QuantFormat.parse(source)
    codes = torch.randint(-128, 128, (num_tokens, hidden // 2), dtype=torch.int8)
    sf = x_fmt.empty_sf(num_tokens, hidden, codes.device)
    exponents = torch.randint(base, base + 12, (*sf.shape, x_fmt.sf_pack), dtype=torch.uint8)
    if x_fmt.sf == 'ue8m0x4':
        sf.copy_(exponents.view(torch.int32).squeeze(-1))
    else:
        sf.copy_((exponents.int() << 23).view(torch.float32).squeeze(-1))
    return dict(x=QuantTensor(codes, sf, x_fmt), fmt=QuantFormat.parse(fmt))


TARGETS = ['e4m3_1x128_f32p2', 'e4m3_32x32_ue8m0x4_col', 'e4m3_128x128_ue8m0x4']
per_block_cast_lossless.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1], hidden=[128], source=['e2m1_1x32_f32p2'], fmt=TARGETS[:1])
    + grid(num_tokens=[37], hidden=[272], source=['e2m1_1x32_f32p2', 'e2m1_1x32_ue8m0x4_col'], fmt=TARGETS)
    + grid(num_tokens=[130], hidden=[98], source=['e2m1_32x16_ue8m0x4'], fmt=['e4m3_128x64_f32'], base=[1]),
    full=grid(
        num_tokens=[4001],
        hidden=[7168, 1090],
        source=['e2m1_1x32_f32p2', 'e2m1_1x32_f32p2_col', 'e2m1_1x32_ue8m0x4', 'e2m1_1x32_ue8m0x4_col'],
        fmt=TARGETS,
        base=[1, 120, 240],
    ),
    bench=grid(num_tokens=[4096, 16384], hidden=[7168], source=['e2m1_1x32_f32p2'], fmt=TARGETS[:1] + TARGETS[2:])
    + grid(num_tokens=[4096], hidden=[7168], source=['e2m1_1x32_ue8m0x4_col'], fmt=TARGETS[1:2]),
)
