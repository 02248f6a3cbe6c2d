"""SwiGLU that also counts what it clamps; see `swiglu_forward`, whose public function calls it."""

import torch
from torch import Tensor

from tile_kernels.activation._checks import (
    check_halves,
)
from tile_kernels.activation._samples import random_rows
from tile_kernels.activation.swiglu_forward_kernels import launch_forward
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.op import Mut, op
from tile_kernels.quant._checks import DTYPES

# Op -----------------------------------------------------------------------------------------


@op(outputs='y', instead='activation.swiglu_forward')
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
    """`swiglu_forward.call` that also counts what it clamps; not differentiable.

    `clamped_count` is (3,) or (4,) int64. Added to are the numbers of gate > clamp_value, up > clamp_value,
    up < -clamp_value and, in the fourth, elements of the result outside padding rows. The clamp must be given.
    """
    num_tokens, hidden = check_halves(x, None)
    check.one_of(dtype, DTYPES, 'dtype')
    y = torch.empty((num_tokens, hidden), dtype=dtype, device=x.device)
    rows = (topk_weights, pos_to_token_topk, pos_to_expert, psum)
    launch_forward(x, None, hidden, dtype, y, None, *rows, weight_scale, clamp_value, clamped_count, alignment, 0.0)
    return y


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, hidden: int, num_counts: int, rows: str = '') -> dict:
    x = random_rows(num_tokens, hidden, torch.bfloat16, rows)
    return dict(**x, clamped_count=torch.arange(num_counts), clamp_value=0.5)


swiglu_forward_and_count.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 7], hidden=[136], num_counts=[3, 4], rows=['map']),
    full=grid(num_tokens=[4001], hidden=[2048, 77], num_counts=[3, 4], rows=['', 'map', 'psum']),
    bench=grid(num_tokens=[16384], hidden=[2048], num_counts=[3]),
)
