"""SwiGLU: the gate of a row passes through silu and scales the up projection; a row may have a routing weight.

    l, r    = x[n, :H], x[n, H:]                            l = min(l, c), r = clamp(r, -c, c) with a clamp value c
    w[n]    = topk_weights[n] * weight_scale                or the weight of the slot that pos_to_token_topk[n] names
    y[n, h] = ((l / (1 + exp(-l))) * r) * w[n]              float32, IEEE, left to right

Rows between experts are padding: they are not read and come out as 0.
Memory bound: the floor is reading x and writing y.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.quant._swiglu_rows import DTYPES, check_clamp, check_counts, check_halves, check_layout, check_weights
from tile_kernels.quant._swiglu_samples import random_rows
from tile_kernels.quant.swiglu_backward import swiglu_backward
from tile_kernels.quant.swiglu_forward_kernels import swiglu_forward_kernel

# Ops ----------------------------------------------------------------------------------------


def _forward(
    x: Tensor,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    psum: Tensor | None,
    weight_scale: float,
    clamp_value: float | None,
    clamped_count: Tensor | None,
    alignment: int,
    dtype: torch.dtype,
) -> Tensor:
    num_tokens, hidden = check_halves(x, None)
    check.one_of(dtype, DTYPES, 'dtype')
    static = (hidden, dtype, x.dtype, check.vector_bytes(x), False)
    static += (
        check_weights(x, num_tokens, topk_weights, pos_to_token_topk),
        check_layout(x, num_tokens, pos_to_expert, psum, alignment),
        clamp_value is not None,
        check_counts(x, clamp_value, clamped_count),
    )
    clamp = check_clamp(clamp_value)
    y = torch.empty((num_tokens, hidden), dtype=dtype, device=x.device)
    rows = (topk_weights, pos_to_token_topk, pos_to_expert, psum, clamped_count)
    launch(swiglu_forward_kernel, static, x, None, y, None, *rows, weight_scale, clamp, alignment, 0.0)
    return y


@op(outputs='y', backward=swiglu_backward)
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
    """SwiGLU of rows that hold gate and up side by side.

    Args:
        x: (num_rows, 2 * hidden) bfloat16, float16 or float32, rows dense, any row stride, any hidden.
        topk_weights: routing weights, float32: (num_rows,), or (num_tokens, num_topk) with `pos_to_token_topk`.
        pos_to_token_topk: (num_rows,) int32, place of each row's weight in the flat weights; -1 stands for weight 0.
        pos_to_expert: (num_rows,) int32, negative for padding rows.
        psum: (num_experts,) int32, expert e owns rows [align(psum[e - 1], alignment), psum[e]); others are padding.
        weight_scale: factor of the weights.
        clamp_value: gate at most this, up within plus and minus this.
        alignment: multiple at which the rows of an expert start, with `psum`.
        dtype: of the result: bfloat16, float16 or float32.

    Returns:
        (num_rows, hidden); padding rows are 0. Differentiable in `x` and `topk_weights`.
    """
    return _forward(
        x, topk_weights, pos_to_token_topk, pos_to_expert, psum, weight_scale, clamp_value, None, alignment, dtype
    )


@op(outputs='y')
def swiglu_forward_and_count(
    x: Tensor,
    clamped_count: Mut,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    psum: Tensor | None = None,
    weight_scale: float = 1.0,
    clamp_value: float | None = None,
    alignment: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`swiglu_forward` that also counts what it clamps.

    Args:
        x: as all arguments not named here, as of `swiglu_forward`.
        clamped_count: (3,) or (4,) int64; added to are the numbers of gate > clamp_value, up > clamp_value,
            up < -clamp_value and, in the fourth, elements of the result outside padding rows.
        topk_weights: see `swiglu_forward`.
        pos_to_token_topk: see `swiglu_forward`.
        pos_to_expert: see `swiglu_forward`.
        psum: see `swiglu_forward`.
        weight_scale: see `swiglu_forward`.
        clamp_value: needed here.
        alignment: see `swiglu_forward`.
        dtype: see `swiglu_forward`.

    Returns:
        (num_rows, hidden); not differentiable.
    """
    return _forward(
        x,
        topk_weights,
        pos_to_token_topk,
        pos_to_expert,
        psum,
        weight_scale,
        clamp_value,
        clamped_count,
        alignment,
        dtype,
    )


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, hidden: int, dtype: torch.dtype, out: torch.dtype, rows: str = '', **options) -> dict:
    return dict(**random_rows(num_tokens, hidden, dtype, rows), dtype=out, **options)


def _make_count(num_tokens: int, hidden: int, num_counts: int, rows: str = '') -> dict:
    x = random_rows(num_tokens, hidden, torch.bfloat16, rows)
    return dict(**x, clamped_count=torch.arange(num_counts), clamp_value=0.5)


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
swiglu_forward_and_count.cases(
    make=_make_count,
    match='bitwise',
    smoke=grid(num_tokens=[0, 7], hidden=[136], num_counts=[3, 4], rows=['map']),
    full=grid(num_tokens=[4001], hidden=[2048, 77], num_counts=[3, 4], rows=['', 'map', 'psum']),
    bench=grid(num_tokens=[16384], hidden=[2048], num_counts=[3]),
)
