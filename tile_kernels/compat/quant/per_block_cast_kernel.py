"""Names of `tile_kernels.quant` at their path in TileKernels."""

from tile_kernels.quant import per_block_cast, per_block_cast_with_precomputed_sf, per_block_cast_with_sf_only
