"""Names of `tile_kernels.mhc` at their path in TileKernels."""

from tile_kernels.mhc import mhc_sinkhorn_bwd, mhc_sinkhorn_fwd
