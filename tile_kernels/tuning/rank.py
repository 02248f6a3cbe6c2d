"""Rank configs without running them: the time of a kernel from what its lowered code does."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tile_kernels.sight.count import count
from tile_kernels.sight.limits import reason_against
from tile_kernels.sight.lower import lower
from tile_kernels.sight.ranking import EVENT_US, Load, load_of, ranking_us
from tile_kernels.sight.subject import Subject


@dataclass(frozen=True)
class Estimate:
    """What is known about a config before it is compiled.

    Attributes:
        us: predicted microseconds.
        source: digest of the CUDA source.
        reads: names of the buffers in global memory that it reads.
        writes: names of those that it writes.
        against: why the GPU cannot launch it, if it cannot.
        loads: its launches.
    """

    us: float
    source: str
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    against: str | None = None
    loads: tuple[Load, ...] = ()


def estimate(subjects: Sequence[Subject]) -> Estimate:
    """Lower the launches of a config, check that they fit the GPU, and predict their time."""
    source, us = hashlib.sha256(), 0.0
    accesses, loads = [], []
    for subject in subjects:
        lowered = lower(subject)
        source.update(lowered.source.encode())
        counted = count(subject, lowered)
        against = next(filter(None, (reason_against(c, subject.gpu) for c in counted)), None)
        if against is not None:
            return Estimate(math.inf, source.hexdigest(), against=against)
        accesses += [a for c in counted for a in c.accesses if a.space == 'global']
        loads += [load_of(c) for c in counted]
        us += EVENT_US + sum(ranking_us(load, subject.gpu) for load in loads[-len(counted) :])
    reads = frozenset(a.buffer for a in accesses if not a.writes)
    return Estimate(
        us, source.hexdigest(), reads, frozenset(a.buffer for a in accesses if a.writes), loads=tuple(loads)
    )
