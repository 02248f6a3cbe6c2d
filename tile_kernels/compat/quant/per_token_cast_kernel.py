"""Names of `tile_kernels.quant` at their path in TileKernels."""

from tile_kernels.quant import per_token_cast, per_token_cast_with_precomputed_sf, per_token_cast_with_sf_only
