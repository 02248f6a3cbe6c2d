"""Names of `tile_kernels.quant` at their path in TileKernels."""

from tile_kernels.quant import per_channel_cast_and_transpose
