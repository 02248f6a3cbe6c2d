"""Sum of the partial column sums of `sinkhorn_step`."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.op import Out, op
from tile_kernels.engram._samples import SINKHORN_BOUNDS
from tile_kernels.engram.grad_w_reduce import sum_of_partials


@op(name='sinkhorn_step_reduce')
def engram_sinkhorn_step_reduce(col_sumsq_partial: Tensor, col_sumsq: Out) -> None:
    """Add up the partial column sums of `engram_sinkhorn_step`.

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


engram_sinkhorn_step_reduce.cases(
    make=lambda num_partials, num_columns: dict(
        col_sumsq_partial=torch.rand(num_partials, num_columns), col_sumsq=torch.empty(num_columns)
    ),
    match=SINKHORN_BOUNDS,
    smoke=grid(num_partials=[0, 1, 50], num_columns=[64, 67]),
    full=grid(num_partials=[256, 396], num_columns=[512, 4096]),
    bench=grid(num_partials=[256], num_columns=[512, 1280]),
)
