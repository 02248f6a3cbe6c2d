"""`@op`: an op is a plain function whose body reads check -> allocate -> launch; everything else follows from it.

    schema and fake     the annotations, and the body run on fake tensors
    autograd            `backward=`: an op whose parameters and outputs name what it needs and gives
    CPU execution       the checks of the body, then the twin in `tile_kernels.reference` (or the interpreter)
    cost, precompile    the body run dry: the launches it would make

Eager calls run the body directly: the dispatcher costs more than many of these kernels. `torch.compile`, export and
dispatch modes take the operator `torch.ops.tile_kernels.<family>_<op>`. Both run the same body.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from tile_kernels.core import check
from tile_kernels.core.cases import Case, Cases
from tile_kernels.core.cost import Cost
from tile_kernels.core.errors import ArgumentError, UnsupportedError
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.knobs import knobs, overrides
from tile_kernels.core.launch import Launch, on_current_device, state, tracing
from tile_kernels.core.params import Mut as Mut  # op files take it from here
from tile_kernels.core.params import Out as Out  # and this
from tile_kernels.core.params import Param
from tile_kernels.core.replay import BODY, MISS, record

#: Arguments and result of an op, which type checkers and editors show.
Args = ParamSpec('Args')
Result = TypeVar('Result')

#: Every op by `family.name`, in definition order.
ops: dict[str, Op] = {}

_library = torch.library.Library('tile_kernels', 'FRAGMENT')
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_active = torch._C._are_functorch_transforms_active

#: Types of arguments that are no tensors.
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, QuantFormat, QuantTensor))

#: Kinds of calls an op remembers before it forgets them all: shapes come and go.
_MAX_REPLAYS = 4096
#: Ways of a kind (strides, alignments, autocast or not) it remembers.
_MAX_WAYS = 8

_NO_VMAP = '{}: cannot be batched by torch.vmap, nor by jacrev and others that use it; call it once for each element'


def op(
    outputs: str = '',
    backward: Op | None = None,
    name: str | None = None,
    twin: Callable | str | None = None,
    same_gradient: dict[str, str] | None = None,
) -> Callable[[Callable[Args, Result]], Op[Args, Result]]:
    """Declare an op.

    Args:
        outputs: names of the returned tensors, in order; empty for an op that only writes arguments (`Mut`, `Out`).
        backward: the op that computes gradients. Its parameter `d<output>` is the gradient of that output, its other
            parameters are inputs, options or outputs of this op by name, its output `d<input>` the gradient of it.
        name: the op's name when it differs from the function's.
        twin: reference implementation, or the name of one in `tile_kernels.reference.<family>` (default: of the op).
        same_gradient: inputs whose gradient is that of another input, e.g. the summands of a sum.
    """

    def declare(fn: Callable[Args, Result]) -> Op[Args, Result]:
        made = Op(fn, tuple(outputs.split()), backward, name or fn.__name__, twin, same_gradient or {})
        ops[made.name] = made
        return made

    return declare


class Op(Generic[Args, Result]):
    """A callable op; see the module docstring for what it offers besides being called."""

    def __init__(
        self,
        fn: Callable[Args, Result],
        outputs: tuple[str, ...],
        backward: Op | None,
        name: str,
        twin: Callable | str | None,
        same_gradient: dict[str, str],
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn: Callable[..., Any] = fn
        self.outputs = outputs
        self.backward = backward
        package, _, rest = fn.__module__.partition('.')
        self.family = rest.partition('.')[0] if package == 'tile_kernels' else package
        self.name = f'{self.family}.{name}'
        self.case_set: Cases | None = None
        self._twin = twin or name
        self.same_gradient = same_gradient
        #: Options and first shape -> functions that replay such calls; none yet after the first.
        self._replays: dict[tuple, list[Callable]] = {}
        hints = typing.get_type_hints(fn, include_extras=True)
        signature = inspect.signature(fn)
        self.params = [Param.of(p, hints[p.name]) for p in signature.parameters.values()]
        self._returns_quant = hints.get('return') is QuantTensor
        self._names = [p.name for p in self.params]
        self._written = [p.name for p in self.params if p.mutated]
        self._body: Callable[..., Any] = self._write if self._written else self.fn
        self._operator_name = self.name.replace('.', '_')
        self._define()
        self.__class__ = type('Op', (Op,), {'__call__': self._front(signature)})

    # Calling --------------------------------------------------------------------------------

    if TYPE_CHECKING:  # every op has a class of its own, with what `_front` writes in this place

        def __call__(self, *args: Args.args, **kwargs: Args.kwargs) -> Result:
            """Run the op."""

    def _front(self, signature: inspect.Signature) -> Callable:
        """`__call__` with the parameters of the op: looks up how such calls are replayed, else hands over to `_run`.

        Written out for the op, since walking over any arguments costs more than all the rest:

            def topk_gate(_op, scores, num_topk):
                _key = None
                if not (_is_compiling() or _dispatch_modes() or _functorch_active()):
                    if type(scores) in _tensors:
                        _key = (_knobs.epoch, _knobs.had_blocks and _overrides() or (), scores.shape, num_topk)
                        ...
        """
        constants: dict[str, Any] = {
            '_is_compiling': torch.compiler.is_compiling,
            '_dispatch_modes': _dispatch_modes,
            '_functorch_active': _functorch_active,
            '_is_grad_enabled': torch.is_grad_enabled,
            '_replays': self._replays,
            '_knobs': knobs,
            '_overrides': overrides,
            '_state': state,
            '_tensors': (Tensor, Parameter),
            '_QuantTensor': QuantTensor,
            '_MISS': MISS,
            '_BODY': BODY,
        }
        head, key, star = ['_op'], ['_knobs.epoch', '_knobs.had_blocks and _overrides() or ()'], False
        tests: list[str] = []
        tensors: list[str] = []
        for param in self.params:
            name = param.name
            if signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY and not star:
                head.append('*')
                star = True
            constants[f'_default_{name}'] = param.default
            head.append(name if param.default is inspect.Parameter.empty else f'{name}=_default_{name}')
            if param.type is QuantTensor:
                tests.append(f'type({name}) is _QuantTensor')
                key += [f'{name}.fmt'] if tensors else [f'{name}[0].shape', f'{name}.fmt']
                tensors += [f'{name}[0]', f'{name}[1]']
            elif param.type is Tensor:
                tests.append(
                    f'({name} is None or type({name}) in _tensors)' if param.optional else f'type({name}) in _tensors'
                )
                key += [f'{name} is None'] if param.optional else [] if tensors else [f'{name}.shape']
                tensors.append(name)
            else:
                key.append(name)
        key += ['_is_grad_enabled()'] if self.backward is not None or self._written else []
        same = ', '.join(f'{name}={name}' for name in self._names)
        lines = f"""
