"""`tile_kernels.reference.mhc` under its earlier path."""

from tile_kernels.reference.mhc import *  # noqa: F403
