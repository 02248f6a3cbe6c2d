"""What happens to the residual streams at the ends of a model and before each of its layers."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.mhc.norm_weight import merge_norm_weight
from tile_kernels.modeling.mhc.ops import (
    expand_to_mhc,
    mhc_head_compute_mix,
    mhc_post,
    mhc_pre_apply_mix,
    mhc_pre_big_fuse,
    mhc_pre_norm_fn,
    mhc_pre_split_mixes,
    sinkhorn_normalize,
)


def expand_from_embedding(x: Tensor, mhc_mult: int = 4) -> Tensor:
    """Residual streams from embeddings (..., hidden): (..., mhc_mult, hidden)."""
    return expand_to_mhc(x, mhc_mult)


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    n_splits: int = 16,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The input of a layer, and the coefficients that its output will be mixed with.

    Where nothing needs a gradient this takes two launches, with the same bits.

    Args:
        residual: (..., n, hidden) bfloat16, contiguous.
        fn: (n (2 + n), n * hidden) float32.
        scale: (3,) float32.
        base: (n (2 + n),) float32.
        norm_weight: (n * hidden,) float32 or None.
        norm_eps: added to the mean square.
        mhc_mult: n.
        post_mult_value: factor of the post coefficients.
        pre_eps: added to the pre coefficients.
        sinkhorn_eps: as given to `sinkhorn_normalize`.
        sinkhorn_repeat: as given to `sinkhorn_normalize`.
        n_splits: has no effect.

    Returns:
        layer_input (..., hidden) bfloat16, and (post_mix (..., n, 1), comb_mix (..., n, n)) for `mhc_post`.
    """
    check.equal(residual.shape[-2], mhc_mult, 'the number of streams')
    inputs = (residual, fn, scale, base, norm_weight)
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in inputs):
        merged = fn if norm_weight is None else merge_norm_weight(fn, norm_weight)
        options = (norm_eps, pre_eps, sinkhorn_eps, post_mult_value, sinkhorn_repeat)
        post_mix, comb_mix, layer_input = mhc_pre_big_fuse(residual, merged, scale, base, *options)
        return layer_input, (post_mix, comb_mix)
    mixes = mhc_pre_norm_fn(residual, fn, norm_weight, norm_eps)
    pre_mix, post_mix, z = mhc_pre_split_mixes(mixes, scale, base, mhc_mult, post_mult_value, pre_eps)
    comb_mix = sinkhorn_normalize(z, sinkhorn_repeat, sinkhorn_eps)
    return mhc_pre_apply_mix(residual, pre_mix), (post_mix, comb_mix)


def mhc_post_pre(
    x: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Post of one layer and pre of the next.

    Args:
        x: (..., hidden) bfloat16; what the layer put out.
        residual: (..., n, hidden) bfloat16; the residual before it.
        post_mix: (..., n, 1) float32, from the pre of the layer.
        comb_mix: (..., n, n) float32, from the pre of the layer.
        fn: of the next layer, as `scale`, `base` and the options; see `mhc_pre`.
        scale: see `mhc_pre`.
        base: see `mhc_pre`.
        options: keyword arguments of `mhc_pre`.

    Returns:
        The next residual, and what `mhc_pre` gives for it: layer_input and (post_mix, comb_mix).
    """
    following = mhc_post(x, residual, post_mix, comb_mix)
    return following, *mhc_pre(following, fn, scale, base, **options)


def mhc_head(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    pre_eps: float = 1e-6,
    n_splits: int = 16,
) -> Tensor:
    """Close the residual streams: their weighted sum, with weights from a projection of their own.

    Args:
        residual: (..., n, hidden) bfloat16, contiguous.
        fn: (n, n * hidden) float32.
        scale: (1,) float32.
        base: (n,) float32.
        norm_weight: (n * hidden,) float32 or None.
        norm_eps: added to the mean square.
        mhc_mult: n.
        pre_eps: added to the weights.
        n_splits: has no effect.

    Returns:
        (..., hidden) bfloat16.
    """
    check.equal(residual.shape[-2], mhc_mult, 'the number of streams')
    mixes = mhc_pre_norm_fn(residual, fn, norm_weight, norm_eps)
    mix = mhc_head_compute_mix(mixes, scale, base, pre_eps)
    return mhc_pre_apply_mix(residual, mix.unsqueeze(-1))
