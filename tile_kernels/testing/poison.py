"""Poisoned allocations: uninitialized memory holds NaN or nonsense, so an element that a kernel does not write shows.

Uninitialized memory may hold anything. Often it holds the results of the last run: the right answer. Inside
`poisoned()` it never does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill the memory that `torch.empty`, `x.new_empty` and similar allocate inside the block, on any device.

    Floats start as NaN, integers as their largest value (not -1, which index maps use for "no entry"), bools as True.
    PyTorch itself fills the memory, in its deterministic mode, so this includes compiled functions, CUDA graphs and C++
    callers. Every allocation costs a write of its memory; the timers of `bench` disable this.
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
    """Do not fill fresh memory inside the block, whatever the mode around it; for timed code."""
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filling
