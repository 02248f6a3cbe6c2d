"""Asynchronous operations in flight, and reads or stores that come too early."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, active_threads, agreed, cluster_distance, first_thread
from tile_kernels.interpreter.engine.lanes import Mask, both, lane_of
from tile_kernels.interpreter.errors import AsyncReadBeforeWait
from tile_kernels.interpreter.memory.access import Access
from tile_kernels.interpreter.memory.buffers import ByteMemory, Place


@dataclass
class InFlight:
    """One asynchronous operation: its destination, the thread that started it, and its wait."""

    memory: ByteMemory
    access: Access
    place: Place
    mask: Mask
    kind: str
    thread: np.ndarray  # per block: the thread that started it
    group: np.ndarray  # per block: the group of that thread, to which it belongs
    done: Any = None
    reads: bool = False  # it reads this memory (an operand) and does not write it
    barriers: list[tuple[int, np.ndarray]] = field(default_factory=list)  # slots, and per block indices, of mbarriers


class AsyncGroups:
    """Asynchronous operations of a batch, by group and thread."""

    def __init__(self, frame: Frame) -> None:
        shape = (frame.blocks, frame.threads)
        self.committed = {'copy': np.zeros(shape, np.int64), 'gemm': np.zeros(shape, np.int64)}
        self.flights: list[InFlight] = []

    def launch(self, frame: Frame, access: Access, mask: Mask, kind: str, commit: bool) -> None:
        """Record data in flight; it belongs to the group that the issuing threads commit next."""
        threads, rows = first_thread(frame), np.arange(frame.blocks)
        group = self.committed[kind][rows, threads] + 1
        others = active_threads(frame) & (self.committed[kind] + 1 != group[:, None])
        if not others.any():
            self._add(frame, access, mask, kind, threads, group, None)
        else:  # warps of a ring that do not advance together
            for value in np.unique((self.committed[kind] + 1)[active_threads(frame)]):
                same = active_threads(frame) & (self.committed[kind] + 1 == value)
                self._add(frame, access, both(mask, same), kind, same.argmax(1), np.full_like(group, value), None)
        if commit:
            self.commit(frame, kind)

    def launch_reads(self, frame: Frame, access: Access, mask: Mask) -> None:
        """Record that the wgmma the threads have just committed still reads an operand."""
        threads = first_thread(frame)
        group = self.committed['gemm'][np.arange(frame.blocks), threads]
        self._add(frame, access, mask, 'gemm', threads, group, None, reads=True)

    def launch_tma(self, frame: Frame, access: Access, mask: Mask, operand: Any) -> None:
        """Record data in flight until a wait on its mbarrier."""
        index = np.asarray(agreed(frame, operand.index(frame)))
        index = np.broadcast_to(index[:, 0] if index.ndim else index, (frame.blocks,)).copy()
        threads = first_thread(frame)
        self._add(frame, access, mask, 'tma', threads, np.zeros(frame.blocks, np.int64), (operand.slot, index))

    def commit(self, frame: Frame, kind: str) -> None:
        """Close the current group of every active thread."""
        self.committed[kind] += active_threads(frame)

    def wait(self, frame: Frame, kind: str, leave: int) -> None:
        """Mark all but the last `leave` groups of the active threads as complete."""
        active = active_threads(frame)
        rows = np.arange(frame.blocks)
        if kind == 'copy' and not active.all():
            self.flights = [part for flight in self.flights for part in self._split(flight, active)]
        for flight in self.flights:
            if flight.kind == kind:
                landed = active[rows, flight.thread]
                landed = landed & (flight.group <= self.committed[kind][rows, flight.thread] - leave)
                newly = landed & ~flight.done
                self._land(flight, landed)
                if flight.reads and flight.memory.race is not None and newly.any():  # it was reading until now
                    lanes = newly.reshape((-1,) + (1,) * (flight.access.ndim - 1))
                    lanes = lanes if flight.mask is None else lanes & flight.mask
                    flight.memory.race.read(frame, flight.access, flight.place, lanes)
        self._sweep()

    def _split(self, flight: InFlight, active: np.ndarray) -> list[InFlight]:
        """What active threads copied, and what inactive ones did: they wait for it later."""
        own = np.ones((1, 1), bool) if flight.mask is None else flight.mask
        own = own.any(axis=tuple(range(2, own.ndim))) & np.ones_like(active)
        split = (own & active).any(1) & (own & ~active).any(1) & ~flight.done
        if flight.kind != 'copy' or not split.any():
            return [flight]
        parts = []
        here = np.where(split[:, None], active, True)
        for threads in (here, ~here):
            lanes = both(flight.mask, threads.reshape(threads.shape + (1,) * (flight.access.ndim - 2)))
            first = np.where(split, (own & threads).argmax(1), flight.thread)
            done = flight.done if threads is here else ~split
            parts.append(replace(flight, mask=lanes, thread=first, done=done.copy()))
        return parts

    def barrier_passed(
        self, frame: Frame, slot: int, numbers: np.ndarray, pairs: tuple[int, ...] | None = None
    ) -> None:
        """Mark the copies of an mbarrier as complete, after a successful wait on it.

        In a cluster of two blocks (`pairs`), the copies of both may count at the mbarrier of the first.
        """
        active = np.ones((1, 1), bool) if frame.mask is None else frame.mask
        shape = np.broadcast_shapes(active.shape, numbers.shape)
        active = np.broadcast_to(active, shape)
        numbers = np.broadcast_to(numbers, shape)
        for flight in self.flights:
            for _, index in (barrier for barrier in flight.barriers if barrier[0] == slot):
                passed = ((numbers == index[:, None]) & active).any(axis=1)
                if pairs is not None and flight.kind == 'tma':
                    passed = passed | passed[np.arange(frame.blocks) + cluster_distance(frame, pairs, 0)[:, 0]]
                self._land(flight, passed)
        self._sweep()

    def tie_to_barrier(self, frame: Frame, operand: Any) -> None:
        """Tie earlier copies of the active threads to the completion of the barrier's phase."""
        index = np.asarray(agreed(frame, operand.index(frame)))
        index = np.broadcast_to(index[:, 0] if index.ndim else index, (frame.blocks,)).copy()
        for flight in self.flights:
            if flight.kind == 'copy' and not flight.barriers:
                flight.barriers.append((operand.slot, index))

    def _add(
        self,
        frame: Frame,
        access: Access,
        mask: Mask,
        kind: str,
        thread: np.ndarray,
        group: np.ndarray,
        barrier: Any,
        reads: bool = False,
    ) -> None:
        memory = access.memory(frame)
        place = access.locate(frame, mask)
        lanes = place.ok if mask is None else mask if place.ok is None else mask & place.ok
        if memory.pending is None:
            memory.pending = Pending(memory)
        memory.pending.mark(place, access, lanes, True, reads)
        done = np.zeros(frame.blocks, bool)
        barriers = [] if barrier is None else [barrier]
        self.flights.append(InFlight(memory, access, place, lanes, kind, thread, group, done, reads, barriers))

    def _land(self, flight: InFlight, blocks: np.ndarray) -> None:
        newly = blocks & ~flight.done
        if not newly.any():
            return
        flight.done |= newly
        lanes = newly.reshape((-1,) + (1,) * (flight.access.ndim - 1))
        lanes = lanes if flight.mask is None else lanes & flight.mask
        flight.memory.pending.mark(flight.place, flight.access, lanes, False, flight.reads)
        for other in self.flights:  # other operations that still read there
            if other.reads and flight.reads and other.memory is flight.memory and not other.done.all():
                still = (~other.done).reshape((-1,) + (1,) * (other.access.ndim - 1))
                still = still if other.mask is None else still & other.mask
                flight.memory.pending.mark(other.place, other.access, still, True, True)

    def _sweep(self) -> None:
        finished = [flight for flight in self.flights if flight.done.all()]
        if not finished:
            return
        self.flights = [flight for flight in self.flights if not flight.done.all()]
        busy = {id(flight.memory) for flight in self.flights}
        for flight in finished:
            if id(flight.memory) not in busy:
                flight.memory.pending = None


