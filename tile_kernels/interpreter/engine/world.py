"""Several simulated devices: their symmetric memory, and the order in which their blocks run."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tile_kernels.interpreter.checks.races import check_all_arrived
from tile_kernels.interpreter.checks.remote import RemoteMarks
from tile_kernels.interpreter.engine.frame import Frame, active_threads
from tile_kernels.interpreter.engine.roles import Waiting
from tile_kernels.interpreter.errors import Deadlock, RemoteOutOfBounds, Site, UnsupportedConstruct
from tile_kernels.interpreter.meaning.statements import Run, drive
from tile_kernels.interpreter.memory.buffers import ByteMemory

_ALIGNMENT = 256  # of a tensor on each device, and the least gap between two
_BLOCKS = 1 << 20  # numbers of blocks per launch of a device
_SWITCH = 0.2  # how often the preferred devices change


@dataclass(eq=False)
class Arena:
    """The memory of one symmetric tensor on all devices, one after the other with gaps between."""

    name: str
    size: int  # bytes on each device
    world: int
    checked: bool  # whether accesses must be ordered; signal pads order themselves
    memory: ByteMemory = field(init=False)

    def __post_init__(self) -> None:
        self.step = -(-self.size // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
        raw = np.full(self.step * self.world + _ALIGNMENT, 0xA5, np.uint8)
        skip = -raw.ctypes.data % _ALIGNMENT
        self.memory = ByteMemory(raw[skip : skip + self.step * self.world].reshape(1, -1), False, raw.size - skip)
        self.memory.size = self.memory.data.size

    @property
    def start(self) -> int:
        """Address of the first byte."""
        return self.memory.data.ctypes.data

    @property
    def addresses(self) -> list[int]:
        """Address of the tensor on each device."""
        return [self.start + rank * self.step for rank in range(self.world)]

    def bytes_of(self, rank: int) -> np.ndarray:
        """The bytes of one device."""
        return self.memory.data[0, rank * self.step : rank * self.step + self.size]


@dataclass(eq=False)
class _Task:
    """A batch of blocks of one device."""

    frame: Frame
    steps: Generator[Waiting, None, None]
    site: Site
    waiting: Waiting | None = None


class World:
    """The devices of a simulation.

    Attributes:
        arenas: Symmetric tensors.
        tables: Memory slots of the parameters that hold their addresses.
        signaled: The values that were signaled, by the address of the cell.
    """

    def __init__(self, size: int, seed: int | None) -> None:
        self.size = size
        self.arenas: list[Arena] = []
        self.tables: set[int] = set()
        self.signaled: dict[int, list[int]] = {}
        self._rng = None if seed is None else random.Random(seed)
        self._running: list[_Task] = []
        self._added: list[_Task] | None = None

    # ---- memory --------------------------------------------------------------------------------------

    def watch(self, arena: Arena, unit: int) -> None:
        """Check the order of accesses to a symmetric tensor."""
        arena.memory.race = RemoteMarks(arena.memory, unit, self)

    def memory(self, frame: Frame, access: Any, address: Any, size: int) -> ByteMemory:
        """The memory of a symmetric tensor, for views of `size` bytes at the addresses of active lanes."""
        spread = np.asarray(address)
        if spread.ndim:
            active = np.ones((1, 1), bool) if frame.mask is None else frame.mask
            active = active.reshape(active.shape + (1,) * (spread.ndim - active.ndim))
            shape = np.broadcast_shapes(active.shape, spread.shape)
            spread = np.broadcast_to(spread, shape)[np.broadcast_to(active, shape)]
        found = [self._arena(frame, access.site, int(one), size) for one in np.unique(spread)]
        if any(arena is not found[0] for arena in found):
            raise frame.error(UnsupportedConstruct, 'one access to several symmetric tensors', access.site)
        return found[0].memory

    def words(self, frame: Frame, site: Site, pads: np.ndarray) -> tuple[np.ndarray, int]:
        """The 64-bit words of the signal pads at these addresses, and the address of the first word."""
        arena, *_ = (self._arena(frame, site, int(pad), 8) for pad in np.unique(pads))
        return arena.memory.typed(np.dtype(np.int64))[0], arena.start

    def _arena(self, frame: Frame, site: Site, address: int, size: int) -> Arena:
        for arena in self.arenas:
            inside = address - arena.start
            if not 0 <= inside < arena.memory.size:
                continue
            rank, offset = divmod(inside, arena.step)
            past = offset + size - arena.size
            if past <= 0:
                return arena
            text = f'rank {frame.rank} uses {size} bytes at byte {offset} of {arena.name} of rank {rank}'
            text += f', {past} more than it has'
            raise frame.error(RemoteOutOfBounds, text, site, None, arena.name, None, (rank,))
        text = f'rank {frame.rank} uses address {address:#x}, where no device has a symmetric tensor'
        raise frame.error(RemoteOutOfBounds, text, site)

    def owner(self, memory: ByteMemory, byte: int) -> tuple[int, str]:
        """The device and the name of the tensor that a byte of an arena belongs to."""
        arena = next(arena for arena in self.arenas if arena.memory is memory)
        return byte // arena.step, arena.name

    def rank_at(self, address: int) -> int:
        """The device whose memory is at an address."""
        arena = next(one for one in self.arenas if 0 <= address - one.start < one.memory.size)
        return (address - arena.start) // arena.step

    def describe(self, frame: Frame, access: Any, lane: tuple[int, ...]) -> tuple[str, str]:
        """The name of the tensor that an access is to, and what to call it."""
        if access.buffer.pointer is None:
            return access.buffer.name, f'the addresses of {access.buffer.name}, one for each rank,'
        address = np.asarray(access.buffer.pointer(frame))
        if address.ndim:
            spot = tuple(min(at, size - 1) for at, size in zip(lane, address.shape, strict=False))
            address = address[spot].reshape(-1)[0]
        arena = self._arena(frame, access.site, int(address), 1)
        return arena.name, f'{arena.name} of rank {self.rank_at(int(address))}'

    # ---- blocks --------------------------------------------------------------------------------------

    def rank_of(self, block: int) -> int:
        """The device of a block."""
        return block // _BLOCKS % self.size

    def first_block(self, rank: int, launch: int) -> int:
        """The number of the first block of a launch of a device."""
        return (launch * self.size + rank) * _BLOCKS

    def add(self, body: Run, frames: list[Frame], site: Site) -> None:
        """Take over the blocks of a launch."""
        if self._added:
            raise frames[0].error(UnsupportedConstruct, 'a simulation of several kernels in one program', site)
        self._added = [_Task(frame, drive(body, frame), site) for frame in frames]

    def collect(self, start: Callable[[], Any]) -> list[_Task]:
        """The blocks that a call of the host code launches."""
        self._added = []
        start()
        added, self._added = self._added, None
        return added or []

    def run(self, start: Callable[[int, int], list[_Task]], launches: int) -> None:
        """Run all launches of all devices; `start(rank, launch)` gives the blocks of one."""
        launched = [0] * self.size
        idle: set[_Task] = set()
        order = list(range(self.size))
        self._running = []
        for rank in range(self.size):
            self._running += start(rank, 0)
        while self._running:
            task = self._next(idle, order)
            shared = task.frame.shared
            events, started = shared.events, task.waiting is not None
            task.waiting = next(task.steps, None)
            if task.waiting is None:
                self._finish(task)
                rank = task.frame.rank or 0
                if launched[rank] + 1 < launches and all(other.frame.rank != rank for other in self._running):
                    launched[rank] += 1
                    self._running += start(rank, launched[rank])
            if task.waiting is not None and started and shared.events == events:
                idle.add(task)
            else:
                idle.clear()
            if self._running and len(idle) == len(self._running):
                raise self._deadlock()

    def _next(self, idle: set[_Task], order: list[int]) -> _Task:
        """The block to run: in turn, or the first of a few preferred devices as long as it can run."""
        if self._rng is None:
            task = next(task for task in self._running if task not in idle)
            self._running.remove(task)
            self._running.append(task)
            return task
        if self._rng.random() < _SWITCH:
            self._rng.shuffle(order)
            self._rng.shuffle(self._running)
        able = [task for task in self._running if task not in idle]
        return min(able, key=lambda task: order.index(task.frame.rank or 0))

    def _finish(self, task: _Task) -> None:
        self._running.remove(task)
        if task.frame.registers is not None:
            task.frame.registers.check(task.frame)
        if task.frame.clock is not None:
            check_all_arrived(task.frame, task.site)

    def _deadlock(self) -> Exception:
        """Which rank waits for what, one sentence part for each rank that has not ended."""
        first: dict[int, _Task] = {}
        for task in sorted(self._running, key=lambda task: (task.frame.rank or 0, task.frame.first_block)):
            first.setdefault(task.frame.rank or 0, task)
        waiting = {rank: task.waiting for rank, task in first.items() if task.waiting is not None}
        parts = [f'rank {rank} for {what()}' for rank, (_, what) in waiting.items()]
        task = next(iter(first.values()))
        active = active_threads(task.frame)
        lane = tuple(int(part) for part in np.argwhere(active)[0]) if active.any() else None
        text = f'every running block waits: {"; ".join(parts)}'
        return task.frame.error(Deadlock, text, next(iter(waiting.values()))[0], lane, others=tuple(first)[1:])
