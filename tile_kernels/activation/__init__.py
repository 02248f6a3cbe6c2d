"""SwiGLU and its gradients, alone and with casts."""

from tile_kernels.activation.fused_swiglu_quant_fp8 import fused_swiglu_quant_fp8
from tile_kernels.activation.swiglu_backward import swiglu_backward
from tile_kernels.activation.swiglu_backward_and_per_token_cast import swiglu_backward_and_per_token_cast
from tile_kernels.activation.swiglu_forward import swiglu_forward
from tile_kernels.activation.swiglu_forward_and_per_block_cast import swiglu_forward_and_per_block_cast
from tile_kernels.activation.swiglu_forward_and_per_channel_cast_and_transpose import (
    swiglu_forward_and_per_channel_cast_and_transpose,
)
from tile_kernels.activation.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast

__all__ = [
    'fused_swiglu_quant_fp8',
    'swiglu_backward',
    'swiglu_backward_and_per_token_cast',
    'swiglu_forward',
    'swiglu_forward_and_per_block_cast',
    'swiglu_forward_and_per_channel_cast_and_transpose',
    'swiglu_forward_and_per_token_cast',
]


def __dir__() -> list[str]:
    return __all__
