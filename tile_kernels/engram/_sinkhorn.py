"""What the Sinkhorn steps share on the host: checks, the number of partial sums, samples."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.engram._rows import MAX_HIDDEN, SLOT

DTYPES = (torch.float32, torch.bfloat16)

#: Blocks that go through the rows of a matrix: two on each of 128 SMs.
MAX_PARTIALS = 256


def sinkhorn_partials(num_rows: int) -> int:
    """Partial sums of a step; at least one, so that there are always zeros to add up."""
    return torch.sym_max(1, torch.sym_min(num_rows, MAX_PARTIALS))


def check_matrix(matrix: Tensor, row_scale: Tensor, col_scale: Tensor) -> tuple[int, int]:
    """Check a matrix and its scales; returns num_rows and num_columns."""
    num_rows, num_columns = check.shape(matrix, 'matrix', 'num_rows num_columns', dtype=DTYPES)
    check.shape(row_scale, 'row_scale', 'num_rows', dtype=torch.float32, num_rows=num_rows)
    check.shape(col_scale, 'col_scale', 'num_columns', dtype=torch.float32, num_columns=num_columns)
    check.multiple(num_columns, SLOT, 'num_columns')
    check.at_least(num_columns, SLOT, 'num_columns')
    check.at_most(num_columns, MAX_HIDDEN, 'num_columns')
    check.contiguous(matrix, 'matrix')
    check.contiguous(row_scale, 'row_scale')
    check.contiguous(col_scale, 'col_scale')
    check.same_device(matrix=matrix, row_scale=row_scale, col_scale=col_scale)
    return num_rows, num_columns


def random_matrix(num_rows: int, num_columns: int, dtype: torch.dtype = torch.float32) -> dict:
    """A matrix with positive scales."""
    return dict(
        matrix=torch.randn(num_rows, num_columns, dtype=dtype),
        row_scale=torch.rand(num_rows) + 0.5,
        col_scale=torch.rand(num_columns) + 0.5,
    )
