"""What the per-channel cast means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant._common import (
    cast_blocks,
)


def _gather(x: Tensor, pos_to_token: Tensor | None) -> Tensor:
    """Rows of `x` by number; a number that is no row gives zeros."""
    if pos_to_token is None:
        return x
    exists = (pos_to_token >= 0) & (pos_to_token < x.shape[0])
    padded = torch.cat((x, x.new_zeros(1, x.shape[1])))
    return padded[torch.where(exists, pos_to_token, x.shape[0]).long()]


def per_channel_cast(x: Tensor, fmt: QuantFormat, pos_to_token: Tensor | None = None) -> QuantTensor:
    """Quantize each channel of `x`, or of rows gathered from it, in groups of rows."""
    return cast_blocks(_gather(x, pos_to_token), fmt)
