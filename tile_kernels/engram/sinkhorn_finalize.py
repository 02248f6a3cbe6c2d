"""The last step of Sinkhorn: the scaled matrix with rows of length alpha.

out[r, d] = x[r, d] * alpha / (norm[r] + eps)                            x and norm as in `sinkhorn_step`
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, resident_blocks
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Out, op
from tile_kernels.engram._checks import DTYPES, check_matrix
from tile_kernels.engram._macros import OWN, ROW_PASS_CONFIGS, load_row, row_layout, scale_row, store_slot, sum_over_row
from tile_kernels.engram._samples import SINKHORN_BENCH, SINKHORN_BOUNDS, SINKHORN_FULL, SINKHORN_SMOKE, random_matrix

# Kernel --------------------------------------------------------------------------------------


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
    """Each group of `row_threads` threads processes `block_rows` rows and prefetches one row."""
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


# Ops -----------------------------------------------------------------------------------------


def _finalize(matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float, out: Tensor) -> None:
    _, num_columns = check_matrix(matrix, row_scale, col_scale)
    static = (num_columns, matrix.dtype, out.dtype, check.vector_bytes(matrix, col_scale))
    tensors = (matrix.unsqueeze(1), row_scale, col_scale.unsqueeze(0), out.unsqueeze(1))
    launch(sinkhorn_finalize_kernel, static, *tensors, eps, alpha)


@op(outputs='out', name='sinkhorn_finalize', twin='sinkhorn_finalize')
def _engram_sinkhorn_finalize(matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float) -> Tensor:
    """The scaled matrix; each row is normalized to length alpha.

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
    """`sinkhorn_finalize` with the result in memory of the caller.

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


@_engram_sinkhorn_finalize.public
def engram_sinkhorn_finalize(
    matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float, out: Tensor | None = None
) -> Tensor:
    """The scaled matrix with each row normalized to length alpha: the update of an embedding table.

    Args:
        matrix: (num_rows, num_columns) float32 or bfloat16, contiguous; num_columns a multiple of 8.
        row_scale: (num_rows,) float32.
        col_scale: (num_columns,) float32.
        eps: added to the length of a row.
        alpha: length of the rows of the result.
        out: tensor for the result, float32 or bfloat16, or None.

    Returns:
        (num_rows, num_columns) of the dtype of matrix, or `out`.
    """
    if out is None:
        return engram_sinkhorn_finalize.call(matrix, row_scale, col_scale, eps, alpha)
    sinkhorn_finalize_(out, matrix, row_scale, col_scale, eps, alpha)
    return out


# Cases ---------------------------------------------------------------------------------------


def _make_final(**case) -> dict:
    return random_matrix(**case) | dict(eps=1e-8, alpha=0.2)


def _make_final_(out_dtype: torch.dtype = torch.float32, **case) -> dict:
    made = _make_final(**case)
    return made | dict(out=torch.empty(made['matrix'].shape, dtype=out_dtype))


engram_sinkhorn_finalize.cases(
    make=_make_final, match=SINKHORN_BOUNDS, smoke=SINKHORN_SMOKE, full=SINKHORN_FULL, bench=SINKHORN_BENCH
)


sinkhorn_finalize_.cases(
    make=_make_final_,
    match=SINKHORN_BOUNDS,
    smoke=SINKHORN_SMOKE[:2] + grid(num_rows=[5], num_columns=[64], dtype=DTYPES, out_dtype=[torch.bfloat16]),
    bench=grid(num_rows=[100003], num_columns=[512], out_dtype=[torch.bfloat16]),
)
