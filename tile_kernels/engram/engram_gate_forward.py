"""RMS norm and projection, in one call: the simple gate over hidden states.

    norm[t, h]   = hidden[t, h] * rsqrt(mean_h(hidden[t, h]^2) + eps)
    output[t, e] = sum_h norm[t, h] * weight[e, h]                           times the same with gate_weight, if given

PyTorch computes the matrix products and the norm; this function has no kernel.
"""

import torch
from torch import Tensor

from tile_kernels.core import check

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _check(hidden: Tensor, weight: Tensor, gate_weight: Tensor | None) -> None:
    _, hidden_size = check.shape(hidden, 'hidden', 'num_tokens hidden', dtype=FLOATS)
    num_experts, _ = check.shape(weight, 'weight', 'num_experts hidden', dtype=FLOATS, hidden=hidden_size)
    if gate_weight is not None:
        known = {'num_experts': num_experts, 'hidden': hidden_size}
        check.shape(gate_weight, 'gate_weight', 'num_experts hidden', dtype=FLOATS, **known)
    check.same_device(hidden=hidden, weight=weight, gate_weight=gate_weight)


def engram_gate_forward(
    hidden: Tensor, weight: Tensor, gate_weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Normalise each row and project it; with `gate_weight` multiply by a second projection.

    Differentiable in all tensors.

    Args:
        hidden: (num_tokens, hidden) bfloat16, float16 or float32.
        weight: (num_experts, hidden).
        gate_weight: (num_experts, hidden) or None.
        eps: added to the mean square of a row.

    Returns:
        output (num_tokens, num_experts) and the normalised rows (num_tokens, hidden), both of the dtype of hidden.
    """
    _check(hidden, weight, gate_weight)
    norm_hidden = torch.nn.functional.rms_norm(hidden.float(), hidden.shape[-1:], eps=eps).to(hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):  # dtypes are explicit here
        output = torch.nn.functional.linear(norm_hidden, weight.to(hidden.dtype))
        if gate_weight is not None:
            output = torch.nn.functional.linear(norm_hidden, gate_weight.to(hidden.dtype)) * output
    return output, norm_hidden


def engram_gate_backward(
    grad_output: Tensor, hidden: Tensor, weight: Tensor, gate_weight: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Gradient of the rows of `engram_gate_forward`; that of the weights is `engram_weight_grad`.

    Args:
        grad_output: (num_tokens, num_experts), gradient of output.
        hidden: (num_tokens, hidden) as given to the forward function.
        weight: (num_experts, hidden) as given to the forward function.
        gate_weight: (num_experts, hidden) as given to the forward function.
        eps: that of the forward function.

    Returns:
        (num_tokens, hidden) of the dtype of hidden, computed in float32.
    """
    _check(hidden, weight, gate_weight)
    known = {'num_tokens': hidden.shape[0], 'num_experts': weight.shape[0]}
    check.shape(grad_output, 'grad_output', 'num_tokens num_experts', dtype=FLOATS, **known)
    check.same_device(hidden=hidden, grad_output=grad_output)
    h, dy, w = hidden.float(), grad_output.float(), weight.float()
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    norm = h * rstd
    with torch.autocast(hidden.device.type, enabled=False):
        if gate_weight is None:
            dnorm = dy @ w
        else:
            g = gate_weight.float()
            dnorm = (dy * (norm @ g.T)) @ w + (dy * (norm @ w.T)) @ g
    return (rstd * (dnorm - norm * (dnorm * norm).mean(-1, keepdim=True))).to(hidden.dtype)


def engram_weight_grad(grad_output: Tensor, norm_hidden: Tensor) -> Tensor:
    """Gradient of the weight of a projection: the sum over tokens of grad_output times the normalised row.

    Args:
        grad_output: (num_tokens, num_experts), gradient of the projection. With a gate weight, the gradient of output
            times the other projection.
        norm_hidden: (num_tokens, hidden) as returned by `engram_gate_forward`.

    Returns:
        (num_experts, hidden) float32, summed in float32.
    """
    num_tokens, _ = check.shape(norm_hidden, 'norm_hidden', 'num_tokens hidden', dtype=FLOATS)
    check.shape(grad_output, 'grad_output', 'num_tokens num_experts', dtype=FLOATS, num_tokens=num_tokens)
    check.same_device(grad_output=grad_output, norm_hidden=norm_hidden)
    with torch.autocast(norm_hidden.device.type, enabled=False):
        return grad_output.float().T @ norm_hidden.float()


def engram_gating(x: Tensor, engram_weight: Tensor, gate_weight: Tensor) -> Tensor:
    """`(norm(x) @ gate_weight.T) * (norm(x) @ engram_weight.T)`; differentiable in all three.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32; norm(x) is x * rsqrt(mean(x^2) + 1e-6) of a row.
        engram_weight: (num_experts, hidden).
        gate_weight: (num_experts, hidden).

    Returns:
        (num_tokens, num_experts) of the dtype of x.
    """
    check.tensor(gate_weight, 'gate_weight')
    return engram_gate_forward(x, engram_weight, gate_weight)[0]


class EngramGatingFunction:
    """`engram_gate_forward` with a gate as an autograd function; `engram_gate_forward` is differentiable, too."""

    apply = staticmethod(engram_gating)
