"""Find ops and cases from user input: `quant.per_token_cast`, `quant`, `num_tokens=64`, `dtype=bfloat16`."""

from __future__ import annotations

import ast
import difflib
import importlib
import re
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any

import torch

from tile_kernels.core import check
from tile_kernels.core.cases import Case, Cases, case_id
from tile_kernels.core.errors import ArgumentError, TileKernelsError
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.launch import Launch
from tile_kernels.core.op import Op, ops

_DTYPES = {'bf16': 'bfloat16', 'fp16': 'float16', 'f16': 'float16', 'fp32': 'float32', 'f32': 'float32'}
#: The number of values of an entry that an error lists.
MAX_LISTED = 8
_FLAGS = {'1': True, 'true': True, 'yes': True, '0': False, 'false': False, 'no': False}


def load_ops() -> dict[str, Op]:
    """Import every family and return all ops by name."""
    package = importlib.import_module('tile_kernels')  # late: the package imports core
    for family in package.FAMILIES:
        importlib.import_module(f'tile_kernels.{family}')
    return ops


def find_op(name: str) -> Op:
    """The op with this name."""
    known = load_ops()
    if name in known:
        return known[name]
    if any(op.family == name for op in known.values()):
        raise ArgumentError(
            f'op must be the name of one op, got the family {name}; tile-kernels list {name} names its ops'
        )
    raise _no_such(name, known)


def find_ops(names: Iterable[str]) -> list[Op]:
    """The named ops; a family means all of its ops, and no name means all ops."""
    known = load_ops()
    found: dict[str, Op] = {}
    for name in names:
        chosen = {op.name: op for op in known.values() if name in (op.name, op.family)}
        if not chosen:
            raise _no_such(name, known)
        found |= chosen
    return list((found or known).values())


def _no_such(name: str, known: Mapping[str, Op]) -> ArgumentError:
    words = [*known, *{op.family for op in known.values()}]
    close = difflib.get_close_matches(name, words, n=1, cutoff=0.5)
    hint = f'did you mean {close[0]}?' if close else 'tile-kernels list names them'
    return ArgumentError(f'op must be the name of an op or a family, got {name!r}; {hint}')


def cases_of(op: Op) -> Cases:
    """The cases of an op."""
    if op.case_set is None:
        raise ArgumentError(f'{op.name}: has no cases')
    return op.case_set


def all_cases(op: Op) -> list[Case]:
    """Every case of an op, cases from models first."""
    cases = op.case_set
    return [] if cases is None else cases.bench + cases.smoke + cases.full


def typical_case(op: Op, given: Mapping[str, Any] | None = None) -> Case:
    """The first case of an op (from a model, if any) with the given changes, as values or text."""
    given = given or {}
    cases = all_cases(op)
    if not cases:
        raise ArgumentError(f'{op.name}: has no cases')
    template = next((case for case in cases if given.keys() <= case.keys()), None)
    if template is None:
        names = list(dict.fromkeys(name for case in cases for name in case))
        unknown = next((name for name in given if name not in names), next(iter(given)))
        hint = check.did_you_mean(unknown, [name for name in names if name != unknown])
        raise ArgumentError(
            f'{op.name}: a case is given by {", ".join(names)}, got {unknown}' + (f'; {hint}' if hint else '')
        )
    return template | {name: _value(name, value, template[name]) for name, value in given.items()}


def case_by_id(op: Op, wanted: str) -> Case:
    """The case of an op with this id."""
    for case in all_cases(op):
        if case_id(case) == wanted:
            return case
    known = [case_id(case) for case in all_cases(op)]
    close = difflib.get_close_matches(wanted, known, n=3, cutoff=0)
    raise ArgumentError(f'{op.name}: case must be the id of a case, got {wanted!r}; near it are {", ".join(close)}')


def launches_of(op: Op, case: Case) -> list[Launch]:
    """The launches of a case; a case that cannot be built (a negative extent, too few channels) is a user error."""
    try:
        return op.trace_case(case)
    except TileKernelsError:
        raise
    except Exception as error:
        reason = _unusual(op, case) or str(error).partition('\n')[0]
        raise ArgumentError(f'{op.name}: no arguments can be made for {case_id(case)}: {reason}') from error


def _unusual(op: Op, case: Case) -> str:
    """The entries of a case that no case of the op has, with the existing values; empty if all are known."""
    words = []
    for name, value in case.items():
        known = [other[name] for other in all_cases(op) if name in other]
        if value not in known:
            listed = list(dict.fromkeys(case_id({'': one}).removeprefix('=') or "''" for one in known))
            words.append(f'{name} is {", ".join(listed[:MAX_LISTED])}{" ..." if len(listed) > MAX_LISTED else ""}')
    return f'in the cases of the op {" and ".join(words)}' if words else ''


def words_to_case(words: Iterable[str]) -> dict[str, str]:
    """`['num_tokens=64']` -> `{'num_tokens': '64'}`."""
    given = {}
    for word in words:
        name, equals, value = word.partition('=')
        if not (name and equals and value):
            raise ArgumentError(f'a case is given as key=value, got {word!r}')
        given[name] = value
    return given


def _value(name: str, value: Any, like: Any) -> Any:
    """`value` for the case: a string is parsed as the type of `like`."""
    read = _read(name, value, like) if isinstance(value, str) and not isinstance(like, str) else value
    if isinstance(like, (int, float)) and not isinstance(read, (type(like), int, NoneType)):
        raise ArgumentError(f'{name} must be like {like}, got {value!r}')
    return read


def _read(name: str, value: str, like: Any) -> Any:
    try:
        if isinstance(like, torch.dtype):
            return _dtype(value)
        if isinstance(like, QuantFormat):
            return QuantFormat.parse(value)
        if isinstance(like, bool):
            return _FLAGS[value.lower()]
        if isinstance(like, (tuple, list)):
            return type(like)(int(extent) for extent in re.split('[x,]', value.strip('()[] ').removesuffix(',')))
        return ast.literal_eval(value)
    except (KeyError, ValueError, SyntaxError) as error:
        raise ArgumentError(f'{name} must be like {like}, got {value!r}') from error


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, _DTYPES.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(name)
    return found
