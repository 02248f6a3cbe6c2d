"""Lanes: many blocks, all threads and all iterations of parallel loops, computed at once.

A value that differs between lanes is an ndarray with axes (block, thread, P0, P1, ...). P0, P1, ... are the parallel
loops around the expression. An axis along which the value is constant has extent 1. A value that is the same everywhere
is a Python or NumPy scalar. A mask is a boolean array over lanes, or None for "all of them".
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

Mask = Any  # boolean ndarray over lanes, or None


def expand(value: Any, ndim: int) -> Any:
    """Add the axes of inner parallel loops to a value from an outer level."""
    if isinstance(value, np.ndarray) and value.ndim < ndim:
        return value.reshape(value.shape + (1,) * (ndim - value.ndim))
    if isinstance(value, tuple):
        return tuple(expand(part, ndim) for part in value)
    return value


@lru_cache(maxsize=4096)
def axis_values(extent: int, axis: int, ndim: int) -> np.ndarray:
    """0 .. extent-1 along one axis of an `ndim`-dimensional lane array."""
    shape = [1] * ndim
    shape[axis] = extent
    values = np.arange(extent, dtype=np.int32).reshape(shape)
    values.flags.writeable = False
    return values


def both(first: Mask, second: Mask) -> Mask:
    """Lanes active in both masks."""
    if first is None:
        return second
    return first if second is None else first & second


def select(condition: Any, if_true: Any, if_false: Any, kind: np.dtype) -> Any:
    """Lane-wise choice between values of dtype `kind` (Python integers have no width)."""
    if isinstance(if_true, tuple):
        return tuple(select(condition, one, other, kind) for one, other in zip(if_true, if_false, strict=True))
    return np.where(condition, np.asarray(if_true, kind), np.asarray(if_false, kind))


def lane_of(mask: np.ndarray) -> tuple[int, ...]:
    """Coordinates of the first lane set in a mask."""
    return tuple(int(position) for position in np.unravel_index(int(np.argmax(mask)), mask.shape))


def splits_warps(mask: Mask, live: Mask = None) -> bool:
    """Whether some warp of a block is only partly active; threads that have returned do not count."""
    if mask is None or mask.shape[1] == 1:
        return False
    if mask.ndim > 2:
        mask = mask.any(axis=tuple(range(2, mask.ndim)))
    idle = ~mask if live is None else ~mask & live
    spare = -mask.shape[1] % 32
    if spare:
        mask = np.concatenate([mask, np.zeros((mask.shape[0], spare), bool)], axis=1)
        idle = np.concatenate([idle, np.zeros((idle.shape[0], spare), bool)], axis=1)
    busy = mask.reshape(mask.shape[0], -1, 32).any(axis=2)
    return bool((busy & idle.reshape(idle.shape[0], -1, 32).any(axis=2)).any())
