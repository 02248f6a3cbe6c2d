"""What every op means, in plain PyTorch: obvious, slow, and independent of the kernels.

The same names, arguments and results as the public functions, on any device; the twins of the ops, which take formats
instead of flags, are in one module per family.
"""

from tile_kernels.torch.moe import (
    aux_fi,
    expand_to_fused,
    expand_to_fused_with_sf,
    fused_expand_reduce,
    get_fused_mapping,
    group_count,
    inplace_unique_group_indices,
    mask_indices_by_tp,
    normalize_weight,
    reduce_fused,
    stable_topk,
    token_to_expert_map,
    topk_gate,
    topk_gating,
    weight_normalize,
)
from tile_kernels.torch.per_channel_cast_fused import per_channel_cast_fused
from tile_kernels.torch.quant import (
    batched_transpose_weight_sf,
    cast,
    cast_back,
    cast_back_from_e5m6,
    cast_to_e5m6,
    fused_swiglu_quant_fp8,
    get_mapping_from_psum,
    per_block_cast_fp8,
    per_channel_cast_fp8,
    per_token_cast_fp8,
    unpack_from_e2m1fn_x2,
)
from tile_kernels.torch.quant.swiglu import swiglu_backward_reference as swiglu_backward
from tile_kernels.torch.quant.swiglu import swiglu_forward_reference as swiglu_forward
from tile_kernels.torch.transpose import batched_transpose, transpose

__all__ = [
    'aux_fi',
    'batched_transpose',
    'batched_transpose_weight_sf',
    'cast',
    'cast_back',
    'cast_back_from_e5m6',
    'cast_to_e5m6',
    'expand_to_fused',
    'expand_to_fused_with_sf',
    'fused_expand_reduce',
    'fused_swiglu_quant_fp8',
    'get_fused_mapping',
    'get_mapping_from_psum',
    'group_count',
    'inplace_unique_group_indices',
    'mask_indices_by_tp',
    'normalize_weight',
    'per_block_cast_fp8',
    'per_channel_cast_fp8',
    'per_channel_cast_fused',
    'per_token_cast_fp8',
    'reduce_fused',
    'stable_topk',
    'swiglu_backward',
    'swiglu_forward',
    'token_to_expert_map',
    'topk_gate',
    'topk_gating',
    'transpose',
    'unpack_from_e2m1fn_x2',
    'weight_normalize',
]
