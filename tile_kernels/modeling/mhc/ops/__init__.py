"""The ops of hyper-connections as differentiable functions, one module each.

They work with ordinary autograd. If a parameter has a `main_grad`, its gradient is added to that. If the storage of a
residual has `grad_from_mhc_post`, gradients are added to that; see `post`.
"""

from tile_kernels.modeling.mhc.ops.expand import expand_to_mhc
from tile_kernels.modeling.mhc.ops.head_compute_mix import mhc_head_compute_mix
from tile_kernels.modeling.mhc.ops.multilayer_recompute import mhc_multilayer_recompute
from tile_kernels.modeling.mhc.ops.norm_fn import mhc_pre_norm_fn
from tile_kernels.modeling.mhc.ops.post import mhc_post, mhc_post_bwd, mhc_post_fwd
from tile_kernels.modeling.mhc.ops.pre_apply_mix import mhc_pre_apply_mix
from tile_kernels.modeling.mhc.ops.pre_big_fuse import mhc_pre_big_fuse
from tile_kernels.modeling.mhc.ops.pre_split_mixes import mhc_pre_split_mixes
from tile_kernels.modeling.mhc.ops.sinkhorn import sinkhorn_normalize

__all__ = [
    'expand_to_mhc',
    'mhc_head_compute_mix',
    'mhc_multilayer_recompute',
    'mhc_post',
    'mhc_post_bwd',
    'mhc_post_fwd',
    'mhc_pre_apply_mix',
    'mhc_pre_big_fuse',
    'mhc_pre_norm_fn',
    'mhc_pre_split_mixes',
    'sinkhorn_normalize',
]
