"""Functions with two forms of arguments, told apart when they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

Function = TypeVar('Function', bound=Callable)


def shown_as(first: Callable, *others: Callable) -> Callable[[Function], Function]:
    """Let `help` and `inspect.signature` show the arguments of the first form instead of `*args`.

    An error of Python about the arguments of a form names the function that was called.
    """

    def show(fn: Function) -> Function:
        setattr(fn, '__signature__', inspect.signature(first))  # noqa: B010
        for form in (first, *others):
            form.__qualname__ = fn.__qualname__
        return fn

    return show
