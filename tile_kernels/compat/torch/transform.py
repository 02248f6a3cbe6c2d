"""`tile_kernels.reference.transform` under its earlier path."""

from tile_kernels.reference.transform import *  # noqa: F403
