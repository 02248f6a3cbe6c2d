"""What the per-token cast means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant._common import (
    cast_blocks,
)


def per_token_cast(
    x: Tensor, fmt: QuantFormat, amax_floor: float | None = None, stochastic: bool = False
) -> QuantTensor:
    """Quantize each row of `x` in groups of `fmt.sf_block[1]` channels."""
    return cast_blocks(x, fmt, amax_floor, stochastic)
