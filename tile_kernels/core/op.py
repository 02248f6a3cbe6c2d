"""`@op` declares an op: a plain function that checks, allocates and launches. The rest is derived from it.

    schema and fake     the annotations, and the body run on fake tensors        core/operator.py
    autograd            `backward=`: an op whose parameters and outputs name      core/autograd.py
                        its inputs and gradients
    calls               direct in eager mode, replayed when they repeat           core/call.py, core/replay.py
    CPU execution       the checks of the body, then the twin in `tile_kernels.reference` (or the interpreter)
    `out=True`          a second op that writes into memory of the caller
    cost, precompile    a dry run of the body: the launches it would make

Eager calls run the body directly, because the dispatcher costs more time than many of these kernels. `torch.compile`,
export and dispatch modes use the operator `torch.ops.tile_kernels.<family>_<op>`. Both run the same body.

An op has a public function if users need other arguments than those of the operator:

    @op(outputs='y y_sf')
    def _per_token_cast(x: Tensor, fmt: QuantFormat) -> QuantTensor: ...

    @_per_token_cast.public
    def per_token_cast(x, fmt, num_per_channels=None, round_sf=False): ...   # calls per_token_cast.call(x, fmt)

`per_token_cast` is then the op: a call takes the public arguments, and `per_token_cast.call` takes the operator's.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import increment_version

from tile_kernels.core import autograd, check
from tile_kernels.core.call import Calls, refuse_gradients, write_call, write_public_call
from tile_kernels.core.cases import Case, Cases
from tile_kernels.core.cost import Cost
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.flops import register_flops
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.front import write_front
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import Launch, state, tracing
from tile_kernels.core.operator import Operator
from tile_kernels.core.params import Mut as Mut  # op files import it from here
from tile_kernels.core.params import Out as Out  # and this
from tile_kernels.core.params import Param

#: Arguments and result of an op, for type checkers and editors.
Args = ParamSpec('Args')
Result = TypeVar('Result')
PublicArgs = ParamSpec('PublicArgs')
PublicResult = TypeVar('PublicResult')

#: Every op by `family.name`, in definition order.
ops: dict[str, Op] = {}


def op(
    outputs: str = '',
    backward: Op | str | None = None,
    name: str | None = None,
    twin: Callable | str | None = None,
    same_gradient: dict[str, str] | None = None,
    out: bool = False,
    instead: str = '',
    constant: str = '',
) -> Callable[[Callable[Args, Result]], Op[Args, Result]]:
    """Declare an op.

    Args:
        outputs: names of the returned tensors, in order; empty for an op that only writes arguments (`Mut`, `Out`).
        backward: the op that computes gradients. Its parameter `d<output>` is the gradient of that output. Its other
            parameters are inputs, options or outputs of this op by name. Its output `d<input>` is the gradient of that
            input. With 'identity', the gradient of the first output is that of the first argument.
        name: the op's name, by default that of the function without a leading underscore.
        twin: reference implementation, or the name of one in `tile_kernels.reference.<family>` (default: of the op).
        same_gradient: inputs whose gradient is that of another input, e.g. the summands of a sum.
        out: whether to also define `op.out`, called `<name>_`, which writes the outputs into memory of the caller. The
            body must then allocate them with `empty`.
        instead: what to call if a gradient is needed, for the error of an op that has none.
        constant: inputs whose gradient is zero, e.g. a bias that only selects. Others without a gradient are refused.
    """

    def declare(fn: Callable[Args, Result]) -> Op[Args, Result]:
        hints = typing.get_type_hints(fn, include_extras=True)
        params = [Param.of(p, hints[p.name]) for p in inspect.signature(fn).parameters.values()]
        made: Op[Args, Result] = Op(fn, params, tuple(outputs.split()), backward, name, twin, same_gradient or {})
        made.returns_quant = hints.get('return') is QuantTensor
        made.instead, made.constant = instead, frozenset(constant.split())
        if out:
            made.body = functools.partial(made._allocate, made.body)
            made.out = _writing(made)
        return made

    return declare


class Op(Generic[Args, Result]):
    """A callable op; the module docstring lists its other abilities."""

    #: The op that writes the outputs of this op into memory of the caller, if the declaration has `out=True`.
    out: Op[..., None]

    def __init__(
        self,
        fn: Callable[Args, Result],
        params: list[Param],
        outputs: tuple[str, ...],
        backward: Op | str | None,
        name: str | None,
        twin: Callable | str | None,
        same_gradient: dict[str, str],
    ) -> None:
        own = fn.__name__.removeprefix('_')
        fn.__name__, fn.__code__ = own, fn.__code__.replace(co_name=own)  # errors name the op, not its body
        functools.update_wrapper(self, fn)
        self.fn: Callable[..., Any] = fn
        self.params = params
        self.names = [p.name for p in params]
        self.outputs = outputs
        self.backward: Any = backward
        package, _, rest = fn.__module__.partition('.')
        self.family = rest.partition('.')[0] if package == 'tile_kernels' else package
        self.name = f'{self.family}.{name or own}'
        self.returns_quant = False
        self.instead = ''
        self.constant: frozenset[str] = frozenset()
        self.same_gradient = same_gradient
        self._cases: Cases | Callable[[], Cases | None] | None = None
        self._twin = twin or own
        self.written = [p.name for p in params if p.mutated]
        self.body: Callable[..., Any] = self._write if self.written else self.fn
        if backward is not None and any(p.many and p.type is Tensor for p in params):
            raise TypeError(f'{self.name}: an op with a list of tensors cannot have a backward')
        self.operator_form = Operator(self.name.replace('.', '_'), params, outputs)
        self._register()
        self.calls = Calls(self)
        call = write_call(self)
        self.__class__ = type('Op', (Op,), {'call': call, '__call__': call})
        self._give_own_frame()
        ops[self.name] = self

    def _give_own_frame(self) -> None:
        """What `torch.compile(op)` compiles: a function with its own code.

        Otherwise all ops would share the code of a wrapper of PyTorch, and its limit of recompilations.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        call.__code__ = call.__code__.replace(co_name=self.__name__)
        self._torchdynamo_orig_callable, self._torchdynamo_wrapper_id = call, id(self)

    # Calling --------------------------------------------------------------------------------

    if TYPE_CHECKING:  # each op has its own class with the methods that `write_call` generates

        def __call__(self, *args: Args.args, **kwargs: Args.kwargs) -> Result:
            """Run the op."""

        def call(self, *args: Any, **kwargs: Any) -> Any:
            """Run the op with the arguments of its operator."""

    def public(self, fn: Callable[PublicArgs, PublicResult]) -> Op[PublicArgs, PublicResult]:
        """Let users call the op through `fn`, which converts its arguments to those of `call`; returns the op."""
        replays = getattr(fn, 'is_replayed', False)
        own: Callable = inspect.unwrap(fn)
        functools.update_wrapper(self, own)
        call = write_front(own, '_op') if replays else write_public_call(self, own)
        self.__class__ = type('Op', (Op,), {'call': type(self).call, '__call__': call})
        return typing.cast('Op[PublicArgs, PublicResult]', self)

    def _write(self, **given: Any) -> Any:
        """Run an op that writes arguments, then increment their versions, which autograd compares."""
        result = self.fn(**given)
        increment_version(self.written_of(given))
        return result

    def _allocate(self, body: Callable[..., Any], /, **given: Any) -> Any:
        """Run an op declared with `out=True` inside the body of another op: its outputs are new memory."""
        if not state.outs:
            return body(**given)
        with state.set(outs=None):
            return body(**given)

    def written_of(self, given: dict[str, Any]) -> list[Tensor]:
        """The arguments that the op writes."""
        values = [given[name] for name in self.written if given[name] is not None]
        return [x for value in values for x in (value if isinstance(value, (list, tuple)) else (value,))]

    def refuse_gradients(self, given: dict[str, Any]) -> None:
        """Reject an argument of an op without a gradient whose gradient would be lost."""
        refuse_gradients(self, given)

    def check_types(self, given: dict[str, Any]) -> None:
        """Check that arguments have the annotated types; the body checks shapes and values."""
        for param in self.params:
            if not param.accepts(given[param.name]):
                check.fail(param.name, f'must be {param.words}', check.describe(given[param.name]), op=self.name)

    def execute(self, **given: Any) -> Any:
        """Run the op without autograd: the body, or on CPU tensors its checks and the twin."""
        self.check_types(given)
        first = given[self.names[0]]
        if isinstance(first, (tuple, list)) and first:
            first = first[0]
        if not isinstance(first, Tensor) or not first.is_cpu or knobs.interpret or state.trace is not None:
            return self.body(**given)
        with state.set(skip=True):
            self.fn(**given)
        with torch.no_grad(), torch.autocast('cpu', enabled=False):  # kernels ignore autocast
            return self.twin(**given)

    @functools.cached_property
    def twin(self) -> Callable:
        """The reference: same signature, plain PyTorch, imported at first use."""
        if not isinstance(self._twin, str):
            return self._twin
        return getattr(importlib.import_module(f'tile_kernels.reference.{self.family}'), self._twin)

    @functools.cached_property
    def plan(self) -> autograd.Plan:
        """What a differentiable call passes to the gradient op."""
        return autograd.Plan(self)

    @functools.cached_property
    def is_flat(self) -> bool:
        """Whether the flat arguments of the operator are those of `call`, in its order."""
        return not any(p.keyword_only or p.type in (QuantTensor, QuantFormat) for p in self.params)

    # The operator ---------------------------------------------------------------------------

    @property
    def schema(self) -> str:
        """Schema of the operator."""
        return self.operator_form.schema

    @property
    def operator(self) -> torch._ops.OpOverload:
        """`torch.ops.tile_kernels.<family>_<op>.default`."""
        return self.operator_form.overload

    def _register(self) -> None:
        self.operator_form.define(self.execute, lambda **given: self.fn(**given))
        if self.backward is None:
            self.operator_form.define_no_gradient(self.refuse_gradients)
        else:
            self.operator_form.define_gradient(
                functools.partial(autograd.backward, self), functools.partial(autograd.setup_context, self)
            )

    def wrap(self, result: Any, given: dict[str, Any]) -> Any:
        """Add to a quantized result the format with which the op was called."""
        return QuantTensor(result[0], result[1], given['fmt']) if self.returns_quant else result

    # Declared once --------------------------------------------------------------------------

    @property
    def case_set(self) -> Cases | None:
        """The cases used to test, benchmark and precompile the op."""
        return self._cases() if callable(self._cases) else self._cases

    def cases(
        self,
        make: Callable[..., dict[str, Any]],
        match: str | dict[str, Any] = 'bitwise',
        smoke: list[Case] | None = None,
        full: list[Case] | None = None,
        bench: list[Case] | None = None,
        flops: Callable[..., int] | None = None,
    ) -> None:
        """Declare the cases used to test, benchmark and precompile the op."""
        self._cases = Cases(make, match, smoke or [], full or [], bench or [], flops)
        if flops is not None:
            for form in (self, getattr(self, 'out', None)):
                if form is not None:
                    register_flops(form.operator_form, flops)

    def trace(self, *args: Any, **kwargs: Any) -> list[Launch]:
        """The launches this call would make; nothing runs. The arguments are those of `call`."""
        with tracing() as launches:
            self.fn(*args, **kwargs)
        return launches

    def trace_case(self, case: Case) -> list[Launch]:
        """The launches that a case would make on a GPU, computed without one."""
        if self.case_set is None:
            raise ArgumentError(f'{self.name}: has no cases')
        with FakeTensorMode():  # on the CPU: a torch without CUDA cannot index a fake CUDA tensor
            return self.trace(**self.case_set.arguments(self.name, case, 'cpu'))

    def cost(self, *args: Any, **kwargs: Any) -> Cost:
        """Bytes this call must move: every tensor of every launch once."""
        return Cost(sum(launch.cost.bytes for launch in self.trace(*args, **kwargs)))

    def __get__(self, instance: object, owner: type | None = None) -> Op[Args, Result]:
        """Return the op itself, also as a class attribute; with this method `help` shows the op as a function."""
        return self

    def __reduce__(self) -> tuple:
        """Pickle and copy an op by name: there is one object per op."""
        return _named, (self.__module__, self.name)

    def __repr__(self) -> str:
        return f'<op {self.name}>'


