"""`tile_kernels.reference.quant` under its earlier path."""

from tile_kernels.reference.quant import *  # noqa: F403
