"""Twin of `moe.moe_topk_gate` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.reference.moe._common import empty_slots
from tile_kernels.reference.moe.route_topk import route_topk_, route_topk_bwd_


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
    """Choose the experts of every token, weigh them and map them to physical experts."""
    num_shared = num_shared_experts if use_shared_as_routed else 0
    out = empty_slots(logits, num_topk + num_shared) if out is None else out
    route_topk_(
        *out,
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
    return out


moe_topk_gate = moe_topk_gate_forward


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
    """Gradient of the logits of `moe_topk_gate_forward`."""
    out = torch.empty_like(scores) if out is None else out
    given = (scores, topk_idx, topk_weights, grad_topk_weights, str(scoring_func).lower(), routed_scaling_factor)
    route_topk_bwd_(out, *given, mask, grad_scores_sum)
    return out
