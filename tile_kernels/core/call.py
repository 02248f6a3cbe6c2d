"""How an op is called: a generated function looks for a replay of the call; `Calls.run` handles all other calls.

A call runs through the operator if a tracer or a dispatch mode is active. Otherwise it runs the body directly, with
autograd around it if a gradient is needed. The second call with the same key is recorded (`core/replay.py`). Later
calls repeat its allocations and launches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import profiler as torch_profiler
from torch.nn import Parameter

from tile_kernels.core import check
from tile_kernels.core.autograd import Differentiable, Transformable
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.knobs import knobs, overrides
from tile_kernels.core.launch import on_current_device, state
from tile_kernels.core.replay import BODY, MISS, record

if TYPE_CHECKING:
    from tile_kernels.core.op import Op

#: `Differentiable.apply` without its search for functorch transforms, which calls have done by then.
DIFFERENTIABLE = super(torch.autograd.Function, Differentiable).apply

_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_active = torch._C._are_functorch_transforms_active

TENSORS = (Tensor, Parameter)

#: Types of arguments that are not tensors.
PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, QuantFormat, QuantTensor))

#: The op clears its table when it holds this many keys, because shapes may change without end.
MAX_KEYS = 4096
#: Maximum number of replays for one key; they differ in strides, alignment or autocast.
MAX_REPLAYS = 8


#: Whether `tile_kernels.profiler` names the calls, so that this module must not.
naming = SimpleNamespace(elsewhere=False)


class Calls:
    """The replays that an op has recorded, and the code that runs all other calls."""

    def __init__(self, op: Op) -> None:
        self.op = op
        #: Options and first shape -> functions that replay such calls. The list is empty after the first call.
        self.replays: dict[tuple, list[Callable]] = {}
        self._dtypes = [param.name for param in op.params if param.type is torch.dtype]

    def run(self, key: tuple | None, given: dict[str, Any]) -> Any:
        """Run a call that no replay serves, all arguments by name; without a `key` it is not recorded."""
        op = self.op
        for name in self._dtypes:
            given[name] = check.to_dtype(given[name], name)
        recording = state.made is not None and _dispatch_modes() == 1  # that mode is ours and sees what bodies do
        if torch.compiler.is_compiling() or (_dispatch_modes() and not recording):
            return op.wrap(op.operator_form(given), given)
        return self.eager(key, given)

    def eager(self, key: tuple | None, given: dict[str, Any]) -> Any:
        """Run a call outside of tracers; an active profiler replaces this method, which no tracer sees."""
        op = self.op
        if op.backward is None:
            op.refuse_gradients(given)
        if _functorch_active():
            return op.wrap(Transformable.apply(op, *op.operator_form.flatten(given)), given)
        tensors: list[Tensor | None] = []
        for param in op.params:
            value = given[param.name]
            for part in value if param.many and isinstance(value, (list, tuple)) else (value,):
                if isinstance(part, Tensor) and type(part) not in TENSORS:
                    return op.wrap(op.operator_form(given), given)  # a tensor subclass: the dispatcher decides
                if type(part) is QuantTensor:
                    tensors += part
                elif isinstance(part, Tensor):
                    tensors.append(part)
                elif part is None and param.type in (Tensor, QuantTensor):
                    tensors += [None] if param.type is Tensor else [None, None]
                elif type(part) not in PLAIN:
                    return op.execute(**given)  # the checks of the body report what is wrong
        first = next((t for t in tensors if t is not None), None)
        if first is None:
            return op.execute(**given)
        differentiates = op.backward is not None and torch.is_grad_enabled()
        if differentiates and any(t is not None and t.requires_grad for t in tensors):
            return op.wrap(Differentiable.apply(op, *op.operator_form.flatten(given)), given)
        if key is None or not first.is_cuda:
            return op.execute(**given)
        return self.learn(key, first, tensors, given)

    def learn(self, key: tuple, first: Tensor, tensors: list[Tensor | None], given: dict[str, Any]) -> Any:
        """Run the body; record the second call with this key, so that later calls replay it."""
        op, known = self.op, self.replays.get(key)
        if known is None:
            op.check_types(given)
            if len(self.replays) >= MAX_KEYS:
                self.replays.clear()
            self.replays[key] = []
        if known is None or state.watchers or not on_current_device(first.get_device()):
            return op.body(**given)
        result, replay = record(op.body, (), given, tensors, op.written_of(given))
        if replay is not None:
            if len(known) >= MAX_REPLAYS:
                known.clear()
            known.append(replay)
        return result


def key_globals() -> dict[str, Any]:
    """The names that a generated call needs to find a replay."""
    return {
        '_is_compiling': torch.compiler.is_compiling,
        '_dispatch_modes': _dispatch_modes,
        '_functorch_active': _functorch_active,
        '_is_grad_enabled': torch.is_grad_enabled,
        '_knobs': knobs,
        '_overrides': overrides,
        '_state': state,
        '_tensors': TENSORS,
        '_QuantTensor': QuantTensor,
        '_MISS': MISS,
        '_BODY': BODY,
    }


def write_call(op: Op) -> Callable:
    """Generate the call of an op with its own parameters: it looks up a replay, or calls `Calls.run`.

    The function is generated for each op, because a loop over arbitrary arguments would cost more than all the rest:

        def topk_gate(_op, scores, num_topk):
            _key = None
            if not (_is_compiling() or _dispatch_modes() or _functorch_active()):
                if type(scores) in _tensors:
                    _key = (_knobs.epoch, _knobs.had_blocks and _overrides() or (), scores.shape, num_topk)
                    ...
    """
    constants: dict[str, Any] = {
        **key_globals(),
        '__op__': op,
        '_replays': op.calls.replays,
        '_profiler': torch_profiler,
        '_naming': naming,
        '_named': named,
        '_differentiable': DIFFERENTIABLE,
    }
    head, key, star = ['_op'], ['_knobs.epoch', '_knobs.had_blocks and _overrides() or ()'], False
    tests: list[str] = []
    tensors: list[str] = []
    for param in op.params:
        name = param.name
        if param.keyword_only and not star:
            head.append('*')
            star = True
        constants[f'_default_{name}'] = param.default
        head.append(name if param.default is inspect.Parameter.empty else f'{name}=_default_{name}')
        if param.type is QuantTensor:
            given = f'type({name}) is _QuantTensor'
            tests.append(f'({name} is None or {given})' if param.optional else given)
            if param.optional:
                key.append(f'{name} is not None and {name}.fmt')
                tensors.append(f'*({name} or (None, None))')
            else:
                key += [f'{name}.fmt'] if tensors else [f'{name}[0].shape', f'{name}.fmt']
                tensors += [f'{name}[0]', f'{name}[1]']
        elif param.type is Tensor and param.many:
            tests.append(f'type({name}) is list and all(type(_x) in _tensors for _x in {name})')
            key.append(f'len({name})')
            tensors.append(f'*{name}')
        elif param.type is Tensor:
            given = f'type({name}) in _tensors'
            tests.append(f'({name} is None or {given})' if param.optional else given)
            key += [f'{name} is None'] if param.optional else [] if tensors else [f'{name}.shape']
            tensors.append(name)
        else:
            key.append(name)
    key.append('_is_grad_enabled()')
    same = ', '.join(f'{param.name}={param.name}' for param in op.params)
    differentiate = ''
    if op.backward is not None and op.is_flat and not any(param.type is torch.dtype for param in op.params):
        needs = (
            f'({p.name} is not None and {p.name}.requires_grad)' if p.optional else f'{p.name}.requires_grad'
            for p in op.params
            if p.type is Tensor
        )
        differentiate = f"""
            if _is_grad_enabled() and ({' or '.join(needs)}):
                return _differentiable(_op, {', '.join(param.name for param in op.params)})"""
    lines = f"""
