"""Sinkhorn steps of the Engram optimiser: rows and columns of an update brought to equal length by two scales.

    x[r, d]        = row_scale[r] * matrix[r, d] * col_scale[d]
    norm[r]        = sqrt(sum_d x[r, d]^2)
    row_scale[r]  <- row_scale[r] / (norm[r] + eps)                          a step, in place
    col_sumsq[d]   = sum_r (x[r, d] / (norm[r] + eps))^2                     a step, as partial sums
    out[r, d]      = x[r, d] * alpha / (norm[r] + eps)                       the end

`row_threads` threads own a row; those of a block go through rows side by side, with the scales of their columns and
their sums over rows in registers. Memory bound: the floor is reading the matrix (and writing the result).
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro, resident_blocks
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, Out, op
from tile_kernels.engram._rows import (
    ROW_PASS_CONFIGS,
    load_row,
    row_layout,
    store_slot,
    sum_over_row,
)
from tile_kernels.engram._sinkhorn import (
    DTYPES,
    check_matrix,
    random_matrix,
    sinkhorn_partials,
)
from tile_kernels.engram.sum_partials import sum_of_partials

#: Elements of a row for each thread.
OWN = 24

# Kernels ------------------------------------------------------------------------------------


@macro
def scale_row(raw_local, row_scale, col_local, x_local, sums):
    """Multiply the matrix by both scales, in float32; sums[0] = the sum of the squares."""
    T.clear(sums)
    for i in T.unroll(x_local.shape[0]):
        for e in T.unroll(x_local.shape[1]):
            x_local[i, e] = row_scale * T.cast(raw_local[i, e], T.float32) * col_local[i, e]
            sums[0] = sums[0] + x_local[i, e] * x_local[i, e]


@kernel(
    choose=lambda *static: dict(resident_threads=512),
    space=dict(resident_threads=(256, 512, 768)),
    pass_configs=ROW_PASS_CONFIGS,
)
def sinkhorn_step_kernel(num_columns: int, dtype: torch.dtype, vector_bytes: int, *, resident_threads: int):
    """Block p goes through the rows r with r % num_partials = p, `teams` of them at a time.

    It reads two rows ahead, or one where registers do not suffice for two.
    """
    width, piece = 16 // dtype.itemsize, vector_bytes // dtype.itemsize
    row_threads, vectors = row_layout(num_columns, OWN // width, width)
    ahead = (0, 1) if vectors * width <= 16 else (0,)
    teams = max(1, 256 // row_threads)
    num_threads = teams * row_threads
    num_rows, num_partials = T.dynamic('num_rows'), T.dynamic('num_partials')

    @T.prim_func
    def sinkhorn_step(
        matrix: T.Tensor((num_rows, 1, num_columns), T.dtype(dtype)),
        row_scale: T.Tensor((num_rows,), T.float32),
        col_scale: T.Tensor((1, num_columns), T.float32),
        row_norm: T.Tensor((num_rows,), T.float32),
        col_sumsq_partial: T.Tensor((num_partials, num_columns), T.float32),
        eps: T.float32,
    ):
        with T.Kernel(num_partials, threads=num_threads) as pid:
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            next_local = T.alloc_local((vectors, width), T.dtype(dtype))
            second_local = T.alloc_local((vectors, width), T.dtype(dtype))
            next_scale = T.alloc_local((2,), T.float32)
            x_local = T.alloc_local((vectors, width), T.float32)
            col_local = T.alloc_local((vectors, width), T.float32)
            square_local = T.alloc_local((vectors, width), T.float32)
            sums = T.alloc_local((1,), T.float32)
            parts_shared = T.alloc_shared((2, num_threads // WARP, 1), T.float32)
            square_shared = T.alloc_shared((teams, width, row_threads), T.float32)
            scale = T.alloc_var(T.float32)
            inverse = T.alloc_var(T.float32)
            thread = T.get_thread_binding()
            team, lane = thread // row_threads, thread % row_threads
            first, stride = pid + team * num_partials, teams * num_partials

            T.clear(next_local)
            T.clear(second_local)
            T.clear(next_scale)
            T.clear(square_local)
            for d in ahead:
                if first + d * stride < num_rows:
                    load_row(matrix, first + d * stride, 0, row_threads, piece, (next_local, second_local)[d])
                    next_scale[d] = row_scale[first + d * stride]
            load_row(col_scale, 0, 0, row_threads, vector_bytes // 4, col_local)
            for i in T.serial(T.ceildiv(num_rows - pid, stride * len(ahead))):
                for d in ahead:
                    row = first + (i * len(ahead) + d) * stride
                    scale = next_scale[d]
                    scale_row((next_local, second_local)[d], scale, col_local, x_local, sums)
                    later = row + len(ahead) * stride
                    if later < num_rows:
                        load_row(matrix, later, 0, row_threads, piece, (next_local, second_local)[d])
                        next_scale[d] = row_scale[later]
                    sum_over_row(sums, parts_shared, (i * len(ahead) + d) % 2, row_threads)
                    norm = T.sqrt(sums[0])
                    inverse = T.float32(1.0) / (norm + eps)
                    if row < num_rows:
                        if lane == 0:
                            row_norm[row] = norm
                            row_scale[row] = scale * inverse
                        for j in T.unroll(vectors):
                            for e in T.unroll(width):
                                x_local[j, e] = x_local[j, e] * inverse
                                square_local[j, e] = square_local[j, e] + x_local[j, e] * x_local[j, e]

            for j in T.unroll(vectors):
                if teams > 1:
                    T.sync_threads()
                    for e in T.unroll(width):
                        square_shared[team, e, lane] = square_local[j, e]
                    T.sync_threads()
                    for t in T.unroll(teams - 1):
                        for e in T.unroll(width):
                            square_local[j, e] = square_local[j, e] + square_shared[t + 1, e, lane]
                slot = j * row_threads + lane
                if team == 0 and slot < num_columns // width:
                    for p in T.unroll(width // 4):
                        for e in T.vectorized(4):
                            col_sumsq_partial[pid, slot * width + p * 4 + e] = square_local[j, p * 4 + e]

    return sinkhorn_step


@kernel(
    choose=lambda *static: dict(block_rows=1, resident_threads=768),
    space=dict(block_rows=(1, 2, 4, 8), resident_threads=(512, 768, 1024)),
    pass_configs=ROW_PASS_CONFIGS,
)
def sinkhorn_finalize_kernel(
    num_columns: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    vector_bytes: int,
    *,
    block_rows: int,
    resident_threads: int,
):
    """A block goes through `block_rows` rows for each of its teams, reading one row ahead."""
    width, piece = 16 // dtype.itemsize, vector_bytes // dtype.itemsize
    row_threads, vectors = row_layout(num_columns, OWN // width, width)
    teams = max(1, 256 // row_threads)
    num_threads = teams * row_threads
    num_rows = T.dynamic('num_rows')

    @T.prim_func
    def sinkhorn_finalize(
        matrix: T.Tensor((num_rows, 1, num_columns), T.dtype(dtype)),
        row_scale: T.Tensor((num_rows,), T.float32),
        col_scale: T.Tensor((1, num_columns), T.float32),
        out: T.Tensor((num_rows, 1, num_columns), T.dtype(out_dtype)),
        eps: T.float32,
        alpha: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_rows, teams * block_rows), threads=num_threads) as pid:
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            next_local = T.alloc_local((vectors, width), T.dtype(dtype))
            x_local = T.alloc_local((vectors, width), T.float32)
            col_local = T.alloc_local((vectors, width), T.float32)
            out_local = T.alloc_local((width,), T.dtype(out_dtype))
            sums = T.alloc_local((1,), T.float32)
            parts_shared = T.alloc_shared((2, num_threads // WARP, 1), T.float32)
            scale = T.alloc_var(T.float32)
            next_scale = T.alloc_var(T.float32, init=0.0)
            thread = T.get_thread_binding()
            team, lane = thread // row_threads, thread % row_threads
            first = pid * block_rows * teams + team

            T.clear(next_local)
            if first < num_rows:
                load_row(matrix, first, 0, row_threads, piece, next_local)
                next_scale = row_scale[first]
            load_row(col_scale, 0, 0, row_threads, vector_bytes // 4, col_local)
            for i in T.serial(block_rows):
                row = first + i * teams
                scale_row(next_local, next_scale, col_local, x_local, sums)
                if i + 1 < block_rows and row + teams < num_rows:
                    load_row(matrix, row + teams, 0, row_threads, piece, next_local)
                    next_scale = row_scale[row + teams]
                sum_over_row(sums, parts_shared, i % 2, row_threads)
                scale = alpha / (T.sqrt(sums[0]) + eps)
                if row < num_rows:
                    for j in T.unroll(vectors):
                        for e in T.vectorized(width):
                            out_local[e] = T.cast(x_local[j, e] * scale, T.dtype(out_dtype))
                        store_slot(out_local, out, row, 0, j * row_threads + lane, min(width, 16 // out_dtype.itemsize))

    return sinkhorn_finalize


# Ops ----------------------------------------------------------------------------------------


@op(outputs='row_norm col_sumsq_partial')
def engram_sinkhorn_step(matrix: Tensor, row_scale: Mut, col_scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Bring the rows of the scaled matrix to length 1 and measure its columns.

    Args:
        matrix: (num_rows, num_columns) float32 or bfloat16, contiguous; num_columns a multiple of 8.
        row_scale: (num_rows,) float32; divided by the length of its row.
        col_scale: (num_columns,) float32.
        eps: added to the length of a row.

    Returns:
        Lengths of the rows before, (num_rows,) float32, and (num_partials, num_columns) float32 whose sum over the
        first dimension is the sum of squares of each column after; num_partials depends on num_rows alone.
    """
    num_rows, num_columns = check_matrix(matrix, row_scale, col_scale)
    row_norm = torch.empty_like(row_scale)
    partial = row_scale.new_empty(sinkhorn_partials(num_rows), num_columns)
    static = (num_columns, matrix.dtype, check.vector_bytes(matrix, col_scale))
    tensors = (matrix.unsqueeze(1), row_scale, col_scale.unsqueeze(0), row_norm, partial)
    launch(sinkhorn_step_kernel, static, *tensors, eps, size=partial.shape[0])
    return row_norm, partial


