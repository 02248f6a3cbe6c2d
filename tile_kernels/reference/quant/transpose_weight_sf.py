"""What packing the scale factors of weights means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def _pack_rows(sf: Tensor, block: int) -> Tensor:
    """Exponents of (batch, rows / block, cols) scale factors, four columns to a word: (batch, cols / 4, rows)."""
    exponents = torch.nn.functional.pad(sf.contiguous().view(torch.int32) >> 23 & 0xFF, (0, -sf.shape[2] % 4))
    first, second, third, fourth = exponents.unflatten(2, (-1, 4)).unbind(-1)
    words = first | second << 8 | third << 16 | fourth << 24
    return words.repeat_interleave(block, 1).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def transpose_weight_sf(sf: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Pack the scale factors of weights along k and along n."""
    return _pack_rows(sf, block), _pack_rows(sf.transpose(1, 2), block)
