"""RMS norm of rows times a gate, in float32."""

import torch
from torch import Tensor


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-5, activation: str = 'silu') -> Tensor:
    """Norm, weight, gate."""
    wide = x.float()
    norm = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    gate = torch.sigmoid(z.float()) * (z.float() if activation == 'silu' else 1.0)
    return (norm * weight.float() * gate).to(x.dtype)


def gated_norm_bwd(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-5, activation: str = 'silu'
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of every row, and the sum of those of the weight."""
    wide, gates, grad = x.float(), z.float(), dy.float()
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    norm, s = wide * rstd, torch.sigmoid(gates)
    gate, slope = (gates * s, s * (1 + gates * (1 - s))) if activation == 'silu' else (s, s * (1 - s))
    dnorm = grad * weight.float() * gate
    dx = rstd * (dnorm - norm * (dnorm * norm).mean(-1, keepdim=True)) if x.numel() else wide
    dz = grad * norm * weight.float() * slope
    return dx.to(x.dtype), dz.to(x.dtype), (grad * norm * gate).sum(0).to(weight.dtype)
