"""What the ops of `tile_kernels.quant` mean, in plain PyTorch."""

from tile_kernels.reference.quant.blocks import (
    batched_transpose_weight_sf,
    cast_back_from_e5m6,
    cast_to_e5m6,
    convert,
    dequantise,
    per_block_cast,
    per_block_cast_fp8,
    per_block_cast_lossless,
    per_block_cast_with_precomputed_sf,
    per_block_cast_with_sf_only,
    per_channel_cast,
    per_channel_cast_and_transpose,
    per_channel_cast_fp8,
    per_channel_recast,
    per_token_cast_and_cast_back,
    transpose_weight_sf,
)
from tile_kernels.reference.quant.norm import (
    add_norm_backward,
    add_norm_forward,
    norm_backward,
    norm_backward_,
    norm_backward_ref,
    norm_forward,
    norm_forward_,
    norm_forward_and_per_token_cast,
    norm_forward_and_per_token_cast_,
    norm_forward_ref,
)
from tile_kernels.reference.quant.swiglu import (
    fused_swiglu_quant_fp8,
    get_mapping_from_psum,
    swiglu_backward,
    swiglu_backward_and_per_token_cast,
    swiglu_forward,
    swiglu_forward_and_count,
    swiglu_forward_and_per_channel_cast_and_transpose,
    swiglu_forward_and_per_token_cast,
)
from tile_kernels.reference.quant.tokens import (
    cast,
    cast_back,
    fake_quantise,
    per_token_cast,
    per_token_cast_fp8,
    per_token_cast_with_precomputed_sf,
    per_token_cast_with_sf_only,
    per_token_recast,
    per_token_recast_with_precomputed_sf,
    per_token_recast_with_sf_only,
    unpack_from_e2m1fn_x2,
)

_MODULES = ('blocks', 'norm', 'stochastic', 'swiglu', 'tokens')

__all__ = [name for name in dir() if not name.startswith('_') and name not in _MODULES]
