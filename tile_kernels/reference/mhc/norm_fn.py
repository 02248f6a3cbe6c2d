"""Twins of `mhc.norm_fn`."""

import torch
from torch import Tensor

from tile_kernels.reference.mhc._common import Tf32Product, round_to_tf32


def norm_fn(residual: Tensor, fn: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Project the normalised streams of every token; fn is rounded to TF32."""
    x = residual.flatten(-2).float()
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return Tf32Product.apply(x, fn) * rstd.unsqueeze(-1), rstd


def norm_fn_bwd(dmixes: Tensor, residual: Tensor, fn: Tensor, mixes: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `norm_fn`; the gradient of the product is rounded to TF32."""
    dx, dfn = _gradients(dmixes, residual, fn, mixes, rstd)
    return dx.to(residual.dtype), dfn


def norm_fn_bwd_(
    dmixes: Tensor, residual: Tensor, fn: Tensor, mixes: Tensor, rstd: Tensor, dresidual: Tensor
) -> Tensor:
    """Gradients of `norm_fn`, that of residual added to dresidual."""
    dx, dfn = _gradients(dmixes, residual, fn, mixes, rstd)
    dresidual.copy_(dresidual.float() + dx)
    return dfn


def _gradients(dmixes: Tensor, residual: Tensor, fn: Tensor, mixes: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of residual and fn in float32."""
    x = residual.flatten(-2).float()
    dmul = round_to_tf32(dmixes * rstd.unsqueeze(-1))
    factor = (dmixes * mixes).sum(-1) * rstd.square() / x.shape[-1]
    dx = dmul @ round_to_tf32(fn) - factor.unsqueeze(-1) * x
    return dx.view(residual.shape), dmul.reshape(-1, fn.shape[0]).T @ x.reshape(-1, fn.shape[1])


def mhc_pre_norm_fn_ref(
    residual: Tensor, mhc_fn: Tensor, mhc_norm_weight: Tensor | None, mhc_norm_eps: float
) -> Tensor:
    """The normalized projection with TF32 products, whatever precision PyTorch is set to."""
    return norm_fn(residual, mhc_fn if mhc_norm_weight is None else mhc_fn * mhc_norm_weight, mhc_norm_eps)[0]


def mhc_pre_norm_fn_partials_ref(residual: Tensor, fn: Tensor, n_splits: int) -> tuple[Tensor, Tensor]:
    """Products and sums of squares of n_splits equal parts of the channels; parts are the first dimension."""
    chunks = residual.flatten(-2).float().chunk(n_splits, -1)
    products = [x @ part.T for x, part in zip(chunks, fn.chunk(n_splits, -1), strict=True)]
    return torch.stack(products), torch.stack([x.square().sum(-1) for x in chunks])
