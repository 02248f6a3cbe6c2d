"""TileLang rewrites the source of a kernel at every build; in this suite once for each function.

A builder defines the same functions for every set of static arguments, with other values in their closures. Rewriting
takes most of the time of a build. What it returns depends on the code alone, except where a `with` opens an object of
the closure, and where hints in the body name types: such functions are rewritten every time.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

from tilelang.language.eager import builder, utils
from tilelang.language.eager.ast import IRGenerator, mutate

#: Rewritten functions by the identities of code and globals; an entry keeps both alive.
_rewritten: dict[tuple[int, int, tuple[str, ...]], tuple[CodeType, IRGenerator]] = {}


def opens_closure(func: Callable, names: set[str]) -> bool:
    """Whether a `with` of a function opens something that one of these names leads to."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(func)))
    opened = [item.context_expr for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items]
    roots = [call.func for call in opened if isinstance(call, ast.Call)]
    return any(isinstance(node, ast.Name) and node.id in names for root in roots for node in ast.walk(root))


def mutate_once(func: Callable[..., Any]) -> IRGenerator:
    """`mutate` of TileLang; a function of the same code gets the same rewritten code, with its own closure."""
    values = utils.get_func_nonlocals(func)
    key = (id(func.__code__), id(func.__globals__), tuple(values))
    found = _rewritten.get(key)
    if found is None:
        made = mutate(func)
        if not made.extra_type_hints and not opens_closure(func, set(values)):
            _rewritten[key] = func.__code__, made
        return made
    first = found[1].gen
    cells = tuple(CellType(values[name]) for name in first.__code__.co_freevars)
    again = FunctionType(first.__code__, first.__globals__, first.__name__, first.__defaults__, cells)
    return IRGenerator(again, found[1].source)


def install() -> None:
    """Let TileLang use it in this process."""
    builder.mutate = mutate_once
