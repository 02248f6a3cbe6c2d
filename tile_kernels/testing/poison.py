"""Poisoned allocations: memory nobody initialised holds NaN or nonsense, so an element a kernel leaves unwritten shows.

Uninitialised memory may hold anything, and most of the time it holds what the last run left there: the right answer.
Inside `poisoned()` it never does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty`, `x.new_empty` and their relatives allocate inside the block, on any device.

    Floats start as NaN, integers as their largest value (not -1, which index maps use for "no entry"), bools as True.
    PyTorch does the filling itself, in its deterministic mode, so compiled functions, CUDA graphs and C++ callers are
    covered. Every allocation costs a write of its memory; the timers of `bench` switch that off.
    """
    mode, filling = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode('warn')
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = filling


@contextmanager
def unpoisoned() -> Iterator[None]:
    """Leave fresh memory as it comes, whatever the mode around the block: for what is timed."""
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filling
