"""Choose the experts of every token, and the gradient, with the arguments of TileKernels; calls of `route_topk_`."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.front import replayed
from tile_kernels.moe._checks import empty_slots, num_shared_slots
from tile_kernels.moe.route_topk import route_topk_, route_topk_bwd_


@check.names(scoring='scoring_func', topk_idx='out[0]', topk_weights='out[1]')
@replayed
def moe_topk_gate_forward(
    logits: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = 'sqrtsoftplus',
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    force_random: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of every token, weigh them and map them to physical experts.

    Experts are in descending order of score; of equal ones the smaller expert comes first, and NaN ranks last.

    Args:
        logits: (num_tokens, num_experts) float32, bfloat16 or float16; rows may be strided; up to 4096 experts.
        num_topk: experts per token, up to 64.
        use_shared_as_routed: whether the shared experts are appended to those of every token, with weight 1.
        num_shared_experts: number of shared experts; their numbers follow those of the routed ones.
        routed_scaling_factor: multiplies the weights of routed experts, which are divided by their sum first.
        ep_rank: this rank; ranks and tokens use the replicas of an expert in turn.
        scoring_func: 'sqrtsoftplus', 'sigmoid', 'softmax' or 'identity'.
        mask: (num_tokens,) bool; False masks a token out: experts -1, weights and scores 0.
        bias: (num_experts,) float32; changes the choice, not the weights.
        image_bias: (num_experts,) float32, used instead of bias for image tokens.
        image_token_mask: (num_tokens,) bool, True for image tokens; needs image_bias.
        fix_routing_mask: (num_tokens,) bool; True takes the experts from unmapped_topk_idx.
        to_physical_map: (num_logical, max_replicas) int32, physical experts of a logical one (shared ones included).
        logical_count: (num_logical,) int32, their number.
        unmapped_topk_idx: (num_tokens, num_topk) int64; gets the logical experts.
        force_random: (num_tokens,) bool; True takes distinct random physical experts and random weights.
        out: memory for the results, or None.
        scores: (num_tokens, num_experts) float32; gets the scores, for the backward.

    Returns:
        topk_idx int64 and topk_weights float32, (num_tokens, num_topk) and the shared experts; `out` if given.
    """
    num_shared = num_shared_slots(num_shared_experts, use_shared_as_routed)
    if out is None:
        topk_idx, topk_weights = empty_slots(logits, num_topk, num_shared)
    else:
        topk_idx, topk_weights = check.pair(out, 'out', 'int64, float32')
    check.integer(num_topk, 'num_topk')
    check.shape(topk_idx, 'out[0]', 'num_tokens num_slots', num_slots=num_topk + num_shared)
    route_topk_(
        topk_idx,
        topk_weights,
        logits,
        scoring=str(scoring_func).lower(),
        routed_scaling_factor=routed_scaling_factor,
        num_shared_experts=num_shared,
        bias=bias,
        image_bias=image_bias,
        image_token_mask=image_token_mask,
        mask=mask,
        fix_routing_mask=fix_routing_mask,
        force_random=force_random,
        unmapped_topk_idx=unmapped_topk_idx,
        scores=scores,
        to_physical_map=to_physical_map,
        logical_count=logical_count,
        ep_rank=ep_rank,
    )
    return topk_idx, topk_weights


moe_topk_gate = moe_topk_gate_forward


@check.names(scoring='scoring_func', dtopk_weights='grad_topk_weights', dscores_sum='grad_scores_sum', dlogits='out')
@replayed
def moe_topk_gate_backward(
    scores: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    grad_topk_weights: Tensor,
    routed_scaling_factor: float,
    scoring_func: str = 'sqrtsoftplus',
    mask: Tensor | None = None,
    grad_scores_sum: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Gradient of the logits of `moe_topk_gate_forward`; deterministic, even for repeated experts.

    Args:
        scores: (num_tokens, num_experts) float32, as written by the forward.
        topk_idx: (num_tokens, num_topk) int64 logical experts, -1 for none: the unmapped_topk_idx of the forward.
        topk_weights: (num_tokens, num_topk) float32 weights of these experts.
        grad_topk_weights: (num_tokens, num_topk) float32 gradient of the weights.
        routed_scaling_factor: as given to the forward.
        scoring_func: as given to the forward.
        mask: (num_tokens,) bool; True for tokens that grad_scores_sum covers.
        grad_scores_sum: (num_seqs, num_experts) float32 gradient of the sums of scores / sum(scores) over the tokens of
            a sequence; needs mask.
        out: memory for the result, or None.

    Returns:
        (num_tokens, num_experts) float32, `out` if given.
    """
    check.shape(scores, 'scores', 'num_tokens num_experts', dtype=torch.float32)
    dlogits = torch.empty_like(scores) if out is None else out
    given = (scores, topk_idx, topk_weights, grad_topk_weights)
    route_topk_bwd_(dlogits, *given, str(scoring_func).lower(), routed_scaling_factor, mask, grad_scores_sum)
    return dlogits
