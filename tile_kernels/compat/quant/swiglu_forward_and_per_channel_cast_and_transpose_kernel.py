"""Names of `tile_kernels.quant` at their path in TileKernels."""

from tile_kernels.quant import swiglu_forward_and_per_channel_cast_and_transpose
