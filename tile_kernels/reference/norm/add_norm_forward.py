"""What RMS norm of a sum and its gradients mean, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.reference.norm._common import normalize
from tile_kernels.reference.norm.norm_backward import norm_backward


def add_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, out_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of each row of the sum, and the sum."""
    exact = x.float() + residual.float()
    z = exact.to(x.dtype)
    rounded = exact + (z.float() - exact).detach()  # z, but gradients of its two uses meet in float32
    y, rstd = normalize(rounded, weight, eps, out_scale)
    return y.to(x.dtype), rstd, z


def add_norm_backward(
    dy: Tensor, dz: Tensor, z: Tensor, rstd: Tensor, weight: Tensor | None = None, out_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Gradients of `add_norm_forward`."""
    return norm_backward(dy, z, rstd, weight, dz, out_scale)
