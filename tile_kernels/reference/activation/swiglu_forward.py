"""What SwiGLU means, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tile_kernels.core.knobs import knobs
from tile_kernels.reference.activation._common import (
    activate,
    real_rows,
    row_weights,
)
from tile_kernels.reference.activation.swiglu_forward_and_count import swiglu_forward_and_count


def swiglu_forward(
    x: Tensor,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    psum: Tensor | None = None,
    weight_scale: float = 1.0,
    clamp_value: float | None = None,
    alignment: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """SwiGLU of rows that hold gate and up side by side."""
    weight = row_weights(topk_weights, pos_to_token_topk, weight_scale)
    return activate(x, None, weight, clamp_value, real_rows(x, pos_to_expert, psum, alignment)).to(dtype)


# TileKernels' reference ---------------------------------------------------------------------


def swiglu_forward_reference(
    x: Tensor,
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    swiglu_clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    *,
    psum_num_tokens_per_expert: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
) -> Tensor:
    """SwiGLU in float32; `clamped_count` counts all rows that the prefix sums do not leave out."""
    clamp_value = swiglu_clamp_value if clamp_value is None else clamp_value
    if clamp_value is None and clamped_count is not None:
        clamp_value = math.inf  # nothing is clamped, elements are counted
    scale = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    rows = topk_weights, pos_to_token_topk, None, psum_num_tokens_per_expert
    options = scale, clamp_value, knobs.token_alignment, torch.float32
    if clamped_count is None:
        return swiglu_forward(x, *rows, *options)
    return swiglu_forward_and_count(x, clamped_count, *rows, *options)
