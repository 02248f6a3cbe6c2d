"""Twins of `mhc.post`.

They use no matrix product: PyTorch may be set to compute those in TF32.
"""

import torch
from torch import Tensor


def post(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor) -> Tensor:
    """Mix the output of a layer and the residual streams into the next residual streams."""
    mixed = post_mix * x.float().unsqueeze(-2)
    for stream, weights in zip(residual.float().unbind(-2), comb_mix.unbind(-2), strict=True):
        mixed = mixed + weights.unsqueeze(-1) * stream.unsqueeze(-2)
    return mixed.to(residual.dtype)


def post_bwd(
    dy: Tensor, x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `post`."""
    dy = dy.float()
    dx = (post_mix * dy).sum(-2).to(x.dtype)
    dresidual, dcomb_mix = torch.zeros_like(dy), torch.empty_like(comb_mix)
    for o, gradient in enumerate(dy.unbind(-2)):
        dresidual += comb_mix[..., o, None] * gradient.unsqueeze(-2)
        dcomb_mix[..., o] = (residual.float() * gradient.unsqueeze(-2)).sum(-1)
    dpost_mix = (x.float().unsqueeze(-2) * dy).sum(-1, keepdim=True)
    return dx, dresidual.to(residual.dtype), dpost_mix, dcomb_mix


def mhc_post_ref(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """The streams after a layer."""
    return post(x, residual, post_layer_mix, comb_res_mix)