@op()
def engram_sinkhorn_step_reduce(col_sumsq_partial: Tensor, col_sumsq: Out) -> None:
    """Add up what `engram_sinkhorn_step` measured of the columns.

    Args:
        col_sumsq_partial: (num_partials, num_columns) float32, contiguous; any number of partial sums.
        col_sumsq: (num_columns,) float32, overwritten.
    """
    _, num_columns = check.shape(
        col_sumsq_partial, 'col_sumsq_partial', 'num_partials num_columns', dtype=torch.float32
    )
    check.shape(col_sumsq, 'col_sumsq', 'num_columns', dtype=torch.float32, num_columns=num_columns)
    check.contiguous(col_sumsq_partial, 'col_sumsq_partial')
    check.contiguous(col_sumsq, 'col_sumsq')
    check.same_device(col_sumsq_partial=col_sumsq_partial, col_sumsq=col_sumsq)
    sum_of_partials(col_sumsq_partial, col_sumsq)


def _finalize(matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float, out: Tensor) -> None:
    _, num_columns = check_matrix(matrix, row_scale, col_scale)
    static = (num_columns, matrix.dtype, out.dtype, check.vector_bytes(matrix, col_scale))
    tensors = (matrix.unsqueeze(1), row_scale, col_scale.unsqueeze(0), out.unsqueeze(1))
    launch(sinkhorn_finalize_kernel, static, *tensors, eps, alpha)


