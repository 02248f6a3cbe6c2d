"""Functions with two forms of arguments, told apart when they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

Function = TypeVar('Function', bound=Callable)


def shown_as(form: Callable) -> Callable[[Function], Function]:
    """Let `help` and `inspect.signature` show the arguments of `form`, the first of two forms, instead of `*args`."""

    def show(fn: Function) -> Function:
        setattr(fn, '__signature__', inspect.signature(form))  # noqa: B010
        return fn

    return show
