"""The normalised projection."""

from typing import Any

import torch
from torch import Tensor


def round_to_tf32(x: Tensor) -> Tensor:
    """The nearest number of 11 significant bits, halves away from zero; a NaN stays one."""
    return torch.where(x.isnan(), x, ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32))


class _Tf32Product(torch.autograd.Function):
    """`x @ fn.T` with fn, and backward the gradient, as TF32 takes them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Tensor) -> Tensor:
        ctx.save_for_backward(x, fn)
        return x @ round_to_tf32(fn).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, fn = ctx.saved_tensors
        dy = round_to_tf32(dy)
        return dy @ round_to_tf32(fn), dy.reshape(-1, fn.shape[0]).T @ x.reshape(-1, fn.shape[1])


def norm_fn(residual: Tensor, fn: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Project the normalised streams of every token; fn counts as TF32 takes it."""
    x = residual.flatten(-2).float()
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return _Tf32Product.apply(x, fn) * rstd.unsqueeze(-1), rstd


def norm_fn_bwd(dmixes: Tensor, residual: Tensor, fn: Tensor, mixes: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `norm_fn`; the gradient of the product counts as TF32 takes it."""
    x = residual.flatten(-2).float()
    dmul = round_to_tf32(dmixes * rstd.unsqueeze(-1))
    pull = (dmixes * mixes).sum(-1) * rstd.square() / x.shape[-1]
    dx = dmul @ round_to_tf32(fn) - pull.unsqueeze(-1) * x
    dfn = dmul.reshape(-1, fn.shape[0]).T @ x.reshape(-1, fn.shape[1])
    return dx.view(residual.shape).to(residual.dtype), dfn


def norm_fn_bwd_(
    dmixes: Tensor, residual: Tensor, fn: Tensor, mixes: Tensor, rstd: Tensor, dresidual: Tensor
) -> Tensor:
    """Gradients of `norm_fn`, that of residual added to what is there."""
    x = residual.flatten(-2).float()
    dmul = round_to_tf32(dmixes * rstd.unsqueeze(-1))
    pull = (dmixes * mixes).sum(-1) * rstd.square() / x.shape[-1]
    dx = dmul @ round_to_tf32(fn) - pull.unsqueeze(-1) * x
    dresidual.copy_(dresidual.float() + dx.view(residual.shape))
    return dmul.reshape(-1, fn.shape[0]).T @ x.reshape(-1, fn.shape[1])


def merge_norm_weight(fn: Tensor, norm_weight: Tensor) -> Tensor:
    """The weight of a norm taken into the projection that follows it."""
    return fn * norm_weight


def merge_norm_weight_(fn: Tensor, norm_weight: Tensor, y: Tensor) -> None:
    """`merge_norm_weight` into memory of the caller."""
    y.copy_(fn * norm_weight)


def merge_norm_weight_bwd(dy: Tensor, fn: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `merge_norm_weight`."""
    return dy * norm_weight, (dy * fn).sum(0)


def merge_norm_weight_bwd_(dy: Tensor, fn: Tensor, norm_weight: Tensor, dfn: Tensor, dnorm_weight: Tensor) -> None:
    """Gradients of `merge_norm_weight`, added to what is there."""
    dfn.add_(dy * norm_weight)
    dnorm_weight.add_((dy * fn).sum(0))


def reduce_parts_(
    mul_parts: Tensor, square_parts: Tensor, mul: Tensor, square: Tensor, y: Tensor, group: int, eps: float = 1e-6
) -> None:
    """Sum the parts of a projection and normalise."""
    mul.copy_(mul_parts.sum(0))
    square.copy_(square_parts.sum(0))
    y.copy_((mul * (square / group + eps).rsqrt().unsqueeze(-1)).sum(1))


def reduce_parts_bwd_(
    dy: Tensor, mul: Tensor, square: Tensor, dmul: Tensor, dsquare: Tensor, group: int, eps: float = 1e-6
) -> None:
    """Gradients of the sums of `reduce_parts_`."""
    rstd = (square / group + eps).rsqrt()
    dmul.copy_(dy.unsqueeze(1) * rstd.unsqueeze(-1))
    dsquare.copy_((dy.unsqueeze(1) * mul).sum(-1) * rstd**3 / (-2 * group))
