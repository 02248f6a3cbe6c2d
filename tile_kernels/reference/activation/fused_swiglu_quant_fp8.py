"""What the friendly SwiGLU with a cast to fp8 means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.reference.activation.swiglu_forward_and_per_block_cast import swiglu_forward_and_per_block_cast
from tile_kernels.reference.activation.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast
from tile_kernels.reference.quant._common import FP8_NAMES


def fused_swiglu_quant_fp8(
    gate: Tensor,
    up: Tensor,
    group_size: int | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    variant: str = 'per_token',
    block_size: int | tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up as fp8 codes and float32 scale factors, for rows, for `group_size` channels or for blocks."""
    if variant == 'per_token':
        fmt = QuantFormat.from_flags(FP8_NAMES[dtype], (1, group_size or 0))
        return tuple(swiglu_forward_and_per_token_cast(gate, fmt, up))
    block_size = 128 if block_size is None else block_size
    block = (block_size, block_size) if isinstance(block_size, int) else block_size
    return tuple(swiglu_forward_and_per_block_cast(gate, QuantFormat.from_flags(FP8_NAMES[dtype], block), up))
