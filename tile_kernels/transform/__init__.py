"""Rotary position embedding."""

from tile_kernels.transform.apply_rotary import apply_rotary
from tile_kernels.transform.rotary_embedding import rotary_embedding

__all__ = ['apply_rotary', 'rotary_embedding']


def __dir__() -> list[str]:
    return __all__
