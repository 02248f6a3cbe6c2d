"""What the cast there and back means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.reference.quant.fake_quantize import fake_quantize


def per_token_cast_and_cast_back(x: Tensor, fmt: QuantFormat) -> None:
    """Replace every number of `x` by what quantizing it per token and dequantizing it again gives."""
    x.copy_(fake_quantize(x, fmt))
