"""The kernel language, loaded at first use.

Importing TileLang takes seconds and a kernel may already be compiled on disk, so op files take `T` and `macro` from
here: `T` is `tilelang.language`, resolved when a builder first runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

#: Threads of a warp.
WARP = 32


class _LazyLanguage:
    """Forwards every attribute to `tilelang.language` and remembers it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') and name.endswith('__'):  # inspection must not load the compiler
            raise AttributeError(name)
        value = getattr(importlib.import_module('tilelang.language'), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    from tilelang import language as T
else:
    T = _LazyLanguage()


def macro(fn: Callable) -> Callable:
    """`T.macro`, applied when the first kernel that uses `fn` is built."""
    built: Callable | None = None

    def expand(*args: Any, **kwargs: Any) -> Any:
        nonlocal built
        if built is None:
            built = T.macro(fn)
        return built(*args, **kwargs)

    return expand


@macro
def begin_early():
    """First of all in a short kernel: it may be launched while the kernel before it still runs, and waits here.

    Only then may the next one be launched, so when a kernel begins all has ended but the one right before it.
    """
    T.pdl_sync()
    T.pdl_trigger()


def resident_blocks(resident_threads: int, num_threads: int) -> int:
    """Thread blocks of an SM that leave each thread the registers `resident_threads` threads would have."""
    return max(1, resident_threads // num_threads)
