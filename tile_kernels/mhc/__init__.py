"""Manifold hyper-connections: several residual streams, mixed before and after every layer."""

from tile_kernels.mhc.apply_mix import apply_mix
from tile_kernels.mhc.big_fuse import big_fuse
from tile_kernels.mhc.expand import expand
from tile_kernels.mhc.front import (
    expand_to_mhc_bwd,
    expand_to_mhc_fwd,
    mhc_fn_normw_merge_bwd,
    mhc_fn_normw_merge_fwd,
    mhc_head_compute_mix_bwd,
    mhc_head_compute_mix_fwd,
    mhc_mix_apply,
    mhc_mix_split,
    mhc_post_bwd,
    mhc_post_fwd,
    mhc_pre_apply_mix_bwd,
    mhc_pre_apply_mix_fwd,
    mhc_pre_big_fuse_fwd,
    mhc_pre_split_mixes_bwd,
    mhc_pre_split_mixes_fwd,
    mhc_reduce_partials_and_rmsnorm_bwd,
    mhc_reduce_partials_and_rmsnorm_fwd,
    mhc_sinkhorn_bwd,
    mhc_sinkhorn_fwd,
    sinkhorn_normalize,
)
from tile_kernels.mhc.head_mix import head_mix
from tile_kernels.mhc.norm_fn import norm_fn
from tile_kernels.mhc.norm_weight import merge_norm_weight
from tile_kernels.mhc.post import post
from tile_kernels.mhc.post_pre import post_pre, pre
from tile_kernels.mhc.recompute import mhc_multilayer_recompute
from tile_kernels.mhc.sinkhorn import sinkhorn
from tile_kernels.mhc.split_mixes import split_mixes

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
