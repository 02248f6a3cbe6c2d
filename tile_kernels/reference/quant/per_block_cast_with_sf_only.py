"""What the scale factors of the per-block cast mean, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.reference.quant._common import (
    cast_blocks,
)


def per_block_cast_with_sf_only(x: Tensor, fmt: QuantFormat, amax_floor: float | None = None) -> Tensor:
    """The scale factors of `per_block_cast`."""
    return cast_blocks(x, fmt, amax_floor).sf
