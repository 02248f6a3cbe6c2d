"""Parameters of ops: what an annotation means in the operator schema, and which arguments it accepts."""

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

#: A tensor argument the op changes in place, and one it overwrites whatever is in it.
Mut = Annotated[Tensor, 'mutated']
Out = Annotated[Tensor, 'overwritten']

#: Annotations of parameters -> what is accepted for them, and how that reads in an error.
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
    """One parameter of an op: its annotation split into type, optional, mutated, and overwritten: not read before."""

    name: str
    type: Any
    optional: bool
    mutated: bool
    overwritten: bool
    default: Any

    @classmethod
    def of(cls, parameter: inspect.Parameter, annotation: Any) -> Param:
        """The parameter of a function, its annotation evaluated."""
        optional, how = False, ''
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            inner = [a for a in typing.get_args(annotation) if a is not type(None)]
            if len(inner) == 1:
                annotation, optional = inner[0], True
        if typing.get_origin(annotation) is Annotated:
            annotation, how = typing.get_args(annotation)
        if annotation not in _ACCEPTED:
            raise TypeError(
                f'op parameter {parameter.name} has the annotation {annotation}, which has no operator type'
            )
        return cls(parameter.name, annotation, optional, how != '', how == 'overwritten', parameter.default)

    def accepts(self, value: Any) -> bool:
        """Whether an argument has the type of the annotation."""
        return (self.optional and value is None) or isinstance(value, _ACCEPTED[self.type][0])

    @property
    def words(self) -> str:
        """What is accepted, as it reads in an error."""
        return _ACCEPTED[self.type][1]

    @property
    def schema(self) -> str:
        """How the parameter reads in the operator schema."""
        if self.type is QuantTensor:
            return f'Tensor {self.name}, Tensor {self.name}_sf, str {self.name}_fmt'
        word = _SCHEMA_TYPES[self.type]
        if self.mutated:
            word = f'Tensor({self.name}!)'
        text = f'{word}{"?" if self.optional else ""} {self.name}'
        return text if self.default is inspect.Parameter.empty else f'{text}={self._default}'

    @property
    def _default(self) -> str:
        if isinstance(self.default, (str, QuantFormat)):
            return f'"{self.default}"'
        if isinstance(self.default, torch.dtype):
            return str(self.default).removeprefix('torch.')
        return str(self.default)
