"""Residual streams after a layer, and how their gradient is accumulated.

Three ops use the residual before a layer: the projection, the mix of the layer's input and post. Autograd would write
three gradients and add them. With `fuse_grad_acc` the backward of post, which runs first, leaves its gradient on the
storage of the residual as `grad_from_mhc_post`. The other two add to it in place and return none. Nothing else may use
that residual, since autograd must pass on the very tensor that post returned.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.mhc.post import mhc_post_fwd, post, post_bwd

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
    """`post` that writes to `out`, or leaves its gradient on the storage of residual."""

    @staticmethod
    def forward(ctx: Any, out: Tensor | None, fuse_grad_acc: bool, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.fuse_grad_acc = fuse_grad_acc
        if out is None:
            return post(*inputs)
        post.out(*inputs, y=out)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        x, residual, post_mix, comb_mix = ctx.saved_tensors
        gradients = mhc_post_bwd(x, residual, post_mix, comb_mix, dy.contiguous(), ctx.fuse_grad_acc)
        return None, None, *gradients


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
        comb_res_mix: (..., n, n) float32, contiguous; [i, o] is the weight of stream i in stream o.
        out: shape of residual, to write to; or None.
        fuse_grad_acc: leave the gradient of residual for the ops before the layer; see the module docstring.

    Returns:
        Shape of residual, `out` if given.
    """
    if out is None and not fuse_grad_acc:
        return post(x, residual, post_layer_mix, comb_res_mix)
    return _Post.apply(out, fuse_grad_acc, x, residual, post_layer_mix, comb_res_mix)
