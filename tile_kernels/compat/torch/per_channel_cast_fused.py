"""`tile_kernels.reference.per_channel_cast_fused` under its path in TileKernels."""

from tile_kernels.reference.per_channel_cast_fused import per_channel_cast_fused as per_channel_cast_fused
