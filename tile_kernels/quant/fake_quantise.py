"""Fake quantisation: a matrix rounded to what a format can hold, with the gradient of the identity.

    y[t, h]  = round(x[t, h] * sf_inv[t, h // G]) * sf[t, h // G]       as `per_token_cast_and_cast_back`, not in place
    dx[t, h] = dy[t, h]                                                 rounding is passed straight through

The kernel is that of `per_token_cast_and_cast_back`; the gradient needs none, it is handed on without a copy.
Memory bound: the floor is reading x and writing y once.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.quant.per_token_cast_and_cast_back import (
    check_input,
    per_token_cast_and_cast_back,
    per_token_cast_and_cast_back_kernel,
)

# Op -----------------------------------------------------------------------------------------


@op(outputs='y')
def fake_quantise(x: Tensor, fmt: QuantFormat) -> Tensor:
    """Every number of `x` as it comes back from being quantised per token; `x` is left as it is.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense, any row stride; hidden even for e2m1.
        fmt: as for `per_token_cast_and_cast_back`.

    Returns:
        (num_tokens, hidden) of the dtype of `x`, contiguous.
    """
    check_input(x, fmt)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    static = (x.shape[1], fmt, x.dtype, check.vector_bytes(x), False)
    launch(per_token_cast_and_cast_back_kernel, static, x, y, fmt.amax_floor)
    return y


class _StraightThrough(torch.autograd.Function):
    """`fake_quantise` with the gradient of the identity."""

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        return fake_quantise(x, QuantFormat.parse(name))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


# Cases --------------------------------------------------------------------------------------

_of_back = per_token_cast_and_cast_back.case_set
fake_quantise.cases(
    make=_of_back.make, match='bitwise', smoke=_of_back.smoke, full=_of_back.full[::5], bench=_of_back.bench[:3]
)
