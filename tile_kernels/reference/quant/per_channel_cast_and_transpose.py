"""What the transposed per-channel cast means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.reference.quant.per_channel_cast import per_channel_cast


def per_channel_cast_and_transpose(x: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """Quantize each channel of `x` in groups of rows and store the codes transposed."""
    y, y_sf = per_channel_cast(x, fmt)
    return y.t().clone(memory_format=torch.contiguous_format), y_sf
