"""Names of `tile_kernels.reference` at their path in TileKernels."""

from tile_kernels.reference import cast_back_from_e5m6, cast_to_e5m6
