"""`tile_kernels.reference.rand` under its earlier path."""

from tile_kernels.reference.rand import *  # noqa: F403
