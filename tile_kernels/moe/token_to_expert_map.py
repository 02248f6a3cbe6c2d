"""Map tokens to experts: `RoutingMap`, and the function that makes one without waiting for the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.moe.fused_mapping import fused_mapping, places_for


@dataclass(frozen=True)
class RoutingMap:
    """Where the rows of every token go when they are sorted by expert, and back. All tensors are int32.

    Attributes:
        pos_to_token: (num_expanded,) token of a place, -1 in padding.
        pos_to_expert: (num_expanded,) expert of a place, -1 in padding.
        pos_to_token_topk: (num_expanded,) slot of a place as token * num_topk + k, -1 in padding.
        token_topk_to_pos: (num_tokens, num_topk) place of a slot, -1 if it has none.
        expert_start: (num_experts,) first place of an expert.
        expert_end: (num_experts,) place behind its last, padding included.
        num_tokens_per_expert: (num_experts,) rows of an expert, padding included.
        overflow: (1,) places that were missing; slots beyond the last place are not placed. 0 if everything fits.
    """

    pos_to_token: Tensor
    pos_to_expert: Tensor
    pos_to_token_topk: Tensor
    token_topk_to_pos: Tensor
    expert_start: Tensor
    expert_end: Tensor
    num_tokens_per_expert: Tensor
    overflow: Tensor


torch.utils._pytree.register_dataclass(RoutingMap, serialized_type_name='tile_kernels.RoutingMap')


@check.names(topk_idx='topk_indices')
def token_to_expert_map(
    topk_indices: Tensor, num_experts: int, alignment: int = 1, *, num_expanded: int | None = None
) -> RoutingMap:
    """Map tokens to experts without waiting for the device; safe to capture in a CUDA graph.

    Args:
        topk_indices: (num_tokens, num_topk) int64 or int32; -1 = slot not routed.
        num_experts: up to 4096.
        alignment: every expert begins at a multiple of it.
        num_expanded: number of places; by default as many as any choice can need. If the choice needs more, the map's
            `overflow` says how many and the last slots stay without a place.

    Returns:
        The map; inside an expert rows are in the order of tokens.
    """
    num_tokens, num_topk = check.shape(
        topk_indices, 'topk_indices', 'num_tokens num_topk', dtype=(torch.int64, torch.int32)
    )
    check.at_least(alignment, 1, 'alignment')
    if num_expanded is None:
        num_expanded = places_for(num_tokens, num_topk, num_experts, alignment)
    choice = topk_indices.contiguous()
    pos_to_expert, pos_to_token, *rest = fused_mapping(choice, num_experts, num_expanded, alignment)
    return RoutingMap(pos_to_token, pos_to_expert, *rest)
