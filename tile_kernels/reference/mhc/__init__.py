"""What the ops of `tile_kernels.mhc` mean, in plain PyTorch."""

from tile_kernels.reference.mhc._common import round_to_tf32
from tile_kernels.reference.mhc.apply_mix import (
    apply_mix,
    apply_mix_bwd,
    apply_mix_bwd_,
    mhc_mix_apply,
    mhc_pre_apply_mix_ref,
)
from tile_kernels.reference.mhc.big_fuse import big_fuse
from tile_kernels.reference.mhc.expand import expand, expand_bwd, expand_to_mhc_ref
from tile_kernels.reference.mhc.head_mix import head_mix, head_mix_bwd, head_mix_bwd_parts, mhc_head_compute_mix_ref
from tile_kernels.reference.mhc.merge_norm_weight import (
    merge_norm_weight,
    merge_norm_weight_bwd,
    merge_norm_weight_bwd_,
)
from tile_kernels.reference.mhc.mix_and_apply import mix_and_apply
from tile_kernels.reference.mhc.norm_fn import (
    mhc_pre_norm_fn_partials_ref,
    mhc_pre_norm_fn_ref,
    norm_fn,
    norm_fn_bwd,
    norm_fn_bwd_,
)
from tile_kernels.reference.mhc.post import mhc_post_ref, post, post_bwd
from tile_kernels.reference.mhc.post_pre import post_pre, post_pre_bwd
from tile_kernels.reference.mhc.pre import pre, pre_bwd
from tile_kernels.reference.mhc.recompute import mhc_multilayer_recompute, recompute_
from tile_kernels.reference.mhc.reduce_parts import reduce_parts, reduce_parts_bwd
from tile_kernels.reference.mhc.sinkhorn import sinkhorn, sinkhorn_bwd, sinkhorn_normalize, sinkhorn_normalize_ref
from tile_kernels.reference.mhc.split_mixes import mhc_mix_split, mhc_pre_split_mixes_ref, split_mixes, split_mixes_bwd
