"""Gradients of RMS norm, see `norm_forward`; the gradient that comes through the residual is added on the way.

    n     = x[t, h] * rstd[t];  g = dy[t, h] * out_scale    x is what was normalised
    c[t]  = sum over h of n * (g * weight[h]) / H
    dx    = (g * weight[h] - n * c[t]) * rstd[t] + dz[t, h]
    dw[h] = sum over t of n * g

A fixed number of blocks walks over the rows, and a second kernel adds up what each found of dw. Every sum has one order
and nothing is added atomically, so results are the same in every run on every device. Memory bound: the floor is
reading dy, x (and dz) and writing dx.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.quant._norm_rows import check_like, check_rows, check_weight
from tile_kernels.quant.norm_backward_kernels import (
    block_count_of,
    norm_backward_kernel,
    norm_weight_gradient_kernel,
)

# Ops ----------------------------------------------------------------------------------------


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dz: Tensor | None,
    out_scale: float,
    dweight: Tensor | None,
    accumulating: bool,
) -> Tensor:
    """Check, launch both kernels, fill dweight; returns dx."""
    num_tokens, hidden = check_rows(x)
    check_like(x, dy=dy, dz=dz)
    check.shape(rstd, 'rstd', 'num_tokens', dtype=torch.float32, num_tokens=num_tokens)
    check.contiguous(rstd, 'rstd')
    check.same_device(x=x, rstd=rstd)
    static = (hidden, x.dtype, check_weight(x, weight), out_scale != 1.0)
    static += (check.vector_bytes(x, dy, dz), dz is not None)
    num_blocks = block_count_of(num_tokens, hidden)
    dx = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    shares = None
    if weight is not None:
        shares = torch.empty((num_blocks, hidden), dtype=torch.float32, device=x.device)
    launch(norm_backward_kernel, static, dy, x, weight, rstd, dz, dx, shares, out_scale, num_blocks)
    if shares is not None and dweight is not None:
        # without rows the gradient is 0, which this kernel writes
        launch(norm_weight_gradient_kernel, (hidden, dweight.dtype, accumulating), shares, dweight, size=hidden)
    return dx


@op(outputs='dx dweight')
def norm_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dz: Tensor | None = None,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Gradients of `norm_forward`.

    Args:
        dy: (num_tokens, hidden), gradient of y, in the dtype of x, rows dense, any row stride.
        x: (num_tokens, hidden) bfloat16, float16 or float32, what was normalised.
        rstd: (num_tokens,) float32 from the forward pass.
        weight: (hidden,) as in the forward pass, or None.
        dz: (num_tokens, hidden), added to the gradient of x, or None.
        out_scale: as in the forward pass.

    Returns:
        dx (num_tokens, hidden) in the dtype of x, and dweight (hidden,) in the dtype of weight, summed in float32 in a
        fixed order; empty without a weight.
    """
    dweight = torch.empty_like(weight) if weight is not None else torch.empty((0,), dtype=x.dtype, device=x.device)
    return _backward(dy, x, weight, rstd, dz, out_scale, dweight, False), dweight


@op(outputs='dx dweight')
def add_norm_backward(
    dy: Tensor, dz: Tensor, z: Tensor, rstd: Tensor, weight: Tensor | None = None, out_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Gradients of `add_norm_forward`, one for both of its summands; see `norm_backward`.

    Args:
        dy: (num_tokens, hidden), gradient of y.
        dz: (num_tokens, hidden), gradient of the sum z.
        z: (num_tokens, hidden), what was normalised.
        rstd: (num_tokens,) float32 from the forward pass.
        weight: (hidden,) or None.
        out_scale: as in the forward pass.

    Returns:
        dx (num_tokens, hidden), the gradient of x and of residual, and dweight (hidden,).
    """
    dweight = torch.empty_like(weight) if weight is not None else torch.empty((0,), dtype=z.dtype, device=z.device)
    return _backward(dy, z, weight, rstd, dz, out_scale, dweight, False), dweight


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
    """Gradients of `norm_forward`, that of the weight added to `weight_grad`; see `norm_backward`.

    Args:
        weight_grad: (hidden,) bfloat16, float16 or float32; the gradient of the weight is added to it.
        dy: (num_tokens, hidden), gradient of y.
        x: (num_tokens, hidden), what was normalised.
        rstd: (num_tokens,) float32 from the forward pass.
        weight: (hidden,).
        dz: (num_tokens, hidden), added to the gradient of x, or None.
        out_scale: as in the forward pass.

    Returns:
        dx (num_tokens, hidden).
    """
    check_weight(x, weight_grad)
    return _backward(dy, x, weight, rstd, dz, out_scale, weight_grad, True)


# Cases --------------------------------------------------------------------------------------


def _make(
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    weight: torch.dtype | None = None,
    through: bool = False,
    pitch: int | None = None,
) -> dict:
    dy, x, dz = (torch.empty(num_tokens, pitch or hidden, dtype=dtype).narrow(1, 0, hidden) for _ in range(3))
    for rows in (dy, x, dz):
        rows.normal_()
    rstd = torch.rsqrt(x.float().square().mean(dim=1) + 1e-5)
    weights = None if weight is None else (1 + 0.2 * torch.randn(hidden)).to(weight)
    return dict(dy=dy, x=x, weight=weights, rstd=rstd, dz=dz if through else None, out_scale=0.5)


def _make_add(**case) -> dict:
    made = _make(**case, through=True)
    made['z'] = made.pop('x')
    return made


def _make_into(accumulator: torch.dtype = torch.float32, **case) -> dict:
    made = _make(**case)
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
    make=_make,
    match=GRADIENT,
    smoke=SMOKE + SMOKE_THROUGH,
    full=FULL + HUGE,
    bench=BENCH + [case | dict(through=True) for case in BENCH[:3]],
)


def _without_through(cases: list[dict]) -> list[dict]:
    return [{name: value for name, value in case.items() if name != 'through'} for case in cases]


add_norm_backward.cases(
    make=_make_add, match=GRADIENT, smoke=SMOKE[1:4], full=_without_through(FULL[:2]), bench=BENCH[:2]
)
norm_backward_.cases(
    make=_make_into,
    match=GRADIENT,
    smoke=SMOKE[:4] + [SMOKE_THROUGH[1] | dict(accumulator=torch.bfloat16)],
    full=FULL[:2],
    bench=BENCH[1:2],
)
