"""`tile_kernels.torch`: another name of `tile_kernels.reference`."""

import sys

from tile_kernels.compat import attach
from tile_kernels.reference import *  # noqa: F403
from tile_kernels.reference import __all__ as __all__

# TileKernels has modules and functions of these names; here as there, the attribute is the function
attach(sys.modules[__name__], 'cast', 'expand_to_fused', 'per_channel_cast_fused', 'reduce_fused')


def __dir__() -> list[str]:
    return __all__