def {self.fn.__name__}({', '.join(head)}):
    _key = None
    if not (_is_compiling() or _dispatch_modes() or _functorch_active()):
        if {' and '.join(tests) or 'False'}:
            _key = ({', '.join(key)},)
            try:
                _ways = _replays.get(_key)
            except TypeError:
                _ways = _key = None
            if _ways and not _state.watchers:
                for _replay in _ways:
                    _result = _replay({', '.join(tensors)})
                    if _result is not _MISS:
                        return _op._body({same}) if _result is _BODY else _result
    return _op._run(_key, dict({same}))
"""
        exec(lines, constants)
        return constants[self.fn.__name__]

    def _run(self, key: tuple | None, given: dict[str, Any]) -> Any:
        """A call that no replay serves, all arguments by name; `key` tells such calls apart, None those of no kind."""
        if torch.compiler.is_compiling() or _dispatch_modes():
            return self._through_operator(given)
        if self._written:
            self._refuse_gradients(given)
        if _functorch_active():
            return self._wrap(_Transformable.apply(self, *self._flatten(given)), given)
        tensors: list[Tensor | None] = []
        for param in self.params:
            value = given[param.name]
            kind = type(value)
            if param.type is Tensor and (kind is Tensor or kind is Parameter or value is None):
                tensors.append(value)
            elif kind is QuantTensor:
                tensors += value
            elif isinstance(value, Tensor) and kind not in (Tensor, Parameter):
                return self._through_operator(given)  # a subclass knows more than we do: the dispatcher decides
            elif kind not in _PLAIN:
                return self.execute(**given)  # the checks of the body will say what is wrong with it
        first = next((t for t in tensors if t is not None), None)
        if first is None:
            return self.execute(**given)
        differentiates = self.backward is not None and torch.is_grad_enabled()
        if differentiates and any(t is not None and t.requires_grad for t in tensors):
            return self._wrap(_Differentiable.apply(self, *self._flatten(given)), given)
        if key is None or not first.is_cuda:
            return self.execute(**given)
        return self._learn(key, first, tensors, given)

    def _learn(self, key: tuple, first: Tensor, tensors: list[Tensor | None], given: dict[str, Any]) -> Any:
        """Run the body; what the second such call does, later ones repeat."""
        ways = self._replays.get(key)
        if ways is None:
            self._check_types(given)
            if len(self._replays) >= _MAX_REPLAYS:
                self._replays.clear()
            self._replays[key] = []
        if ways is None or state.watchers or not on_current_device(first.get_device()):
            return self._body(**given)
        result, replay = record(self._body, (), given, tensors, self._written_of(given))
        if replay is not None:
            if len(ways) >= _MAX_WAYS:
                ways.clear()
            ways.append(replay)
        return result

    def _write(self, **given: Any) -> Any:
        """The body of an op that writes arguments. Autograd is told so: it compares versions of what it has saved."""
        result = self.fn(**given)
        increment_version(self._written_of(given))
        return result

    def _written_of(self, given: dict[str, Any]) -> list[Tensor]:
        return [given[name] for name in self._written if given[name] is not None]

    def _refuse_gradients(self, given: dict[str, Any]) -> None:
        """Autograd does not see what a kernel writes: gradients that pass through an argument would be wrong."""
        if not torch.is_grad_enabled():
            return
        for name in self._written:
            value = given[name]
            if isinstance(value, Tensor) and value.requires_grad:
                check.fail(
                    name,
                    'must not require a gradient, since it is written in place',
                    f'{check.describe(value)} that does',
                    hint=f'call it under torch.no_grad() or give it {name}.detach()',
                    op=self.name,
                )

    def _check_types(self, given: dict[str, Any]) -> None:
        """Arguments must have the types of the annotations; their shapes and values are the body's to check."""
        for param in self.params:
            if not param.accepts(given[param.name]):
                check.fail(param.name, f'must be {param.words}', check.describe(given[param.name]), op=self.name)

    def execute(self, **given: Any) -> Any:
        """Run the op without autograd, on all its arguments: the body, or on CPU tensors its checks and the twin."""
        self._check_types(given)
        first = given[self._names[0]]
        if type(first) is QuantTensor:
            first = first[0]
        if not isinstance(first, Tensor) or not first.is_cpu or knobs.interpret or state.trace is not None:
            return self._body(**given)
        with state.set(skip=True):
            self.fn(**given)
        with torch.no_grad(), torch.autocast('cpu', enabled=False):  # a kernel knows no autocast
            return self.twin(**given)

    @functools.cached_property
    def twin(self) -> Callable:
        """The reference: same signature, plain PyTorch; imported when it is first needed."""
        if not isinstance(self._twin, str):
            return self._twin
        return getattr(importlib.import_module(f'tile_kernels.reference.{self.family}'), self._twin)

    # The operator ---------------------------------------------------------------------------

    @property
    def schema(self) -> str:
        """Schema of the operator."""
        returns = {0: '()', 1: 'Tensor'}.get(len(self.outputs), f'({", ".join("Tensor" for _ in self.outputs)})')
        return f'{self._operator_name}({", ".join(p.schema for p in self.params)}) -> {returns}'

    @property
    def operator(self) -> torch._ops.OpOverload:
        """`torch.ops.tile_kernels.<family>_<op>.default`."""
        return getattr(torch.ops.tile_kernels, self._operator_name).default

    def _define(self) -> None:
        name = self._operator_name
        _library.define(self.schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ('CPU', 'CUDA'):
            _library.impl(name, self._run_flat, key)
        torch.library.register_fake(f'tile_kernels::{name}', self._fake_flat, lib=_library)
        if self.backward is not None:
            torch.library.register_autograd(
                f'tile_kernels::{name}', self._backward, setup_context=self._setup_context, lib=_library
            )
        else:
            _library.impl(name, self._below_autograd, 'Autograd', with_keyset=True)

    def _below_autograd(self, keyset: torch._C.DispatchKeySet, *flat: Any) -> Any:
        """Without a backward, results are not differentiable: nothing is recorded."""
        if self._written:
            self._refuse_gradients(self._unflatten(flat))
        with torch._C._AutoDispatchBelowAutograd():
            return self.operator.redispatch(keyset & torch._C._after_autograd_keyset, *flat)

    def _run_flat(self, *flat: Any) -> Any:
        return self._plain(self.execute(**self._unflatten(flat)))

    def _fake_flat(self, *flat: Any) -> Any:
        return self._plain(self.fn(**self._unflatten(flat)))

    @staticmethod
    def _plain(result: Any) -> Any:
        return tuple(result) if isinstance(result, QuantTensor) else result

    def _through_operator(self, given: dict[str, Any]) -> Any:
        return self._wrap(self.operator(*self._flatten(given)), given)

    def _flatten(self, given: dict[str, Any]) -> list[Any]:
        """Arguments as the operator takes them: formats by name, a quantised tensor as data, factors, format."""
        flat: list[Any] = []
        for param in self.params:
            value = given.get(param.name, param.default)
            if param.type is QuantTensor:
                flat.extend((value.data, value.sf, value.fmt.name))
            elif param.type is QuantFormat and value is not None:
                flat.append(value.name)
            else:
                flat.append(value)
        return flat

    def _unflatten(self, flat: tuple) -> dict[str, Any]:
        """The inverse of `_flatten`, by parameter name."""
        values = iter(flat)
        bound: dict[str, Any] = {}
        for param in self.params:
            value = next(values, param.default)
            if param.type is QuantTensor:
                value = QuantTensor(value, next(values), next(values))
            elif param.type is QuantFormat and value is not None:
                value = QuantFormat.parse(value)
            bound[param.name] = value
        return bound

    def _wrap(self, result: Any, given: dict[str, Any]) -> Any:
        """A quantised result gets its format back, which the op was called with."""
        return QuantTensor(result[0], result[1], given['fmt']) if self._returns_quant else result

    # Autograd -------------------------------------------------------------------------------

    def _setup_context(self, ctx: Any, inputs: tuple, output: Any) -> None:
        """Keep what the backward op names; outputs it has no gradient for are not differentiable."""
        results = output if isinstance(output, (tuple, list)) else (output,)
        wanted = set(self.backward._names) if self.backward is not None else set()
        ctx.mark_non_differentiable(
            *(r for name, r in zip(self.outputs, results, strict=True) if f'd{name}' not in wanted)
        )
        known = dict(zip(self._flat_names, inputs, strict=True)) | dict(zip(self.outputs, results, strict=True))
        saved = {name: known[name] for name in known if name in wanted}
        ctx.tensor_names = [name for name, value in saved.items() if isinstance(value, Tensor)]
        ctx.save_for_backward(*(saved[name] for name in ctx.tensor_names))
        ctx.options = {name: value for name, value in saved.items() if not isinstance(value, Tensor)}
        ctx.given = {name for name, value in zip(self._flat_names, inputs, strict=True) if isinstance(value, Tensor)}

    def _backward(self, ctx: Any, *grads: Tensor | None) -> tuple:
        """Call the backward op by name and put its results where autograd expects them."""
        if self.backward is None:
            return (None,) * len(self._flat_names)
        known = dict(zip(ctx.tensor_names, ctx.saved_tensors, strict=True)) | ctx.options
        for name, grad in zip(self.outputs, grads, strict=True):
            if grad is not None:
                known[f'd{name}'] = grad.contiguous()  # `sum().backward()` hands over a broadcast
        names = tuple(name for name in self.backward._names if name in known)
        values = [known[name] for name in names]
        if torch.is_grad_enabled():  # the gradient may be differentiated in turn
            result = _Gradient.apply(self.name, self.backward, names, *values)
        else:
            result = self.backward(**dict(zip(names, values, strict=True)))
        results = result if isinstance(result, tuple) else (result,)
        gradients = dict(zip(self.backward.outputs, results, strict=True))
        gradients |= {f'd{name}': gradients[f'd{other}'] for name, other in self.same_gradient.items()}
        return tuple(gradients.get(f'd{name}') if name in ctx.given else None for name in self._flat_names)

    @functools.cached_property
    def _flat_names(self) -> list[str]:
        names: list[str] = []
        for param in self.params:
            names.append(param.name)
            if param.type is QuantTensor:
                names.extend((f'{param.name}_sf', f'{param.name}_fmt'))
        return names

    # Declared once --------------------------------------------------------------------------

    def cases(
        self,
        make: Callable[..., dict[str, Any]],
        match: str | dict[str, float] = 'bitwise',
        smoke: list[Case] | None = None,
        full: list[Case] | None = None,
        bench: list[Case] | None = None,
        flops: Callable[..., int] | None = None,
    ) -> None:
        """Declare what the op is tested, measured and precompiled with."""
        self.case_set = Cases(make, match, smoke or [], full or [], bench or [], flops)

    def trace(self, *args: Any, **kwargs: Any) -> list[Launch]:
        """The launches this call would make; nothing runs."""
        with tracing() as launches:
            self.fn(*args, **kwargs)
        return launches

    def trace_case(self, case: Case) -> list[Launch]:
        """The launches a case would make on a GPU, found without one."""
        if self.case_set is None:
            raise ArgumentError(f'{self.name}: has no cases')
        with FakeTensorMode():  # on the CPU: a torch without CUDA refuses to index a fake CUDA tensor
            return self.trace(**self.case_set.arguments(self.name, case, 'cpu'))

    def cost(self, *args: Any, **kwargs: Any) -> Cost:
        """Bytes this call must move: every tensor of every launch once."""
        return Cost(sum(launch.cost.bytes for launch in self.trace(*args, **kwargs)))

    def __get__(self, instance: object, owner: type | None = None) -> Op[Args, Result]:
        """The op itself, also as an attribute of a class; `help` shows it as a function because this is here."""
        return self

    def __reduce__(self) -> tuple:
        """An op is pickled and copied by name: there is one of each."""
        return _named, (self.__module__, self.name)

    def __repr__(self) -> str:
        return f'<op {self.name}>'


def _named(module: str, name: str) -> Op:
    importlib.import_module(module)
    return ops[name]


class _Differentiable(torch.autograd.Function):
    """Eager autograd around any op: forward and backward are those of the operator, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, op: Op, *flat: Any) -> Any:
        result = op._plain(op(**op._unflatten(flat)))
        ctx.op = op
        op._setup_context(ctx, flat, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        return (None, *ctx.op._backward(ctx, *grads))


class _Transformable(torch.autograd.Function):
    """The same in the form that functorch transforms need; it costs more per call."""

    @staticmethod
    def forward(op: Op, *flat: Any) -> Any:
        return op._plain(op(**op._unflatten(flat)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.op = inputs[0]
        ctx.op._setup_context(ctx, inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        return (None, *ctx.op._backward(ctx, *grads))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, op: Op, *flat: Any) -> NoReturn:
        raise UnsupportedError(_NO_VMAP.format(op.name))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        raise UnsupportedError(f'{ctx.op.name}: has no forward-mode derivative; take torch.func.grad or vjp')


class _Gradient(torch.autograd.Function):
    """The gradient of an op where it might be differentiated: that has no gradient, which is not the gradient 0."""

    @staticmethod
    def forward(name: str, gradient: Op, names: tuple[str, ...], *values: Any) -> Any:
        return gradient(**dict(zip(names, values, strict=True)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise UnsupportedError(f'{ctx.name}: has no second derivative; its gradient cannot be differentiated')

    @staticmethod
    def vmap(info: Any, in_dims: tuple, name: str, *args: Any) -> NoReturn:
        raise UnsupportedError(_NO_VMAP.format(name))