def _named(module: str, name: str) -> Op:
    importlib.import_module(module)
    return ops[name]


# Forms that write into memory of the caller -----------------------------------------------------


def empty(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The output `name` of an op declared with `out=True`: new memory, or memory given to `op.out`."""
    given = state.outs.pop(name, None) if state.outs else None
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    check.tensor(given, name)
    if given.shape != torch.Size(shape) or given.dtype is not dtype or given.device != device:
        word = str(dtype).removeprefix('torch.')
        check.fail(name, f'must be {tuple(shape)} {word} on {device}', check.describe(given))
    check.contiguous(given, name)
    return given


def _writing(op: Op) -> Op[..., None]:
    """The op that computes the same as `op` but writes its outputs into keyword arguments of the same names."""
    extra = [Param(name, Tensor, False, False, True, True, True, inspect.Parameter.empty) for name in op.outputs]
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = inspect.signature(op.fn)
    added = [inspect.Parameter(name, keyword, annotation=Out) for name in op.outputs]
    signature = own.replace(parameters=[*own.parameters.values(), *added], return_annotation=None)

    def fn(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        arguments = given.arguments
        outs = {name: arguments.pop(name) for name in op.outputs}
        with state.set(outs=outs):
            op.fn(**arguments)
        if outs:
            raise TypeError(f'{op.name}: the body must allocate {", ".join(outs)} by `empty`')

    def twin(**given: Any) -> None:
        outs = [given.pop(name) for name in op.outputs]
        result = op.twin(**given)
        for memory, value in zip(outs, result if isinstance(result, tuple) else (result,), strict=True):
            memory.copy_(value)

    names = ' and '.join(f'`{name}`' for name in op.outputs)
    fn.__name__ = f'{op.fn.__name__}_'
    fn.__doc__ = f'`{op.fn.__name__}` that writes {names} into memory of the caller; arguments as there.'
    fn.__module__, fn.__qualname__ = op.fn.__module__, fn.__name__
    for function in (fn, twin):
        function.__signature__ = signature  # type: ignore[attr-defined]
    made: Op[..., None] = Op(fn, [*op.params, *extra], (), None, f'{op.name.partition(".")[2]}_', twin, {})

    def cases() -> Cases | None:
        """The first, second and last smoke case of the op, and one benchmark case."""
        base = op.case_set
        if base is None:
            return None

        def make(**case: Any) -> dict[str, Any]:
            arguments = base.make(**case)
            with state.set(skip=True):
                result = op.fn(**arguments)
            results = result if isinstance(result, tuple) else (result,)
            return arguments | dict(zip(op.outputs, results, strict=True))

        smoke = list({id(case): case for case in (*base.smoke[:2], *base.smoke[-1:])}.values())
        return Cases(make, base.match, smoke, [], base.bench[:1], base.flops)

    made._cases = cases
    made.instead = op.name if op.backward is not None else ''
    return made
