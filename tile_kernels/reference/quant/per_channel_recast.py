"""What the per-channel cast of a quantized matrix means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant.dequantize import dequantize
from tile_kernels.reference.quant.per_channel_cast import per_channel_cast


def per_channel_recast(x: QuantTensor, fmt: QuantFormat, pos_to_token: Tensor | None = None) -> QuantTensor:
    """`per_channel_cast` of a quantized `x`."""
    return per_channel_cast(dequantize(x, torch.float32), fmt, pos_to_token)
