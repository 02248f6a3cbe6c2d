"""Twin of `moe.normalize_weight` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def normalize_weight(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each row by its sum, added up from 1e-20 one weight after another."""
    denominator = torch.full(topk_weights.shape[:1], 1e-20, device=topk_weights.device)
    for k in range(topk_weights.shape[1]):
        denominator = denominator + topk_weights[:, k]
    return denominator, topk_weights / denominator.unsqueeze(1)


def normalize_weight_bwd(ddenominator: Tensor, dnormalized: Tensor, denominator: Tensor, normalized: Tensor) -> Tensor:
    """Gradient of `normalize_weight`."""
    mean = (dnormalized.double() * normalized.double()).sum(1, keepdim=True)
    quotient = (dnormalized.double() - mean) / denominator.double().unsqueeze(1)
    return (quotient + ddenominator.double().unsqueeze(1)).float()


def weight_normalize(topk_weights: Tensor) -> Tensor:
    """Weights divided by their row sum; a zero row stays zero."""
    return normalize_weight(topk_weights)[1]
