"""Parameters of ops: the meaning of an annotation in the operator schema, and the arguments it accepts.

    Tensor, Mut, Out          a tensor; one the op changes; one it overwrites without reading it
    list[Tensor]              any number of tensors; list[Mut] and list[Out] are written
    QuantTensor               data and scale factors, and the name of the format in the schema
    QuantFormat, torch.dtype  by name in the schema
    int, float, bool, str     options; tuple[int, ...] for several integers

All of these except lists and tuples may be `| None`.
"""

from __future__ import annotations

import inspect
import types
import typing
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor

#: A tensor argument the op changes in place, and one it overwrites without reading it.
Mut = Annotated[Tensor, 'mutated']
Out = Annotated[Tensor, 'overwritten']

#: Annotations of parameters -> accepted types, and their description in an error.
_ACCEPTED: dict[Any, tuple[Any, str]] = {
    Tensor: (Tensor, 'a tensor'),
    int: ((Integral, torch.SymInt), 'an integer'),
    float: ((Real, torch.SymInt, torch.SymFloat), 'a number'),
    bool: ((Integral, torch.SymBool), 'True or False'),
    str: (str, 'a string'),
    torch.dtype: (torch.dtype, 'a dtype'),
    QuantFormat: (QuantFormat, 'a QuantFormat'),
    QuantTensor: (QuantTensor, 'a QuantTensor'),
}

_SCHEMA_TYPES = {
    Tensor: 'Tensor',
    int: 'SymInt',
    float: 'float',
    bool: 'bool',
    str: 'str',
    torch.dtype: 'ScalarType',
    QuantFormat: 'str',
}


@dataclass(frozen=True)
class Param:
    """One parameter of an op: its annotation, split into the element type and the rest.

    `many` marks a list of tensors or a tuple of integers. `mutated` marks a tensor that the op writes. `overwritten`
    marks a tensor that the op writes but never reads.
    """

    name: str
    type: Any
    optional: bool
    many: bool
    mutated: bool
    overwritten: bool
    keyword_only: bool
    default: Any

    @classmethod
    def of(cls, parameter: inspect.Parameter, annotation: Any) -> Param:
        """The parameter of a function with its evaluated annotation."""
        optional, many, how = False, False, ''
        element = annotation
        if typing.get_origin(element) in (typing.Union, types.UnionType):
            inner = [a for a in typing.get_args(element) if a is not type(None)]
            if len(inner) == 1:
                element, optional = inner[0], True
        if typing.get_origin(element) is list or typing.get_args(element) == (int, ...):
            element, many = typing.get_args(element)[0], True
        if typing.get_origin(element) is Annotated:
            element, how = typing.get_args(element)
        if element not in _ACCEPTED or (many and (optional or element not in (Tensor, int))):
            raise TypeError(
                f'op parameter {parameter.name} has the annotation {annotation}, which has no operator type'
            )
        keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        written = how != '', how == 'overwritten'
        return cls(parameter.name, element, optional, many, *written, keyword_only, parameter.default)

    @property
    def required(self) -> bool:
        """Whether a call must pass this parameter."""
        return self.default is inspect.Parameter.empty

    def accepts(self, value: Any) -> bool:
        """Whether an argument has the type of the annotation."""
        accepted = _ACCEPTED[self.type][0]
        if self.many:
            return isinstance(value, (list, tuple)) and all(isinstance(v, accepted) for v in value)
        return (self.optional and value is None) or isinstance(value, accepted)

    @property
    def words(self) -> str:
        """The accepted types, as an error lists them."""
        if self.many:
            return 'a list of tensors' if self.type is Tensor else 'a tuple of integers'
        return _ACCEPTED[self.type][1]

    @property
    def schema(self) -> str:
        """The parameter as it appears in the operator schema."""
        mark = '?' if self.optional else ''
        if self.type is QuantTensor:
            end = '' if self.required else '=None'
            return ', '.join(
                f'{word}{mark} {self.name}{suffix}{end}'
                for word, suffix in (('Tensor', ''), ('Tensor', '_sf'), ('str', '_fmt'))
            )
        word = f'Tensor({self.name}!)' if self.mutated else _SCHEMA_TYPES[self.type]
        text = f'{word}{"[]" if self.many else mark} {self.name}'
        return text if self.required else f'{text}={self._default}'

    @property
    def _default(self) -> str:
        if isinstance(self.default, (str, QuantFormat)):
            return f'"{self.default}"'
        if isinstance(self.default, torch.dtype):
            return str(self.default).removeprefix('torch.')
        return str(list(self.default)) if self.many else str(self.default)
