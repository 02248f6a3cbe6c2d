"""Twin of `moe.group_count` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def group_count(group_idx: Tensor, num_groups: int) -> Tensor:
    """Count how often each group occurs."""
    groups = group_idx[(group_idx >= 0) & (group_idx < num_groups)].long()
    counts = torch.zeros(num_groups, dtype=torch.int32, device=group_idx.device)
    return counts.scatter_add_(0, groups, torch.ones_like(groups, dtype=torch.int32))
