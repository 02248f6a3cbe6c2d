"""What the momentum update means, in plain PyTorch."""

import torch
from torch import Tensor


def _fma(a: Tensor | float, b: Tensor | float, c: Tensor) -> Tensor:
    """Multiply and add, rounded once: float64 holds the product of two float32 numbers exactly."""
    return (torch.as_tensor(a, device=c.device).double() * torch.as_tensor(b, device=c.device).double() + c).float()


def engram_sinkhorn_momentum_update(
    grad: Tensor, momentum_buffer: Tensor, beta1: float, nesterov: bool = True
) -> Tensor:
    """Move the momentum towards the gradient, in place; the update in float32."""
    g, m = grad.float(), momentum_buffer.float()
    keep, take = torch.tensor(beta1, device=g.device), torch.tensor(1 - beta1, device=g.device)
    m = _fma(m, keep, take * g)
    momentum_buffer.copy_(m)
    return _fma(g, take, keep * m) if nesterov else m


engram_sinkhorn_momentum_update_ref = engram_sinkhorn_momentum_update
