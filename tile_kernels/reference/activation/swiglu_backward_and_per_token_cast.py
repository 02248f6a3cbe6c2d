"""What the gradients of SwiGLU of a quantized x mean, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.activation._common import (
    cast_rows,
    gradients,
    real_rows,
    row_weights,
    weight_gradient,
)
from tile_kernels.reference.quant.dequantize import dequantize


def swiglu_backward_and_per_token_cast(
    x: QuantTensor,
    dy: Tensor,
    fmt: QuantFormat,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    token_topk_to_pos: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    psum: Tensor | None = None,
    weight_scale: float = 1.0,
    clamp_value: float | None = None,
    alignment: int = 128,
    dx_dtype: torch.dtype = torch.bfloat16,
    recompute: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of SwiGLU of a quantized x, also quantized from their float32 results."""
    real = real_rows(x.data, pos_to_expert, psum, alignment)
    values = dequantize(x, torch.float32)
    weight = row_weights(topk_weights, pos_to_token_topk, weight_scale)
    dx, products, y = gradients(dy, values, weight, clamp_value, real)
    codes, sf = cast_rows(dx, fmt, None, real)
    dtopk_weights = weight_gradient(products, topk_weights, pos_to_token_topk, weight_scale)
    y = y.to(dx_dtype) if recompute else y.new_empty((0, y.shape[1]), dtype=dx_dtype)
    return codes, sf, dx.to(dx_dtype), dtopk_weights, y
