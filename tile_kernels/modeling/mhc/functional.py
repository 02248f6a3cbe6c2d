"""Functions on the residual streams: at both ends of a model and before each of its layers."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.mhc.apply_mix import apply_mix_bwd_
from tile_kernels.mhc.big_fuse import big_fuse
from tile_kernels.mhc.merge_norm_weight import merge_norm_weight, merge_norm_weight_bwd
from tile_kernels.mhc.norm_fn import norm_fn_bwd_
from tile_kernels.mhc.post_pre import post_pre, post_pre_bwd
from tile_kernels.mhc.pre import pre, pre_bwd
from tile_kernels.mhc.sinkhorn import sinkhorn_bwd
from tile_kernels.mhc.split_mixes import split_mixes, split_mixes_bwd
from tile_kernels.modeling._parameters import into_main_grad
from tile_kernels.modeling.mhc.ops import (
    expand_to_mhc,
    mhc_head_compute_mix,
    mhc_pre_apply_mix,
    mhc_pre_norm_fn,
)
from tile_kernels.modeling.mhc.ops.post import handed_over


class _Pre(torch.autograd.Function):
    """`pre` or `post_pre`; backward adds to `main_grad` and to a gradient that `mhc_post` has left."""

    @staticmethod
    def forward(
        ctx: Any,
        options: tuple,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        norm_weight: Tensor | None,
        *streams: Tensor,
    ) -> tuple[Tensor, ...]:
        merged = fn if norm_weight is None else merge_norm_weight(fn, norm_weight)
        run = pre.call if len(streams) == 1 else post_pre.call
        *results, pre_mix, mixes, rstd = run(*streams, merged, scale, base, *options)
        made = streams if len(streams) == 1 else (*streams, results[0])
        ctx.save_for_backward(fn, scale, base, norm_weight, merged, pre_mix, mixes, rstd, *made)
        repeat, _, _, sinkhorn_eps, post_mult = options
        ctx.options = (repeat, sinkhorn_eps, post_mult)
        ctx.parameters = (fn, norm_weight)  # saved tensors lose their attributes
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple:
        fn, scale, base, norm_weight, merged, *saved = ctx.saved_tensors
        saved, streams = saved[:3], saved[3:]
        upstream = tuple(d.contiguous() for d in upstream)
        left = handed_over(streams[-1])
        if len(streams) > 1:
            *dstreams, dmerged, dscale, dbase = post_pre_bwd.call(
                *upstream, *streams[:-1], merged, scale, base, streams[-1], *saved, *ctx.options
            )
        elif left is None:
            *dstreams, dmerged, dscale, dbase = pre_bwd.call(
                *upstream, *streams, merged, scale, base, *saved, *ctx.options
            )
        else:
            dstreams = [None]
            dmerged, dscale, dbase = _pre_bwd_(
                upstream, streams[0], merged, scale, base, saved, left.view(streams[0].shape), ctx.options
            )
        if left is not None:
            del streams[-1].untyped_storage().grad_from_mhc_post
        dfn, dnorm_weight = dmerged, None
        if norm_weight is not None:
            dfn, dnorm_weight = merge_norm_weight_bwd(dmerged, fn, norm_weight)
        own_fn, own_weight = ctx.parameters
        return None, into_main_grad(own_fn, dfn), dscale, dbase, into_main_grad(own_weight, dnorm_weight), *dstreams


def _pre_bwd_(
    upstream: tuple,
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    saved: list,
    dresidual: Tensor,
    options: tuple,
) -> tuple:
    """As `pre_bwd`, with the gradient of residual added to dresidual."""
    (dlayer_input, dpost, dcomb), (pre_mix, mixes, rstd) = upstream, saved
    repeat, sinkhorn_eps, post_mult = options
    dpre = apply_mix_bwd_(dlayer_input, residual, pre_mix, dresidual)
    z = split_mixes(mixes, scale, base, residual.shape[-2])[2]
    dz = sinkhorn_bwd(dcomb, z, repeat, sinkhorn_eps)
    dmixes, dscale, dbase = split_mixes_bwd(dpre, dpost, dz, mixes, scale, base, post_mult)
    return norm_fn_bwd_(dmixes, residual, fn, mixes, rstd, dresidual), dscale, dbase


def _run_pre(
    fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, options: tuple, *streams: Tensor
) -> tuple[Tensor, ...]:
    """The differentiable results of `pre` or `post_pre`."""
    if not torch.compiler.is_compiling():
        return _Pre.apply(options, fn, scale, base, norm_weight, *streams)
    merged = fn if norm_weight is None else merge_norm_weight(fn, norm_weight)
    run = pre.call if len(streams) == 1 else post_pre.call
    return run(*streams, merged, scale, base, *options)[:-3]


def expand_from_embedding(x: Tensor, mhc_mult: int = 4) -> Tensor:
    """Residual streams from embeddings (..., hidden): (..., mhc_mult, hidden)."""
    return expand_to_mhc(x, mhc_mult)


def _check_streams(residual: Tensor, mhc_mult: int) -> None:
    if check.tensor(residual, 'residual').shape[-2:-1] != (mhc_mult,):
        check.fail('residual', f'must be (..., mhc_mult, hidden) with mhc_mult = {mhc_mult}', check.describe(residual))


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
    """The input of a layer, and the coefficients that its output is mixed with.

    The same kernels run with and without gradients, so the bits are the same.

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
    _check_streams(residual, mhc_mult)
    options = (sinkhorn_repeat, norm_eps, pre_eps, sinkhorn_eps, post_mult_value)
    inputs = (residual, fn, scale, base, norm_weight)
    if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        merged = fn if norm_weight is None else merge_norm_weight(fn, norm_weight)
        post_mix, comb_mix, layer_input = big_fuse(residual, merged, scale, base, *options)
    else:
        layer_input, post_mix, comb_mix = _run_pre(fn, scale, base, norm_weight, options, residual)
    return layer_input, (post_mix, comb_mix)


def mhc_post_pre(
    x: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
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
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Post of one layer and pre of the next, with the bits of the two; the gradient between them is written once.

    Args:
        x: (..., hidden) bfloat16; the output of the layer.
        residual: (..., n, hidden) bfloat16; the residual before it.
        post_mix: (..., n, 1) float32, from the pre of the layer.
        comb_mix: (..., n, n) float32, from the pre of the layer.
        fn: (n (2 + n), n * hidden) float32; of the next layer, like all following arguments.
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
        The next residual, and what `mhc_pre` gives for it: layer_input and (post_mix, comb_mix).
    """
    _check_streams(residual, mhc_mult)
    options = (sinkhorn_repeat, norm_eps, pre_eps, sinkhorn_eps, post_mult_value)
    streams = (x, residual, post_mix, comb_mix)
    following, layer_input, post, comb = _run_pre(fn, scale, base, norm_weight, options, *streams)
    return following, layer_input, (post, comb)


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
    _check_streams(residual, mhc_mult)
    check.shape(fn, 'fn', 'mhc_mult elements', mhc_mult=mhc_mult)
    mixes = mhc_pre_norm_fn(residual, fn, norm_weight, norm_eps)
    mix = mhc_head_compute_mix(mixes, scale, base, pre_eps)
    return mhc_pre_apply_mix(residual, mix.unsqueeze(-1))
