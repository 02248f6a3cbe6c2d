"""Names of `tile_kernels.transpose` at their path in TileKernels."""

from tile_kernels.transpose import batched_transpose, transpose
