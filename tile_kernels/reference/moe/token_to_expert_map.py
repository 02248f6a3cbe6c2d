"""Twin of `moe.token_to_expert_map` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.moe.token_to_expert_map import RoutingMap
from tile_kernels.reference.moe.fused_mapping import fused_mapping


def token_to_expert_map(
    topk_indices: Tensor, num_experts: int, alignment: int = 1, *, num_expanded: int | None = None
) -> RoutingMap:
    """Map tokens to experts, with enough positions for any choice unless a number is given."""
    if num_expanded is None:
        num_expanded = (topk_indices.numel() + (alignment - 1) * num_experts) // alignment * alignment
    pos_to_expert, pos_to_token, *rest = fused_mapping(topk_indices, num_experts, num_expanded, alignment)
    return RoutingMap(pos_to_token, pos_to_expert, *rest)
