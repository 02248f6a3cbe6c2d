"""TileKernels' reference of the cast back from e5m6, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant.dequantize import dequantize


def cast_back_from_e5m6(x: tuple[Tensor, Tensor], fmt: str, x_block_size: tuple[int, int]) -> Tensor:
    """Dequantize e5m6 to 'fp32' or 'bf16'."""
    data, sf = x
    packed = sf.dtype is torch.int32
    layout = QuantFormat.from_flags('e5m6', x_block_size, round_sf=packed, use_packed_ue8m0=packed)
    return dequantize(QuantTensor(data, sf, layout), torch.float32 if fmt == 'fp32' else torch.bfloat16)
