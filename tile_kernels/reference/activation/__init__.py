"""What the ops of `tile_kernels.activation` mean, in plain PyTorch."""

from tile_kernels.reference.activation._common import get_mapping_from_psum
from tile_kernels.reference.activation.fused_swiglu_quant_fp8 import fused_swiglu_quant_fp8
from tile_kernels.reference.activation.swiglu_backward import swiglu_backward
from tile_kernels.reference.activation.swiglu_backward_and_per_token_cast import swiglu_backward_and_per_token_cast
from tile_kernels.reference.activation.swiglu_forward import swiglu_forward
from tile_kernels.reference.activation.swiglu_forward_and_count import swiglu_forward_and_count
from tile_kernels.reference.activation.swiglu_forward_and_per_block_cast import swiglu_forward_and_per_block_cast
from tile_kernels.reference.activation.swiglu_forward_and_per_channel_cast_and_transpose import (
    swiglu_forward_and_per_channel_cast_and_transpose,
)
from tile_kernels.reference.activation.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast

__all__ = [name for name in dir() if not name.startswith('_')]
