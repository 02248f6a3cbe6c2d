"""Manifold hyper-connections: several residual streams, mixed before and after every layer."""

from tile_kernels.mhc.apply_mix import apply_mix, mhc_mix_apply, mhc_pre_apply_mix_bwd, mhc_pre_apply_mix_fwd
from tile_kernels.mhc.big_fuse import big_fuse
from tile_kernels.mhc.expand import expand, expand_to_mhc_bwd, expand_to_mhc_fwd
from tile_kernels.mhc.head_mix import head_mix, mhc_head_compute_mix_bwd, mhc_head_compute_mix_fwd
from tile_kernels.mhc.merge_norm_weight import merge_norm_weight, mhc_fn_normw_merge_bwd, mhc_fn_normw_merge_fwd
from tile_kernels.mhc.mix_and_apply import mhc_pre_big_fuse_fwd
from tile_kernels.mhc.norm_fn import norm_fn
from tile_kernels.mhc.post import mhc_post_bwd, mhc_post_fwd, post
from tile_kernels.mhc.post_pre import post_pre
from tile_kernels.mhc.pre import pre
from tile_kernels.mhc.recompute import mhc_multilayer_recompute
from tile_kernels.mhc.reduce_parts import mhc_reduce_partials_and_rmsnorm_bwd, mhc_reduce_partials_and_rmsnorm_fwd
from tile_kernels.mhc.sinkhorn import mhc_sinkhorn_bwd, mhc_sinkhorn_fwd, sinkhorn, sinkhorn_normalize
from tile_kernels.mhc.split_mixes import mhc_mix_split, mhc_pre_split_mixes_bwd, mhc_pre_split_mixes_fwd, split_mixes

__all__ = [
    'apply_mix',
    'big_fuse',
    'expand',
    'expand_to_mhc_bwd',
    'expand_to_mhc_fwd',
    'head_mix',
    'merge_norm_weight',
    'mhc_fn_normw_merge_bwd',
    'mhc_fn_normw_merge_fwd',
    'mhc_head_compute_mix_bwd',
    'mhc_head_compute_mix_fwd',
    'mhc_mix_apply',
    'mhc_mix_split',
    'mhc_multilayer_recompute',
    'mhc_post_bwd',
    'mhc_post_fwd',
    'mhc_pre_apply_mix_bwd',
    'mhc_pre_apply_mix_fwd',
    'mhc_pre_big_fuse_fwd',
    'mhc_pre_split_mixes_bwd',
    'mhc_pre_split_mixes_fwd',
    'mhc_reduce_partials_and_rmsnorm_bwd',
    'mhc_reduce_partials_and_rmsnorm_fwd',
    'mhc_sinkhorn_bwd',
    'mhc_sinkhorn_fwd',
    'norm_fn',
    'post',
    'post_pre',
    'pre',
    'sinkhorn',
    'sinkhorn_normalize',
    'split_mixes',
]


def __dir__() -> list[str]:
    return __all__
