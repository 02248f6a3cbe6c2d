"""Names of `tile_kernels.reference` at their path in TileKernels."""

from tile_kernels.reference import expand_to_fused, expand_to_fused_with_sf
