"""Transposes of matrices of every dtype and every size."""

from tile_kernels.transpose.batched_transpose import batched_transpose, batched_transpose_bwd
from tile_kernels.transpose.transpose import transpose

__all__ = ['batched_transpose', 'batched_transpose_bwd', 'transpose']


def __dir__() -> list[str]:
    return __all__
