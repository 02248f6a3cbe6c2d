"""Rank configs without running them: the time of a kernel from what its lowered code does."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tile_kernels.core.gpus import Gpu
from tile_kernels.sight.count import Counts, count
from tile_kernels.sight.limits import occupancy, reason_against
from tile_kernels.sight.lower import lower
from tile_kernels.sight.subject import Subject

#: What an empty launch takes on an H200 by the timer of `bench`, in microseconds.
EVENT_US = 4.8


@dataclass(frozen=True)
class Load:
    """What the ranking knows about a launch; it has no other input, so records of it can be ranked again.

    Attributes:
        blocks: blocks of the grid.
        threads: threads of a block.
        shared: bytes of dynamic shared memory of a block.
        bytes: bytes of the tensors.
        requested: bytes that loads and stores ask of global memory.
        flops: operations of products by element type.
        events: other instructions by class.
        accesses: bytes, sectors and wavefronts by space and kind of access, e.g. `'global load'`.
    """

    blocks: int
    threads: int
    shared: int
    bytes: float
    requested: float
    flops: dict[str, float]
    events: dict[str, float]
    accesses: dict[str, list[float]]


def load_of(counts: Counts) -> Load:
    """The load of a counted launch."""
    accesses: dict[str, list[float]] = {}
    for a in counts.accesses:
        total = accesses.setdefault(f'{a.space} {a.how}', [0.0, 0.0, 0.0])
        total[:] = (x + y for x, y in zip(total, (a.bytes, a.sectors, a.wavefronts), strict=True))
    size = float(sum(counts.sizes.values()))
    return Load(
        counts.blocks, counts.threads, counts.shared, size, counts.requested(), counts.flops, counts.events, accesses
    )


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


def ranking_us(load: Load, gpu: Gpu) -> float:
    """Microseconds that order the configs of one problem; as times they are coarser than `sight.predict`.

    Bytes at the speed of a copy or of the L2 cache, or products at 80 % of the peak; then idle waves and few warps.
    """
    peak = max(gpu.peaks.values()) if any('float8' in name for name in load.flops) else sorted(gpu.peaks.values())[1]
    products = sum(load.flops.values()) / (0.8 * peak)
    memory = max(load.bytes / gpu.copy_bandwidth, load.requested / (2.6 * gpu.copy_bandwidth))
    resident = max(occupancy(load, gpu).blocks, 1)
    waves = load.blocks / (gpu.sms * resident)
    idle = math.ceil(waves) / waves if waves > 1 else min(1 / (waves * resident), 4) if waves * resident < 1 else 1
    few = max(1.0, 12 / (resident * load.threads / 32)) ** 0.5
    return float(1e6 * max(products, memory) * idle * few)
