"""Sinkhorn steps of the Engram optimizer: two scales bring the rows and columns of an update to equal length.

    x[r, d]        = row_scale[r] * matrix[r, d] * col_scale[d]
    norm[r]        = sqrt(sum_d x[r, d]^2)
    row_scale[r]  <- row_scale[r] / (norm[r] + eps)                          a step, in place
    col_sumsq[d]   = sum_r (x[r, d] / (norm[r] + eps))^2                     a step, as partial sums
    out[r, d]      = x[r, d] * alpha / (norm[r] + eps)                       the end

`row_threads` threads own a row. The groups of a block process several rows in parallel. A thread keeps the scales of
its columns and their sums over rows in registers. Memory bound: the floor is reading the matrix (and writing the
result).
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, resident_blocks
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.engram._checks import check_matrix, sinkhorn_partials
from tile_kernels.engram._macros import OWN, ROW_PASS_CONFIGS, load_row, row_layout, scale_row, sum_over_row
from tile_kernels.engram._samples import SINKHORN_BENCH, SINKHORN_BOUNDS, SINKHORN_FULL, SINKHORN_SMOKE, random_matrix

# Kernel --------------------------------------------------------------------------------------


@kernel(
    choose=lambda *static: dict(resident_threads=512),
    space=dict(resident_threads=(256, 512, 768)),
    pass_configs=ROW_PASS_CONFIGS,
)
def sinkhorn_step_kernel(num_columns: int, dtype: torch.dtype, vector_bytes: int, *, resident_threads: int):
    """Block p processes the rows r with r % num_partials = p, `teams` of them at a time.

    It prefetches two rows, or one if registers do not suffice for two.
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


# Op ------------------------------------------------------------------------------------------


@op(outputs='row_norm col_sumsq_partial', name='sinkhorn_step')
def engram_sinkhorn_step(matrix: Tensor, row_scale: Mut, col_scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalize the rows of the scaled matrix to length 1 and compute the sums of squares of its columns.

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


# Cases ---------------------------------------------------------------------------------------


def _make_step(**case) -> dict:
    return random_matrix(**case) | dict(eps=1e-8)


engram_sinkhorn_step.cases(
    make=_make_step, match=SINKHORN_BOUNDS, smoke=SINKHORN_SMOKE, full=SINKHORN_FULL, bench=SINKHORN_BENCH
)
