"""Sinkhorn: scale the rows and columns of every matrix in turn until both have the sums they should.

    p = softmax over a row of x + eps,  r = num_rows / num_columns
    columns:  p[i, j] *= r / (sum_i p[i, j] + eps)          once, and then repeat - 1 times after
    rows:     p[i, j] *= 1 / (sum_j p[i, j] + eps)

A square matrix becomes doubly stochastic. The scalings are kept apart from the matrix, p = diag(u) k diag(v), and each
as the inverse of its divisor, so an iteration is two products of k with a vector and a reciprocal for each row and
column:

    rows:     a[i] = sum_j k[i, j] v[j] + eps a[i]          u[i] = 1 / a[i]
    columns:  b[j] = sum_i u[i] k[i, j] + eps / r b[j]      v[j] = r / b[j]

`lanes` neighbouring threads own a matrix: each has all rows of its columns in registers, sums over rows need no other
lane. Backward walks the scalings in reverse. Where y = f x with a factor f for each row or column,

    dx = f (dy - sum(dy y))                                 sums over what the factor scales, for columns over r

so all it needs of the way forward are the divisors, which it writes down in shared memory while it repeats that way.
Latency bound at the sizes in use: the chain of 2 repeat sums and reciprocals.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, begin_early, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Out, op
from tile_kernels.mhc._rows import WARP, flat, lead_of, vector_width

F32 = torch.float32

#: Elements of a matrix a lane may hold, and bytes of shared memory for the divisors of a block.
MAX_ELEMENTS, MAX_HISTORY = 64, 200 << 10

LANES = (1, 2, 4, 8, 16, 32)

# Config -------------------------------------------------------------------------------------


def lanes_for(num_rows: int, num_columns: int) -> int:
    """The fewest lanes that leave at most 16 elements to each: what one lane holds needs no shuffle."""
    return next((n for n in LANES if num_rows * -(-num_columns // n) <= 16), WARP)


def choose(num_rows: int, num_columns: int, width: int, num_matrices: int) -> dict:
    """Single warps, so that few matrices spread over all SMs."""
    return dict(lanes=lanes_for(num_rows, num_columns), num_threads=32)


def choose_bwd(num_rows: int, num_columns: int, width: int, repeat: int, num_matrices: int) -> dict:
    """As forward."""
    return dict(lanes=lanes_for(num_rows, num_columns), num_threads=32)


def share_of(num_columns: int, lanes: int, width: int) -> tuple[int, int]:
    """Columns of a lane, and how many of them an access takes when the matrix allows `width`."""
    held = -(-num_columns // lanes)
    return held, math.gcd(held, width)


def history_bytes(num_rows: int, held: int, repeat: int, num_threads: int, sharing: int) -> int:
    """Bytes for the divisors of all steps, if so many lanes share those of rows."""
    return 4 * repeat * (num_rows * num_threads // sharing + held * num_threads)


# Kernels ------------------------------------------------------------------------------------


@macro
def sum_lanes(value, lanes):
    """The sum of a value over the lanes of a matrix, in all of them."""
    total = T.alloc_var(T.float32)
    total = value
    for step in (16, 8, 4, 2, 1):
        if step < lanes:
            total = total + T.shfl_xor(total, step)
    return total


@macro
def max_lanes(value, lanes):
    """The largest value of the lanes of a matrix."""
    peak = T.alloc_var(T.float32)
    peak = value
    for step in (16, 8, 4, 2, 1):
        if step < lanes:
            peak = T.max(peak, T.shfl_xor(peak, step))
    return peak


@macro
def softmax_rows(k_local, lanes, columns, eps):
    """`k = softmax over rows + eps`; columns behind the last become 0. `columns` are those of this lane."""
    num_rows, held = k_local.shape
    for i in T.unroll(num_rows):
        peak = T.alloc_var(T.float32)
        peak = -T.infinity(T.float32)
        for c in T.unroll(held):
            if c < columns:
                peak = T.max(peak, k_local[i, c])
        peak = max_lanes(peak, lanes)
        total = T.alloc_var(T.float32, init=0.0)
        for c in T.unroll(held):
            k_local[i, c] = T.if_then_else(c < columns, T.exp(k_local[i, c] - peak), T.float32(0.0))
            total = total + k_local[i, c]
        total = T.fast_rcp(sum_lanes(total, lanes))
        for c in T.unroll(held):
            k_local[i, c] = T.if_then_else(c < columns, T.ieee_fmaf(k_local[i, c], total, eps), T.float32(0.0))


@macro
def invert(divisor_local, factor_local, ratio):
    """`factor = ratio / divisor` for all; two share a reciprocal, 1 / x = y / (x y): there are few units for it."""
    count = divisor_local.shape[0]
    for i in T.unroll(count // 2):
        shared = T.fast_rcp(T.ieee_mul(divisor_local[2 * i], divisor_local[2 * i + 1]))
        if ratio != 1.0:
            shared = T.ieee_mul(shared, T.float32(ratio))
        factor_local[2 * i] = T.ieee_mul(shared, divisor_local[2 * i + 1])
        factor_local[2 * i + 1] = T.ieee_mul(shared, divisor_local[2 * i])
    if count % 2 == 1:
        factor_local[count - 1] = T.ieee_mul(T.fast_rcp(divisor_local[count - 1]), T.float32(ratio))


@macro
def start_scaling(a_local, b_local, u_local, v_local, ratio):
    """Factors of 1, as the divisors that give them."""
    T.fill(a_local, 1.0)
    T.fill(u_local, 1.0)
    T.fill(b_local, ratio)
    T.fill(v_local, 1.0)


@macro
def scale_columns(k_local, u_local, b_local, v_local, columns, ratio, eps):
    """`b[c] = sum_i u[i] k[i, c] + eps / r b[c]`, `v[c] = r / b[c]`."""
    num_rows, held = k_local.shape
    for c in T.unroll(held):
        b_local[c] = T.ieee_mul(b_local[c], eps if ratio == 1.0 else T.ieee_mul(eps, T.float32(1.0 / ratio)))
        for i in T.unroll(num_rows):
            b_local[c] = T.ieee_fmaf(u_local[i], k_local[i, c], b_local[c])
        b_local[c] = T.if_then_else(c < columns, b_local[c], T.float32(1.0))  # a neighbour shares its reciprocal
    invert(b_local, v_local, ratio)
    for c in T.unroll(held):
        v_local[c] = T.if_then_else(c < columns, v_local[c], T.float32(0.0))


@macro
def scale_rows(k_local, a_local, u_local, v_local, lanes, eps):
    """`a[i] = sum_c k[i, c] v[c] + eps a[i]`, `u[i] = 1 / a[i]`."""
    num_rows, held = k_local.shape
    for i in T.unroll(num_rows):
        total = T.alloc_var(T.float32)
        if lanes == 1:
            total = T.ieee_mul(a_local[i], eps)
            for c in T.unroll(held):
                total = T.ieee_fmaf(k_local[i, c], v_local[c], total)
            a_local[i] = total
        else:
            total = 0.0
            for c in T.unroll(held):
                total = T.ieee_fmaf(k_local[i, c], v_local[c], total)
            a_local[i] = T.ieee_fmaf(a_local[i], eps, sum_lanes(total, lanes))
    invert(a_local, u_local, 1.0)


@macro
def scale_matrix(k_local, lanes, columns, ratio, repeat, eps):
    """All scalings of a matrix, and the matrix they give in `k_local`."""
    num_rows, held = k_local.shape
    a_local = T.alloc_local((num_rows,), T.float32)
    b_local = T.alloc_local((held,), T.float32)
    u_local = T.alloc_local((num_rows,), T.float32)
    v_local = T.alloc_local((held,), T.float32)
    softmax_rows(k_local, lanes, columns, eps)
    start_scaling(a_local, b_local, u_local, v_local, ratio)
    scale_columns(k_local, u_local, b_local, v_local, columns, ratio, eps)
    for _ in T.serial(repeat - 1):
        scale_rows(k_local, a_local, u_local, v_local, lanes, eps)
        scale_columns(k_local, u_local, b_local, v_local, columns, ratio, eps)
    for i in T.unroll(num_rows):
        for c in T.unroll(held):
            k_local[i, c] = T.ieee_mul(T.ieee_mul(u_local[i], k_local[i, c]), v_local[c])


@macro
def load_matrix(x, matrix, first, columns, k_local, width):
    """The columns from `first` on of a matrix, `columns` of them; others are not touched."""
    num_rows, held = k_local.shape
    for i in T.unroll(num_rows):
        for v in T.unroll(held // width):
            if v * width < columns:
                for e in T.vectorized(width):
                    k_local[i, v * width + e] = x[matrix, i, first + v * width + e]


@macro
def store_matrix(k_local, y, matrix, first, columns, width):
    """The inverse of `load_matrix`."""
    num_rows, held = k_local.shape
    for i in T.unroll(num_rows):
        for v in T.unroll(held // width):
            if v * width < columns:
                for e in T.vectorized(width):
                    y[matrix, i, first + v * width + e] = k_local[i, v * width + e]


@kernel(choose=choose, space=dict(lanes=LANES, num_threads=(32, 64, 128)))
def sinkhorn_kernel(num_rows: int, num_columns: int, width: int, *, lanes: int, num_threads: int):
    """`num_threads // lanes` matrices per block; a lane has a run of neighbouring columns, `width` in an access."""
    held, width = share_of(num_columns, lanes, width)
    matrices = num_threads // lanes
    num_matrices = T.dynamic('num_matrices')

    @T.prim_func
    def sinkhorn(
        x: T.Tensor((num_matrices, num_rows, num_columns), T.float32),
        y: T.Tensor((num_matrices, num_rows, num_columns), T.float32),
        repeat: T.int32,
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_matrices, matrices), threads=num_threads) as pid:
            k_local = T.alloc_local((num_rows, held), T.float32)
            tx = T.get_thread_binding()
            matrix = T.min(pid * matrices + tx // lanes, num_matrices - 1)  # shuffles need all lanes
            first = tx % lanes * held
            columns = T.max(T.min(held, num_columns - first), 0)

            begin_early()
            load_matrix(x, matrix, first, columns, k_local, width)
            ratio = num_rows / num_columns
            scale_matrix(k_local, lanes, columns, ratio, repeat, eps)
            if pid * matrices + tx // lanes < num_matrices:
                store_matrix(k_local, y, matrix, first, columns, width)

    return sinkhorn


@macro
def unscale_columns(k_local, g_local, u_local, b_local, v_local, columns, ratio):
    """The gradient before a scaling of columns, and v as it was; `b_local` has the divisors from before."""
    num_rows, held = k_local.shape
    for c in T.unroll(held):
        factor = T.alloc_var(T.float32)
        factor = v_local[c] * b_local[c] if ratio == 1.0 else v_local[c] * b_local[c] * T.float32(1.0 / ratio)
        total = T.alloc_var(T.float32, init=0.0)
        for i in T.unroll(num_rows):
            total = T.ieee_fmaf(g_local[i, c], u_local[i] * k_local[i, c], total)
        total = total * (v_local[c] * factor)
        if ratio != 1.0:
            total = total * T.float32(1.0 / ratio)
        for i in T.unroll(num_rows):
            g_local[i, c] = T.ieee_fmaf(g_local[i, c], factor, -total)
    invert(b_local, v_local, ratio)
    for c in T.unroll(held):
        v_local[c] = T.if_then_else(c < columns, v_local[c], T.float32(0.0))


@macro
def unscale_rows(k_local, g_local, a_local, u_local, v_local, lanes):
    """The gradient before a scaling of rows, and u as it was; `a_local` has the divisors from before."""
    num_rows, held = k_local.shape
    for i in T.unroll(num_rows):
        total = T.alloc_var(T.float32, init=0.0)
        for c in T.unroll(held):
            total = T.ieee_fmaf(g_local[i, c], k_local[i, c] * v_local[c], total)
        total = sum_lanes(total, lanes)
        factor = T.alloc_var(T.float32)
        factor = u_local[i] * a_local[i]
        total = total * (u_local[i] * factor)
        for c in T.unroll(held):
            g_local[i, c] = T.ieee_fmaf(g_local[i, c], factor, -total)
    invert(a_local, u_local, 1.0)


@macro
def unscale_matrix(k_local, g_local, lanes, columns, ratio, repeat, eps, num_threads):
    """`g_local`, the gradient of the scaled matrix, becomes that of the elements in `k_local`, which are lost.

    Forward once more, then back; divisors of all steps wait in shared memory, each lane's beside its neighbours'. Those
    of rows are the same in all lanes of a matrix, which keep one for all if there are too many steps.
    """
    num_rows, held = k_local.shape
    sharing = lanes if history_bytes(num_rows, held, repeat, num_threads, 1) > MAX_HISTORY else 1
    a_local = T.alloc_local((num_rows,), T.float32)
    b_local = T.alloc_local((held,), T.float32)
    u_local = T.alloc_local((num_rows,), T.float32)
    v_local = T.alloc_local((held,), T.float32)
    rows_shared = T.alloc_shared((repeat, num_rows, num_threads // sharing), T.float32)
    columns_shared = T.alloc_shared((repeat, held, num_threads), T.float32)
    tx = T.get_thread_binding()
    softmax_rows(k_local, lanes, columns, eps)
    start_scaling(a_local, b_local, u_local, v_local, ratio)
    for step in T.serial(repeat):
        for i in T.unroll(num_rows):
            rows_shared[step, i, tx // sharing] = a_local[i]
        for c in T.unroll(held):
            columns_shared[step, c, tx] = b_local[c]
        if step > 0:
            scale_rows(k_local, a_local, u_local, v_local, lanes, eps)
        scale_columns(k_local, u_local, b_local, v_local, columns, ratio, eps)

    for back in T.serial(repeat):
        for c in T.unroll(held):
            b_local[c] = columns_shared[repeat - 1 - back, c, tx]
        unscale_columns(k_local, g_local, u_local, b_local, v_local, columns, ratio)
        if back < repeat - 1:
            for i in T.unroll(num_rows):
                a_local[i] = rows_shared[repeat - 1 - back, i, tx // sharing]
            unscale_rows(k_local, g_local, a_local, u_local, v_local, lanes)

    for i in T.unroll(num_rows):
        total = T.alloc_var(T.float32, init=0.0)
        for c in T.unroll(held):
            k_local[i, c] = T.if_then_else(c < columns, k_local[i, c] - eps, T.float32(0.0))
            total = T.ieee_fmaf(g_local[i, c], k_local[i, c], total)
        total = sum_lanes(total, lanes)
        for c in T.unroll(held):
            g_local[i, c] = k_local[i, c] * (g_local[i, c] - total)


@kernel(choose=choose_bwd, space=dict(lanes=LANES, num_threads=(32, 64, 128)))
def sinkhorn_bwd_kernel(num_rows: int, num_columns: int, width: int, repeat: int, *, lanes: int, num_threads: int):
    """As forward, and back again: see `unscale_matrix`."""
    held, width = share_of(num_columns, lanes, width)
    matrices = num_threads // lanes
    num_matrices = T.dynamic('num_matrices')

    @T.prim_func
    def sinkhorn_bwd(
        dy: T.Tensor((num_matrices, num_rows, num_columns), T.float32),
        x: T.Tensor((num_matrices, num_rows, num_columns), T.float32),
        dx: T.Tensor((num_matrices, num_rows, num_columns), T.float32),
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_matrices, matrices), threads=num_threads) as pid:
            k_local = T.alloc_local((num_rows, held), T.float32)
            g_local = T.alloc_local((num_rows, held), T.float32)
            tx = T.get_thread_binding()
            matrix = T.min(pid * matrices + tx // lanes, num_matrices - 1)  # shuffles need all lanes
            first = tx % lanes * held
            columns = T.max(T.min(held, num_columns - first), 0)

            begin_early()
            T.clear(g_local)
            load_matrix(x, matrix, first, columns, k_local, width)
            load_matrix(dy, matrix, first, columns, g_local, width)
            unscale_matrix(k_local, g_local, lanes, columns, num_rows / num_columns, repeat, eps, num_threads)
            if pid * matrices + tx // lanes < num_matrices:
                store_matrix(g_local, dx, matrix, first, columns, width)

    return sinkhorn_bwd


# Ops ----------------------------------------------------------------------------------------


def _check(x: Tensor, repeat: int) -> tuple[tuple, int, int]:
    """Check the input; returns the leading shape and the extents of a matrix."""
    lead = lead_of(x, 'x', 'num_rows num_columns', F32)
    num_rows, num_columns = x.shape[-2:]
    check.at_least(repeat, 1, 'repeat')
    check.at_least(min(num_rows, num_columns), 1, 'the extents of a matrix')
    if num_rows * -(-num_columns // WARP) > MAX_ELEMENTS:
        check.fail('x', f'must have matrices of at most {MAX_ELEMENTS} x {WARP} elements', check.describe(x))
    return lead, num_rows, num_columns


def check_history(num_rows: int, num_columns: int, repeat: int) -> None:
    """Refuse no steps, and more than a gradient can remember."""
    check.at_least(repeat, 1, 'repeat')
    lanes = lanes_for(num_rows, num_columns)
    most = MAX_HISTORY // history_bytes(num_rows, -(-num_columns // lanes), 1, WARP, lanes)
    if repeat > most:
        check.fail(
            'repeat', f'must be at most {most} for gradients of {num_rows} x {num_columns} matrices', str(repeat)
        )


def _static(num_rows: int, num_columns: int, *tensors: Tensor) -> tuple[int, int, int]:
    return num_rows, num_columns, math.gcd(num_columns, vector_width(*tensors))


@op()
def sinkhorn_bwd_(dy: Tensor, x: Tensor, dx: Out, repeat: int = 10, eps: float = 1e-6) -> None:
    """Gradient of `sinkhorn` into memory of the caller.

    Args:
        dy: gradient of the result, shape of x, float32, contiguous.
        x: as given to `sinkhorn`.
        dx: shape of x, float32, contiguous; overwritten.
        repeat: as given to `sinkhorn`.
        eps: as given to `sinkhorn`.
    """
    lead, num_rows, num_columns = _check(x, repeat)
    shape = dict(num_rows=num_rows, num_columns=num_columns)
    lead_of(dy, 'dy', 'num_rows num_columns', F32, lead, **shape)
    lead_of(dx, 'dx', 'num_rows num_columns', F32, lead, **shape)
    check.same_device(x=x, dy=dy, dx=dx)
    dy_flat, x_flat, dx_flat = (flat(t, lead, num_rows, num_columns) for t in (dy, x, dx))
    static = _static(num_rows, num_columns, dy_flat, x_flat, dx_flat)
    check_history(num_rows, num_columns, repeat)
    launch(sinkhorn_bwd_kernel, (*static, repeat), dy_flat, x_flat, dx_flat, eps)


@op(outputs='dx')
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
    dx = torch.empty_like(x)
    sinkhorn_bwd_.fn(dy, x, dx, repeat, eps)
    return dx


@op()
def sinkhorn_(x: Tensor, y: Out, repeat: int = 10, eps: float = 1e-6) -> None:
    """Sinkhorn into memory of the caller; see `sinkhorn`.

    Args:
        x: (..., num_rows, num_columns) float32, contiguous.
        y: shape of x, float32, contiguous; overwritten.
        repeat: how often columns are scaled, at least once; rows once less, besides the softmax.
        eps: added to the softmax and to every sum.
    """
    lead, num_rows, num_columns = _check(x, repeat)
    lead_of(y, 'y', 'num_rows num_columns', F32, lead, num_rows=num_rows, num_columns=num_columns)
    check.same_device(x=x, y=y)
    x_flat, y_flat = (flat(t, lead, num_rows, num_columns) for t in (x, y))
    launch(sinkhorn_kernel, _static(num_rows, num_columns, x_flat, y_flat), x_flat, y_flat, repeat, eps)


@op(outputs='y', backward=sinkhorn_bwd)
def sinkhorn(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Scale the rows and columns of every matrix in turn until both have the sums they should; differentiable.

    Args:
        x: (..., num_rows, num_columns) float32, contiguous; up to 64 x 32, 32 x 64, 8 x 256 elements.
        repeat: how often columns are scaled, at least once; rows once less, besides the softmax. Gradients go
            through about 200 times at most, through fewer of very wide matrices.
        eps: added to the softmax and to every sum; far below 1e-12 very unequal elements can give NaN.

    Returns:
        Shape of x, float32: rows sum to 1, columns to num_rows / num_columns, nearly.
    """
    y = torch.empty_like(x)
    sinkhorn_.fn(x, y, repeat, eps)
    return y


