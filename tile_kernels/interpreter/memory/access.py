"""One access to a buffer: from index expressions to memory, with TileLang's guards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, active_threads, first_thread
from tile_kernels.interpreter.engine.lanes import Mask, axis_values, both, expand, lane_of, select
from tile_kernels.interpreter.errors import (
    InterpreterError,
    LayoutDependent,
    MisalignedAccess,
    OutOfBounds,
    ReducerMisuse,
    RemoteOutOfBounds,
    Site,
    UninitializedRead,
    UnsupportedConstruct,
)
from tile_kernels.interpreter.memory.buffers import LocalMemory, Place, ReplicatedMemory, covers, memory_at
from tile_kernels.interpreter.memory.dtypes import DType, decoder

Layout = Callable[[Frame], tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class Dim:
    """One index: `base + sum(coefficient * axis)`.

    `guard` determines the behavior outside the buffer: 'both' (loads give the safe value, stores are dropped) or 'none'
    (an error).
    """

    base: Callable[[Frame], Any]
    terms: tuple[tuple[int, int], ...]
    guard: str


@dataclass(frozen=True)
class Buffer:
    """A typed view of memory."""

    name: str
    slot: int
    dtype: DType
    scope: str  # 'global', 'shared', 'fragment', 'local' or 'barrier'
    layout: Layout
    offset: Callable[[Frame], Any] | None = None
    pointer: Callable[[Frame], Any] | None = None  # the address of a buffer made from a raw pointer
    fixed: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # shape and strides, if they are literals


class Access:
    """A load or store of one element per lane (tile operations add their own axes)."""

    def __init__(
        self,
        buffer: Buffer,
        dims: list[Dim],
        ndim: int,
        site: Site,
        checked: bool,
        safe_value: Callable[[Frame], Any] | None = None,
    ) -> None:
        self.buffer = buffer
        self.dims = dims
        self.ndim = ndim  # number of lane axes: block, thread, and the parallel axes
        self.site = site
        self.checked = checked
        self.safe_value = safe_value
        self.extra: tuple[Callable[[Frame], int], ...] = ()
        self.atomic = False
        self.asynchronous = ''  # 'copy', 'tma' or 'gemm' for an asynchronous copy or wgmma
        self.vector_bytes = 0  # size of the vector that starts here; its address must be a multiple
        self.base_bytes = 0  # size of vectors at multiples of their size; the buffer must also start at one
        self.updates = False  # it is part of a reducer update
        self.only_moves = False  # its values only move to registers: nothing has to wait for them yet
        self.path = 0  # number of the path of branches and loops around it
        self.contended = False  # its statement also accesses the same shared buffer at other indices
        self.everyone = False  # every thread of the block reads it (operands of matrix products and reductions)
        self.private = False  # each thread makes the whole access
        self.row_shift: Callable[[Frame], Any] | None = None  # distance in rows to the written block of the cluster
        self.per_thread = False  # each thread uses its own copy of a replicated fragment
        self.may_be_in_flight = False  # a wgmma may add to its own unfinished result

    def moved(self, offset: int) -> Access:
        """The same access, shifted by `offset` elements along the last dimension."""
        if not offset:
            return self
        last = self.dims[-1]
        dims = [*self.dims[:-1], Dim(lambda frame: last.base(frame) + offset, last.terms, last.guard)]
        other = Access(self.buffer, dims, self.ndim, self.site, self.checked, self.safe_value)
        other.extra, other.atomic, other.per_thread = self.extra, self.atomic, self.per_thread
        other.asynchronous, other.path = self.asynchronous, self.path
        return other

    def extents(self, frame: Frame) -> list[int]:
        """Extent of every parallel axis of this access."""
        count = self.ndim - 2 - len(self.extra)
        return frame.extents[:count] + [extent(frame) for extent in self.extra]

    def memory(self, frame: Frame) -> Any:
        """The memory behind the buffer."""
        if self.buffer.pointer is not None:
            address, lowest, highest = self._addresses(frame)
            shape, strides = self.buffer.layout(frame)
            reach = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
            size = reach * self.buffer.dtype.storage.itemsize
            if frame.shared.world is not None:
                return frame.shared.world.memory(frame, self, address, size)
            return memory_at(lowest, highest - lowest + size)
        memory = frame.memory[self.buffer.slot]
        if memory is None:
            raise frame.error(
                UnsupportedConstruct, f'{self.buffer.name} was passed as None but the kernel uses it', self.site
            )
        return memory

    def locate(self, frame: Frame, mask: Mask) -> Place:
        """Find the elements; `ok` marks the lanes inside guarded dimensions, and other lanes outside are an error."""
        if self.plain:
            element = self._one_element(frame)
            if element is not None:
                axes = self.ndim - 2
                return Place(element, (1,) * axes, (0,) * axes)
        return self._locate_lanes(frame, mask)

    @cached_property
    def plain(self) -> bool:
        """Whether all lanes may address one element, decided without the parallel axes."""
        view = self.buffer
        special = view.offset is not None or view.pointer is not None or self.row_shift is not None or self.extra
        return view.fixed is not None and not special and not any(dim.terms for dim in self.dims)

    def _one_element(self, frame: Frame) -> int | None:
        """The element that all lanes address, or None if they differ or are outside."""
        element = 0
        for dim, length, stride in zip(self.dims, *self.buffer.fixed or ((), ()), strict=True):
            index = dim.base(frame)
            if type(index) is not int or not 0 <= index < length:
                return None
            element += index * stride
        return element

    def _locate_lanes(self, frame: Frame, mask: Mask) -> Place:
        shape, strides = self.buffer.layout(frame)
        extents = self.extents(frame)
        base: Any = 0 if self.buffer.offset is None else self.buffer.offset(frame)
        if self.buffer.pointer is not None:
            address, lowest, _ = self._addresses(frame)
            if frame.shared.world is not None:
                lowest = self.memory(frame).data.ctypes.data
            base = base + (address - lowest) // self.buffer.dtype.storage.itemsize
        steps = [0] * len(extents)
        ok: Mask = None
        for position, (dim, length, stride) in enumerate(zip(self.dims, shape, strides, strict=True)):
            start = dim.base(frame)
            if isinstance(start, np.ndarray):
                start = expand(start, self.ndim).astype(np.intp, copy=False)
                low, high = (int(start.min()), int(start.max())) if start.size else (0, 0)
            else:
                low = high = start = int(start)
            for axis, coefficient in dim.terms:
                reach = coefficient * (extents[axis] - 1)
                low, high = (low, high + reach) if reach > 0 else (low + reach, high)
            if low >= 0 and high < length:
                base = base + start * stride
                for axis, coefficient in dim.terms:
                    steps[axis] += coefficient * stride
                continue
            index, inside = self._outside(frame, mask, position, start, length, extents)
            base = base + index * stride
            ok = both(ok, inside)
        if self.row_shift is not None:
            row = frame.memory[self.buffer.slot].typed(self.buffer.dtype.storage).shape[1]
            base = base + expand(self.row_shift(frame) * row, self.ndim)
        used = tuple(extent if step else 1 for extent, step in zip(extents, steps, strict=True))
        return Place(base, used, tuple(steps), ok, len(self.extra))

    def load(self, frame: Frame, mask: Mask) -> Any:
        """Values of the lanes; the safe value if a guarded index is outside."""
        place = self.locate(frame, mask)
        memory = self.memory(frame)
        if self.vector_bytes or self.base_bytes:
            self.check_aligned(frame, memory, place, both(mask, place.ok))
        if self.buffer.scope == 'fragment' and memory.partial and self.checked and not self.updates:
            text = (
                f'reducer {self.buffer.name} is read before T.finalize_reducer, while threads hold parts of its result'
            )
            frame.report(ReducerMisuse, text, self.site, buffer=self.buffer.name)
        if isinstance(memory, ReplicatedMemory) and memory.lines is not None:
            value = self._read_copies(frame, memory, place, both(mask, place.ok))
        else:
            self.watch_read(frame, memory, place, both(mask, place.ok))
            value = memory.read(place, self.buffer.dtype)
        if place.ok is not None:
            safe = 0 if self.safe_value is None else self.safe_value(frame)
            value = select(place.ok, value, safe, self.buffer.dtype.value)
        if frame.shared.observer is not None:
            self.observe(frame, 'load', place, value, mask)
        return value

    def store(self, frame: Frame, value: Any, mask: Mask) -> None:
        """Store values of the active lanes; a guarded index outside drops the store."""
        place = self.locate(frame, mask)
        mask = both(mask, place.ok)
        memory = self.memory(frame)
        if self.vector_bytes or self.base_bytes:
            self.check_aligned(frame, memory, place, mask)
        if frame.shared.observer is not None:
            self.observe(frame, 'store', place, value, mask)
        if memory.pending is not None and not self.may_be_in_flight:
            memory.pending.check(frame, self, place, mask, 'written')
        if self.buffer.scope in ('shared', 'global') and frame.clock is not None and frame.clock.settling:
            frame.clock.settle(active_threads(frame))
        if self.buffer.scope == 'fragment' and self._store_differs(frame, memory, place, value, mask):
            return
        if memory.race is None or self.atomic:
            memory.write(place, value, self.buffer.dtype, mask)
            return
        seen = memory.race.before_write(frame, self, place, mask, value)
        memory.write(place, value, self.buffer.dtype, mask)
        memory.race.after_write(frame, self, seen)

    def check_aligned(self, frame: Frame, memory: Any, place: Place, mask: Mask) -> None:
        """Raise if a vector does not start at a multiple of its size."""
        if self.buffer.scope not in ('global', 'shared') or not self.checked:
            return
        begin = memory.data.ctypes.data if self.buffer.scope == 'global' else 0
        size, address = self.base_bytes, np.full((1,) * self.ndim, begin, np.int64)
        if self.vector_bytes:
            size, address = self.vector_bytes, begin + place.flat() * self.buffer.dtype.bits // 8
        bad = address % size != 0
        bad = bad if mask is None else bad & mask
        if not bad.any():
            return
        lane = lane_of(bad)
        index = self.index_at(frame, lane)
        frame.report(
            MisalignedAccess,
            f'a vector of {size} bytes of {self.buffer.name} at index {_tuple(index)} begins '
            f'{int(np.broadcast_to(address, bad.shape)[lane] % size)} bytes behind a multiple of its size',
            self.site,
            _thread_lane(bad, lane),
            self.buffer.name,
            index,
        )

    def _read_copies(self, frame: Frame, memory: ReplicatedMemory, place: Place, mask: Mask) -> Any:
        """Values of the threads' own copies; in a collective operation they must be equal."""
        lines, dtype = memory.spread(), self.buffer.dtype
        place = memory.copies(place, dtype)
        active = expand(active_threads(frame), self.ndim)
        self.watch_read(frame, lines, place, active if mask is None else active & mask)
        if self.per_thread:
            return lines.read(place, dtype)
        raw = lines.read_raw(place, dtype)
        chosen = raw[np.arange(frame.blocks), first_thread(frame)][:, None]
        differs = (raw != chosen) & active
        differs = differs if mask is None else differs & mask
        if differs.any():
            frame.shared.session.found(self.depends(frame, lane_of(differs), 'read by threads together'))
        return decoder(dtype)(chosen)

    def _store_differs(self, frame: Frame, memory: Any, place: Place, value: Any, mask: Mask) -> bool:
        """Store to the threads' own copies of a fragment if the values differ; returns whether they do."""
        by_value = _differs_by_thread(frame, value)
        if not isinstance(memory, ReplicatedMemory):
            apart = isinstance(place.base, np.ndarray) and place.base.shape[1] > 1
            if by_value and not apart:
                raise self.depends(frame, (0, -1), 'written by threads together')
            return False
        by_mask = frame.mask is not None and _splits_blocks(frame)
        if memory.lines is None:
            by_place = isinstance(place.base, np.ndarray) and place.base.shape[1] > 1
            if not (by_value or by_mask or by_place):
                return False
        elif mask is None and not (by_value or by_mask) and covers(place, memory.size * 8 // self.buffer.dtype.bits):
            memory.unite(same=True)
            return False
        active = None if frame.mask is None else expand(active_threads(frame), self.ndim)
        memory.spread().write(memory.copies(place, self.buffer.dtype), value, self.buffer.dtype, both(mask, active))
        return True

    def depends(self, frame: Frame, lane: tuple[int, ...], done: str) -> InterpreterError:
        """The finding for a result that depends on the layout of a fragment."""
        index = self.index_at(frame, (*lane, *(0,) * (self.ndim - len(lane))))
        return frame.error(
            LayoutDependent,
            f'fragment {self.buffer.name} is {done} at index {_tuple(index)}, where their values differ: which of them '
            'counts depends on the layout that the compiler chooses',
            self.site,
            lane,
            self.buffer.name,
            index,
        )

    def observe(self, frame: Frame, action: str, place: Place, value: Any, mask: Mask) -> None:
        """Report the lanes of this access that are inside the buffer to the observer."""
        from tile_kernels.interpreter.observe import AccessEvent

        observer, frame.shared.observer = frame.shared.observer, None  # the observer's reads do not count
        try:
            observer.access(AccessEvent(action, frame, self, place, value, both(mask, place.ok)))
        finally:
            frame.shared.observer = observer

    def watch_read(self, frame: Frame, memory: Any, place: Place, mask: Mask) -> None:
        """Check a read against the state of the memory: written, complete, ordered."""
        if memory.written is not None and self.checked:
            self._check_written(frame, memory, place, mask)
        if memory.pending is not None and not self.may_be_in_flight:
            memory.pending.check(frame, self, place, mask, 'read')
        if memory.race is not None and not self.atomic:
            memory.race.read(frame, self, place, mask)

    def index_at(self, frame: Frame, lane: tuple[int, ...]) -> tuple[int, ...]:
        """The index of one lane, for messages."""
        extents = self.extents(frame)
        found = []
        for dim in self.dims:
            index = self._index(dim, expand(dim.base(frame), self.ndim), extents)
            if isinstance(index, np.ndarray):
                spot = tuple(min(place, size - 1) for place, size in zip(lane, index.shape, strict=True))
                index = index[spot]
            found.append(int(index))
        return tuple(found)

    def _addresses(self, frame: Frame) -> tuple[Any, int, int]:
        """Address of the buffer for every lane (arbitrary for inactive lanes), and the lowest and highest address."""
        address = 0 if self.buffer.pointer is None else self.buffer.pointer(frame)
        if not isinstance(address, np.ndarray):
            return int(address), int(address), int(address)
        address = expand(address, self.ndim).astype(np.int64)
        active = np.ones((1, 1), bool) if frame.mask is None else frame.mask
        active = np.broadcast_to(expand(active, self.ndim), np.broadcast_shapes(active.shape, address.shape))
        used = np.broadcast_to(address, active.shape)[active]
        lowest, highest = int(used.min()), int(used.max())
        return np.clip(address, lowest, highest), lowest, highest

    def _index(self, dim: Dim, start: Any, extents: list[int]) -> Any:
        index = start
        for axis, coefficient in dim.terms:
            index = index + axis_values(extents[axis], 2 + axis, self.ndim).astype(np.intp) * coefficient
        return index

    def _outside(
        self, frame: Frame, mask: Mask, position: int, start: Any, length: int, extents: list[int]
    ) -> tuple[Any, np.ndarray]:
        dim = self.dims[position]
        index = np.asarray(self._index(dim, start, extents), dtype=np.intp)
        index = index.reshape((1,) * self.ndim) if index.ndim == 0 else index
        inside = (index >= 0) & (index < length)
        if dim.guard != 'both' and self.checked:
            bad = ~inside if mask is None else ~inside & mask
            if bad.any():
                frame.shared.session.found(self.outside_error(frame, bad))
        if dim.guard != 'none' and (mask is None or (~inside & mask).any()):
            frame.shared.note_guarded(self.site, self.buffer.name)
            if frame.shared.session.strict or self.is_remote(frame):
                frame.shared.session.found(self.outside_error(frame, ~inside if mask is None else ~inside & mask))
        return np.where(inside, index, 0), inside

    def outside_error(self, frame: Frame, bad: np.ndarray) -> InterpreterError:
        """The finding for the first lane outside the buffer."""
        lane = lane_of(bad)
        index = self.index_at(frame, lane)
        shape, _ = self.buffer.layout(frame)
        kind: type[InterpreterError] = OutOfBounds
        name, what = self.buffer.name, f'{self.buffer.scope} buffer {self.buffer.name}'
        if self.is_remote(frame):
            kind = RemoteOutOfBounds
            name, what = frame.shared.world.describe(frame, self, lane)
        text = f'index {_tuple(index)} of {what} is outside its shape {_tuple(shape)}'
        return frame.error(kind, text, self.site, _thread_lane(bad, lane), name, index)

    def is_remote(self, frame: Frame) -> bool:
        """Whether the access is to a symmetric tensor of a device, or to the table of their addresses."""
        world = frame.shared.world
        return world is not None and (self.buffer.pointer is not None or self.buffer.slot in world.tables)

    def _check_written(self, frame: Frame, memory: Any, place: Place, mask: Mask) -> None:
        missing = memory.unwritten(place, self.buffer.dtype)
        if missing is None:
            return
        missing = missing if mask is None else missing & mask
        if not missing.any():
            return
        session = frame.shared.session
        if session.looking:
            session.unwritten = missing if session.unwritten is None else session.unwritten | missing
            return
        lane = lane_of(missing)
        index = self.index_at(frame, lane)
        frame.report(
            UninitializedRead,
            f'{self.buffer.scope} buffer {self.buffer.name} is read at index {_tuple(index)} before it is written',
            self.site,
            _thread_lane(missing, lane),
            self.buffer.name,
            index,
        )


def is_local(memory: Any) -> bool:
    """Whether a memory contains private registers of threads."""
    return isinstance(memory, LocalMemory)


def _differs_by_thread(frame: Frame, value: Any) -> bool:
    """Whether active threads of a block hold different values."""
    if not isinstance(value, np.ndarray) or value.ndim < 2 or value.shape[1] == 1:
        return False
    if frame.mask is None:
        first = value[:, :1]
    else:
        value = np.broadcast_to(value, (frame.blocks, *value.shape[1:]))
        first = value[np.arange(frame.blocks), first_thread(frame)][:, None]
    differs = value != first
    if value.dtype.kind == 'f':
        differs &= ~((value != value) & (first != first))
    return bool((differs if frame.mask is None else differs & expand(active_threads(frame), value.ndim)).any())


def _splits_blocks(frame: Frame) -> bool:
    """Whether some running threads of a block are inactive while others are active."""
    if frame.mask.shape[1] == 1:
        return False
    active = active_threads(frame)
    idle = ~active if frame.live is None else ~active & frame.live
    return bool((active.any(axis=1) & idle.any(axis=1)).any())


def _tuple(values: tuple[int, ...]) -> str:
    return '(' + ', '.join(str(value) for value in values) + ')'


def _thread_lane(mask: np.ndarray, lane: tuple[int, ...]) -> tuple[int, ...]:
    """The lane, with thread -1 if the mask does not distinguish threads."""
    return (lane[0], lane[1] if mask.shape[1] > 1 else -1, *lane[2:])
