"""What SwiGLU with a per-block cast means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.activation._common import (
    activate,
    cast_rows,
    count_clamped,
    real_rows,
    row_weights,
)


def swiglu_forward_and_per_block_cast(
    x: Tensor,
    fmt: QuantFormat,
    up: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    psum: Tensor | None = None,
    weight_scale: float = 1.0,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    alignment: int = 128,
    amax_floor: float | None = None,
) -> QuantTensor:
    """SwiGLU, quantized in blocks of rows and channels from its float32 result."""
    real = real_rows(x, pos_to_expert, psum, alignment)
    if clamped_count is not None:
        count_clamped(x, up, clamp_value, real, clamped_count)
    weight = row_weights(topk_weights, pos_to_token_topk, weight_scale)
    return cast_rows(activate(x, up, weight, clamp_value, real), fmt, amax_floor, real)
