"""What the gradients of SwiGLU mean, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core.forms import shown_as
from tile_kernels.reference.activation._common import (
    gradients,
    real_rows,
    row_weights,
    weight_gradient,
)
from tile_kernels.reference.quant.cast_back import cast_back


def swiglu_backward(
    dy: Tensor,
    x: Tensor,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    token_topk_to_pos: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    psum: Tensor | None = None,
    weight_scale: float = 1.0,
    clamp_value: float | None = None,
    alignment: int = 128,
    dx_dtype: torch.dtype | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `swiglu_forward`, and its result again."""
    weight = row_weights(topk_weights, pos_to_token_topk, weight_scale)
    dx, products, y = gradients(dy, x, weight, clamp_value, real_rows(x, pos_to_expert, psum, alignment))
    dtopk_weights = weight_gradient(products, topk_weights, pos_to_token_topk, weight_scale)
    dtype = dx_dtype or x.dtype
    y = y.to(dtype) if recompute else y.new_empty((0, y.shape[1]), dtype=dtype)
    return dx.to(dtype), dtopk_weights, y


# TileKernels' reference ---------------------------------------------------------------------


def _reference_by_maps(
    x: tuple[Tensor, Tensor],
    grad_out: Tensor,
    weight: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    num_per_channels: int,
    swiglu_clamp_value: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    values = cast_back(x, 'fp32', (1, num_per_channels))
    dx, dtopk_weights, y = swiglu_backward(
        grad_out, values, weight, pos_to_token_topk, token_topk_to_pos, clamp_value=swiglu_clamp_value, recompute=True
    )
    return y, dx, dtopk_weights


def _reference_by_prefix_sums(
    x: Tensor,
    grad_out: Tensor,
    psum: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    alignment: int = 128,
) -> tuple[Tensor, ...]:
    dx, dtopk_weights, y = swiglu_backward(
        grad_out,
        x,
        topk_weights,
        psum=psum,
        weight_scale=1.0 if routed_scaling_factor is None else routed_scaling_factor,
        clamp_value=clamp_value,
        alignment=alignment,
        dx_dtype=torch.float32,
        recompute=True,
    )
    return (dx, y) if topk_weights is None else (dx, dtopk_weights, y)


@shown_as(_reference_by_maps)
def swiglu_backward_reference(
    x: Tensor | tuple[Tensor, Tensor], grad_out: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Gradients of SwiGLU in float32, in two forms that x tells apart.

    A quantized x comes with maps, a plain one with prefix sums (weight_grad only if there are weights):

        (x, grad_out, weight, pos_to_token_topk, token_topk_to_pos, num_per_channels, swiglu_clamp_value=None)
            -> (out, x_grad, weight_grad)
        (x, grad_out, psum=None, topk_weights=None, routed_scaling_factor=None, clamp_value=None, alignment=128)
            -> (x_grad, [weight_grad], out)
    """
    if isinstance(x, tuple):
        return _reference_by_maps(x, grad_out, *args, **kwargs)
    return _reference_by_prefix_sums(x, grad_out, *args, **kwargs)
