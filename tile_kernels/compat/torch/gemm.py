"""`tile_kernels.reference.gemm` under its earlier path."""

from tile_kernels.reference.gemm import *  # noqa: F403