@op(outputs='out')
def sinkhorn_finalize(matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float) -> Tensor:
    """The scaled matrix, each row brought to length alpha.

    Args:
        matrix: (num_rows, num_columns) float32 or bfloat16, contiguous; num_columns a multiple of 8.
        row_scale: (num_rows,) float32.
        col_scale: (num_columns,) float32.
        eps: added to the length of a row.
        alpha: length of the rows of the result.

    Returns:
        (num_rows, num_columns) of the dtype of matrix.
    """
    out = torch.empty_like(matrix)
    _finalize(matrix, row_scale, col_scale, eps, alpha, out)
    return out


@op()
def sinkhorn_finalize_(
    out: Out, matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float
) -> None:
    """`sinkhorn_finalize` into memory of the caller.

    Args:
        out: (num_rows, num_columns) float32 or bfloat16, contiguous, aligned to 16 bytes; overwritten. May be matrix.
        matrix: (num_rows, num_columns) float32 or bfloat16, contiguous; num_columns a multiple of 8.
        row_scale: (num_rows,) float32.
        col_scale: (num_columns,) float32.
        eps: added to the length of a row.
        alpha: length of the rows of the result.
    """
    num_rows, num_columns = check_matrix(matrix, row_scale, col_scale)
    known = {'num_rows': num_rows, 'num_columns': num_columns}
    check.shape(out, 'out', 'num_rows num_columns', dtype=DTYPES, **known)
    check.contiguous(out, 'out')
    check.equal(check.vector_bytes(out), 16, 'alignment of out')
    check.same_device(matrix=matrix, out=out)
    _finalize(matrix, row_scale, col_scale, eps, alpha, out)


