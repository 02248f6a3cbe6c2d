"""The projection that the coefficients of a layer come from."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.mhc.merge_norm_weight import merge_norm_weight, merge_norm_weight_bwd
from tile_kernels.mhc.norm_fn import norm_fn, norm_fn_bwd, norm_fn_bwd_
from tile_kernels.modeling._parameters import into_main_grad
from tile_kernels.modeling.mhc.ops.post import handed_over


class _NormFn(torch.autograd.Function):
    """`norm_fn` of merged weights; backward adds to `main_grad` and to a gradient that `mhc_post` has left."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, fn: Tensor, norm_weight: Tensor | None, eps: float, fuse_grad_acc: bool
    ) -> Tensor:
        merged = fn if norm_weight is None else merge_norm_weight(fn, norm_weight)
        mixes, rstd = norm_fn(residual, merged, eps)
        ctx.save_for_backward(residual, fn, norm_weight, merged, mixes, rstd)
        ctx.fuse_grad_acc = fuse_grad_acc
        ctx.parameters = (fn, norm_weight)  # saved tensors lose their attributes
        return mixes

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dmixes: Tensor) -> tuple:
        residual, fn, norm_weight, merged, mixes, rstd = ctx.saved_tensors
        dresidual = handed_over(residual) if ctx.fuse_grad_acc else None
        if dresidual is None:
            dresidual, dmerged = norm_fn_bwd(dmixes.contiguous(), residual, merged, mixes, rstd)
        else:
            dmerged = norm_fn_bwd_(dmixes.contiguous(), residual, merged, mixes, rstd, dresidual.view(residual.shape))
            del residual.untyped_storage().grad_from_mhc_post
            dresidual = None
        dfn, dnorm_weight = dmerged, None
        if norm_weight is not None:
            dfn, dnorm_weight = merge_norm_weight_bwd(dmerged, fn, norm_weight)
        own_fn, own_weight = ctx.parameters
        return dresidual, into_main_grad(own_fn, dfn), into_main_grad(own_weight, dnorm_weight), None, None


def mhc_pre_norm_fn(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int = 16,
) -> Tensor:
    """Project the normalized streams of every token; differentiable in residual, mhc_fn and mhc_norm_weight.

    Args:
        residual: (..., n, hidden) bfloat16, contiguous.
        mhc_fn: (num_mixes, n * hidden) float32, contiguous.
        mhc_norm_weight: (n * hidden,) float32, or None.
        mhc_norm_eps: added to the mean square.
        fuse_grad_acc: add to the gradient that `mhc_post` has left for residual, if there is one. Otherwise return the
            gradient.
        n_splits: has no effect; the size of the projection determines the splits.

    Returns:
        (..., num_mixes) float32.
    """
    if torch.compiler.is_compiling():
        merged = mhc_fn if mhc_norm_weight is None else merge_norm_weight(mhc_fn, mhc_norm_weight)
        return norm_fn(residual, merged, mhc_norm_eps)[0]
    return _NormFn.apply(residual, mhc_fn, mhc_norm_weight, mhc_norm_eps, fuse_grad_acc)
