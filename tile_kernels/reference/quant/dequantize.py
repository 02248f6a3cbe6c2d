"""What dequantizing means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantTensor
from tile_kernels.reference.quant._common import (
    codes_and_factors,
)


def dequantize(x: QuantTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Codes times scale factors in float32, rounded to `dtype`."""
    codes, factors = codes_and_factors(x)
    return (codes * factors).to(dtype)
