"""Map tokens to experts: `RoutingMap`, and the function that makes one without waiting for the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.moe.fused_mapping import fused_mapping, places_for


@dataclass(frozen=True)
class RoutingMap:
    """Positions of the rows of all tokens in expert order, and the inverse maps. All tensors are int32.

    Attributes:
        pos_to_token: (num_expanded,) token of a position, -1 in padding.
        pos_to_expert: (num_expanded,) expert of a position, -1 in padding.
        pos_to_token_topk: (num_expanded,) slot of a position as token * num_topk + k, -1 in padding.
        token_topk_to_pos: (num_tokens, num_topk) position of a slot, -1 if it has none.
        expert_start: (num_experts,) first position of an expert.
        expert_end: (num_experts,) end of its positions, including padding.
        num_tokens_per_expert: (num_experts,) rows of an expert, including padding.
        overflow: (1,) number of missing positions, 0 if all slots fit; slots beyond the last position get none.
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
    """Map tokens to experts without waiting for the device; works in CUDA graphs.

    Args:
        topk_indices: (num_tokens, num_topk) int64 or int32; -1 = slot not routed.
        num_experts: up to 4096.
        alignment: every expert begins at a multiple of it.
        num_expanded: number of positions; by default enough for any choice. If there are too few, `overflow` of the map
            has the number missing, and the last slots get no position.

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
