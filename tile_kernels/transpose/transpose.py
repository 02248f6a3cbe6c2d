"""Transpose of one matrix; see `batched_transpose` for the kernel."""

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.transpose.batched_transpose import batched_transpose, bits_of


def transpose(x: Tensor) -> Tensor:
    """Transpose a matrix: `batched_transpose` for a batch of one.

    Args:
        x: (num_rows, num_cols), with the dtypes, sizes and strides of `batched_transpose`.

    Returns:
        (num_cols, num_rows), contiguous, never an alias of `x`.
    """
    check.shape(x, 'x', 'num_rows num_cols')
    bits_of(x, 'x')  # checked here, so that errors show the shape that was given
    return batched_transpose(x.unsqueeze(0)).squeeze(0)
