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


def resident_blocks(resident_threads: int, num_threads: int) -> int:
    """Thread blocks per SM that give each thread as many registers as `resident_threads` threads would have."""
    return max(1, resident_threads // num_threads)


def byte_perm(low: Any, high: Any, selector: Any) -> Any:
    """Four bytes selected from two words; the low three bits of each nibble of the selector name a byte."""
    return T.call_extern(T.uint32, '__byte_perm', low, high, selector)


def pick_bytes(low: Any, high: Any, *numbers: int) -> Any:
    """Four bytes selected from two words; bytes are numbered from the lowest byte of `low`."""
    return byte_perm(low, high, T.uint32(sum(number << 4 * place for place, number in enumerate(numbers))))


def widened(pair: Any, half: int) -> Any:
    """One of the two bfloat16 of a word as float32, or a single bfloat16.

    Each takes one instruction. For the upper half, the compiler alone would first extract a separate bfloat16.
    """
    if pair.dtype != 'uint32':
        return T.cast(pair, T.float32)
    return T.reinterpret(pair & T.uint32(0xFFFF0000) if half else pair << 16, T.float32)
