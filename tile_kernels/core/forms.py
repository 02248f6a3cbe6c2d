"""Functions that accept two sets of arguments and distinguish them at each call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

Function = TypeVar('Function', bound=Callable)


def shown_as(first: Callable, *others: Callable) -> Callable[[Function], Function]:
    """Make `help` and `inspect.signature` show the arguments of the first form instead of `*args`.

    Python's own errors about the arguments of a form then name the function that was called.
    """

    def show(fn: Function) -> Function:
        setattr(fn, '__signature__', inspect.signature(first))  # noqa: B010
        for form in (first, *others):
            form.__qualname__ = fn.__qualname__
        return fn

    return show
