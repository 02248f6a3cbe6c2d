"""Names of `tile_kernels.mhc` at their path in TileKernels."""

from tile_kernels.mhc import mhc_head_compute_mix_bwd, mhc_head_compute_mix_fwd
