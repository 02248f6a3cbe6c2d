"""Residual streams: expansion, the mix before a layer and the one after it.

No matrix products: those would have the precision that PyTorch is set to, on a GPU perhaps TF32.
"""

import torch
from torch import Tensor


def expand(x: Tensor, num_streams: int = 4) -> Tensor:
    """Copy the hidden states of every token into all of its residual streams."""
    return x.float().unsqueeze(-2).expand(*x.shape[:-1], num_streams, x.shape[-1]).to(x.dtype)


def expand_(x: Tensor, y: Tensor) -> None:
    """Expand into memory of the caller."""
    y.copy_(expand(x, y.shape[-2]))


def expand_bwd(dy: Tensor) -> Tensor:
    """The sum over streams."""
    return _sum_streams(dy.float().unbind(-2)).to(dy.dtype)


def expand_bwd_(dy: Tensor, dx: Tensor) -> None:
    """Gradient of `expand` into memory of the caller."""
    dx.copy_(expand_bwd(dy))


def _sum_streams(streams: tuple[Tensor, ...]) -> Tensor:
    """Sum in ascending order."""
    total = torch.zeros_like(streams[0])
    for stream in streams:
        total = total + stream
    return total


def post(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor) -> Tensor:
    """Mix the output of a layer and the residual streams into the next residual streams."""
    mixed = post_mix * x.float().unsqueeze(-2)
    for stream, shares in zip(residual.float().unbind(-2), comb_mix.unbind(-2), strict=True):
        mixed = mixed + shares.unsqueeze(-1) * stream.unsqueeze(-2)
    return mixed.to(residual.dtype)


def post_(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, y: Tensor) -> None:
    """Post into memory of the caller."""
    y.copy_(post(x, residual, post_mix, comb_mix))


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


def apply_mix(x: Tensor, mix: Tensor) -> Tensor:
    """The weighted sum of the residual streams."""
    return (mix * x.float()).sum(-2).to(x.dtype)


def apply_mix_(x: Tensor, mix: Tensor, y: Tensor) -> None:
    """Apply a mix into memory of the caller."""
    y.copy_(apply_mix(x, mix))


def apply_mix_bwd(dy: Tensor, x: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `apply_mix`."""
    dy = dy.float().unsqueeze(-2)
    return (mix * dy).to(x.dtype), (dy * x.float()).sum(-1, keepdim=True)


def apply_mix_bwd_(dy: Tensor, x: Tensor, mix: Tensor, dx: Tensor) -> Tensor:
    """Gradients of `apply_mix`, that of x added to what is there."""
    dy = dy.float().unsqueeze(-2)
    dx.copy_(dx.float() + mix * dy)
    return (dy * x.float()).sum(-1, keepdim=True)
