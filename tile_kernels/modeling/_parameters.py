"""Parameters for the ops: float32 after any cast of a module, with gradients added to `main_grad` if present."""

import torch
from torch import Tensor


def float32_of(parameter: Tensor) -> Tensor:
    """The parameter in float32, whatever dtype `.to()` gave it; its `main_grad` still receives the gradient."""
    wide = parameter.float()
    if wide is not parameter and not torch.compiler.is_compiling() and hasattr(parameter, 'main_grad'):
        wide.main_grad = parameter.main_grad
    return wide


def into_main_grad(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Add a gradient to the `main_grad` of a parameter if it has one; otherwise return the gradient."""
    main_grad = getattr(parameter, 'main_grad', None)
    if main_grad is None or gradient is None:
        return gradient
    main_grad.add_(gradient)
    return None
