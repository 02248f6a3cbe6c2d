"""`mhc_post_fwd` and `mhc_post_bwd` under the module path of TileKernels."""

from tile_kernels.mhc.post import mhc_post_bwd_fused as mhc_post_bwd
from tile_kernels.mhc.post import mhc_post_fwd

__all__ = ['mhc_post_bwd', 'mhc_post_fwd']
