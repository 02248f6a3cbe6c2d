"""Kernels of Sinkhorn, forward and backward. See `sinkhorn.py` for the mathematics.

`lanes` neighboring threads own a matrix. Each lane holds all rows of its columns in registers, so sums over rows need
no other lane. Backward repeats forward and stores the divisors of all steps in shared memory.
"""

import math

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, begin_early, macro

#: Bytes of shared memory for the divisors of a block.
MAX_HISTORY = 200 << 10

LANES = (1, 2, 4, 8, 16, 32)

# Config ------------------------------------------------------------------------------------


def lanes_for(num_rows: int, num_columns: int) -> int:
    """The fewest lanes with at most 16 elements each: fewer lanes need fewer shuffles."""
    return next((n for n in LANES if num_rows * -(-num_columns // n) <= 16), WARP)


def choose(num_rows: int, num_columns: int, width: int, num_matrices: int) -> dict:
    """Blocks of one warp, so that few matrices spread over all SMs."""
    return dict(lanes=lanes_for(num_rows, num_columns), num_threads=32)


def choose_bwd(num_rows: int, num_columns: int, width: int, repeat: int, num_matrices: int) -> dict:
    """As forward."""
    return dict(lanes=lanes_for(num_rows, num_columns), num_threads=32)


def columns_of(num_columns: int, lanes: int, width: int) -> tuple[int, int]:
    """Columns of a lane, and columns in an access if the alignment of the matrix allows `width`."""
    held = -(-num_columns // lanes)
    return held, math.gcd(held, width)


def history_bytes(num_rows: int, held: int, repeat: int, num_threads: int, sharing: int) -> int:
    """Bytes for the divisors of all steps, if `sharing` lanes store the divisors of rows once."""
    return 4 * repeat * (num_rows * num_threads // sharing + held * num_threads)


# Kernels -----------------------------------------------------------------------------------


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
    """The largest value of the lanes of a matrix, in all of them."""
    peak = T.alloc_var(T.float32)
    peak = value
    for step in (16, 8, 4, 2, 1):
        if step < lanes:
            peak = T.max(peak, T.shfl_xor(peak, step))
    return peak


@macro
def softmax_rows(k_local, lanes, columns, eps):
    """`k = softmax over rows + eps` for the `columns` of this lane; padding becomes 0."""
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
    """`factor = ratio / divisor`; one reciprocal serves two divisors (1 / x = y / (x y)): its throughput is low."""
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
    """Set all factors to 1, with the matching divisors."""
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
        b_local[c] = T.if_then_else(c < columns, b_local[c], T.float32(1.0))  # its neighbor uses the same reciprocal
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
    """Apply all scalings to the matrix in `k_local`."""
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
    """Load `columns` columns of a matrix from `first` on; the rest of `k_local` stays unchanged."""
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


@kernel(choose=choose, space=dict(lanes=LANES, num_threads=(32, 64, 128)), fixed='lanes')
def sinkhorn_kernel(num_rows: int, num_columns: int, width: int, *, lanes: int, num_threads: int):
    """`num_threads // lanes` matrices per block; a lane has neighboring columns, `width` in an access."""
    held, width = columns_of(num_columns, lanes, width)
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
    """Undo a scaling of columns: the gradient and v before it, from the earlier divisors in `b_local`."""
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
    """Undo a scaling of rows: the gradient and u before it, from the earlier divisors in `a_local`."""
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
    """Turn `g_local` from the gradient of the scaled matrix into that of the input; overwrites `k_local`.

    Forward runs again and stores the divisors of all steps in shared memory; then backward reads them. All lanes of a
    matrix have the same row divisors, and store them once if there are too many steps.
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


@kernel(choose=choose_bwd, space=dict(lanes=LANES, num_threads=(32, 64, 128)), fixed='lanes')
def sinkhorn_bwd_kernel(num_rows: int, num_columns: int, width: int, repeat: int, *, lanes: int, num_threads: int):
    """Forward, then backward: see `unscale_matrix`."""
    held, width = columns_of(num_columns, lanes, width)
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
