"""Choose the experts of every token in its best groups, with the arguments of TileKernels; a call of `route_topk_`."""

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.moe._checks import empty_slots, num_shared_slots
from tile_kernels.moe.route_topk import route_topk_


@check.names(scoring='scoring_func')
def top2_sum_gate(
    logits: Tensor,
    bias: Tensor | None,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: str,
    mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts in the groups whose two best scores have the largest sum, weigh them, and number them by rank.

    Experts are in descending order of score; of equal ones the smaller expert comes first, and NaN ranks last.

    Args:
        logits: (num_tokens, num_experts) float32, bfloat16 or float16; rows may be strided; up to 4096 experts.
        bias: (num_experts,) float32 or None; changes the choice, not the weights.
        num_topk: experts per token, up to 64.
        num_topk_groups: number of groups to choose from; 0 for no groups.
        num_groups: number of equal groups of neighboring experts; 0 for none.
        use_shared_as_routed: whether the shared experts are appended to those of every token, with weight 1.
        num_shared_experts: number of shared experts; their numbers follow those of the routed ones.
        routed_scaling_factor: multiplies the weights of routed experts, which are divided by their sum first.
        ep_rank: this rank; ranks and tokens use the replicas of an expert in turn.
        num_ep_ranks: number of ranks that hold the physical experts.
        tp_rank: this tensor-parallel rank.
        num_tp_ranks: if more than one, experts of other ranks become -1 and the others get their local numbers.
        scoring_func: 'sigmoid', 'sqrtsoftplus', 'softmax' or 'identity'.
        mask: (num_tokens,) bool; False masks a token out: experts -1, weights 0.
        fix_routing_mask: (num_tokens,) bool; True takes the experts from unmapped_topk_idx.
        to_physical_map: (num_logical, max_replicas) int32, physical experts of a logical one (shared ones included).
        logical_count: (num_logical,) int32, their number.
        unmapped_topk_idx: (num_tokens, num_topk) int64; gets the logical experts.

    Returns:
        topk_idx int64 and topk_weights float32, (num_tokens, num_topk) and the shared experts.
    """
    num_shared = num_shared_slots(num_shared_experts, use_shared_as_routed)
    if num_shared > 0 and to_physical_map is None:
        check.fail('use_shared_as_routed', 'must come with to_physical_map', 'no to_physical_map')
    topk_idx, topk_weights = empty_slots(logits, num_topk, num_shared)
    route_topk_(
        topk_idx,
        topk_weights,
        logits,
        scoring=str(scoring_func).lower(),
        routed_scaling_factor=routed_scaling_factor,
        num_shared_experts=num_shared,
        bias=bias,
        num_groups=num_groups or None,
        num_topk_groups=num_topk_groups or None,
        mask=mask,
        fix_routing_mask=fix_routing_mask,
        unmapped_topk_idx=unmapped_topk_idx,
        to_physical_map=to_physical_map,
        logical_count=logical_count,
        ep_rank=ep_rank,
        num_ep_ranks=num_ep_ranks,
        tp_rank=tp_rank,
        num_tp_ranks=num_tp_ranks,
    )
    return topk_idx, topk_weights
