"""Per-token cast to fp8 with float32 scales: the friendly name of `per_token_cast`."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat
from tile_kernels.quant._checks import FP8_NAMES, GROUPS
from tile_kernels.quant.per_token_cast import per_token_cast


def per_token_cast_fp8(
    x: Tensor, group_size: int | None = None, dtype: torch.dtype | str = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Quantize each row of `x` to fp8.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, any hidden.
        group_size: channels that share a scale: 16, 32, 64 or 128; None for one scale per row.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2, also as 'e4m3' or 'e5m2'.

    Returns:
        `(x_fp8, scale)`: codes (num_tokens, hidden) and float32 scales (num_tokens, 1) or
        (num_tokens, ceil(hidden / group_size)), with x ~= x_fp8.float() * scale.
    """
    code = check.to_dtype(dtype, 'dtype')
    check.one_of(code, FP8_NAMES, 'dtype')
    check.one_of(group_size, (None, *GROUPS), 'group_size')
    return per_token_cast.call(x, QuantFormat.from_flags(FP8_NAMES[code], (1, group_size or 0)))
