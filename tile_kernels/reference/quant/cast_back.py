"""TileKernels' reference of the cast back, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant.dequantize import dequantize


def with_format(x: tuple[Tensor, Tensor], block_size: tuple[int, int]) -> QuantTensor:
    """A pair of data and scale factors with the format that their dtypes tell."""
    data, sf = x
    name, packed = 'e2m1' if data.dtype in (torch.int8, torch.uint8) else 'e4m3', sf.dtype is torch.int32
    return QuantTensor(data, sf, QuantFormat.from_flags(name, block_size, False, packed, packed))


def cast_back(x: tuple[Tensor, Tensor], fmt: str, block_size: tuple[int, int] = (32, 32)) -> Tensor:
    """Dequantize a pair of data and scale factors (any layout): code * sf, as 'fp32' or 'bf16'."""
    return dequantize(with_format(x, block_size), torch.float32 if fmt == 'fp32' else torch.bfloat16)
