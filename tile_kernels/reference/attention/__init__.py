"""Twins of the attention ops."""

from tile_kernels.reference.attention.attend import attend, attend_bwd
from tile_kernels.reference.attention.combine import combine
from tile_kernels.reference.attention.decode import decode
from tile_kernels.reference.attention.topk_indices import topk_indices

__all__ = ['attend', 'attend_bwd', 'combine', 'decode', 'topk_indices']


def __dir__() -> list[str]:
    return __all__
