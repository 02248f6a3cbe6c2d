"""SwiGLU of separate gate and up, quantized to fp8: the friendly name of `swiglu_forward_and_per_token_cast`."""

import torch
from torch import Tensor

from tile_kernels.activation.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast
from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat
from tile_kernels.quant._checks import FP8_NAMES, GROUPS


def fused_swiglu_quant_fp8(
    gate: Tensor, up: Tensor, group_size: int | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """`silu(gate) * up`, quantized to fp8; gate and up are read once.

    Args:
        gate: (num_tokens, intermediate) bfloat16, float16 or float32, any row stride, any width.
        up: shape and dtype of `gate`.
        group_size: channels that share a scale: 16, 32, 64 or 128; None for one scale per row.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        `(out_fp8, scale)`: codes (num_tokens, intermediate) and float32 scales (num_tokens, 1) or
        (num_tokens, ceil(intermediate / group_size)), with silu(gate) * up ~= out_fp8.float() * scale.
    """
    check.one_of(dtype, FP8_NAMES, 'dtype')
    check.one_of(group_size, (None, *GROUPS), 'group_size')
    layout = QuantFormat.from_flags(FP8_NAMES[dtype], (1, group_size or 0))
    return swiglu_forward_and_per_token_cast.call(gate, layout, up)
