"""What the ops of `tile_kernels.moe` compute, in plain PyTorch."""

from tile_kernels.reference.moe._common import stable_topk
from tile_kernels.reference.moe.aux_fi import aux_fi
from tile_kernels.reference.moe.expand_and_per_token_cast import expand_and_per_token_cast
from tile_kernels.reference.moe.expand_to_fused import expand_to_fused, expand_to_fused_bwd
from tile_kernels.reference.moe.expand_to_fused_with_sf import expand_to_fused_with_sf, expand_with_sf
from tile_kernels.reference.moe.fused_expand_reduce import fused_expand_reduce
from tile_kernels.reference.moe.fused_mapping import fused_mapping, get_fused_mapping
from tile_kernels.reference.moe.gate_logits import gate_logits, gate_logits_bwd
from tile_kernels.reference.moe.group_count import group_count
from tile_kernels.reference.moe.inplace_unique_group_indices import inplace_unique_group_indices
from tile_kernels.reference.moe.mask_indices_by_tp import mask_indices_by_tp
from tile_kernels.reference.moe.moe_topk_gate import moe_topk_gate, moe_topk_gate_backward, moe_topk_gate_forward
from tile_kernels.reference.moe.moe_topk_routing import MoETopKRouting, moe_topk_routing
from tile_kernels.reference.moe.normalize_weight import normalize_weight, normalize_weight_bwd, weight_normalize
from tile_kernels.reference.moe.reduce_fused import reduce_fused
from tile_kernels.reference.moe.reduce_rows import reduce_rows, reduce_rows_, reduce_rows_bwd
from tile_kernels.reference.moe.route_topk import route_topk_, route_topk_bwd_
from tile_kernels.reference.moe.token_to_expert_map import token_to_expert_map
from tile_kernels.reference.moe.top2_sum_gate import top2_sum_gate
from tile_kernels.reference.moe.topk_gate import topk_gate
from tile_kernels.reference.moe.topk_gating import topk_gating, topk_gating_bwd
from tile_kernels.reference.moe.topk_sum_and_topk_group_idx import (
    topk_sum_and_topk_group_idx,
    topk_sum_and_topk_group_idx_reference,
)
from tile_kernels.reference.moe.weighted_reduce_rows import weighted_reduce_rows, weighted_reduce_rows_bwd

__all__ = [
    'MoETopKRouting',
    'aux_fi',
    'expand_and_per_token_cast',
    'expand_to_fused',
    'expand_to_fused_bwd',
    'expand_to_fused_with_sf',
    'expand_with_sf',
    'fused_expand_reduce',
    'fused_mapping',
    'gate_logits',
    'gate_logits_bwd',
    'get_fused_mapping',
    'group_count',
    'inplace_unique_group_indices',
    'mask_indices_by_tp',
    'moe_topk_gate',
    'moe_topk_gate_backward',
    'moe_topk_gate_forward',
    'moe_topk_routing',
    'normalize_weight',
    'normalize_weight_bwd',
    'reduce_fused',
    'reduce_rows',
    'reduce_rows_',
    'reduce_rows_bwd',
    'route_topk_',
    'route_topk_bwd_',
    'stable_topk',
    'token_to_expert_map',
    'top2_sum_gate',
    'topk_gate',
    'topk_gating',
    'topk_gating_bwd',
    'topk_sum_and_topk_group_idx',
    'topk_sum_and_topk_group_idx_reference',
    'weight_normalize',
    'weighted_reduce_rows',
    'weighted_reduce_rows_bwd',
]
