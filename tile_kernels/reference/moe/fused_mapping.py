"""Twin of `moe.fused_mapping` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def fused_mapping(
    topk_idx: Tensor, num_experts: int, num_expanded: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Find the position of every slot (token, k): a stable sort of slots by expert."""
    num_tokens, num_topk = topk_idx.shape
    expert = topk_idx.flatten().long()
    slot = ((expert >= 0) & (expert < num_experts)).nonzero().flatten()
    slot = slot[expert[slot].argsort(stable=True)]
    expert = expert[slot]

    count = torch.zeros(num_experts, dtype=torch.int64, device=expert.device)
    count.scatter_add_(0, expert, torch.ones_like(expert))
    rows = -(-count // alignment) * alignment
    end = rows.cumsum(0)
    start = end - rows
    earlier = torch.arange(slot.numel(), device=slot.device) - (count.cumsum(0) - count)[expert]
    pos = start[expert] + earlier
    fits = pos < num_expanded
    pos, slot, expert = pos[fits], slot[fits], expert[fits]

    def scattered(size: int, index: Tensor, values: Tensor) -> Tensor:
        return torch.full((size,), -1, dtype=torch.int32, device=index.device).scatter_(0, index, values.int())

    return (
        scattered(num_expanded, pos, expert),
        scattered(num_expanded, pos, slot // max(num_topk, 1)),
        scattered(num_expanded, pos, slot),
        scattered(num_tokens * num_topk, slot, pos).view(num_tokens, num_topk),
        start.clamp(max=num_expanded).int(),
        end.clamp(max=num_expanded).int(),
        rows.int(),
        (end[-1:] - num_expanded).clamp(min=0).int(),
    )


def get_fused_mapping(
    topk_idx: Tensor, num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[int]]:
    """Map tokens to experts, with exact sizes and a list of rows per expert unless a number is given."""
    if num_expanded_tokens or force_no_sync:
        return *fused_mapping(topk_idx, num_experts, num_expanded_tokens, alignment)[:-1], []
    enough = (topk_idx.numel() + (alignment - 1) * num_experts) // alignment * alignment
    maps = fused_mapping(topk_idx, num_experts, enough, alignment)[:-1]
    rows = maps[-1].tolist()
    first, second, third = (pos_map[: sum(rows)] for pos_map in maps[:3])
    return first, second, third, *maps[3:], rows
