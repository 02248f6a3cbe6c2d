"""Residual streams: expansion, the mix before a layer and the one after it."""

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
    mixed = torch.einsum('...io,...ih->...oh', comb_mix, residual.float())
    return (post_mix * x.float().unsqueeze(-2) + mixed).to(residual.dtype)


def post_(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, y: Tensor) -> None:
    """Post into memory of the caller."""
    y.copy_(post(x, residual, post_mix, comb_mix))


def post_bwd(
    dy: Tensor, x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `post`."""
    dy = dy.float()
    dx = (post_mix * dy).sum(-2).to(x.dtype)
    dresidual = torch.einsum('...io,...oh->...ih', comb_mix, dy).to(residual.dtype)
    dpost_mix = (x.float().unsqueeze(-2) * dy).sum(-1, keepdim=True)
    dcomb_mix = torch.einsum('...ih,...oh->...io', residual.float(), dy)
    return dx, dresidual, dpost_mix, dcomb_mix


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
