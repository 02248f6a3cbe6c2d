"""What RMS norm means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.reference.norm._common import normalize, summed


def norm_forward(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, out_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """RMS norm of each row."""
    y, rstd = normalize(x, weight, eps, out_scale)
    return y.to(x.dtype), rstd


def norm_forward_(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    eps: float = 1e-6,
    out_scale: float = 1.0,
) -> Tensor:
    """RMS norm into memory of the caller."""
    z = summed(x, residual)
    y, rstd = norm_forward(z, weight, eps, out_scale)
    if residual_out is not None:
        residual_out.copy_(z)
    out.copy_(y)
    return rstd


# TileKernels' reference ---------------------------------------------------------------------


def norm_forward_ref(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None, out_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm over the last dimension: the result, rstd and what was normalized."""
    z = summed(x, residual)
    return *norm_forward(z, weight, eps, out_scale), z
