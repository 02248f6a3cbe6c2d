"""Names of `tile_kernels.mhc` at their path in TileKernels."""

from tile_kernels.mhc import (
    mhc_fn_normw_merge_bwd,
    mhc_fn_normw_merge_fwd,
    mhc_reduce_partials_and_rmsnorm_bwd,
    mhc_reduce_partials_and_rmsnorm_fwd,
    norm_fn,
)
