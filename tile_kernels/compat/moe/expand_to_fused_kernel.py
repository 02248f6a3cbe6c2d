"""Names of `tile_kernels.moe` at their path in TileKernels."""

from tile_kernels.moe import expand_to_fused, expand_to_fused_with_sf
