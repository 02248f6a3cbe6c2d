"""Twin of `moe.topk_gate` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.reference.moe._common import stable_topk


def topk_gate(scores: Tensor, num_topk: int) -> Tensor:
    """The experts with the largest scores, best first."""
    return stable_topk(scores, num_topk)
