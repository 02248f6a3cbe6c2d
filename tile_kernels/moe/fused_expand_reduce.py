"""Expand rows to expert order, apply the experts, and reduce the results back to tokens, in one call."""

from collections.abc import Callable

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.moe.expand_to_fused import expand_to_fused
from tile_kernels.moe.reduce_fused import reduce_fused
from tile_kernels.moe.token_to_expert_map import RoutingMap


def fused_expand_reduce(
    hidden: Tensor,
    routing_map: RoutingMap,
    expert_fn: Callable[[Tensor, RoutingMap], Tensor],
    topk_weights: Tensor | None = None,
) -> Tensor:
    """Expand rows to expert order, apply the experts, and sum the results back to tokens; differentiable.

    Args:
        hidden: (num_tokens, hidden) rows of tokens.
        routing_map: from `token_to_expert_map`.
        expert_fn: called as `expert_fn(expanded, routing_map)` with (num_expanded, hidden) rows in expert order;
            returns (num_expanded, out_hidden) bfloat16, float16 or float32. Padding rows are zero in the input and
            ignored in the result.
        topk_weights: (num_tokens, num_topk) float32 weights of the sum, None for a plain one.

    Returns:
        (num_tokens, out_hidden); 0 for tokens without a position.
    """
    if not isinstance(routing_map, RoutingMap):
        check.fail('routing_map', 'must be a RoutingMap', check.describe(routing_map), 'token_to_expert_map makes one')
    if not callable(expert_fn):
        check.fail('expert_fn', 'must be a function', check.describe(expert_fn))
    num_tokens = routing_map.token_topk_to_pos.shape[0]
    check.shape(hidden, 'hidden', 'num_tokens hidden', num_tokens=num_tokens)
    check.unit_stride(hidden, 'hidden')
    expanded = expand_to_fused(hidden, routing_map.token_topk_to_pos, routing_map.pos_to_expert)
    result = expert_fn(expanded, routing_map)
    check.shape(result, 'the result of expert_fn', 'num_expanded out_hidden', num_expanded=expanded.shape[0])
    return reduce_fused(result, topk_weights, routing_map.token_topk_to_pos)
