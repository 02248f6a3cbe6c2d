"""`tile_kernels.torch`: another name of `tile_kernels.reference`."""

from tile_kernels.reference import *  # noqa: F403
from tile_kernels.reference import __all__ as __all__


def __dir__() -> list[str]:
    return __all__
