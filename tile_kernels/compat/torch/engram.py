"""`tile_kernels.reference.engram` under its earlier path."""

from tile_kernels.reference.engram import *  # noqa: F403
