"""RMS norm of the rows of heads, times a gate.

    n = x * (mean(x^2) + eps)^-1/2,      y = n * weight * a(z)         a: silu or sigmoid, in float32, rounded once

    dn = dy * weight * a(z),      dx = rstd * (dn - n * mean(dn * n))
    dz = dy * n * weight * a'(z),      dweight = sum over rows of dy * n * a(z)

A block owns 64 rows, 16 at a time. Each block writes a partial sum of dweight; a second kernel adds these in one order.
Memory bound.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.engram.grad_w_reduce import sum_of_partials
from tile_kernels.linear_attention._checks import HALVES, check_dim
from tile_kernels.linear_attention.l2norm import columns_of

ROWS, STEPS, THREADS = 16, 4, 128
PASS_CONFIGS = {'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_ENABLE_LOWER_LDGSTG': True}
ACTIVATIONS = ('silu', 'sigmoid')


def _sigmoid(z: Any) -> Any:
    return T.fast_rcp(T.float32(1.0) + T.__exp(-z))


@kernel(pass_configs=PASS_CONFIGS)
def gated_norm_kernel(dim: int, dtype: torch.dtype, weight_dtype: torch.dtype, silu: bool):
    """Rows of 16 at a time."""
    num_rows = T.dynamic('num_rows')
    elem, wide = T.dtype(dtype), columns_of(dim)

    @T.prim_func
    def gated_norm(
        x: T.Tensor((num_rows, dim), elem),
        z: T.Tensor((num_rows, dim), elem),
        weight: T.Tensor((dim,), T.dtype(weight_dtype)),
        y: T.Tensor((num_rows, dim), elem),
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_rows, ROWS), threads=THREADS) as pid:
            values = T.alloc_fragment((ROWS, wide), T.float32)
            gates = T.alloc_fragment((ROWS, wide), T.float32)
            squares = T.alloc_fragment((ROWS, wide), T.float32)
            sums = T.alloc_fragment((ROWS,), T.float32)
            for i, d in T.Parallel(ROWS, wide):
                row = pid * ROWS + i
                inside = T.And(row < num_rows, T.truncdiv(d, 8) * 8 < dim)
                values[i, d] = T.if_then_else(inside, T.cast(x[row, d], T.float32), T.float32(0.0))
                gates[i, d] = T.if_then_else(inside, T.cast(z[row, d], T.float32), T.float32(0.0))
            for i, d in T.Parallel(ROWS, wide):
                squares[i, d] = values[i, d] * values[i, d]
                s = _sigmoid(gates[i, d])
                gates[i, d] = gates[i, d] * s if silu else s
            T.reduce_sum(squares, sums, dim=1)
            for i, d in T.Parallel(ROWS, wide):
                row = pid * ROWS + i
                if T.And(row < num_rows, d < dim):
                    norm = values[i, d] * T.rsqrt(sums[i] / dim + eps)
                    y[row, d] = norm * T.cast(weight[d], T.float32) * gates[i, d]

    return gated_norm


@kernel(pass_configs=PASS_CONFIGS)
def gated_norm_bwd_kernel(dim: int, dtype: torch.dtype, weight_dtype: torch.dtype, silu: bool):
    """`partial[b]` is the sum over the 64 rows of a block."""
    num_rows, num_parts = T.dynamic('num_rows'), T.dynamic('num_parts')
    elem, wide = T.dtype(dtype), columns_of(dim)

    @T.prim_func
    def gated_norm_bwd(
        dy: T.Tensor((num_rows, dim), elem),
        x: T.Tensor((num_rows, dim), elem),
        z: T.Tensor((num_rows, dim), elem),
        weight: T.Tensor((dim,), T.dtype(weight_dtype)),
        dx: T.Tensor((num_rows, dim), elem),
        dz: T.Tensor((num_rows, dim), elem),
        partial: T.Tensor((num_parts, dim), T.float32),
        eps: T.float32,
    ):
        with T.Kernel(num_parts, threads=THREADS) as pid:
            values = T.alloc_fragment((ROWS, wide), T.float32)
            gates = T.alloc_fragment((ROWS, wide), T.float32)
            grads = T.alloc_fragment((ROWS, wide), T.float32)
            terms = T.alloc_fragment((ROWS, wide), T.float32)
            weights = T.alloc_fragment((ROWS, wide), T.float32)
            shares = T.alloc_fragment((ROWS, wide), T.float32)  # sigmoids of the gates
            rstd = T.alloc_fragment((ROWS,), T.float32)
            along = T.alloc_fragment((ROWS,), T.float32)
            total = T.alloc_fragment((wide,), T.float32)
            T.clear(weights)
            for step in T.serial(STEPS):
                for i, d in T.Parallel(ROWS, wide):
                    row = (pid * STEPS + step) * ROWS + i
                    inside = T.And(row < num_rows, T.truncdiv(d, 8) * 8 < dim)
                    values[i, d] = T.if_then_else(inside, T.cast(x[row, d], T.float32), T.float32(0.0))
                    gates[i, d] = T.if_then_else(inside, T.cast(z[row, d], T.float32), T.float32(0.0))
                    grads[i, d] = T.if_then_else(inside, T.cast(dy[row, d], T.float32), T.float32(0.0))
                for i, d in T.Parallel(ROWS, wide):
                    terms[i, d] = values[i, d] * values[i, d]
                    shares[i, d] = _sigmoid(gates[i, d])
                T.reduce_sum(terms, rstd, dim=1)
                for i in T.Parallel(ROWS):
                    rstd[i] = T.rsqrt(rstd[i] / dim + eps)
                for i, d in T.Parallel(ROWS, wide):
                    own = T.cast(weight[T.min(d, dim - 1)], T.float32)
                    values[i, d] = values[i, d] * rstd[i]
                    s = shares[i, d]
                    gate = gates[i, d] * s if silu else s
                    slope = s + gate * (T.float32(1.0) - s) if silu else s * (T.float32(1.0) - s)
                    weights[i, d] = weights[i, d] + grads[i, d] * values[i, d] * gate
                    row = (pid * STEPS + step) * ROWS + i
                    if T.And(row < num_rows, d < dim):
                        dz[row, d] = grads[i, d] * values[i, d] * own * slope
                    grads[i, d] = grads[i, d] * own * gate
                    terms[i, d] = grads[i, d] * values[i, d]
                T.reduce_sum(terms, along, dim=1)
                for i, d in T.Parallel(ROWS, wide):
                    row = (pid * STEPS + step) * ROWS + i
                    if T.And(row < num_rows, d < dim):
                        dx[row, d] = rstd[i] * (grads[i, d] - values[i, d] * (along[i] / dim))
            T.reduce_sum(weights, total, dim=0)
            for d in T.Parallel(wide):
                if d < dim:
                    partial[pid, d] = total[d]

    return gated_norm_bwd


def _check(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str) -> tuple:
    """Returns the static arguments."""
    rows, dim = check.shape(x, 'x', 'rows dim', dtype=HALVES)
    check.contiguous(x, 'x')
    check_dim(dim, 'the last extent of x')
    check.packed(check.tensor(z, 'z'), 'z', 'rows dim', x.dtype, rows=rows, dim=dim)
    check.packed(check.tensor(weight, 'weight'), 'weight', 'dim', (torch.float32, x.dtype), dim=dim)
    check.one_of(activation, ACTIVATIONS, 'activation')
    check.at_least(eps, 0.0, 'eps')
    check.same_device(x=x, z=z, weight=weight)
    return dim, x.dtype, weight.dtype, activation == 'silu'


@op(outputs='dx dz dweight')
def gated_norm_bwd(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-5, activation: str = 'silu'
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `gated_norm`; equal bits in every run.

    Args:
        dy: gradient of y, contiguous.
        x: as in `gated_norm`, as all that follows.
        z: as there.
        weight: as there.
        eps: as there.
        activation: as there.

    Returns:
        Gradients of x, z and weight.
    """
    static = _check(x, z, weight, eps, activation)
    rows, dim = x.shape
    check.packed(dy, 'dy', 'rows dim', x.dtype, rows=rows, dim=dim)
    check.same_device(x=x, dy=dy)
    dx, dz = torch.empty_like(x), torch.empty_like(z)
    if x.numel() == 0:
        return dx, dz, torch.zeros_like(weight)
    partial = torch.empty(-(-rows // (ROWS * STEPS)), dim, dtype=torch.float32, device=x.device)
    launch(gated_norm_bwd_kernel, static, dy, x, z, weight, dx, dz, partial, eps, size=x.numel())
    return dx, dz, sum_of_partials(partial).to(weight.dtype)


@op(outputs='y', backward=gated_norm_bwd)
def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-5, activation: str = 'silu') -> Tensor:
    """RMS norm of rows, times a gate; differentiable in x, z and weight.

    Args:
        x: (rows, dim) bfloat16 or float16, contiguous; dim is a multiple of 16 up to 256.
        z: the same, inputs of the gate.
        weight: (dim,) float32 or of the dtype of x.
        eps: added to the mean of squares.
        activation: 'silu' or 'sigmoid', of the gate.

    Returns:
        y like x.
    """
    static = _check(x, z, weight, eps, activation)
    y = torch.empty_like(x)
    launch(gated_norm_kernel, static, x, z, weight, y, eps, size=x.numel())
    return y


# Cases --------------------------------------------------------------------------------------

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMOKE = (
    grid(rows=[0, 1, 21], dim=[48])
    + grid(rows=[70], dim=[16], dtype=[F16], weights=[F16], activation=['sigmoid'])
    + grid(rows=[3], dim=[256], weights=[BF16])
)
BENCH = grid(rows=[32768 * 32, 8001 * 24], dim=[128], weights=[BF16])


def _make(rows: int, dim: int, dtype: torch.dtype = BF16, weights: torch.dtype = F32, activation: str = 'silu') -> dict:
    x, z = torch.randn(rows, dim).to(dtype), torch.randn(rows, dim).to(dtype)
    return dict(x=x, z=z, weight=torch.randn(dim).to(weights), activation=activation)


def _make_bwd(**case: Any) -> dict:
    made = _make(**case)
    return dict(dy=torch.randn(made['x'].shape).to(made['x'].dtype), **made)


BOUNDS = dict(rtol=1e-2, atol=2e-2)
gated_norm.cases(make=_make, match=BOUNDS, smoke=SMOKE, full=BENCH, bench=BENCH)
gated_norm_bwd.cases(make=_make_bwd, match=BOUNDS, smoke=SMOKE, full=BENCH, bench=BENCH)
