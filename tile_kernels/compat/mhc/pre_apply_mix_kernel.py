"""Names of `tile_kernels.mhc` at their path in TileKernels."""

from tile_kernels.mhc import mhc_pre_apply_mix_bwd, mhc_pre_apply_mix_fwd
