"""What SwiGLU that counts what it clamps means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.reference.activation._common import (
    activate,
    count_clamped,
    real_rows,
    row_weights,
)


def swiglu_forward_and_count(
    x: Tensor,
    clamped_count: Tensor,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    psum: Tensor | None = None,
    weight_scale: float = 1.0,
    clamp_value: float | None = None,
    alignment: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`swiglu_forward` that also counts what it clamps."""
    real = real_rows(x, pos_to_expert, psum, alignment)
    count_clamped(x, None, clamp_value, real, clamped_count)
    weight = row_weights(topk_weights, pos_to_token_topk, weight_scale)
    return activate(x, None, weight, clamp_value, real).to(dtype)
