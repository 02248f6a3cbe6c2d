"""Names of `tile_kernels.mhc` at their path in TileKernels."""

from tile_kernels.mhc import mhc_pre_big_fuse_fwd
