"""Per-channel casts: quantize every channel of a matrix in groups of consecutive rows, gathered if wanted.

    r[n, h]    = x[pos_to_token[n], h]                      x itself without a map; 0 where the map names no row;
                                                            of a quantized x: code * sf
    amax[i, h] = max |r[iM : (i+1)M, h]|                    M = fmt.sf_block[0], the last group may be shorter
    a[i, h]    = min(max(amax[i, h], amax_floor), FLT_MAX)
    sf[i, h]   = a / max(fmt)                               rounded as the format stores it
    y[n, h]    = round(r[n, h] * sf_inv[n // M, h])         to nearest even, saturating

Memory bound. Numbers that are not finite are treated as by `per_token_cast`.
"""

import torch
from torch import Tensor

from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.op import op
from tile_kernels.quant._checks import Pair, channel_format, check_channel_format, check_matrix
from tile_kernels.quant._samples import random_map
from tile_kernels.quant.per_channel_cast_kernels import launch_channel_cast
from tile_kernels.quant.per_channel_recast import per_channel_recast_pair

# Op -----------------------------------------------------------------------------------------


@op(outputs='y y_sf')
def _per_channel_cast(x: Tensor, fmt: QuantFormat, pos_to_token: Tensor | None = None) -> QuantTensor:
    """Quantize each channel of `x`, or of rows gathered from it, in groups of `fmt.sf_block[0]` rows (0: all rows).

    A number in `pos_to_token` that is no row of `x` (such as -1) makes a row of zeros. A last group shorter than the
    others uses its own rows only. Packed scale factors hold four groups of rows of a channel.
    """
    check_matrix(x)
    check_channel_format(fmt)
    return launch_channel_cast(x, None, x.dtype, pos_to_token, fmt)


@_per_channel_cast.public
def per_channel_cast(
    x: Tensor | Pair,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Quantize each channel of `x` in groups of rows.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32 of any shape; or fp8 data and scale factors, one for each
            row and `num_per_channels` channels.
        fmt: 'e4m3' or 'e5m2'.
        num_per_tokens: rows that share a scale factor, 32 or 128.
        round_sf: scale factors are rounded up to powers of two.
        num_per_channels: channels that share a scale factor of a quantized `x`, 32, 64 or 128.
        use_packed_ue8m0: the exponent bytes of four groups of rows in an int32; needs `round_sf`.

    Returns:
        `QuantTensor`: data (num_tokens, hidden), sf (ceil(num_tokens / num_per_tokens), hidden).
    """
    layout = channel_format(fmt, num_per_tokens, round_sf, use_packed_ue8m0)
    if isinstance(x, Tensor):
        return per_channel_cast.call(x, layout)
    return per_channel_recast_pair(x, num_per_channels, layout)


# Cases --------------------------------------------------------------------------------------


def make_case(num_tokens: int, hidden: int, dtype: torch.dtype, fmt: str, gather: int | None = None) -> dict:
    """Arguments of a case."""
    magnitude = torch.exp2(torch.randint(-12, 12, (num_tokens, 1))).to(dtype)
    x = torch.randn(num_tokens, hidden, dtype=dtype) * magnitude
    x[:, : min(4, hidden // 2)] = 0
    return dict(x=x, fmt=QuantFormat.parse(fmt), pos_to_token=random_map(num_tokens, gather))


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
per_channel_cast.cases(
    make=make_case,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1], hidden=[128], dtype=BF16, fmt=['e4m3_128x1_f32'])
    + grid(num_tokens=[133], hidden=[264], dtype=BF16, fmt=['e4m3_128x1_f32p2', 'e5m2_32x1_ue8m0x4'])  # tails
    + grid(num_tokens=[40], hidden=[99], dtype=F32, fmt=['e4m3_32x1_f32', 'e4m3_allx1_f32'])
    + grid(num_tokens=[150], hidden=[100], dtype=F16, fmt=['e4m3_allx1_ue8m0x4'], gather=[140])
    + grid(num_tokens=[20], hidden=[136, 1160], dtype=BF16, fmt=['e4m3_128x1_f32'], gather=[131])  # a panel, two
    + grid(num_tokens=[131], hidden=[40], dtype=BF16, fmt=['e4m3_allx1_f32']),
    full=grid(
        num_tokens=[4001],
        hidden=[7168, 1090],
        dtype=BF16 + F16 + F32,
        fmt=[
            f'{d}_{h}x1_{sf}' for d in ('e4m3', 'e5m2') for h in (32, 128, 'all') for sf in ('f32', 'f32p2', 'ue8m0x4')
        ],
    )
    + grid(num_tokens=[4001], hidden=[7168], dtype=BF16, fmt=['e4m3_128x1_f32'], gather=[16001])
    + grid(num_tokens=[300001], hidden=[7168], dtype=BF16, fmt=['e4m3_128x1_f32']),  # past 2^31 elements
    bench=grid(num_tokens=[64, 4096, 16384], hidden=[7168], dtype=BF16, fmt=['e4m3_128x1_f32'])
    + grid(num_tokens=[4096], hidden=[7168], dtype=BF16, fmt=['e4m3_32x1_ue8m0x4', 'e4m3_allx1_f32'])
    + grid(num_tokens=[32001], hidden=[1344, 576], dtype=BF16, fmt=['e4m3_128x1_f32'])
    + grid(num_tokens=[8001], hidden=[4096], dtype=F32, fmt=['e4m3_128x1_f32'])
    + grid(num_tokens=[4096], hidden=[7168], dtype=BF16, fmt=['e4m3_128x1_f32'], gather=[16384]),
)