def engram_sinkhorn_finalize(
    matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float, out: Tensor | None = None
) -> Tensor:
    """The scaled matrix, each row brought to length alpha: the update of an embedding table.

    Args:
        matrix: (num_rows, num_columns) float32 or bfloat16, contiguous; num_columns a multiple of 8.
        row_scale: (num_rows,) float32.
        col_scale: (num_columns,) float32.
        eps: added to the length of a row.
        alpha: length of the rows of the result.
        out: where to write the result, float32 or bfloat16, or None.

    Returns:
        (num_rows, num_columns) of the dtype of matrix, or `out`.
    """
    if out is None:
        return sinkhorn_finalize(matrix, row_scale, col_scale, eps, alpha)
    sinkhorn_finalize_(out, matrix, row_scale, col_scale, eps, alpha)
    return out


# Cases --------------------------------------------------------------------------------------


def _make_step(**case) -> dict:
    return random_matrix(**case) | dict(eps=1e-8)


def _make_final(**case) -> dict:
    return random_matrix(**case) | dict(eps=1e-8, alpha=0.2)


def _make_final_(out_dtype: torch.dtype = torch.float32, **case) -> dict:
    made = _make_final(**case)
    return made | dict(out=torch.empty(made['matrix'].shape, dtype=out_dtype))


SMOKE = grid(num_rows=[0, 1, 37], num_columns=[256]) + grid(num_rows=[3], num_columns=[8, 1280, 3080], dtype=DTYPES)
FULL = grid(num_rows=[1, 100003], num_columns=[64, 512, 1280, 4096], dtype=DTYPES)
BENCH = grid(num_rows=[100003], num_columns=[512, 1024, 1280]) + grid(num_rows=[64], num_columns=[512])
BOUNDS = dict(rtol=1e-5, atol=1e-5)

engram_sinkhorn_step.cases(make=_make_step, match=BOUNDS, smoke=SMOKE, full=FULL, bench=BENCH)
engram_sinkhorn_step_reduce.cases(
    make=lambda num_partials, num_columns: dict(
        col_sumsq_partial=torch.rand(num_partials, num_columns), col_sumsq=torch.empty(num_columns)
    ),
    match=BOUNDS,
    smoke=grid(num_partials=[0, 1, 50], num_columns=[64, 67]),
    full=grid(num_partials=[256, 396], num_columns=[512, 4096]),
    bench=grid(num_partials=[256], num_columns=[512, 1280]),
)
sinkhorn_finalize.cases(make=_make_final, match=BOUNDS, smoke=SMOKE, full=FULL, bench=BENCH)
sinkhorn_finalize_.cases(
    make=_make_final_,
    match=BOUNDS,
    smoke=SMOKE[:2] + grid(num_rows=[5], num_columns=[64], dtype=DTYPES, out_dtype=[torch.bfloat16]),
    bench=grid(num_rows=[100003], num_columns=[512], out_dtype=[torch.bfloat16]),
)
