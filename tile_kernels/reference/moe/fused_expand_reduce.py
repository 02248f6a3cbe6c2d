"""Twin of `moe.fused_expand_reduce` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tile_kernels.moe.token_to_expert_map import RoutingMap
from tile_kernels.reference.moe.expand_to_fused import expand_to_fused
from tile_kernels.reference.moe.reduce_fused import reduce_fused


def fused_expand_reduce(
    hidden: Tensor,
    routing_map: RoutingMap,
    expert_fn: Callable[[Tensor, RoutingMap], Tensor],
    topk_weights: Tensor | None = None,
) -> Tensor:
    """Expand rows to expert order, apply the experts, and sum the results back to tokens."""
    expanded = expand_to_fused(hidden, routing_map.token_topk_to_pos, routing_map.pos_to_expert)
    return reduce_fused(expert_fn(expanded, routing_map), topk_weights, routing_map.token_topk_to_pos)