def {op.fn.__name__}({', '.join(head)}):
    _key = None
    if not (_is_compiling() or _dispatch_modes() or _functorch_active()):
        if _profiler._is_profiler_enabled and _state.named is not _op and not _naming.elsewhere:
            return _named(_op, dict({same}))
        if {' and '.join(tests) or 'False'}:{differentiate}
            _key = ({', '.join(key)},)
            try:
                _known = _replays.get(_key)
            except TypeError:
                _known = _key = None
            if _known and not _state.watchers:
                for _replay in _known:
                    _result = _replay({', '.join(tensors)})
                    if _result is not _MISS:
                        return _op.body({same}) if _result is _BODY else _result
    return _op.calls.run(_key, dict({same}))
"""
    exec(lines, constants)
    return constants[op.fn.__name__]


def named(op: Op, given: dict[str, Any]) -> Any:
    """A call as a slice of the active `torch.profiler`; a gradient calls the op again inside of it."""
    with state.as_named(op), torch_profiler.record_function(op.name):
        return op.call(**given)


def write_public_call(op: Op, public: Callable) -> Callable:
    """Generate `__call__` of an op with a public function: it forwards its arguments."""
    signature = inspect.signature(public)
    parameters = list(signature.parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters):
        return lambda _op, *args, **kwargs: public(*args, **kwargs)
    constants: dict[str, Any] = {'_public': public}
    head, words, star = ['_op'], [], False
    for parameter in parameters:
        name, keyword = parameter.name, parameter.kind is parameter.KEYWORD_ONLY
        if keyword and not star:
            head.append('*')
            star = True
        constants[f'_default_{name}'] = parameter.default
        head.append(name if parameter.default is parameter.empty else f'{name}=_default_{name}')
        words.append(f'{name}={name}' if keyword else name)
    exec(f'def {public.__name__}({", ".join(head)}):\n    return _public({", ".join(words)})', constants)
    return constants[public.__name__]


def refuse_gradients(op: Op, given: dict[str, Any]) -> None:
    """Reject arguments of an op without a gradient whose gradient would be lost, while gradients are recorded.

    These are arguments that the op writes, because autograd does not see a kernel's writes. If the op returns
    floating-point numbers, these are all arguments. Codes and scale factors of a quantized result have no gradient.
    """
    if not torch.is_grad_enabled():
        return
    needing = [p.name for p in op.params for x in _tensors_of(given[p.name]) if x.requires_grad]
    if not needing:
        return
    written = [name for name in needing if name in op.written]
    if written:
        reason = 'since it is written in place'
    elif op.outputs and _returns_numbers(op, given):
        reason = 'since this op has no gradient'
    else:
        return
    name = (written or needing)[0]
    value = next(x for x in _tensors_of(given[name]) if x.requires_grad)
    hint = f'call it under torch.no_grad() or give it {name}.detach()'
    if op.instead:
        hint += f', or use {op.instead} for a gradient'
    check.fail(name, f'must not require a gradient, {reason}', f'{check.describe(value)} that does', hint, op.name)


def _tensors_of(value: Any) -> list[Tensor]:
    """The tensors of an argument."""
    return [x for x in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(x, Tensor)]


def _returns_numbers(op: Op, given: dict[str, Any]) -> bool:
    """Whether a call returns floating-point numbers besides codes and scale factors (`sf`, `<name>_sf`)."""
    op.check_types(given)
    with state.set(skip=True), torch.no_grad():
        result = op.fn(**given)
    results = result if isinstance(result, tuple) else (result,)
    return any(
        x.is_floating_point() and x.dtype.itemsize > 1 and name.rpartition('_')[2] != 'sf'
        for name, x in zip(op.outputs, results, strict=True)
    )
