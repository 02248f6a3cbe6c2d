"""Names of `tile_kernels.quant` at their path in TileKernels."""

from tile_kernels.quant import cast_back, per_token_cast_back
