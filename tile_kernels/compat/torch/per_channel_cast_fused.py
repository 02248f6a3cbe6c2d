"""Names of `tile_kernels.reference.per_channel_cast_fused` at their path in TileKernels."""

from tile_kernels.reference.per_channel_cast_fused import per_channel_cast_fused as per_channel_cast_fused
