"""Twin of `moe.inplace_unique_group_indices` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def inplace_unique_group_indices(group_indices: Tensor, num_groups: int) -> None:
    """Keep the first of equal indices in a row and set the others to -1."""
    equal = group_indices.unsqueeze(2) == group_indices.unsqueeze(1)
    seen_before = equal.tril(diagonal=-1).any(dim=2)
    group_indices[seen_before & (group_indices >= 0)] = -1
