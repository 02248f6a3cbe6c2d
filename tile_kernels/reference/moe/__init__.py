"""What the ops of `tile_kernels.moe` mean, in plain PyTorch."""

from tile_kernels.reference.moe.gates import stable_topk, topk_gate, topk_gating, topk_gating_bwd
from tile_kernels.reference.moe.moving import (
    aux_fi,
    expand_and_per_token_cast,
    expand_to_fused,
    expand_to_fused_bwd,
    expand_to_fused_with_sf,
    expand_with_sf,
    fused_expand_reduce,
    fused_mapping,
    get_fused_mapping,
    group_count,
    inplace_unique_group_indices,
    mask_indices_by_tp,
    normalize_weight,
    normalize_weight_bwd,
    reduce_fused,
    reduce_rows,
    reduce_rows_,
    reduce_rows_bwd,
    token_to_expert_map,
    weight_normalize,
    weighted_reduce_rows,
    weighted_reduce_rows_bwd,
)
from tile_kernels.reference.moe.routes import (
    MoETopKRouting,
    gate_logits,
    gate_logits_bwd,
    moe_topk_gate,
    moe_topk_gate_backward,
    moe_topk_gate_forward,
    moe_topk_routing,
    route_topk_,
    route_topk_bwd_,
    top2_sum_gate,
    topk_sum_and_topk_group_idx,
    topk_sum_and_topk_group_idx_reference,
)

__all__ = [name for name in dir() if not name.startswith('_') and name not in ('gates', 'moving', 'routes')]
