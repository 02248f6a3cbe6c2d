"""Twin of `moe.mask_indices_by_tp` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_indices_by_tp(indices: Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int) -> Tensor:
    """Local numbers of the experts that this tensor-parallel rank holds, -1 for all others."""
    per_gpu = n // num_ep_ranks
    per_dp = num_tp_ranks * per_gpu
    mine = (indices >= 0) & ((indices // per_gpu) % num_tp_ranks == tp_rank)
    local = indices - tp_rank * per_gpu
    local = local - local // per_dp * (per_dp - per_gpu)
    return torch.where(mine, local, -1)
