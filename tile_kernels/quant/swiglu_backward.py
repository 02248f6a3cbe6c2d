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

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.quant._swiglu_rows import DTYPES, check_clamp, check_halves, check_layout, check_weights
from tile_kernels.quant._swiglu_samples import random_rows
from tile_kernels.quant.swiglu_backward_kernels import swiglu_backward_kernel

# Ops ----------------------------------------------------------------------------------------


def run_backward(
    dy: Tensor,
    x: Tensor,
    x_sf: Tensor | None,
    source: torch.dtype | QuantFormat,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    token_topk_to_pos: Tensor | None,
    pos_to_expert: Tensor | None,
    psum: Tensor | None,
    weight_scale: float,
    clamp_value: float | None,
    alignment: int,
    dx_dtype: torch.dtype,
    recompute: bool,
    dx_quant: QuantTensor | None,
    amax_floor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check what both backward ops share, allocate and launch; returns dx, dtopk_weights and y."""
    num_tokens, hidden = x.shape[0], x.shape[1] // 2
    check.shape(dy, 'gradient', 'num_rows hidden', dtype=DTYPES, num_rows=num_tokens, hidden=hidden)
    check.unit_stride(dy, 'gradient')
    check.one_of(dx_dtype, DTYPES, 'dx_dtype')
    check.same_device(x=x, gradient=dy)
    kind = check_weights(x, num_tokens, topk_weights, pos_to_token_topk)
    layout = check_layout(x, num_tokens, pos_to_expert, psum, alignment)
    clamp = check_clamp(clamp_value)
    dx = torch.empty((num_tokens, 2 * hidden), dtype=dx_dtype, device=x.device)
    y = torch.empty((num_tokens if recompute else 0, hidden), dtype=dx_dtype, device=x.device)
    dtopk_weights = _weight_gradient(x, topk_weights, pos_to_token_topk, token_topk_to_pos)
    fmt, codes, dx_sf = (dx_quant.fmt, *dx_quant) if dx_quant is not None else (None, None, None)
    zero_slots = token_topk_to_pos is not None
    static = (hidden, source, dy.dtype, dx_dtype, fmt, check.vector_bytes(x, dy), kind, layout)
    static += (clamp_value is not None, recompute, zero_slots)
    launch(
        swiglu_backward_kernel,
        static,
        dy,
        x,
        x_sf,
        topk_weights,
        pos_to_token_topk,
        token_topk_to_pos,
        pos_to_expert,
        psum,
        dx,
        codes,
        dx_sf,
        dtopk_weights if topk_weights is not None else None,
        y if recompute else None,
        weight_scale,
        clamp,
        alignment,
        amax_floor,
        size=num_tokens + topk_weights.shape[0] if zero_slots else num_tokens,  # slots are cleared without any row, too
    )
    return dx, dtopk_weights, y


def _weight_gradient(
    x: Tensor, topk_weights: Tensor | None, pos_to_token_topk: Tensor | None, token_topk_to_pos: Tensor | None
) -> Tensor:
    """Memory for the gradient of the weights: zeros where the kernel is not told which slots have no row."""
    if token_topk_to_pos is not None:
        if pos_to_token_topk is None or topk_weights is None:
            check.fail('token_topk_to_pos', 'must come with topk_weights and pos_to_token_topk', 'it alone')
        num_sources, num_topk = topk_weights.shape
        known = dict(num_tokens=num_sources, num_topk=num_topk)
        check.shape(token_topk_to_pos, 'token_topk_to_pos', 'num_tokens num_topk', dtype=torch.int32, **known)
        check.contiguous(token_topk_to_pos, 'token_topk_to_pos')
        check.same_device(x=x, token_topk_to_pos=token_topk_to_pos)
        return torch.empty_like(topk_weights)
    if topk_weights is None:
        return torch.empty((0,), dtype=torch.float32, device=x.device)
    return torch.empty_like(topk_weights) if pos_to_token_topk is None else torch.zeros_like(topk_weights)


@op(outputs='dx dtopk_weights y')
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
    """Gradients of `swiglu_forward`.

    Args:
        dy: (num_rows, hidden) bfloat16, float16 or float32, rows dense, any row stride: gradient of the result.
        x: (num_rows, 2 * hidden), as all arguments not named here, as of `swiglu_forward`.
        topk_weights: see `swiglu_forward`.
        pos_to_token_topk: see `swiglu_forward`.
        token_topk_to_pos: (num_tokens, num_topk) int32, the inverse of `pos_to_token_topk`, negative for slots without
            a row; saves clearing the gradient of the weights first.
        pos_to_expert: see `swiglu_forward`.
        psum: see `swiglu_forward`.
        weight_scale: see `swiglu_forward`.
        clamp_value: see `swiglu_forward`.
        alignment: see `swiglu_forward`.
        dx_dtype: of dx and y; that of x if None.
        recompute: whether to return the result of the forward pass again.

    Returns:
        dx (num_rows, 2 * hidden), 0 in padding rows; the gradient of the weights in their shape, 0 for slots without a
        row (empty without weights); y (num_rows, hidden) (empty unless recomputed).
    """
    check_halves(x, None)
    rows = (topk_weights, pos_to_token_topk, token_topk_to_pos, pos_to_expert, psum)
    options = (weight_scale, clamp_value, alignment, dx_dtype or x.dtype, recompute)
    return run_backward(dy, x, None, x.dtype, *rows, *options, None, 0.0)


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, hidden: int, dtype: torch.dtype, rows: str = '', **options) -> dict:
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
