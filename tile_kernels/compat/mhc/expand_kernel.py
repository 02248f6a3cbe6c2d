"""Names of `tile_kernels.mhc` at their path in TileKernels."""

from tile_kernels.mhc import expand_to_mhc_bwd, expand_to_mhc_fwd
