"""Per-channel cast of what is quantized per token already: (code * sf), rounded to float32, is quantized per channel.

The kernels are those of `per_channel_cast`.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.op import op
from tile_kernels.quant._checks import (
    FP8_NAMES,
    Pair,
    check_channel_format,
    check_quantized,
    with_token_format,
)
from tile_kernels.quant._samples import random_map
from tile_kernels.quant.per_channel_cast_kernels import launch_channel_cast
from tile_kernels.quant.per_token_cast import per_token_cast

# Op -----------------------------------------------------------------------------------------


@op(outputs='y y_sf')
def per_channel_recast(x: QuantTensor, fmt: QuantFormat, pos_to_token: Tensor | None = None) -> QuantTensor:
    """`per_channel_cast` of a quantized `x`: (code * sf), rounded to float32, is quantized per channel.

    Args:
        x: (num_tokens, hidden) e4m3 or e5m2 with one scale factor for each row and 32, 64 or 128 channels, any layout.
        fmt: as for `per_channel_cast`.
        pos_to_token: as for `per_channel_cast`.

    Returns:
        As `per_channel_cast`.
    """
    check.one_of(x.fmt.data.name, FP8_NAMES.values(), 'x.fmt.data')
    check.equal(x.fmt.sf_block[0], 1, 'x.fmt.sf_block[0]')
    check.one_of(x.fmt.sf_block[1], (32, 64, 128), 'x.fmt.sf_block[1]')
    check_quantized(x)
    check_channel_format(fmt)
    return launch_channel_cast(x.data, x.sf, x.fmt, pos_to_token, fmt)


def per_channel_recast_pair(
    x: Pair, num_per_channels: int | None, fmt: QuantFormat, pos_to_token: Tensor | None = None
) -> QuantTensor:
    """`per_channel_recast` of a pair with a scale factor for each row and `num_per_channels` channels."""
    check.one_of(num_per_channels, (None, 32, 64, 128), 'num_per_channels')
    return per_channel_recast(with_token_format(x, num_per_channels), fmt, pos_to_token)


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, hidden: int, source: str, fmt: str, gather: int | None = None) -> dict:
    x_fmt = QuantFormat.parse(source)
    x = per_token_cast.call(torch.randn(num_tokens, hidden), x_fmt)
    return dict(x=x, fmt=QuantFormat.parse(fmt), pos_to_token=random_map(num_tokens, gather))


per_channel_recast.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0], hidden=[128], source=['e4m3_1x128_f32'], fmt=['e4m3_128x1_f32'])
    + grid(num_tokens=[37], hidden=[264], source=['e4m3_1x128_f32'], fmt=['e4m3_128x1_f32'], gather=[133])
    + grid(
        num_tokens=[37], hidden=[100], source=['e5m2_1x32_ue8m0x4_col'], fmt=['e4m3_32x1_ue8m0x4', 'e4m3_allx1_f32']
    ),
    full=grid(
        num_tokens=[4001],
        hidden=[7168, 1090],
        source=['e4m3_1x128_f32', 'e4m3_1x32_ue8m0x4_col', 'e4m3_1x32_f32_col', 'e5m2_1x64_ue8m0x4'],
        fmt=['e4m3_128x1_f32', 'e4m3_32x1_ue8m0x4'],
        gather=[None, 8192],
    ),
    bench=grid(
        num_tokens=[4096], hidden=[7168], source=['e4m3_1x128_f32'], fmt=['e4m3_128x1_f32'], gather=[None, 16384]
    ),
)
