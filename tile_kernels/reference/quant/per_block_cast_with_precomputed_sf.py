"""What the per-block cast with given scale factors means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.reference.quant._common import (
    divide,
    load_sf,
    quantize,
)


def per_block_cast_with_precomputed_sf(x: Tensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    """Quantize `x` with given scale factors."""
    return quantize(x, divide(1.0, load_sf(sf, fmt, fmt.blocks(*x.shape))), fmt)
