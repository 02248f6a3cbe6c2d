"""Gradients of SwiGLU, and the activation itself where it is wanted again.

    l, r  = x[n, :H], x[n, H:]                              clamped as in the forward pass, w its weights
    t     = 1 + exp(-l);  s = 1 / t;  act = (l / t) * r     float32, IEEE
    g     = (dy * w) * s
    dl    = (g * r) * fma(l, 1 - s, 1)                      0 where the gate was clamped
    dr    = g * l                                           0 where up was clamped
    dw[n] = (sum over h of dy * act) * weight_scale
    y     = act * w

One pass over rows, one owner for each, so every sum has one order. Padding rows are not read; their gradients are 0.
Memory bound: the floor is reading x and dy and writing dx.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.activation._checks import (
    check_halves,
    weight_scale_of,
)
from tile_kernels.activation._samples import random_rows
from tile_kernels.activation.swiglu_backward_kernels import launch_backward
from tile_kernels.core.cases import grid
from tile_kernels.core.knobs import knobs
from tile_kernels.core.op import op
from tile_kernels.quant._checks import (
    dtype_of,
)

# Op -----------------------------------------------------------------------------------------


@op(outputs='dx dtopk_weights y')
def _swiglu_backward(
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
    """Gradients of `swiglu_forward.call`, arguments as there.

    `token_topk_to_pos`, (num_tokens, num_topk) int32, is the inverse of `pos_to_token_topk`, negative for slots without
    a row; it saves clearing the gradient of the weights first. `dx_dtype` is that of dx and y, by default that of x.

    Returns:
        dx (num_rows, 2 * hidden), 0 in padding rows; the gradient of the weights in their shape, 0 for slots without a
        row (empty without weights); y (num_rows, hidden) (empty unless recomputed).
    """
    check_halves(x, None)
    rows = (topk_weights, pos_to_token_topk, token_topk_to_pos, pos_to_expert, psum)
    options = (weight_scale, clamp_value, alignment, dx_dtype or x.dtype, recompute)
    return launch_backward(dy, x, None, x.dtype, *rows, *options, None, 0.0)


@_swiglu_backward.public
def swiglu_backward(
    x: Tensor,
    act_x_grad: Tensor,
    fmt: str | torch.dtype,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients of `swiglu_forward`.

    Args:
        x: (num_rows, 2 * hidden), what the forward pass was given.
        act_x_grad: (num_rows, hidden), gradient of its result.
        fmt: dtype of the gradient of x, and of the result again: 'bf16', 'fp16' or 'fp32'.
        psum_num_tokens_per_expert: see `swiglu_forward`.
        topk_weights: see `swiglu_forward`.
        routed_scaling_factor: see `swiglu_forward`.
        clamp_value: see `swiglu_forward`.
        do_recompute: whether to return the result of the forward pass again.

    Returns:
        A tuple: the gradient of x; with weights their gradient (num_rows,); with `do_recompute` the forward result.
    """
    dx_dtype = dtype_of(fmt)
    dx, dtopk_weights, y = swiglu_backward.call(
        act_x_grad,
        x,
        topk_weights=topk_weights,
        psum=psum_num_tokens_per_expert,
        weight_scale=weight_scale_of(routed_scaling_factor, topk_weights),
        clamp_value=clamp_value,
        alignment=knobs.token_alignment,
        dx_dtype=dx_dtype,
        recompute=do_recompute,
    )
    return (dx,) + ((dtopk_weights,) if topk_weights is not None else ()) + ((y,) if do_recompute else ())


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, hidden: int, dtype: torch.dtype, rows: str = '', **options: Any) -> dict:
    dy = torch.randn(num_tokens, hidden, dtype=dtype)
    return dict(dy=dy, **random_rows(num_tokens, hidden, dtype, rows), **options)


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
swiglu_backward.cases(
    make=_make,
    match=dict(rtol=1.6e-2, atol=1e-3),  # the sums for the weights; all else is compared bit for bit in the tests
    smoke=grid(num_tokens=[0, 1, 5], hidden=[128], dtype=BF16)
    + grid(num_tokens=[9], hidden=[264], dtype=BF16, rows=['map', 'psum'], clamp_value=[1.0])
    + grid(num_tokens=[5], hidden=[99], dtype=F32, rows=['row'], weight_scale=[1.7], recompute=[True])
    + grid(num_tokens=[3], hidden=[40], dtype=F16, dx_dtype=F32),
    full=grid(
        num_tokens=[1, 4001],
        hidden=[2048, 1090, 77],
        dtype=BF16 + F32,
        rows=['', 'map', 'psum', 'row'],
        clamp_value=[None, 0.5],
        recompute=[True],
    )
    + grid(num_tokens=[3], hidden=[20000], dtype=BF16, rows=['row'])  # several turns
    + grid(num_tokens=[600001], hidden=[2048], dtype=BF16, rows=['row']),  # past 2^31 elements
    bench=grid(num_tokens=[64, 4096, 16384], hidden=[2048], dtype=BF16)
    + grid(num_tokens=[8001], hidden=[3584], dtype=BF16, rows=['map', 'psum', 'row'], clamp_value=[10.0]),
)
