"""Twins of the attention ops."""

from tile_kernels.reference.attention.combine import combine

__all__ = ['combine']


def __dir__() -> list[str]:
    return __all__
