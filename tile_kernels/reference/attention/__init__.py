"""Twins of the attention ops."""

from tile_kernels.reference.attention.append import append
from tile_kernels.reference.attention.attend import attend, attend_bwd
from tile_kernels.reference.attention.combine import combine
from tile_kernels.reference.attention.decode import decode

__all__ = ['append', 'attend', 'attend_bwd', 'combine', 'decode']


def __dir__() -> list[str]:
    return __all__
