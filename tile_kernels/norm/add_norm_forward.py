"""RMS norm of a sum: `norm_forward` with a residual, differentiable in both summands.

z = round(x + residual);  y, rstd = norm_forward(z)     one launch of its kernel
dx = dresidual                                          see `norm_backward`, with the gradient of z as dz
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core.op import op
from tile_kernels.norm._checks import (
    check_like,
    check_rows,
)
from tile_kernels.norm._samples import (
    BENCH,
    FULL,
    SMOKE,
    add_norm_case,
)
from tile_kernels.norm.norm_backward import BENCH as BACKWARD_BENCH
from tile_kernels.norm.norm_backward import FULL as BACKWARD_FULL
from tile_kernels.norm.norm_backward import GRADIENT, launch_backward, random_gradients
from tile_kernels.norm.norm_backward import SMOKE as BACKWARD_SMOKE
from tile_kernels.norm.norm_forward_kernels import launch_norm

# Ops ----------------------------------------------------------------------------------------


@op(outputs='dx dweight')
def add_norm_backward(
    dy: Tensor, dz: Tensor, z: Tensor, rstd: Tensor, weight: Tensor | None = None, out_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Gradients of `add_norm_forward`: dx, which is that of both summands, and dweight, empty without a weight."""
    dweight = torch.empty_like(weight) if weight is not None else torch.empty((0,), dtype=z.dtype, device=z.device)
    return launch_backward(dy, z, weight, rstd, dz, out_scale, dweight, False), dweight


@op(outputs='y rstd z', backward=add_norm_backward, same_gradient={'residual': 'x'})
def add_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, out_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of each row of `x + residual`: y, rstd, and the sum z that was normalized, in the dtype of x."""
    num_tokens, hidden = check_rows(x)
    check_like(x, residual=residual)
    y = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    z = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    return y, launch_norm(x, weight, residual, y, z, eps, out_scale), z


# Cases --------------------------------------------------------------------------------------


def _make_backward(**case: Any) -> dict:
    made = random_gradients(**case, through=True)
    made['z'] = made.pop('x')
    return made


def _without_through(cases: list[dict]) -> list[dict]:
    return [{name: value for name, value in case.items() if name != 'through'} for case in cases]


add_norm_forward.cases(
    make=add_norm_case, match='bitwise', smoke=SMOKE, full=FULL[:8] + FULL[-1:], bench=BENCH[:3] + BENCH[4:8:3]
)
add_norm_backward.cases(
    make=_make_backward,
    match=GRADIENT,
    smoke=BACKWARD_SMOKE[1:4],
    full=_without_through(BACKWARD_FULL[:2]),
    bench=BACKWARD_BENCH[:2],
)
