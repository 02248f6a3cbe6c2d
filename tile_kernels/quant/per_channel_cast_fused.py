"""Rows gathered, dequantized if need be, and quantized per channel: `per_channel_cast` with a map, in one launch."""

from torch import Tensor

from tile_kernels.core.formats import QuantTensor
from tile_kernels.quant._checks import Pair, channel_format
from tile_kernels.quant.per_channel_cast import per_channel_cast
from tile_kernels.quant.per_channel_recast import per_channel_recast_pair


def per_channel_cast_fused(
    x: Tensor | Pair,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: Tensor | None = None,
) -> QuantTensor:
    """Gather rows of `x`, dequantize them if it is quantized, and quantize each channel in groups of rows.

    Args:
        x: as for `per_channel_cast`.
        fmt: 'e4m3' or 'e5m2'.
        num_per_tokens: rows of the result that share a scale factor, 32 or 128.
        round_sf: scale factors are rounded up to powers of two.
        num_per_channels: channels that share a scale factor of a quantized `x`.
        pos_to_token: (num_rows,) int32, the row of `x` for each row of the result; -1 for a row of zeros.

    Returns:
        `QuantTensor`: data (num_rows, hidden), sf (ceil(num_rows / num_per_tokens), hidden).
    """
    layout = channel_format(fmt, num_per_tokens, round_sf)
    if isinstance(x, Tensor):
        return per_channel_cast.call(x, layout, pos_to_token)
    return per_channel_recast_pair(x, num_per_channels, layout, pos_to_token)
