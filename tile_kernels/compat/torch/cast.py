"""Names of `tile_kernels.reference` at their path in TileKernels."""

from tile_kernels.reference import cast, cast_back
