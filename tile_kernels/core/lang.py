"""The kernel language, imported at first use.

Importing TileLang takes seconds, and a kernel may already be compiled on disk. So op files import `T` and `macro` from
here: `T` is `tilelang.language`, imported when a builder first runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

#: Threads in a warp.
WARP = 32


class _LazyLanguage:
    """Forwards every attribute to `tilelang.language` and caches it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') and name.endswith('__'):  # inspection must not import the compiler
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
    """Wait for the previous kernel under programmatic dependent launch (PDL); a short kernel calls this first.

    Only after this wait may the next kernel launch. So when a kernel starts, every kernel except the previous one has
    ended.
    """
    T.pdl_sync()
    T.pdl_trigger()


#: A launch that moves fewer bytes uses programmatic dependent launch: inside a CUDA graph it then takes 0.6 to 0.95 of
#: the time.
EARLY_BYTES = 1 << 25

#: The values of the config entry `early` of a kernel that may call `begin_early`.
EARLY = (False, True)


def is_short(num_bytes: int) -> bool:
    """Whether a kernel that moves so many bytes shall use PDL: most of its time is then that of its launch."""
    return num_bytes < EARLY_BYTES


def resident_blocks(resident_threads: int, num_threads: int) -> int:
    """Thread blocks per SM that give each thread as many registers as `resident_threads` threads would have."""
    return max(1, resident_threads // num_threads)
