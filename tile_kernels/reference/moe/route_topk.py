"""Twins of `moe.route_topk_` and its gradient in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.reference.moe._common import best_groups, score, stable_topk_of
from tile_kernels.reference.moe.mask_indices_by_tp import mask_indices_by_tp


def route_topk_(
    topk_idx: Tensor,
    topk_weights: Tensor,
    logits: Tensor,
    scoring: str = 'softmax',
    routed_scaling_factor: float = 1.0,
    num_shared_experts: int = 0,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    num_groups: int | None = None,
    num_topk_groups: int | None = None,
    mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    force_random: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    scores: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    ep_rank: int = 0,
    num_ep_ranks: int = 1,
    tp_rank: int = 0,
    num_tp_ranks: int = 1,
) -> None:
    """Choose the experts of every token, weigh them and map them to physical experts; writes into arguments."""
    num_tokens, num_experts = logits.shape
    num_slots = topk_idx.shape[1]
    num_topk = num_slots - num_shared_experts
    logits = logits.float()
    no_token = torch.zeros(num_tokens, dtype=torch.bool, device=logits.device)
    is_out = no_token if mask is None else ~mask
    is_random = no_token if force_random is None else force_random & ~is_out

    # Choice.
    all_scores = score(logits, scoring)
    ranked = logits if scoring == 'softmax' else all_scores
    added = torch.zeros_like(logits) if bias is None else bias.expand_as(logits)
    if image_bias is not None and image_token_mask is not None:
        added = torch.where(image_token_mask.unsqueeze(1), image_bias, added)
    if bias is not None or image_bias is not None:
        ranked = ranked + added
    chosen = stable_topk_of(ranked, best_groups(ranked, num_groups, num_topk_groups), num_topk)
    if fix_routing_mask is not None and unmapped_topk_idx is not None:
        exists = (unmapped_topk_idx >= 0) & (unmapped_topk_idx < num_experts)
        chosen = torch.where(fix_routing_mask.unsqueeze(1), torch.where(exists, unmapped_topk_idx, -1), chosen)

    # Weights; softmax over all experts, renormalized, is softmax over the chosen ones.
    nothing = -torch.inf if scoring == 'softmax' else 0.0
    values = (logits if scoring == 'softmax' else all_scores).gather(1, chosen.clamp(min=0))
    values = torch.where(chosen >= 0, values, nothing)
    weights = values.softmax(-1) if scoring == 'softmax' else values / (values.sum(-1, keepdim=True) + 1e-20)
    weights = torch.where(chosen >= 0, weights * routed_scaling_factor, 0.0)
    shared = torch.arange(num_experts, num_experts + num_shared_experts, device=logits.device)
    places = torch.cat([chosen, shared.expand(num_tokens, -1)], dim=1)
    weights = torch.cat([weights, torch.ones_like(places[:, num_topk:], dtype=torch.float32)], dim=1)

    # Physical experts.
    num_places, max_replicas = num_experts + num_shared_experts, 1
    if to_physical_map is not None and logical_count is not None:
        max_replicas = to_physical_map.shape[1]
        num_places = max(int(logical_count.sum()), num_slots)
        turn = torch.arange(num_tokens, device=logits.device).unsqueeze(1) * 23333 + ep_rank
        replica = turn % logical_count.clamp(min=1).long()[places.clamp(min=0)]
        places = torch.where(places >= 0, to_physical_map[places.clamp(min=0), replica].long(), -1)
    drawn, drawn_weights = random_places(num_tokens, num_slots, num_places, ep_rank, logits.device)
    places = torch.where(is_random.unsqueeze(1), drawn, places)
    weights = torch.where(is_random.unsqueeze(1), drawn_weights, weights)
    if num_tp_ranks > 1:
        num_physical = num_experts + max_replicas - 1
        places = mask_indices_by_tp(places, num_physical, num_ep_ranks, tp_rank, num_tp_ranks)

    topk_idx.copy_(torch.where(is_out.unsqueeze(1), -1, places))
    topk_weights.copy_(torch.where(is_out.unsqueeze(1), 0.0, weights))
    is_unrouted = (is_out | is_random).unsqueeze(1)
    if unmapped_topk_idx is not None:
        unmapped_topk_idx.copy_(torch.where(is_unrouted, -1, chosen))
    if scores is not None:
        scores.copy_(torch.where(is_unrouted, 0.0, all_scores))


def route_topk_bwd_(
    dlogits: Tensor,
    scores: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    dtopk_weights: Tensor,
    scoring: str = 'softmax',
    routed_scaling_factor: float = 1.0,
    mask: Tensor | None = None,
    dscores_sum: Tensor | None = None,
) -> None:
    """Gradient of the logits of `route_topk_`, in float64."""
    num_tokens = scores.shape[0]
    scores, exists = scores.double(), topk_idx >= 0
    chosen = torch.where(exists, scores.gather(1, topk_idx.clamp(min=0)), 0.0)
    total = chosen.sum(-1, keepdim=True) + 1e-20
    moved = torch.where(exists, dtopk_weights.double() * topk_weights, 0.0).sum(-1, keepdim=True)
    route = torch.where(exists, (dtopk_weights.double() * routed_scaling_factor - moved) / total, 0.0)
    dscores = torch.zeros_like(scores).scatter_add(1, topk_idx.clamp(min=0), route)
    if mask is not None and dscores_sum is not None:
        h = dscores_sum.double().repeat_interleave(num_tokens // dscores_sum.shape[0], dim=0)
        share = torch.where(mask, 1 / scores.sum(-1), 0.0).unsqueeze(1)
        dscores = dscores + torch.where(mask.unsqueeze(1), (h - (h * scores).sum(-1, keepdim=True) * share) * share, 0)
    if scoring == 'softmax':
        result = scores * (dscores - (scores * dscores).sum(-1, keepdim=True))
    elif scoring == 'sigmoid':
        result = scores * (1 - scores) * dscores
    elif scoring == 'sqrtsoftplus':
        result = torch.where(scores > 0, -torch.expm1(-scores.square()) / (2 * scores), 0.0) * dscores
    else:
        result = dscores
    dlogits.copy_(result)


# Random experts -----------------------------------------------------------------------------


def random_places(
    num_tokens: int, num_slots: int, num_places: int, ep_rank: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Distinct experts below `num_places` and weights in [0, 1) for every slot of every token, seeded by the rank.

    Every token has its own permutation of slots: a Feistel network of four rounds on numbers of 2 * half bits. It is
    repeated until the result is below `num_places`.
    """
    slots = torch.arange(num_slots, device=device).expand(num_tokens, -1)
    seed = _mix(_mix(torch.tensor(ep_rank, device=device)) + torch.arange(num_tokens, device=device)).unsqueeze(1)
    half = max(1, -(-(num_places - 1).bit_length() // 2))

    def permuted(index: Tensor) -> Tensor:
        left, right = index >> half, index & ((1 << half) - 1)
        for i in range(4):
            left, right = right, left ^ (_mix(seed + right * 4 + i) >> (32 - half))
        return (left << half) | right

    places = permuted(slots)
    while bool((places >= num_places).any()):
        places = torch.where(places >= num_places, permuted(places), places)
    weights = _mix(_mix(seed ^ 0x9E3779B9) + slots) >> 8
    return places, weights.float() * 2**-24


def _mix(x: Tensor) -> Tensor:
    """A hash of 32 bits, in int64."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
