"""Sinkhorn: scale the rows and columns of every matrix in turn until both have the right sums.

    p = softmax over a row of x + eps,  r = num_rows / num_columns
    columns:  p[i, j] *= r / (sum_i p[i, j] + eps)          once, and then repeat - 1 times after
    rows:     p[i, j] *= 1 / (sum_j p[i, j] + eps)

A square matrix becomes doubly stochastic. The kernel keeps the matrix k and the factors apart, p = diag(u) k diag(v),
and stores each factor as the inverse of its divisor. A step is then a product of k with a vector, and reciprocals:

    rows:     a[i] = sum_j k[i, j] v[j] + eps a[i]          u[i] = 1 / a[i]
    columns:  b[j] = sum_i u[i] k[i, j] + eps / r b[j]      v[j] = r / b[j]

Backward applies the scalings in reverse. For y = f x with a factor f for each row or column,

    dx = f (dy - sum(dy y))                                 the sum is over the row or column, for columns over r

so backward needs only the divisors of forward. Latency bound at common sizes: a chain of 2 repeat sums and reciprocals.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.lang import WARP
from tile_kernels.core.launch import launch
from tile_kernels.core.op import empty, op
from tile_kernels.mhc._checks import F32, flat, lead_of, vector_width
from tile_kernels.mhc.sinkhorn_kernels import (
    MAX_HISTORY,
    history_bytes,
    lanes_for,
    sinkhorn_bwd_kernel,
    sinkhorn_kernel,
)

#: Elements of a matrix a lane may hold.
MAX_ELEMENTS = 64

# Ops ---------------------------------------------------------------------------------------


def _check(x: Tensor, repeat: int) -> tuple[tuple[int, ...], int, int]:
    """Check the input; returns the leading shape and the extents of a matrix."""
    lead = lead_of(x, 'x', 'num_rows num_columns', F32)
    num_rows, num_columns = x.shape[-2:]
    check.at_least(repeat, 1, 'repeat')
    check.at_least(min(num_rows, num_columns), 1, 'the extents of a matrix')
    if num_rows * -(-num_columns // WARP) > MAX_ELEMENTS:
        check.fail('x', f'must have matrices of at most {MAX_ELEMENTS} x {WARP} elements', check.describe(x))
    return lead, num_rows, num_columns


def check_history(num_rows: int, num_columns: int, repeat: int) -> None:
    """Check that the divisors of all steps fit into shared memory."""
    check.at_least(repeat, 1, 'repeat')
    lanes = lanes_for(num_rows, num_columns)
    most = MAX_HISTORY // history_bytes(num_rows, -(-num_columns // lanes), 1, WARP, lanes)
    if repeat > most:
        check.fail(
            'repeat', f'must be at most {most} for gradients of {num_rows} x {num_columns} matrices', str(repeat)
        )


def _static(num_rows: int, num_columns: int, *tensors: Tensor) -> tuple[int, int, int]:
    return num_rows, num_columns, math.gcd(num_columns, vector_width(*tensors))


@op(outputs='dx', out=True)
def sinkhorn_bwd(dy: Tensor, x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Gradient of `sinkhorn`.

    Args:
        dy: gradient of the result, shape of x, float32, contiguous.
        x: as given to `sinkhorn`.
        repeat: as given to `sinkhorn`.
        eps: as given to `sinkhorn`.

    Returns:
        Gradient of x, float32; deterministic.
    """
    lead, num_rows, num_columns = _check(x, repeat)
    lead_of(dy, 'dy', 'num_rows num_columns', F32, lead, num_rows=num_rows, num_columns=num_columns)
    check.same_device(x=x, dy=dy)
    check_history(num_rows, num_columns, repeat)
    dx = empty('dx', x.shape, F32, x.device)
    dy_flat, x_flat, dx_flat = (flat(t, lead, num_rows, num_columns) for t in (dy, x, dx))
    static = _static(num_rows, num_columns, dy_flat, x_flat, dx_flat)
    launch(sinkhorn_bwd_kernel, (*static, repeat), dy_flat, x_flat, dx_flat, eps)
    return dx


