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


class Plan:
    """What the gradient of an op needs, by position: decided once, not at every call."""

    def __init__(self, op: Op) -> None:
        inputs, outputs, gradient = op.operator_form.flat_names, op.outputs, op.backward
        given = {f'd{name}' for name in (*op.same_gradient, *op.constant)} | set(gradient.outputs)
        #: Inputs that must not require a gradient.
        self.refused = [i for i, name in enumerate(inputs) if f'd{name}' not in given]
        #: Outputs without a parameter for their gradient.
        self.constant_outputs = [i for i, name in enumerate(outputs) if f'd{name}' not in gradient.names]
        #: Arguments of the gradient op that the forward call has, and their places among its inputs and outputs.
        self.names = [name for name in gradient.names if name in (*inputs, *outputs)]
        known = [*inputs, *outputs]
        places = [len(known) - 1 - known[::-1].index(name) for name in self.names]  # of a name, the output
        self.saved = [(i < len(inputs), i if i < len(inputs) else i - len(inputs)) for i in places]
        #: Arguments that are gradients of outputs, and the outputs.
        self.grads = [(f'd{name}', i) for i, name in enumerate(outputs) if f'd{name}' in gradient.names]
        shared = {f'd{name}': f'd{other}' for name, other in op.same_gradient.items()}
        places_of = {name: i for i, name in enumerate(gradient.outputs)}
        #: For every input, the output of the gradient op that is its gradient, or None.
        self.results = [places_of.get(shared.get(f'd{name}', f'd{name}')) for name in inputs]


def setup_context(op: Op, ctx: Any, inputs: tuple, output: Any) -> None:
    """Save the tensors that the backward op needs; mark outputs without a gradient parameter as not differentiable."""
    results = output if isinstance(output, (tuple, list)) else (output,)
    ctx.given = [isinstance(value, Tensor) for value in inputs]
    if op.backward == IDENTITY:
        ctx.mark_non_differentiable(*results[1:])
        return
    plan = op.plan
    for i in plan.refused:
        if ctx.given[i] and inputs[i].requires_grad:
            rule = 'must not require a gradient, since this op has none for it'
            fact, name = f'{check.describe(inputs[i])} that does', op.operator_form.flat_names[i]
            check.fail(name, rule, fact, f'give it {name}.detach()', op.name)
    ctx.mark_non_differentiable(*[results[i] for i in plan.constant_outputs])
    saved = [inputs[i] if is_input else results[i] for is_input, i in plan.saved]
    ctx.save_for_backward(*[value for value in saved if isinstance(value, Tensor)])
    ctx.options = [None if isinstance(value, Tensor) else (value,) for value in saved]


def backward(op: Op, ctx: Any, *grads: Tensor | None) -> tuple:
    """Call the backward op with arguments by name and return its results in the order autograd expects."""
    if op.backward == IDENTITY:
        return tuple(grads[0] if i == 0 else None for i in range(len(ctx.given)))
    plan, tensors = op.plan, iter(ctx.saved_tensors)
    known = {
        name: next(tensors) if option is None else option[0]
        for name, option in zip(plan.names, ctx.options, strict=True)
    }
    for name, i in plan.grads:
        grad = grads[i]
        if grad is not None:
            known[name] = grad.contiguous()  # `sum().backward()` passes an expanded gradient
    if torch.is_grad_enabled():  # a second derivative may be requested
        result = NoSecondDerivative.apply(op.name, op.backward, tuple(known), *known.values())
    else:
        result = op.backward.call(**known)
    results = result if isinstance(result, tuple) else (result,)
    return tuple(
        [
            results[place] if place is not None and given else None
            for place, given in zip(plan.results, ctx.given, strict=True)
        ]
    )


class Differentiable(torch.autograd.Function):
    """Eager autograd around an op: it runs the same forward and backward as the operator, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, op: Op, *flat: Any) -> Any:
        result = op.call(*flat) if op.is_flat else plain(op.call(**op.operator_form.unflatten(flat)))
        ctx.op = op
        setup_context(op, ctx, flat, result)
        # Else each output without a gradient, as rstd, costs a kernel that writes zeros.
        ctx.set_materialize_grads(False)
        if op.backward != IDENTITY and len(op.plan.grads) > 1:
            ctx.shapes = [(result[i].shape, result[i].dtype, result[i].device) for _, i in op.plan.grads]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        op = ctx.op
        used = [0] if op.backward == IDENTITY else [i for _, i in op.plan.grads]
        missing = [i for i in used if grads[i] is None]
        if len(missing) == len(used):
            return (None,) * (1 + len(ctx.given))
        if missing:
            zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes]
            grads = tuple(zeros[used.index(i)] if i in missing else grad for i, grad in enumerate(grads))
        return (None, *backward(op, ctx, *grads))


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
