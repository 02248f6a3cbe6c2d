"""Inputs of routers."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.testing.generator import default_device


def construct_logits(
    num_tokens: int, num_experts: int, *, spread: float = 4.0, device: torch.device | str | None = None
) -> Tensor:
    """Random logits whose choice of experts is unambiguous.

    Each row holds evenly spaced values from -spread to spread in random order, shifted by up to a quarter of a step. So
    no two scores of a row are close enough for rounding to swap them.

    Returns:
        float32 (num_tokens, num_experts).
    """
    device = default_device(device)
    step = 2 * spread / max(num_experts - 1, 1)
    order = torch.rand(num_tokens, num_experts, device=device).argsort(dim=1)
    jitter = (torch.rand(num_tokens, num_experts, device=device) - 0.5) * (step / 2)
    return order * step - spread + jitter
