"""Mixture of experts: routing from logits to experts and back."""

from typing import TYPE_CHECKING

from tile_kernels.moe.aux_fi import aux_fi
from tile_kernels.moe.expand_and_per_token_cast import expand_and_per_token_cast
from tile_kernels.moe.expand_to_fused import expand_to_fused
from tile_kernels.moe.expand_to_fused_with_sf import expand_to_fused_with_sf
from tile_kernels.moe.fused_expand_reduce import fused_expand_reduce
from tile_kernels.moe.fused_mapping import fused_mapping, get_fused_mapping
from tile_kernels.moe.gate_logits import gate_logits, gate_logits_bwd
from tile_kernels.moe.group_count import group_count
from tile_kernels.moe.inplace_unique_group_indices import inplace_unique_group_indices
from tile_kernels.moe.mask_indices_by_tp import mask_indices_by_tp
from tile_kernels.moe.moe_gating_kernel import MoEGatingKernel
from tile_kernels.moe.moe_topk_gate import moe_topk_gate, moe_topk_gate_backward, moe_topk_gate_forward
from tile_kernels.moe.moe_topk_routing import MoETopKRouting, moe_topk_routing
from tile_kernels.moe.normalize_weight import normalize_weight, weight_normalize
from tile_kernels.moe.reduce_fused import reduce_fused
from tile_kernels.moe.route_topk import route_topk_, route_topk_bwd_
from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.moe.token_to_expert_map import RoutingMap, token_to_expert_map
from tile_kernels.moe.top2_sum_gate import top2_sum_gate
from tile_kernels.moe.topk_gate import topk_gate
from tile_kernels.moe.topk_gating import topk_gating, topk_gating_bwd
from tile_kernels.moe.topk_sum_and_topk_group_idx import topk_sum_and_topk_group_idx

if TYPE_CHECKING:
    from tile_kernels.modeling.moe import MoELayer

__all__ = [
    'MoEGatingKernel',
    'MoELayer',
    'MoETopKRouting',
    'RoutingMap',
    'ScoringFunc',
    'aux_fi',
    'expand_and_per_token_cast',
    'expand_to_fused',
    'expand_to_fused_with_sf',
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
    'reduce_fused',
    'route_topk_',
    'route_topk_bwd_',
    'token_to_expert_map',
    'top2_sum_gate',
    'topk_gate',
    'topk_gating',
    'topk_gating_bwd',
    'topk_sum_and_topk_group_idx',
    'weight_normalize',
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> type:
    if name == 'MoELayer':  # built of this family and others, so it is not loaded with it
        from tile_kernels.modeling.moe import MoELayer

        return MoELayer
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
