"""Casts between model dtypes and quantised formats, alone and fused with SwiGLU."""

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.quant.convert import unpack_from_e2m1fn_x2
from tile_kernels.quant.front import (
    fake_quantise,
    per_token_cast,
    per_token_cast_fp8,
    per_token_cast_with_precomputed_sf,
    per_token_cast_with_sf_only,
)
from tile_kernels.quant.front_blocks import (
    batched_transpose_weight_sf,
    cast,
    cast_back,
    per_block_cast,
    per_block_cast_fp8,
    per_block_cast_lossless,
    per_block_cast_with_precomputed_sf,
    per_block_cast_with_sf_only,
    per_channel_cast,
    per_channel_cast_and_transpose,
    per_channel_cast_fp8,
    per_channel_cast_fused,
    per_token_cast_and_cast_back,
    per_token_cast_back,
)
from tile_kernels.quant.front_norm import norm_backward, norm_forward, norm_forward_and_per_token_cast
from tile_kernels.quant.front_swiglu import (
    fused_swiglu_quant_fp8,
    swiglu_backward,
    swiglu_backward_and_per_token_cast,
    swiglu_forward,
    swiglu_forward_and_per_channel_cast_and_transpose,
    swiglu_forward_and_per_token_cast,
)

__all__ = [
    'QuantFormat',
    'QuantTensor',
    'batched_transpose_weight_sf',
    'cast',
    'cast_back',
    'fake_quantise',
    'fused_swiglu_quant_fp8',
    'norm_backward',
    'norm_forward',
    'norm_forward_and_per_token_cast',
    'per_block_cast',
    'per_block_cast_fp8',
    'per_block_cast_lossless',
    'per_block_cast_with_precomputed_sf',
    'per_block_cast_with_sf_only',
    'per_channel_cast',
    'per_channel_cast_and_transpose',
    'per_channel_cast_fp8',
    'per_channel_cast_fused',
    'per_token_cast',
    'per_token_cast_and_cast_back',
    'per_token_cast_back',
    'per_token_cast_fp8',
    'per_token_cast_with_precomputed_sf',
    'per_token_cast_with_sf_only',
    'swiglu_backward',
    'swiglu_backward_and_per_token_cast',
    'swiglu_forward',
    'swiglu_forward_and_per_channel_cast_and_transpose',
    'swiglu_forward_and_per_token_cast',
    'unpack_from_e2m1fn_x2',
]


def __dir__() -> list[str]:
    return __all__
