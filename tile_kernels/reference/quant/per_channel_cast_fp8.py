"""What the friendly per-channel cast means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.reference.quant._common import (
    FP8_NAMES,
)
from tile_kernels.reference.quant.per_channel_cast import per_channel_cast


def per_channel_cast_fp8(
    x: Tensor, group_size: int | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Columns of fp8 codes and float32 scale factors, one for each column or for each `group_size` rows of it."""
    return tuple(per_channel_cast(x, QuantFormat.from_flags(FP8_NAMES[dtype], (group_size or 0, 1))))
