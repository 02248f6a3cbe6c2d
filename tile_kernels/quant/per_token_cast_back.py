"""Cast back per token: `cast_back` of groups of channels."""

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.front import replayed
from tile_kernels.quant._checks import Pair, dtype_of, with_token_format
from tile_kernels.quant.dequantize import dequantize


@replayed
def per_token_cast_back(
    x: Pair, fmt: str = 'bf16', num_per_channels: int | None = None, x_special_fmt: str | None = None
) -> Tensor:
    """`cast_back` of one scale factor for each row and `num_per_channels` channels."""
    dtype = dtype_of(fmt)
    check.one_of(x_special_fmt, (None, 'e5m6'), 'x_special_fmt')
    return dequantize(with_token_format(x, num_per_channels, x_special_fmt), dtype)
