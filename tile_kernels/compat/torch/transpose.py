"""`tile_kernels.reference.transpose` under its earlier path."""

from tile_kernels.reference.transpose import *  # noqa: F403
