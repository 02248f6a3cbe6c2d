"""RMS norm and projection."""

import torch
from torch import Tensor


def engram_gate_forward(
    hidden: Tensor, weight: Tensor, gate_weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Normalise each row and project it; with `gate_weight` multiply by a second projection."""
    h = hidden.float()
    norm_hidden = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)).to(hidden.dtype)
    output = norm_hidden.float() @ weight.float().T
    if gate_weight is not None:
        output = (norm_hidden.float() @ gate_weight.float().T) * output
    return output.to(hidden.dtype), norm_hidden


def engram_gate_backward(
    grad_output: Tensor, hidden: Tensor, weight: Tensor, gate_weight: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Gradient of the rows, as autograd finds it in float32."""
    with torch.enable_grad():
        h = hidden.detach().float().requires_grad_()
        weights = (weight.detach().float(), None if gate_weight is None else gate_weight.detach().float())
        output, _ = engram_gate_forward(h, *weights, eps)
        (grad,) = torch.autograd.grad(output, h, grad_output.float())
    return grad.to(hidden.dtype)


def engram_weight_grad(grad_output: Tensor, norm_hidden: Tensor) -> Tensor:
    """Gradient of the weight of a projection, float32."""
    return grad_output.float().T @ norm_hidden.float()
