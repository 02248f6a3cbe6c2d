"""RMS norm: divide every row by the root of its mean square, with an optional residual added first.

    z[t, h] = round(x[t, h] + residual[t, h])               to the dtype of x; x itself without a residual
    rstd[t] = 1 / sqrt(sum over h of z[t, h]^2 / H + eps)   float32, correctly rounded from the sum on
    y[t, h] = (z[t, h] * rstd[t]) * (weight[h] * out_scale) float32, left to right, rounded once

One pass: a row is read once and stays in registers until it is written. The order of the sum depends on H alone, so a
row has the same bits in any batch. Memory bound: the floor is reading x (and residual) and writing y (and z).
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.front import replayed
from tile_kernels.core.op import Out, op
from tile_kernels.norm._checks import (
    as_rows,
    check_like,
    check_residual_out,
    check_rows,
    out_rows,
    shaped_like,
)
from tile_kernels.norm._samples import (
    BENCH,
    FULL,
    SMOKE,
    add_norm_case,
    norm_case,
)
from tile_kernels.norm.add_norm_forward import add_norm_forward
from tile_kernels.norm.norm_backward import norm_backward
from tile_kernels.norm.norm_forward_kernels import launch_norm

# Ops ----------------------------------------------------------------------------------------


@op(outputs='y rstd', backward=norm_backward)
def _norm_forward(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, out_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """RMS norm of each row of a matrix, up to 128 KiB long: y in the dtype of x, and rstd."""
    num_tokens, hidden = check_rows(x)
    y = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    return y, launch_norm(x, weight, None, y, None, eps, out_scale)


@op(outputs='rstd', instead='norm_forward without out')
def norm_forward_(
    out: Out,
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    residual_out: Out | None = None,
    eps: float = 1e-6,
    out_scale: float = 1.0,
) -> Tensor:
    """RMS norm into memory of the caller; returns rstd.

    `out` and `residual_out` have the shape and dtype of x and any row stride. Each may be x or residual itself.
    `residual_out` comes with `residual` and takes the sum.
    """
    check_rows(x)
    check_like(x, out=out, residual=residual, residual_out=residual_out)
    if (residual is None) != (residual_out is None):
        check.fail('residual_out', 'must come with residual', 'one of them')
    return launch_norm(x, weight, residual, out, residual_out, eps, out_scale)


@_norm_forward.public
@replayed
def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    with_rstd: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """RMS norm of each row of `x`, or of `x + residual`: ((z * rstd) * (weight * out_scale)), float32 inside.

    Differentiable in x, residual and weight unless `out` or `residual_out` is given.

    Args:
        x: (num_tokens, hidden) or (batch, num_tokens, hidden) bfloat16, float16 or float32, rows dense.
        weight: (hidden,) bfloat16, float16 or float32, or None.
        eps: added to the mean square.
        residual: shape and dtype of x, or None; the sum is rounded to the dtype of x.
        out_scale: factor of the result.
        out: where to write the result; may be x or residual itself.
        residual_out: where to write the sum; may be x or residual itself.
        with_rstd: whether to return 1 / sqrt(mean square + eps).

    Returns:
        The result in the dtype of x; rstd, float32 without the last dimension, or None; and what was normalized: x
        itself, or the sum.
    """
    check_residual_out(residual, residual_out)
    rows = as_rows(x, 'x')
    residual_rows = None if residual is None else as_rows(residual, 'residual')
    if out is not None or residual_out is not None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        if residual is not None and residual_out is None:
            residual_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        room = out_rows(residual_out, x, 'residual_out')
        rstd = norm_forward_(out_rows(out, x, 'out'), rows, weight, residual_rows, room, eps, out_scale)
        y, z = out, residual_out
    elif residual_rows is None:
        y, rstd = norm_forward.call(rows, weight, eps, out_scale)
        z = None
    else:
        y, rstd, z = add_norm_forward(rows, residual_rows, weight, eps, out_scale)
    return shaped_like(y, x), rstd.view(x.shape[:-1]) if with_rstd else None, x if z is None else shaped_like(z, x)


# Cases --------------------------------------------------------------------------------------


def _make_into(residual: bool = False, **case: Any) -> dict:
    made = (add_norm_case if residual else norm_case)(**case)
    made['out'] = torch.empty_like(made['x'])
    made['residual_out'] = torch.empty_like(made['x']) if residual else None
    return made


norm_forward.cases(make=norm_case, match='bitwise', smoke=SMOKE, full=FULL, bench=BENCH)
norm_forward_.cases(
    make=_make_into,
    match='bitwise',
    smoke=SMOKE[:2] + [case | dict(residual=True) for case in SMOKE[2:]],
    full=[FULL[3] | dict(residual=True)],
    bench=[BENCH[1], BENCH[1] | dict(residual=True)],
)