class Pending:
    """Bytes of a memory whose asynchronous data is still in flight."""

    def __init__(self, memory: ByteMemory) -> None:
        self.marks = ByteMemory(np.zeros(memory.data.shape, np.uint8), memory.per_block, memory.size)
        self.reading: ByteMemory | None = None  # bytes that products still read

    def mark(self, place: Place, access: Access, mask: Mask, flying: bool, reads: bool = False) -> None:
        """Set or clear the marks of an access."""
        dtype = access.buffer.dtype
        full = 15 if dtype.packed else (1 << (8 * dtype.storage.itemsize)) - 1
        raw = np.asarray(full if flying else 0, np.dtype(f'uint{dtype.storage.itemsize * 8}')).view(dtype.storage)
        if reads and self.reading is None:
            self.reading = ByteMemory(np.zeros_like(self.marks.data), self.marks.per_block, self.marks.size)
        marks: Any = self.reading if reads else self.marks
        marks.write_raw(place, raw, dtype, mask)

    def check(self, frame: Frame, access: Access, place: Place, mask: Mask, done: str) -> None:
        """Raise if a lane reads or overwrites data in flight."""
        what = 'its asynchronous copy or product is in flight'
        self._check(frame, access, place, mask, self.marks, done, what)
        if self.reading is not None and done == 'written':
            self._check(frame, access, place, mask, self.reading, done, 'an asynchronous product still reads it')

    def _check(
        self, frame: Frame, access: Access, place: Place, mask: Mask, marks: ByteMemory, done: str, what: str
    ) -> None:
        dtype = access.buffer.dtype
        raw = marks.read_raw(place, dtype)
        flying = np.ascontiguousarray(raw).view(np.dtype(f'uint{dtype.storage.itemsize * 8}')) != 0
        flying = flying if mask is None else flying & mask
        if not flying.any():
            return
        lane = lane_of(flying)
        index = access.index_at(frame, lane)
        frame.report(
            AsyncReadBeforeWait,
            f'{access.buffer.scope} buffer {access.buffer.name} is {done} at index {index} while {what}; '
            'wait for it first',
            access.site,
            (lane[0], lane[1] if flying.shape[1] > 1 else -1),
            access.buffer.name,
            index,
        )
