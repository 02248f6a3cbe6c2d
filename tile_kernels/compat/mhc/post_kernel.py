"""`mhc_post_bwd` with `fuse_grad_acc`, and `mhc_post_fwd`, at their path in TileKernels 1.0."""

from tile_kernels.modeling.mhc.ops.post import mhc_post_bwd, mhc_post_fwd
