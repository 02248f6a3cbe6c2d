"""Twin of `moe.top2_sum_gate` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.reference.moe._common import empty_slots
from tile_kernels.reference.moe.route_topk import route_topk_


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
    """Choose experts in the groups whose two best scores have the largest sum, weigh them, and number them by rank."""
    num_shared = num_shared_experts if use_shared_as_routed else 0
    out = empty_slots(logits, num_topk + num_shared)
    route_topk_(
        *out,
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
    return out
