"""Rows divided by their Euclidean norm.

    rstd = (sum_d x[d]^2 + 1e-6)^-1/2,      y = rstd * x
    dx   = rstd * (dy - y * sum_d y[d] * dy[d])

A warp owns 4 rows. The gradient needs y, not x, so nothing else is saved. Memory bound.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.linear_attention._checks import HALVES, check_dim, check_vectors
from tile_kernels.linear_attention.delta_rule_kernels import strided

EPS = 1e-6
ROWS, THREADS = 16, 128
PASS_CONFIGS = {'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_ENABLE_LOWER_LDGSTG': True}


def columns_of(dim: int) -> int:
    """Columns of a tile of rows, a power of two; those behind the row hold 0."""
    return 1 << (dim - 1).bit_length()


@kernel(pass_configs=PASS_CONFIGS)
def l2norm_kernel(dim: int, dtype: torch.dtype):
    """A block owns 16 rows."""
    batch_size, num_tokens, heads = T.dynamic('batch_size'), T.dynamic('num_tokens'), T.dynamic('heads')
    elem, wide = T.dtype(dtype), columns_of(dim)
    x_type, x_strides = strided('x', (batch_size, num_tokens, heads, dim), elem)

    @T.prim_func
    def l2norm(
        x: x_type,
        y: T.Tensor((batch_size, num_tokens, heads, dim), elem),
        rstd: T.Tensor((batch_size, num_tokens, heads), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_tokens * heads, ROWS), batch_size, threads=THREADS) as (pid, batch):
            for stride in x_strides:
                T.assume(stride % 8 == 0)
            values = T.alloc_fragment((ROWS, wide), T.float32)
            squares = T.alloc_fragment((ROWS, wide), T.float32)
            norms = T.alloc_fragment((ROWS,), T.float32)
            for i, d in T.Parallel(ROWS, wide):
                row = pid * ROWS + i
                inside = T.And(row < num_tokens * heads, T.truncdiv(d, 8) * 8 < dim)
                values[i, d] = T.if_then_else(
                    inside,
                    T.cast(x[batch, T.truncdiv(row, heads), T.truncmod(row, heads), d], T.float32),  # type: ignore[index]
                    T.float32(0.0),
                )
            for i, d in T.Parallel(ROWS, wide):
                squares[i, d] = values[i, d] * values[i, d]
            T.reduce_sum(squares, norms, dim=1)
            for i in T.Parallel(ROWS):
                norms[i] = T.rsqrt(norms[i] + EPS)
                row = pid * ROWS + i
                if row < num_tokens * heads:
                    rstd[batch, T.truncdiv(row, heads), T.truncmod(row, heads)] = norms[i]
            for i, d in T.Parallel(ROWS, wide):
                row = pid * ROWS + i
                if T.And(row < num_tokens * heads, d < dim):
                    y[batch, T.truncdiv(row, heads), T.truncmod(row, heads), d] = values[i, d] * norms[i]

    return l2norm


@kernel(pass_configs=PASS_CONFIGS)
def l2norm_bwd_kernel(dim: int, dtype: torch.dtype):
    """A block owns 16 rows."""
    num_rows = T.dynamic('num_rows')
    elem, wide = T.dtype(dtype), columns_of(dim)

    @T.prim_func
    def l2norm_bwd(
        dy: T.Tensor((num_rows, dim), elem),
        y: T.Tensor((num_rows, dim), elem),
        rstd: T.Tensor((num_rows,), T.float32),
        dx: T.Tensor((num_rows, dim), elem),
    ):
        with T.Kernel(T.ceildiv(num_rows, ROWS), threads=THREADS) as pid:
            values = T.alloc_fragment((ROWS, wide), T.float32)
            grads = T.alloc_fragment((ROWS, wide), T.float32)
            terms = T.alloc_fragment((ROWS, wide), T.float32)
            sums = T.alloc_fragment((ROWS,), T.float32)
            for i, d in T.Parallel(ROWS, wide):
                row = pid * ROWS + i
                inside = T.And(row < num_rows, T.truncdiv(d, 8) * 8 < dim)
                values[i, d] = T.if_then_else(inside, T.cast(y[row, d], T.float32), T.float32(0.0))
                grads[i, d] = T.if_then_else(inside, T.cast(dy[row, d], T.float32), T.float32(0.0))
            for i, d in T.Parallel(ROWS, wide):
                terms[i, d] = values[i, d] * grads[i, d]
            T.reduce_sum(terms, sums, dim=1)
            for i, d in T.Parallel(ROWS, wide):
                row = pid * ROWS + i
                if T.And(row < num_rows, d < dim):
                    dx[row, d] = rstd[row] * (grads[i, d] - values[i, d] * sums[i])

    return l2norm_bwd


@op(outputs='dx')
def l2norm_bwd(dy: Tensor, y: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of `l2norm`.

    Args:
        dy: gradient of y, contiguous.
        y: first result of `l2norm`.
        rstd: second result.

    Returns:
        The gradient of x.
    """
    batch, tokens, heads, dim = check.shape(y, 'y', 'batch tokens heads dim', dtype=HALVES)
    known = dict(batch=batch, tokens=tokens, heads=heads)
    check.packed(dy, 'dy', 'batch tokens heads dim', y.dtype, dim=dim, **known)
    check.packed(rstd, 'rstd', 'batch tokens heads', torch.float32, **known)
    check.contiguous(y, 'y')
    check_dim(dim, 'the last extent of y')
    check.same_device(y=y, dy=dy, rstd=rstd)
    dx = torch.empty_like(y)
    rows = (dy.view(-1, dim), y.view(-1, dim), rstd.view(-1), dx.view(-1, dim))
    launch(l2norm_bwd_kernel, (dim, y.dtype), *rows, size=y.numel())
    return dx


