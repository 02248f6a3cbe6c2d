"""The checks of op bodies. Each raises `ArgumentError` in one form: `<op>: <argument> must <rule>, got <fact>`.

The checks run on every call, so the passing path only compares; the message is built only on failure. Its first word is
the public function that the user called, read from the call stack. The argument has its name in that function, even if
the op uses another one: the public `out` may be the `y` of the op.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable
from numbers import Integral, Real
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tile_kernels.core.errors import ArgumentError

#: Subpackages whose functions users do not call directly.
_INTERNAL = ('core', 'testing', 'interpreter', 'cli')

Front = TypeVar('Front', bound=Callable)


def names(**names: str) -> Callable[[Front], Front]:
    """Declare how a public function names arguments of the op it calls, if it does not pass the same object."""

    def mark(front: Front) -> Front:
        setattr(front, 'argument_names', names)  # noqa: B010
        return front

    return mark


def _called(op: str) -> tuple[str, dict[str, str], FrameType | None]:
    """The call of the user: name, `names` and frame of the outermost function of this package on the stack.

    Without such a function, `op` is the name.
    """
    name, names, user = op, dict[str, str](), None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        package, _, rest = frame.f_globals.get('__name__', '').partition('.')
        family, function = rest.partition('.')[0], frame.f_code.co_name
        inside = package == 'tile_kernels' and family not in _INTERNAL
        called = frame.f_globals.get('__op__')  # the generated call of an op
        if called is not None:
            name, names, user = f'{called.family}.{called.fn.__name__}', {}, frame
        elif inside and frame.f_code.co_varnames[:1] == ('self',):  # a method: report the class, which the user knows
            owner = type(frame.f_locals['self'])
            inner = function.startswith('_') or function == 'forward'
            name = owner.__name__ if inner else f'{owner.__name__}.{function}'
            names, user = getattr(owner, 'argument_names', {}), frame
        elif inside and not function.startswith(('_', '<')):
            name = f'{family}.{function}'
            names, user = getattr(frame.f_globals.get(function), 'argument_names', {}), frame
        elif not name and package != 'tile_kernels':
            name = function
        frame = frame.f_back
    return name, names, user


def _argument(name: str, user: FrameType | None) -> str:
    """The name that the function of frame `user` has for the object that an inner function checks under `name`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame is not user and (name not in frame.f_locals or frame.f_globals is globals()):
        frame = frame.f_back
    if frame is None or user is None or frame is user or isinstance(frame.f_locals[name], (int, float)):
        return name  # no outer name, or a number: equal numbers are the same object
    code, given = user.f_code, user.f_locals
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    theirs = [argument for argument in arguments if given.get(argument, given) is frame.f_locals[name]]
    return theirs[0] if len(theirs) == 1 else name  # an object given twice could have either name


def fail(argument: str, rule: str, fact: str, hint: str | None = None, op: str = '') -> NoReturn:
    """Raise the error sentence; `op` is its first word if no function of an op is on the stack yet."""
    function, names, user = _called(op)
    own = _argument(argument, user)

    def said(text: str) -> str:
        """Use the argument names of the public function; the wrong argument may start an expression."""
        text = re.sub(r'\w+', lambda word: names.get(word[0], word[0]), text)
        return text if own == argument else text.replace(f'{argument}.', f'{own}.')

    raise ArgumentError(f'{function}: {said(own)} {said(rule)}, got {fact}' + (f'; {said(hint)}' if hint else ''))


def describe(x: object) -> str:
    """Describe a tensor: dtype, shape, device, and layout or strides if they are unusual."""
    if x is None:
        return 'None'
    if not isinstance(x, Tensor):
        return f'{type(x).__name__} {x!r}' if isinstance(x, (int, float, str, bool)) else type(x).__name__
    if x.is_nested:  # a nested tensor has no plain shape
        return f'a nested tensor of {_dtype_names(x.dtype)}'
    shape = ', '.join(str(extent) for extent in x.shape)
    text = f'{_dtype_names(x.dtype)}[{shape}] on {x.device}'
    if x.layout is not torch.strided:
        return f'{text}, layout {str(x.layout).removeprefix("torch.").lstrip("_")}'
    return text if x.is_contiguous() else f'{text}, strides {tuple(x.stride())}'


