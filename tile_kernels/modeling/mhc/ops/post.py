"""Residual streams after a layer, and the hand-over of their gradient.

The residual before a layer is used three times: by the projection, by the mix of the layer's input and by post.
Autograd would write three gradients and add them. With `fuse_grad_acc` the gradient of post, which comes first, is left
on the storage of the residual as `grad_from_mhc_post`; the other two add theirs to it in place and return none. This
asks that nothing else uses that residual, since autograd must hand on the very tensor that post returned.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.mhc import mhc_post_fwd
from tile_kernels.mhc.post import post, post_, post_bwd

__all__ = ['mhc_post', 'mhc_post_bwd', 'mhc_post_fwd']


def mhc_post_bwd(
    x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, d_o: Tensor, fuse_grad_acc: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, residual, post and comb.

    Args:
        x: (..., hidden) bfloat16.
        residual: (..., n, hidden) bfloat16.
        post: (..., n, 1) float32.
        comb: (..., n, n) float32.
        d_o: gradient of the result, (..., n, hidden) bfloat16.
        fuse_grad_acc: whether the gradient of residual is also left on its storage, as `grad_from_mhc_post`.

    Returns:
        The four gradients.
    """
    gradients = post_bwd(d_o, x, residual, post, comb)
    if fuse_grad_acc:
        residual.untyped_storage().grad_from_mhc_post = gradients[1]
    return gradients


def handed_over(residual: Tensor) -> Tensor | None:
    """The gradient that post has left for this residual, or None."""
    return getattr(residual.untyped_storage(), 'grad_from_mhc_post', None)


class _Post(torch.autograd.Function):
    """`post` whose gradients the caller chooses what to do with."""

    @staticmethod
    def forward(ctx: Any, out: Tensor | None, fuse_grad_acc: bool, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.fuse_grad_acc = fuse_grad_acc
        if out is None:
            return post(*inputs)
        post_(*inputs, out)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        return None, None, *mhc_post_bwd(*ctx.saved_tensors, dy.contiguous(), fuse_grad_acc=ctx.fuse_grad_acc)


def mhc_post(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    out: Tensor | None = None,
    *,
    fuse_grad_acc: bool = False,
) -> Tensor:
    """Mix the output of a layer and the residual streams into the next residual streams; differentiable.

    Args:
        x: (..., hidden) bfloat16, contiguous.
        residual: (..., n, hidden) bfloat16, contiguous.
        post_layer_mix: (..., n, 1) float32, contiguous.
        comb_res_mix: (..., n, n) float32, contiguous; [i, o] is the share of stream i in stream o.
        out: shape of residual, to write to; or None.
        fuse_grad_acc: hand the gradient of residual over to the ops before the layer; see the top of this module.

    Returns:
        Shape of residual, `out` if given.
    """
    if out is None and not fuse_grad_acc:
        return post(x, residual, post_layer_mix, comb_res_mix)
    return _Post.apply(out, fuse_grad_acc, x, residual, post_layer_mix, comb_res_mix)
