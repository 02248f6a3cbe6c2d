"""What fake quantization means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.reference.quant._common import (
    cast_blocks,
)
from tile_kernels.reference.quant.dequantize import dequantize


def fake_quantize(x: Tensor, fmt: QuantFormat) -> Tensor:
    """Every number of `x` as it comes back from being quantized per token."""
    return dequantize(cast_blocks(x, fmt), x.dtype)