def _dtype_names(dtypes: torch.dtype | Collection[torch.dtype]) -> str:
    listed = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
    return ' or '.join(str(d).removeprefix('torch.') for d in listed)


def tensor(x: object, name: str) -> Tensor:
    """`x` must be a strided tensor whose elements are numbers in memory; kernels can read nothing else."""
    if not isinstance(x, Tensor):
        fail(name, 'must be a tensor', describe(x))
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        way = 'to_padded_tensor(0.0)' if x.is_nested else 'dequantize()' if x.is_quantized else 'to_dense()'
        fail(name, 'must be a plain dense tensor', describe(x), hint=f'pass {name}.{way}')
    return x


def shape(
    x: Tensor, name: str, spec: str, dtype: torch.dtype | Collection[torch.dtype] | None = None, **known: int
) -> tuple[int, ...]:
    """`x` must have the dimensions of `spec`, with the extents given by keyword; returns all extents."""
    names, extents = spec.split(), tensor(x, name).shape
    if len(extents) != len(names):
        fail(name, f'must be ({", ".join(names)})', describe(x))
    for dim, extent in known.items():
        if extents[names.index(dim)] != extent:
            fail(name, f'must be ({", ".join(names)}) with {dim} = {extent}', describe(x))
    if dtype is not None and x.dtype is not dtype and (isinstance(dtype, torch.dtype) or x.dtype not in dtype):
        fail(name, f'must be {_dtype_names(dtype)}', describe(x))
    return tuple(extents)


def dtype(x: Tensor, name: str, allowed: torch.dtype | Collection[torch.dtype]) -> None:
    """`x` must have one of these dtypes."""
    tensor(x, name)
    if x.dtype is not allowed and (isinstance(allowed, torch.dtype) or x.dtype not in allowed):
        fail(name, f'must be {_dtype_names(allowed)}', describe(x))


def multiple(value: int, factor: int, name: str) -> None:
    """`value` must be a multiple of `factor`."""
    if value % factor != 0:
        fail(name, f'must be a multiple of {factor}', str(value))


def equal(value: object, expected: object, name: str) -> None:
    """`value` must equal `expected`."""
    if value != expected:
        fail(name, f'must be {expected}', str(value))


#: Short names of dtypes; the names of PyTorch hold too.
_DTYPE_WORDS = {
    'bf16': torch.bfloat16,
    'fp16': torch.float16,
    'fp32': torch.float32,
    'fp64': torch.float64,
    'e4m3': torch.float8_e4m3fn,
    'e5m2': torch.float8_e5m2,
}


def to_dtype(value: Any, name: str) -> Any:
    """The dtype that 'bf16' or 'bfloat16' names; any other value is left to the checks that follow."""
    if not isinstance(value, str):
        return value
    found = _DTYPE_WORDS.get(value, getattr(torch, value, None))
    if isinstance(found, torch.dtype):
        return found
    words = {*_DTYPE_WORDS, *(str(dtype).removeprefix('torch.') for dtype in _DTYPE_WORDS.values())}
    fail(name, f'must be a dtype or one of {", ".join(_DTYPE_WORDS)}', repr(value), did_you_mean(value, sorted(words)))


def one_of(value: object, allowed: Collection, name: str) -> None:
    """`value` must be one of `allowed`; a float is rejected even if it equals an allowed integer."""
    if isinstance(value, (Tensor, float)) or value not in allowed:
        fact = describe(value) if isinstance(value, Tensor) else repr(value)
        listed = ', '.join(str(a) or repr(a) for a in allowed)
        fail(name, f'must be one of {listed}', fact, did_you_mean(value, allowed))