# Cases --------------------------------------------------------------------------------------


def _make(lead: tuple, shape: tuple, repeat: int) -> dict:
    return dict(x=torch.randn(*lead, *shape), repeat=repeat)


def _make_(lead: tuple, shape: tuple, repeat: int) -> dict:
    return _make(lead, shape, repeat) | dict(y=torch.empty(*lead, *shape))


def _make_bwd(lead: tuple, shape: tuple, repeat: int) -> dict:
    return dict(dy=torch.randn(*lead, *shape)) | _make(lead, shape, repeat)


def _make_bwd_(lead: tuple, shape: tuple, repeat: int) -> dict:
    return _make_bwd(lead, shape, repeat) | dict(dx=torch.empty(*lead, *shape))


SMOKE = (
    grid(lead=[(0,), (), (2, 3)], shape=[(4, 4)], repeat=[10])
    + grid(lead=[(35,)], shape=[(2, 2), (8, 8)], repeat=[1, 3])  # several blocks, lanes that share a matrix
    + grid(lead=[(3,)], shape=[(8, 64), (3, 5), (5, 37)], repeat=[4])  # rectangles, columns behind the last
)
FULL = grid(lead=[(4001,), (3, 1001)], shape=[(2, 2), (4, 4), (8, 8), (8, 64), (16, 100)], repeat=[10, 20])
BENCH = grid(lead=[(64,), (4096,), (4001,), (16384,)], shape=[(4, 4)], repeat=[20]) + grid(
    lead=[(4096,)], shape=[(8, 8), (8, 64)], repeat=[20]
)
CLOSE, CLOSE_BWD = dict(rtol=2e-6, atol=1e-6), dict(rtol=1e-4, atol=1e-5)
sinkhorn.cases(make=_make, match=CLOSE, smoke=SMOKE, full=FULL, bench=BENCH)
sinkhorn_.cases(make=_make_, match=CLOSE, smoke=SMOKE[:2], bench=BENCH[:1])
sinkhorn_bwd.cases(make=_make_bwd, match=CLOSE_BWD, smoke=SMOKE, full=FULL, bench=BENCH)
sinkhorn_bwd_.cases(make=_make_bwd_, match=CLOSE_BWD, smoke=SMOKE[:2], bench=BENCH[:1])
