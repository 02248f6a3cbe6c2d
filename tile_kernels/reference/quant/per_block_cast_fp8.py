"""What the friendly per-block cast means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.reference.quant._common import (
    FP8_NAMES,
    cast_blocks,
)


def per_block_cast_fp8(
    w: Tensor, block_size: int | tuple[int, int] = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Blocks of fp8 codes and their float32 scale factors."""
    block = (block_size, block_size) if isinstance(block_size, int) else block_size
    return tuple(cast_blocks(w, QuantFormat.from_flags(FP8_NAMES[dtype], block)))
