"""What SwiGLU with a per-channel cast means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.reference.activation._common import (
    activate,
)
from tile_kernels.reference.quant.per_channel_cast import per_channel_cast
from tile_kernels.reference.quant.per_channel_cast_and_transpose import per_channel_cast_and_transpose


def swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor, fmt: QuantFormat, clamp_value: float | None = None, transpose: bool = True
) -> tuple[Tensor, Tensor]:
    """SwiGLU, rounded to bfloat16, quantized in groups of rows for each channel, and transposed."""
    act = activate(x, None, None, clamp_value, None).bfloat16()
    return per_channel_cast_and_transpose(act, fmt) if transpose else tuple(per_channel_cast(act, fmt))
