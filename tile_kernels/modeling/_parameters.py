"""Parameters as the ops want them: float32 after any cast of a module, gradients where a `main_grad` collects them."""

import torch
from torch import Tensor


def float32_of(parameter: Tensor) -> Tensor:
    """The parameter in float32, whatever `.to()` has made of it; its `main_grad` still takes the gradient."""
    wide = parameter.float()
    if wide is not parameter and not torch.compiler.is_compiling() and hasattr(parameter, 'main_grad'):
        wide.main_grad = parameter.main_grad
    return wide


def into_main_grad(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Add a gradient to the `main_grad` of a parameter that has one; otherwise it is returned."""
    main_grad = getattr(parameter, 'main_grad', None)
    if main_grad is None or gradient is None:
        return gradient
    main_grad.add_(gradient)
    return None