def did_you_mean(value: object, allowed: Iterable) -> str | None:
    """The hint of an error about a misspelled name; None if no name is near."""
    names = [word for word in allowed if isinstance(word, str)]
    close = difflib.get_close_matches(value.lower(), names, n=1) if isinstance(value, str) else []
    return f'did you mean {close[0]}?' if close else None


def at_least(value: float, bound: float, name: str) -> None:
    """`value` must not be smaller than `bound`."""
    try:
        small = value < bound
    except TypeError:
        fail(name, 'must be a number', describe(value))
    if small:
        fail(name, f'must be at least {bound}', str(value))


def at_most(value: float, bound: float, name: str) -> None:
    """`value` must not be larger than `bound`."""
    try:
        large = value > bound
    except TypeError:
        fail(name, 'must be a number', describe(value))
    if large:
        fail(name, f'must be at most {bound}', str(value))


def integer(value: object, name: str, least: int | None = None) -> None:
    """`value` must be an integer; for values that are used before the op checks its arguments."""
    if not isinstance(value, (Integral, torch.SymInt)):
        fail(name, 'must be an integer', describe(value))
    if least is not None:
        at_least(cast('int', value), least, name)


def number(value: object, name: str) -> None:
    """`value` must be a number."""
    if not isinstance(value, (Real, torch.SymInt, torch.SymFloat)):
        fail(name, 'must be a number', describe(value))


def pair(value: object, name: str, parts: str = 'data, sf') -> tuple[Tensor, Tensor]:
    """`value` must be a pair of tensors, by default data and scale factors."""
    if not isinstance(value, tuple) or len(value) != 2:
        fail(name, f'must be a pair ({parts})', describe(value))
    return tensor(value[0], f'{name}[0]'), tensor(value[1], f'{name}[1]')


def same_device(**tensors: Tensor | None) -> None:
    """All tensors (given by keyword; None is skipped) must be on one device."""
    first_name, first = None, None
    for name, x in tensors.items():
        if x is None:
            continue
        if first is None:
            first_name, first = name, x
        elif x.device != first.device:
            fail(name, f'must be on the device of {first_name} ({first.device})', describe(x))


def together(**values: object) -> None:
    """Either all of these values are given or none."""
    missing = [name for name, value in values.items() if value is None]
    if missing and len(missing) < len(values):
        present = next(name for name in values if name not in missing)
        fail(present, f'must come with {missing[0]}', f'no {missing[0]}')


def contiguous(x: Tensor, name: str) -> None:
    """`x` must be contiguous."""
    if not x.is_contiguous():
        fail(name, 'must be contiguous', describe(x), hint=f'pass {name}.contiguous()')


def packed(x: Tensor | None, name: str, spec: str, dtype: torch.dtype | Collection[torch.dtype], **known: int) -> None:
    """`x` must be contiguous with the dimensions named in `spec`, or be None."""
    if x is not None:
        shape(x, name, spec, dtype, **known)
        contiguous(x, name)


def unit_stride(x: Tensor, name: str) -> None:
    """The last dimension of `x` must be dense; the others may be strided."""
    if x.stride(-1) != 1 and x.shape[-1] > 1 and not x.is_contiguous():  # an empty tensor may have any strides
        fail(name, 'must have stride 1 in the last dimension', describe(x), hint=f'pass {name}.contiguous()')


def vector_bytes(*tensors: Tensor | None) -> int:
    """Widest access (16, 8, 4, 2 or 1 bytes) that the base pointers and outer strides of all tensors allow.

    A kernel takes it as a static argument, so a misaligned view runs a narrower variant instead of faulting. A fake
    tensor has no address: its storage counts as aligned. Symbolic offsets and strides are ignored.
    """
    bits = 16
    for x in tensors:
        if x is None:
            continue
        size = x.element_size()
        if type(x) is FakeTensor:
            for extent in (x.storage_offset(), *x.stride()[:-1]):
                bits |= extent * size if isinstance(extent, int) else 0
            continue
        bits |= x.data_ptr()
        for stride in x.stride()[:-1]:
            bits |= stride * size
    return bits & -bits  # the lowest set bit
