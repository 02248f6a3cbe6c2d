"""Twins of `mhc.apply_mix`."""

from torch import Tensor


def apply_mix(x: Tensor, mix: Tensor) -> Tensor:
    """The weighted sum of the residual streams."""
    return (mix * x.float()).sum(-2).to(x.dtype)


def apply_mix_bwd(dy: Tensor, x: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `apply_mix`."""
    dy = dy.float().unsqueeze(-2)
    return (mix * dy).to(x.dtype), (dy * x.float()).sum(-1, keepdim=True)


def apply_mix_bwd_(dy: Tensor, x: Tensor, mix: Tensor, dx: Tensor) -> Tensor:
    """Gradients of `apply_mix`, that of x added to what is there."""
    dy = dy.float().unsqueeze(-2)
    dx.copy_(dx.float() + mix * dy)
    return (dy * x.float()).sum(-1, keepdim=True)


def mhc_mix_apply(x: Tensor, mix: Tensor) -> Tensor:
    """The weighted sum of the residual streams."""
    return apply_mix(x, mix)


def mhc_pre_apply_mix_ref(x: Tensor, mix: Tensor) -> Tensor:
    """The weighted sum of the streams."""
    return apply_mix(x, mix)