@op(outputs='y rstd', backward=l2norm_bwd)
def l2norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divide rows by their norm.

    Args:
        x: (batch, tokens, heads, dim) bfloat16 or float16.

    Returns:
        y like x, contiguous, and the factors (batch, tokens, heads) float32.
    """
    *extents, dim = check.shape(x, 'x', 'batch tokens heads dim', dtype=HALVES)
    check_dim(dim, 'the last extent of x')
    check_vectors(x=x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(extents, dtype=torch.float32, device=x.device)
    launch(l2norm_kernel, (dim, x.dtype), x, y, rstd, size=x.numel())
    return y, rstd


# Cases --------------------------------------------------------------------------------------

BF16, F16 = torch.bfloat16, torch.float16
SMOKE = (
    grid(shape=[(2, 0, 1, 16), (2, 5, 3, 16)])
    + grid(shape=[(1, 3, 2, 80)], dtype=[F16])
    + grid(shape=[(2, 4, 2, 128)], sliced=[True])
)
BENCH = grid(shape=[(4, 8192, 16, 128), (1, 8001, 24, 128)])


def _make(shape: tuple, dtype: torch.dtype = BF16, sliced: bool = False) -> dict:
    x = torch.randn(*shape[:-1], shape[-1] * (2 if sliced else 1)).to(dtype)
    return dict(x=x[..., shape[-1] :] if sliced else x)


def _make_bwd(**case: object) -> dict:
    x = _make(**case)['x'].float()  # type: ignore[arg-type]
    rstd = (x.square().sum(-1) + EPS).rsqrt()
    dtype = case.get('dtype', BF16)
    y = (x * rstd[..., None]).to(dtype).contiguous()  # type: ignore[call-overload]
    return dict(dy=torch.randn(y.shape).to(y.dtype), y=y, rstd=rstd.contiguous())


l2norm.cases(make=_make, match=dict(rtol=1e-2, atol=1e-3), smoke=SMOKE, full=BENCH, bench=BENCH)
l2norm_bwd.cases(make=_make_bwd, match=dict(rtol=1e-2, atol=1e-2), smoke=SMOKE, full=BENCH, bench=BENCH)
