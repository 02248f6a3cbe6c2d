"""Twins of the attention ops."""

from tile_kernels.reference.attention.attend import attend, attend_bwd
from tile_kernels.reference.attention.combine import combine

__all__ = ['attend', 'attend_bwd', 'combine']


def __dir__() -> list[str]:
    return __all__
