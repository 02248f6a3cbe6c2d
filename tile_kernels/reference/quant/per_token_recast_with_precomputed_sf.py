"""What the same with given scale factors means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant._common import (
    divide,
    load_sf,
    requantize,
)


def per_token_recast_with_precomputed_sf(x: QuantTensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    """Quantize each row of a quantized `x` with given scale factors."""
    return requantize(x, divide(1.0, load_sf(sf, fmt, fmt.blocks(*x.shape))), fmt)
