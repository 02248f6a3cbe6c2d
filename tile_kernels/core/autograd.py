# ruff: noqa: D102 - the methods are those of autograd.Function
"""Gradients of ops: autograd calls the backward op of the declaration, in eager mode and in every transform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.errors import UnsupportedError
from tile_kernels.core.operator import plain

if TYPE_CHECKING:
    from tile_kernels.core.op import Op

#: `backward=IDENTITY`: the gradient of the first output is passed unchanged to the first tensor.
IDENTITY = 'identity'

_NO_VMAP = '{}: cannot be batched by torch.vmap, nor by jacrev and others that use it; call it once for each element'


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd must record a call with these arguments."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def autocast(*tensors: Any) -> tuple:
    """The arguments with floating-point tensors in the dtype of autocast, where it is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in tensors)


def setup_context(op: Op, ctx: Any, inputs: tuple, output: Any) -> None:
    """Save the tensors that the backward op needs; mark outputs without a gradient parameter as not differentiable."""
    results = output if isinstance(output, (tuple, list)) else (output,)
    names = op.operator_form.flat_names
    ctx.given = {name for name, value in zip(names, inputs, strict=True) if isinstance(value, Tensor)}
    if op.backward == IDENTITY:
        ctx.mark_non_differentiable(*results[1:])
        return
    given = {f'd{name}' for name in (*op.same_gradient, *op.constant)} | set(op.backward.outputs)
    for name, value in zip(names, inputs, strict=True):
        if isinstance(value, Tensor) and value.requires_grad and f'd{name}' not in given:
            rule, fact = (
                'must not require a gradient, since this op has none for it',
                f'{check.describe(value)} that does',
            )
            check.fail(name, rule, fact, f'give it {name}.detach()', op.name)
    wanted = set(op.backward.names)
    ctx.mark_non_differentiable(*(r for name, r in zip(op.outputs, results, strict=True) if f'd{name}' not in wanted))
    known = dict(zip(names, inputs, strict=True)) | dict(zip(op.outputs, results, strict=True))
    saved = {name: known[name] for name in known if name in wanted}
    ctx.tensor_names = [name for name, value in saved.items() if isinstance(value, Tensor)]
    ctx.save_for_backward(*(saved[name] for name in ctx.tensor_names))
    ctx.options = {name: value for name, value in saved.items() if not isinstance(value, Tensor)}


def backward(op: Op, ctx: Any, *grads: Tensor | None) -> tuple:
    """Call the backward op with arguments by name and return its results in the order autograd expects."""
    names = op.operator_form.flat_names
    if op.backward == IDENTITY:
        return tuple(grads[0] if i == 0 else None for i in range(len(names)))
    known = dict(zip(ctx.tensor_names, ctx.saved_tensors, strict=True)) | ctx.options
    for name, grad in zip(op.outputs, grads, strict=True):
        if grad is not None:
            known[f'd{name}'] = grad.contiguous()  # `sum().backward()` passes an expanded gradient
    taken = tuple(name for name in op.backward.names if name in known)
    values = [known[name] for name in taken]
    if torch.is_grad_enabled():  # a second derivative may be requested
        result = NoSecondDerivative.apply(op.name, op.backward, taken, *values)
    else:
        result = op.backward.call(**dict(zip(taken, values, strict=True)))
    results = result if isinstance(result, tuple) else (result,)
    gradients = dict(zip(op.backward.outputs, results, strict=True))
    gradients |= {f'd{name}': gradients[f'd{other}'] for name, other in op.same_gradient.items()}
    return tuple(gradients.get(f'd{name}') if name in ctx.given else None for name in names)


class Differentiable(torch.autograd.Function):
    """Eager autograd around an op: it runs the same forward and backward as the operator, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, op: Op, *flat: Any) -> Any:
        result = plain(op.call(**op.operator_form.unflatten(flat)))
        ctx.op = op
        setup_context(op, ctx, flat, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        return (None, *backward(ctx.op, ctx, *grads))


class Transformable(torch.autograd.Function):
    """The same as `Differentiable` in the form that functorch transforms need; it costs more per call."""

    @staticmethod
    def forward(op: Op, *flat: Any) -> Any:
        return plain(op.call(**op.operator_form.unflatten(flat)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.op = inputs[0]
        if ctx.op.backward is None:
            results = output if isinstance(output, (tuple, list)) else (output,)
            ctx.mark_non_differentiable(*(r for r in results if isinstance(r, Tensor)))
        else:
            setup_context(ctx.op, ctx, inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        if ctx.op.backward is None:
            return (None,) * (1 + len(ctx.op.operator_form.flat_names))
        return (None, *backward(ctx.op, ctx, *grads))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, op: Op, *flat: Any) -> NoReturn:
        raise UnsupportedError(_NO_VMAP.format(op.name))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        raise UnsupportedError(f'{ctx.op.name}: has no forward-mode derivative; take torch.func.grad or vjp')


class NoSecondDerivative(torch.autograd.Function):
    """A differentiable call of a backward op: a second derivative raises an error, because zero would be wrong."""

    @staticmethod
    def forward(name: str, gradient: Op, names: tuple[str, ...], *values: Any) -> Any:
        return gradient.call(**dict(zip(names, values, strict=True)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise UnsupportedError(f'{ctx.name}: has no second derivative; its gradient cannot be differentiated')

    @staticmethod
    def vmap(info: Any, in_dims: tuple, name: str, *args: Any) -> NoReturn:
        raise UnsupportedError(_NO_VMAP.format(name))
