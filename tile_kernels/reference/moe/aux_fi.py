"""Twin of `moe.aux_fi` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.reference.moe.group_count import group_count


def aux_fi(topk_idx: Tensor, num_experts: int, num_aux_topk: int) -> Tensor:
    """Load fraction of each expert."""
    even = torch.tensor(max(topk_idx.shape[0] * num_aux_topk, 1), dtype=torch.float32, device=topk_idx.device)
    return group_count(topk_idx, num_experts).float() * num_experts / even
