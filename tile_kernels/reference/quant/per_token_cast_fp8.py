"""What the friendly per-token cast means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.reference.quant._common import (
    FP8_NAMES,
    cast_blocks,
)


def per_token_cast_fp8(
    x: Tensor, group_size: int | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Row-wise fp8 codes and float32 scale factors, one for each row or for each `group_size` channels."""
    return tuple(cast_blocks(x, QuantFormat.from_flags(FP8_NAMES[dtype], (1, group_size or 0))))
