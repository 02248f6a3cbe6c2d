"""Results in memory of the caller, as part of the graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core.op import Op


class _Written(torch.autograd.Function):
    """Runs an op that writes `out`, with the gradient of its allocating form."""

    @staticmethod
    def forward(ctx: Any, write: Callable, gradient: Callable, out: Tensor, *inputs: Tensor) -> Tensor:
        write(*inputs, out)
        ctx.gradient = gradient
        ctx.save_for_backward(*inputs)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        gradients = ctx.gradient(dy.contiguous(), *ctx.saved_tensors)
        return None, None, None, *(gradients if isinstance(gradients, tuple) else (gradients,))


def written(write: Op, gradient: Callable, out: Tensor, *inputs: Tensor) -> Tensor:
    """`write(*inputs, out)`, and `out` as a function of the inputs; `gradient(dy, *inputs)` gives their gradients."""
    return _Written.apply(write, gradient, out, *inputs)
