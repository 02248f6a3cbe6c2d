"""Per-channel cast to fp8 with float32 scales: the friendly name of `per_channel_cast`."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat
from tile_kernels.quant._checks import FP8_NAMES
from tile_kernels.quant.per_channel_cast import per_channel_cast


def per_channel_cast_fp8(
    x: Tensor, group_size: int | None = None, dtype: torch.dtype | str = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Quantize each column of `x` to fp8.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, any shape.
        group_size: rows that share a scale, 32 or 128; None for one scale per column.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2, also as 'e4m3' or 'e5m2'.

    Returns:
        `(x_fp8, scale)`: codes (num_tokens, hidden) and float32 scales (1, hidden) or
        (ceil(num_tokens / group_size), hidden), with x ~= x_fp8.float() * scale.
    """
    code = check.to_dtype(dtype, 'dtype')
    check.one_of(code, FP8_NAMES, 'dtype')
    check.one_of(group_size, (None, 32, 128), 'group_size')
    return per_channel_cast.call(x, QuantFormat.from_flags(FP8_NAMES[code], (group_size or 0, 1)))
