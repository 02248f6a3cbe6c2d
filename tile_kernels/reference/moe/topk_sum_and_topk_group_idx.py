"""Twin of `moe.topk_sum_and_topk_group_idx` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.reference.moe._common import stable_topk


def topk_sum_and_topk_group_idx(scores: Tensor, num_topk_sum: int, num_topk_groups: int) -> Tensor:
    """The groups with the largest sum of their `num_topk_sum` best scores, best first."""
    best = scores.gather(-1, stable_topk(scores, num_topk_sum))
    return stable_topk(best.float().sum(-1), num_topk_groups)


def topk_sum_and_topk_group_idx_reference(scores: Tensor, num_group_sum_topk: int, num_topk_groups: int) -> Tensor:
    """`topk_sum_and_topk_group_idx` with the argument names of TileKernels' reference."""
    return topk_sum_and_topk_group_idx(scores, num_group_sum_topk, num_topk_groups)
