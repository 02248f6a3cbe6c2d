"""`tile_kernels.reference.moe` under its earlier path."""

from tile_kernels.reference.moe import *  # noqa: F403