@op(outputs='y', backward=sinkhorn_bwd, out=True)
def sinkhorn(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Scale the rows and columns of every matrix in turn until both have the right sums; differentiable.

    Args:
        x: (..., num_rows, num_columns) float32, contiguous; up to 64 x 32, 32 x 64, 8 x 256 elements.
        repeat: number of scalings of columns, at least one; rows are scaled once less, besides the softmax. Gradients
            work up to about 200, and for very wide matrices up to less.
        eps: added to the softmax and to every sum; far below 1e-12 very unequal elements can give NaN.

    Returns:
        Shape of x, float32: rows sum to 1, columns to num_rows / num_columns, nearly.
    """
    lead, num_rows, num_columns = _check(x, repeat)
    y = empty('y', x.shape, F32, x.device)
    x_flat, y_flat = (flat(t, lead, num_rows, num_columns) for t in (x, y))
    launch(sinkhorn_kernel, _static(num_rows, num_columns, x_flat, y_flat), x_flat, y_flat, repeat, eps)
    return y


def sinkhorn_normalize(conn_weights: Tensor, num_iters: int = 20, eps: float = 1e-6) -> Tensor:
    """Scale the rows and columns of every matrix in turn: rows sum to 1, columns to rows / columns; differentiable.

    Args:
        conn_weights: (..., num_rows, num_columns) float32, contiguous; [8, 64] is one matrix, [..., n, n] a batch.
        num_iters: number of scalings of columns.
        eps: added to every sum.

    Returns:
        Shape of conn_weights; square matrices become doubly stochastic.
    """
    check.at_least(num_iters, 1, 'num_iters')
    return sinkhorn(conn_weights, num_iters, eps)


def mhc_sinkhorn_fwd(comb: Tensor, out: Tensor, repeat: int, eps: float) -> None:
    """Write the Sinkhorn scaling of comb (..., n, n) into out."""
    sinkhorn.out(comb, repeat, eps, y=out)


def mhc_sinkhorn_bwd(grad_output: Tensor, x: Tensor, grad_input: Tensor, repeat: int, eps: float) -> None:
    """Write the gradient of `mhc_sinkhorn_fwd` with respect to comb = x into grad_input."""
    sinkhorn_bwd.out(grad_output, x, repeat, eps, dx=grad_input)


# Cases -------------------------------------------------------------------------------------


def _make(lead: tuple, shape: tuple, repeat: int) -> dict:
    return dict(x=torch.randn(*lead, *shape), repeat=repeat)


def _make_bwd(lead: tuple, shape: tuple, repeat: int) -> dict:
    return dict(dy=torch.randn(*lead, *shape)) | _make(lead, shape, repeat)


SMOKE = (
    grid(lead=[(0,), (), (2, 3)], shape=[(4, 4)], repeat=[10])
    + grid(lead=[(35,)], shape=[(2, 2), (8, 8)], repeat=[1, 3])  # several blocks, several lanes for a matrix
    + grid(lead=[(3,)], shape=[(8, 64), (3, 5), (5, 37)], repeat=[4])  # rectangles, padded columns
)
FULL = grid(lead=[(4001,), (3, 1001)], shape=[(2, 2), (4, 4), (8, 8), (8, 64), (16, 100)], repeat=[10, 20])
BENCH = grid(lead=[(64,), (4096,), (4001,), (16384,)], shape=[(4, 4)], repeat=[20]) + grid(
    lead=[(4096,)], shape=[(8, 8), (8, 64)], repeat=[20]
)
CLOSE, CLOSE_BWD = dict(rtol=2e-6, atol=1e-6), dict(rtol=1e-4, atol=1e-5)
sinkhorn.cases(make=_make, match=CLOSE, smoke=SMOKE, full=FULL, bench=BENCH)
sinkhorn_bwd.cases(make=_make_bwd, match=CLOSE_BWD, smoke=SMOKE, full=FULL, bench=BENCH)
