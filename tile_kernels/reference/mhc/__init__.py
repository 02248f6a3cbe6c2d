"""What the ops of `tile_kernels.mhc` mean, in plain PyTorch."""

from tile_kernels.reference.mhc.fused import (
    big_fuse,
    mhc_multilayer_recompute,
    mix_and_apply_,
    post_pre,
    post_pre_bwd,
    pre,
    pre_bwd,
)
from tile_kernels.reference.mhc.mixes import (
    head_mix,
    head_mix_,
    head_mix_bwd,
    head_mix_bwd_parts_,
    sinkhorn,
    sinkhorn_,
    sinkhorn_bwd,
    sinkhorn_bwd_,
    split_mixes,
    split_mixes_,
    split_mixes_bwd,
    split_mixes_bwd_,
)
from tile_kernels.reference.mhc.projection import (
    merge_norm_weight,
    merge_norm_weight_,
    merge_norm_weight_bwd,
    merge_norm_weight_bwd_,
    norm_fn,
    norm_fn_bwd,
    norm_fn_bwd_,
    reduce_parts_,
    reduce_parts_bwd_,
    round_to_tf32,
)
from tile_kernels.reference.mhc.references import (
    expand_to_mhc_ref,
    mhc_head_compute_mix_ref,
    mhc_mix_apply,
    mhc_mix_split,
    mhc_post_ref,
    mhc_pre_apply_mix_ref,
    mhc_pre_norm_fn_partials_ref,
    mhc_pre_norm_fn_ref,
    mhc_pre_split_mixes_ref,
    sinkhorn_normalize,
    sinkhorn_normalize_ref,
)
from tile_kernels.reference.mhc.streams import (
    apply_mix,
    apply_mix_,
    apply_mix_bwd,
    apply_mix_bwd_,
    expand,
    expand_,
    expand_bwd,
    expand_bwd_,
    post,
    post_,
    post_bwd,
)
