"""SwiGLU: the gate of a row passes through silu and scales the up projection; a row may have a routing weight.

    l, r    = x[n, :H], x[n, H:]                            l = min(l, c), r = clamp(r, -c, c) with a clamp value c
    w[n]    = topk_weights[n] * weight_scale                or the weight of the slot that pos_to_token_topk[n] names
    y[n, h] = ((l / (1 + exp(-l))) * r) * w[n]              float32, IEEE, left to right

Rows between experts are padding: they are not read and come out as 0.
Memory bound: the floor is reading x and writing y.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.activation._checks import (
    check_halves,
    counted_clamp,
    weight_scale_of,
)
from tile_kernels.activation._samples import random_rows
from tile_kernels.activation.swiglu_backward import swiglu_backward
from tile_kernels.activation.swiglu_forward_and_count import swiglu_forward_and_count
from tile_kernels.activation.swiglu_forward_kernels import launch_forward
from tile_kernels.core import check
from tile_kernels.core.autograd import needs_gradient
from tile_kernels.core.cases import grid
from tile_kernels.core.front import replayed
from tile_kernels.core.knobs import knobs
from tile_kernels.core.op import op
from tile_kernels.quant._checks import (
    DTYPES,
    dtype_of,
)

# Op -----------------------------------------------------------------------------------------


@op(outputs='y', backward=swiglu_backward)
def _swiglu_forward(
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
    """SwiGLU of rows that hold gate and up side by side.

    Args:
        x: (num_rows, 2 * hidden).
        topk_weights: routing weights, float32: (num_rows,), or (num_tokens, num_topk) with `pos_to_token_topk`.
        pos_to_token_topk: (num_rows,) int32, place of each row's weight in the flat weights; -1 stands for weight 0.
        pos_to_expert: (num_rows,) int32, negative for padding rows.
        psum: (num_experts,) int32, expert e owns rows [align(psum[e - 1], alignment), psum[e]); others are padding.
        weight_scale: factor of the weights.
        clamp_value: gate at most this, up within plus and minus this.
        alignment: multiple at which the rows of an expert start, with `psum`.
        dtype: of the result.

    Returns:
        (num_rows, hidden); padding rows are 0.
    """
    num_tokens, hidden = check_halves(x, None)
    check.one_of(dtype, DTYPES, 'dtype')
    y = torch.empty((num_tokens, hidden), dtype=dtype, device=x.device)
    rows = (topk_weights, pos_to_token_topk, pos_to_expert, psum)
    launch_forward(x, None, hidden, dtype, y, None, *rows, weight_scale, clamp_value, None, alignment, 0.0)
    return y


@_swiglu_forward.public
@replayed
def swiglu_forward(
    x: Tensor,
    fmt: str | torch.dtype,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
) -> Tensor:
    """SwiGLU of rows that hold gate and up side by side: (silu(gate) * up) * weight.

    Args:
        x: (num_rows, 2 * hidden) bfloat16, float16 or float32, any row stride, any hidden. More leading dimensions are
            allowed; the result has them too.
        fmt: dtype of the result: 'bf16', 'fp16' or 'fp32', or a torch dtype.
        psum_num_tokens_per_expert: (num_experts,) int32, where the rows of each expert end; other rows are padding.
        topk_weights: (num_rows,) float32.
        routed_scaling_factor: factor of the weights.
        clamp_value: gate at most this, up within plus and minus this.
        clamped_count: (3,) or (4,) int64, added to: gate > c, up > c, up < -c (nothing without a clamp) and elements
            outside padding rows.

    Returns:
        (num_rows, hidden), differentiable in `x` and `topk_weights`. If a gradient is needed, `clamped_count` costs a
        second launch.
    """
    dtype = dtype_of(fmt)
    if check.tensor(x, 'x').dim() > 2:
        weights = None if topk_weights is None else topk_weights.flatten()
        options = (psum_num_tokens_per_expert, weights, routed_scaling_factor, clamp_value, clamped_count)
        return swiglu_forward(x.flatten(0, -2), fmt, *options).unflatten(0, x.shape[:-1])
    given: dict[str, Any] = dict(
        topk_weights=topk_weights,
        psum=psum_num_tokens_per_expert,
        weight_scale=weight_scale_of(routed_scaling_factor, topk_weights),
        clamp_value=counted_clamp(clamp_value, clamped_count),
        alignment=knobs.token_alignment,
        dtype=dtype,
    )
    if clamped_count is None:
        return swiglu_forward.call(x, **given)
    if not needs_gradient(x, topk_weights):
        return swiglu_forward_and_count(x, clamped_count, **given)
    with torch.no_grad():
        swiglu_forward_and_count(x, clamped_count, **given)
    return swiglu_forward.call(x, **given)


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, hidden: int, dtype: torch.dtype, out: torch.dtype, rows: str = '', **options: Any) -> dict:
    return dict(**random_rows(num_tokens, hidden, dtype, rows), dtype=out, **options)


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
swiglu_forward.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1, 5], hidden=[128], dtype=BF16, out=BF16)
    + grid(num_tokens=[9], hidden=[264], dtype=BF16, out=F32, rows=['map', 'psum'], clamp_value=[1.0])
    + grid(num_tokens=[5], hidden=[99], dtype=F32, out=F16, rows=['row'], weight_scale=[1.7])
    + grid(num_tokens=[4], hidden=[40], dtype=F16, out=BF16),
    full=grid(
        num_tokens=[1, 4001],
        hidden=[2048, 1090, 77],
        dtype=BF16 + F16 + F32,
        out=BF16 + F32,
        rows=['', 'map', 'psum', 'row'],
        clamp_value=[None, 0.5],
    )
    + grid(num_tokens=[600001], hidden=[2048], dtype=BF16, out=BF16, rows=['row']),  # past 2^31 elements
    bench=grid(num_tokens=[64, 4096, 16384], hidden=[2048], dtype=BF16, out=BF16)
    + grid(num_tokens=[8001], hidden=[3584], dtype=BF16, out=BF16, rows=['map', 'psum'], clamp_value=[10.0]),
)
