"""Order configs without running them: the time of a launch from what its lowered code does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tile_kernels.core.gpus import Gpu
from tile_kernels.sight.count import Counts
from tile_kernels.sight.limits import occupancy

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


# The time of a launch -----------------------------------------------------------------------

#: Fitted on one problem of each of eight kernels, 203 times of an H200 (`benchmarks/results/sight/sweeps.jsonl`).
#: Microseconds until a block runs, of a block barrier, and of a warp that it stops.
START_US, BARRIER_US, STOPPED_US = 0.54, 0.054, 0.0005
#: Of a store of 16 bytes and of a shuffle in a chain of instructions, and until a copy by TMA arrives.
STORE_US, SHUFFLE_US, ARRIVAL_US = 1.0, 0.0022, 1.1
#: Fitted as well: slots of the issue unit for a shuffle, and the part of other work that products do not hide.
SHUFFLE_SLOTS, EXPOSED = 9.2, 0.11
#: How many times as long a product with spilled sums takes.
SPILLED = 2.75
#: Threads of a warpgroup; in a product by wgmma, one loads. Sums of a thread from which on registers spill.
WARPGROUP, MANY_SUMS = 128, 200
#: Clocks of an SM in a microsecond, and what it does in one: operations of threads, shuffles of warps.
CLOCKS, ALU, SFU, SHUFFLES = 1755.0, 128, 16, 32


def ranking_us(load: Load, gpu: Gpu) -> float:
    """Microseconds that order the configs of one problem; as times they are coarser than `sight.predict`.

    Bytes at the speed of a copy or of the L2 cache, and the work of blocks in waves; the longer one counts most.
    """
    memory = 1e6 * max(load.bytes / gpu.copy_bandwidth, load.requested / (2.6 * gpu.copy_bandwidth))
    steps = _steps(load)
    resident = max(occupancy(load, gpu, _registers(load, steps)).blocks, 1)
    waves = math.ceil(load.blocks / (gpu.sms * resident))
    shared = min(resident, math.ceil(load.blocks / gpu.sms))  # blocks that share an SM
    work = waves * (_product_us if load.flops else _chain_us)(load, gpu, shared)
    return float((memory**4 + work**4) ** 0.25)


def _each(load: Load, access: str, what: int = 0) -> float:
    """Bytes, sectors or wavefronts of a kind of access in one block."""
    return load.accesses.get(access, [0.0, 0.0, 0.0])[what] / load.blocks


def _steps(load: Load) -> float:
    """Steps of the loop of a block that copies by TMA, from its barriers; 0 without such copies."""
    copied = _each(load, 'global tma_load')
    return max(load.events.get('barrier', 0.0) / load.blocks / load.threads - 1, 1.0) if copied else 0.0


def _sums(load: Load, steps: float) -> float:
    """Numbers that a thread of a product keeps: its results, and the scores of a step of attention."""
    scores = load.events.get('sfu', 0.0) / load.blocks / steps if steps else 0.0
    return (_each(load, 'global store') / 2 + scores) / max(load.threads - WARPGROUP, 32)


def _registers(load: Load, steps: float) -> int:
    """Registers of a thread, on average, before anything is compiled."""
    if not steps:
        return min(255, 24 + int(_each(load, 'global load') / load.threads / 4))
    loading = min(WARPGROUP, load.threads)
    own = (load.threads - loading) * min(255.0, _sums(load, steps) + 60)
    return int((own + loading * 40) / load.threads)


def _issue_us(load: Load) -> float:
    """Microseconds of instructions of one block, alone on an SM."""
    slots = {'alu': 1 / ALU, 'sfu': 1 / SFU, 'shuffle': SHUFFLE_SLOTS / SHUFFLES}
    return sum(load.events.get(name, 0.0) * slot for name, slot in slots.items()) / load.blocks / CLOCKS


def _chain_us(load: Load, gpu: Gpu, shared: int) -> float:
    """A block without products: the longest of what it waits for, its instructions, and accesses to shared memory."""
    warps = math.ceil(load.threads / 32)
    chain = START_US + load.events.get('block_barrier', 0.0) / load.blocks * (BARRIER_US + STOPPED_US * warps)
    chain += _each(load, 'global store') / load.threads / 16 * STORE_US
    chain += load.events.get('shuffle', 0.0) / load.blocks / warps * SHUFFLE_US
    wavefronts = sum(_each(load, access, 2) for access in load.accesses if access.startswith('shared'))
    return max(chain, shared * _issue_us(load), shared * wavefronts / CLOCKS)


def _product_us(load: Load, gpu: Gpu, shared: int) -> float:
    """A block with products: steps that wait for their copies or for each other, and other instructions beside."""
    peak = max(gpu.peaks.values()) if any('float8' in name for name in load.flops) else sorted(gpu.peaks.values())[1]
    steps = _steps(load)
    product = 1e6 * sum(load.flops.values()) / load.blocks / (0.8 * peak / gpu.sms)
    products = shared * product
    if steps:
        stages = load.shared / (_each(load, 'global tma_load') / steps)
        wait = ARRIVAL_US / max(stages - 1, 1) + (product / steps if stages < 2 else 0)
        products = steps * max(products / steps, wait)
    other = shared * _issue_us(load)
    spilled = SPILLED if _sums(load, steps) >= MANY_SUMS else 1
    return (max(products, other) + EXPOSED * min(products, other) + START_US) * spilled
