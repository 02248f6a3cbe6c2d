"""What the per-block cast means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant._common import (
    cast_blocks,
)


def per_block_cast(x: Tensor, fmt: QuantFormat, amax_floor: float | None = None) -> QuantTensor:
    """Quantize `x` in blocks of `fmt.sf_block` rows and channels."""
    return cast_blocks(x, fmt, amax_floor)
