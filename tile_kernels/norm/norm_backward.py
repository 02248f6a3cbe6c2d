"""Gradients of RMS norm, see `norm_forward`; the gradient that comes through the residual is added on the way.

    n     = x[t, h] * rstd[t];  g = dy[t, h] * out_scale    x is what was normalized
    c[t]  = sum over h of n * (g * weight[h]) / H
    dx    = (g * weight[h] - n * c[t]) * rstd[t] + dz[t, h]
    dw[h] = sum over t of n * g

A fixed number of blocks walks over the rows, and a second kernel adds up what each found of dw. Every sum has one order
and nothing is added atomically, so results are the same in every run on every device. Memory bound: the floor is
reading dy, x (and dz) and writing dx.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.front import replayed
from tile_kernels.core.op import Mut, op
from tile_kernels.norm._checks import (
    as_rows,
    check_weight,
)
from tile_kernels.norm.norm_backward_kernels import launch_backward

# Ops ----------------------------------------------------------------------------------------


@op(outputs='dx dweight')
def _norm_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dz: Tensor | None = None,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Gradients of `norm_forward.call`; dweight is in the dtype of the weight, empty without one."""
    dweight = torch.empty_like(weight) if weight is not None else torch.empty((0,), dtype=x.dtype, device=x.device)
    return launch_backward(dy, x, weight, rstd, dz, out_scale, dweight, False), dweight


@op(outputs='dx')
def norm_backward_(
    weight_grad: Mut,
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    dz: Tensor | None = None,
    out_scale: float = 1.0,
) -> Tensor:
    """The gradient dx of `norm_forward.call`; that of the weight is added to `weight_grad`, of any model dtype."""
    check_weight(x, weight_grad)
    return launch_backward(dy, x, weight, rstd, dz, out_scale, weight_grad, True)


@_norm_backward.public
@replayed
def norm_backward(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None = None,
    out_scale: float = 1.0,
    weight_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `norm_forward`, deterministic and the same on every device.

    Args:
        out_grad: gradient of the result, shape and dtype of x.
        x: (num_tokens, hidden) or (batch, num_tokens, hidden), what was normalized.
        weight: (hidden,) or None.
        rstd: float32 from the forward pass.
        residual_out_grad: gradient of the sum, added to that of x, or None.
        out_scale: as in the forward pass.
        weight_grad: (hidden,); the gradient of the weight is added to it. None returns a new one in weight's dtype.

    Returns:
        The gradient of x (and of the residual), and that of the weight, `weight_grad` if given, None without a weight.
    """
    if weight_grad is not None and weight is None:
        check.fail('weight_grad', 'must come with weight', 'no weight')
    rows, upstream = as_rows(x, 'x'), as_rows(out_grad, 'out_grad')
    through = None if residual_out_grad is None else as_rows(residual_out_grad, 'residual_out_grad')
    factors = check.tensor(rstd, 'rstd').reshape(-1)
    if weight_grad is None or weight is None:
        dx, dweight = norm_backward.call(upstream, rows, factors, weight, through, out_scale)
    else:
        dx = norm_backward_(weight_grad, upstream, rows, factors, weight, through, out_scale)
        dweight = weight_grad
    return dx.view(x.shape), None if weight is None else dweight


# Cases --------------------------------------------------------------------------------------


def random_gradients(
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    weight: torch.dtype | None = None,
    through: bool = False,
    pitch: int | None = None,
) -> dict:
    """Arguments of `norm_backward`."""
    dy, x, dz = (torch.empty(num_tokens, pitch or hidden, dtype=dtype).narrow(1, 0, hidden) for _ in range(3))
    for rows in (dy, x, dz):
        rows.normal_()
    rstd = torch.rsqrt(x.float().square().mean(dim=1) + 1e-5)
    weights = None if weight is None else (1 + 0.2 * torch.randn(hidden)).to(weight)
    return dict(dy=dy, x=x, weight=weights, rstd=rstd, dz=dz if through else None, out_scale=0.5)


def _make_into(accumulator: torch.dtype = torch.float32, **case: Any) -> dict:
    made = random_gradients(**case)
    return dict(weight_grad=torch.randn(made['x'].shape[1]).to(accumulator), **made)


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
SMOKE = (
    grid(num_tokens=[0, 1, 37], hidden=[128], dtype=BF16, weight=BF16)  # many teams to a block
    + grid(num_tokens=[3], hidden=[4416], dtype=BF16, weight=F32)  # a team is a block, a shorter last vector
    + grid(num_tokens=[2], hidden=[99], dtype=F16, pitch=[101])  # odd rows, odd stride, no weight
    + grid(num_tokens=[2], hidden=[6144], dtype=F32, weight=BF16)  # no room to ask early
    + grid(num_tokens=[9], hidden=[1348], dtype=F32, weight=F32)  # a tail within a warp
)
SMOKE_THROUGH = [case | dict(through=True) for case in SMOKE[2:]]
FULL = grid(
    num_tokens=[4001], hidden=[576, 1024, 2560, 7168, 8192, 16384], dtype=BF16, weight=BF16, through=[True]
) + grid(num_tokens=[257], hidden=[1, 99, 4100, 32768], dtype=F32, weight=F32, through=[False])
HUGE = grid(num_tokens=[300001], hidden=[136], dtype=BF16, weight=BF16, pitch=[8192])  # beyond 2^31 elements
BENCH = (
    grid(num_tokens=[64, 4096, 16384], hidden=[7168], dtype=BF16, weight=BF16)
    + grid(num_tokens=[8001], hidden=[1024, 2560, 4096, 16384], dtype=BF16, weight=BF16)
    + grid(num_tokens=[32001], hidden=[1344], dtype=BF16, weight=F32)
    + grid(num_tokens=[8001], hidden=[4096], dtype=F32, weight=F32)
)
GRADIENT = dict(rtol=2e-5, atol=1e-4)  # sums of float32 in another order
norm_backward.cases(
    make=random_gradients,
    match=GRADIENT,
    smoke=SMOKE + SMOKE_THROUGH,
    full=FULL + HUGE,
    bench=BENCH + [case | dict(through=True) for case in BENCH[:3]],
)
norm_backward_.cases(
    make=_make_into,
    match=GRADIENT,
    smoke=SMOKE[:4] + [SMOKE_THROUGH[1] | dict(accumulator=torch.bfloat16)],
    full=FULL[:2],
    bench=BENCH[1:2],
)
