"""Races: the last accesses to every element, and the barriers that order them.

Two accesses to one element race if one of them changes the value, different threads (blocks) make them, and no barrier
orders them. Threads of a block are distinguished by number. Only the compiler knows the threads of parallel loops and
tile operations. So each iteration and each tile element counts as one thread, and as the same thread in loops of equal
shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.clock import Clock
from tile_kernels.interpreter.engine.frame import Frame, active_threads, first_thread
from tile_kernels.interpreter.engine.lanes import Mask, expand
from tile_kernels.interpreter.errors import DataRace, Site
from tile_kernels.interpreter.memory.access import Access
from tile_kernels.interpreter.memory.buffers import ByteMemory, Place, any_over, gather, scatter
from tile_kernels.interpreter.memory.dtypes import encoder

NOBODY = -1
SEVERAL = -2
ANOTHER_BLOCK = -3
_SEVERAL_OF_WARP = -10  # minus the warp: several threads of that warp
_AGREED = -4  # several threads that wrote the same value
_MOST_SPREADS = 64  # most places of a buffer whose lanes are remembered
_MOST_AGREED = 4096  # most elements of one statement for which the threads are kept
_PAST = ('wrote', 'read', 'updated atomically')
_TILE = 1 << 40  # agents of tiles and parallel loops start here


def _unlike(stored: Any, written: Any) -> Any:
    """Whether a write changes the stored value; a NaN over a NaN does not."""
    different = np.asarray(stored != written)
    if np.asarray(stored).dtype.kind == 'f':
        different &= ~((stored != stored) & (written != written))
    return different


@dataclass
class Lanes:
    """The active lanes of an access, as parallel lists."""

    block: np.ndarray
    cell: np.ndarray
    agent: np.ndarray
    warp: np.ndarray  # the warp that makes the access
    now: np.ndarray  # number of block barriers passed
    warp_now: np.ndarray  # number of warp barriers passed
    stamp: np.ndarray
    position: np.ndarray  # index in the lane array
    raw: np.ndarray  # bits that a store writes (empty for loads)
    spot: np.ndarray | slice  # index in the traces, a slice if it is one
    changed: np.ndarray | None = None  # whether they differ from the stored bits


@dataclass
class Spread:
    """What the lanes of an access are, whenever it is made at the same place without a mask."""

    access: Access  # kept alive, because its identity is part of the key
    shape: tuple[int, ...]
    block: np.ndarray
    cell: np.ndarray
    agent: np.ndarray
    warp: np.ndarray
    position: np.ndarray
    spot: np.ndarray | slice


class Trace:
    """The last reads, or the last writes, of every element of a shared buffer."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.cells, size = shape[1], shape[0] * shape[1]  # one row of cells per block, one after the other
        self.agent = np.full(size, NOBODY, np.int64)
        self.at = np.full(size, -1, np.int32)
        self.warp = np.full(size, -1, np.int32)
        self.warp_at = np.zeros(size, np.int32)
        self.stamp = np.zeros(size, np.int32)
        self.period = np.full(size, -1, np.int32)  # period of the warp, for reads that nothing waits for; else -1
        self.fences = np.full(size, -1, np.int32)  # number of fences before the access; -1 for TMA writes
        self.path = np.zeros(size, np.int32)
        self.agreed: dict[int, set[int]] = {}  # element -> threads that wrote the same value

    def unordered(self, clock: Clock, lanes: Lanes) -> Any:
        """Lanes that no barrier orders after the last access of another thread to their element."""
        spot = lanes.spot
        other = self.agent[spot]
        clash: Any = ((self.at[spot] == lanes.now) | (other == ANOTHER_BLOCK)) & (other != lanes.agent)
        if not clash.any():
            return clash
        # a warp barrier orders two threads of one warp
        several = np.where(other <= _SEVERAL_OF_WARP, _SEVERAL_OF_WARP - other, other // 32)
        known = ((other >= 0) & (other < _TILE)) | (other <= _SEVERAL_OF_WARP)
        clash &= ~(
            known & (lanes.agent < _TILE) & (several == lanes.agent // 32) & (self.warp_at[spot] < lanes.warp_now)
        )
        # a thread that wrote the value may read it, even if other threads wrote the same value
        for lane in np.flatnonzero(clash & (other == _AGREED)):
            clash[lane] = not self._wrote_it(lanes, int(lane))
        # an mbarrier or a barrier of a role may order two warps; for several warps the order is unknown
        warp = self.warp[spot]
        seen = clock.seen[lanes.block, lanes.warp, clock.other(lanes.block, np.maximum(warp, 0))]
        clash &= ~((warp >= 0) & (seen >= self.stamp[spot])) & ~((warp < 0) & bool(clock.published))
        return clash

    def _wrote_it(self, lanes: Lanes, lane: int) -> bool:
        """Whether a lane is one of the threads that wrote an element, or a warp barrier orders it after them."""
        block, cell, agent = int(lanes.block[lane]), int(lanes.cell[lane]), int(lanes.agent[lane])
        threads = self.agreed.get(block * self.cells + cell, set())
        if agent in threads or not threads:
            return True
        if {thread // 32 for thread in threads} != {agent // 32}:
            return False
        return bool(self.warp_at[block * self.cells + cell] < lanes.warp_now[lane])

    def note_write(self, lanes: Lanes, lost: np.ndarray) -> None:
        """Record writes; if several threads write the value that is already stored, record all of them."""
        spot = lanes.spot
        before = np.where(self.at[spot] == lanes.now, self.agent[spot], NOBODY)
        again = ~lost & self.repeats(lanes) & (before != NOBODY)
        self.note(lanes, merge=False)
        met = ~lost & ((self.agent[spot] != lanes.agent) | (again & (before != lanes.agent)))
        if not met.any():
            return
        key = lanes.block * self.cells + lanes.cell
        if len(np.unique(key[met])) > _MOST_AGREED:
            return
        members = np.flatnonzero(np.isin(key, key[met]))
        members = members[np.argsort(key[members], kind='stable')]
        for group in np.split(members, np.flatnonzero(np.diff(key[members])) + 1):
            first, one = group[0], int(key[group[0]])
            threads = {int(agent) for agent in lanes.agent[group]}
            if again[first]:  # earlier writers of the same value stay valid
                threads |= self.agreed.get(one, set()) if before[first] == _AGREED else {int(before[first])}
            self.agreed[one] = threads
            self.agent[one] = _AGREED
            if len({thread // 32 for thread in threads}) > 1:
                self.warp[one] = -1

    def repeats(self, lanes: Lanes) -> np.ndarray:
        """Lanes that write the value that their element already has."""
        return ~lanes.changed if lanes.changed is not None else np.zeros(len(lanes.block), bool)

    def note(self, lanes: Lanes, merge: bool) -> None:
        """Record these accesses in addition to earlier ones of the same epoch (`merge`), or instead of them."""
        spot = lanes.spot
        fresh = self.at[spot] != lanes.now
        self.warp[spot] = np.where(fresh | (not merge) | (self.warp[spot] == lanes.warp), lanes.warp, -1)
        if merge:
            before = np.where(fresh, NOBODY, self.agent[spot])
            known = (before == NOBODY) | (before == lanes.agent)
            merged = lanes.agent if known.all() else _merge(before, lanes.agent)
            self.agent[spot] = merged
            if not isinstance(spot, slice) and (self.agent[spot] != merged).any():  # lanes share an element
                for _ in range(2):
                    self.agent[spot] = _merge(self.agent[spot], lanes.agent)
                self.warp[spot] = np.where(self.warp[spot] == lanes.warp, lanes.warp, -1)
        else:
            self.agent[spot] = lanes.agent
        self.at[spot], self.warp_at[spot], self.stamp[spot] = (lanes.now, lanes.warp_now, lanes.stamp)


class SharedMarks:
    """The last threads that wrote and read every element of a shared buffer, and the time of each access."""

    def __init__(self, memory: ByteMemory, unit: int) -> None:
        self.shape = (memory.data.shape[0], memory.data.shape[1] * 8 // unit)
        self.unit = unit  # bits of an element of the traces
        self.memory = memory
        self.atomics: Trace | None = None  # atomic updates, once there is one
        self.readers: np.ndarray | None = None  # stamp of the last read of every warp, once a block has sent here
        self.spreads: dict[tuple, Spread] = {}

    @cached_property
    def writes(self) -> Trace:
        """The last writes, allocated at the first use: many buffers never need them."""
        return Trace(self.shape)

    @cached_property
    def reads(self) -> Trace:
        """The last reads."""
        return Trace(self.shape)

    def read(self, frame: Frame, access: Access, place: Place, mask: Mask) -> None:
        """Record reads; reading what another thread wrote since the last barrier is a race."""
        if frame.clock.alone and not access.contended and self.readers is None:
            return
        lanes, shape = self._lanes(frame, access, place, mask)
        if lanes is None:
            return
        for trace, earlier in self._changes():
            self._report(frame, access, trace.unordered(frame.clock, lanes), lanes, shape, trace, 'reads', earlier)
        if access.asynchronous:
            self._require_fence(frame, access, lanes, shape)
        self.reads.note(lanes, merge=True)
        spot = lanes.spot
        self.reads.period[spot] = frame.clock.period[lanes.block, lanes.warp] if access.only_moves else -1
        if self.readers is not None:
            self.readers[lanes.block, lanes.cell, lanes.warp] = lanes.stamp

    def before_write(self, frame: Frame, access: Access, place: Place, mask: Mask, value: Any) -> Any:
        """Check writes against earlier accesses; returns the argument of `after_write`."""
        if frame.clock.alone and not access.contended and (access.extra or self._all_keep(access, place, mask, value)):
            return None
        lanes, shape = self._lanes(frame, access, place, mask, value)
        if lanes is None:
            return None
        changed = lanes.changed = _unlike(self._stored(access, lanes), lanes.raw)
        for trace, earlier in (*self._changes(), (self.reads, 'read')):
            clash = changed & trace.unordered(frame.clock, lanes)
            self._report(frame, access, clash, lanes, shape, trace, 'writes', earlier)
        if access.asynchronous == 'tma' and frame.clock.settling:
            self._require_settled(frame, access, lanes, shape)
        return lanes, shape

    def _require_fence(self, frame: Frame, access: Access, lanes: Lanes, shape: tuple[int, ...]) -> None:
        """TMA and wgmma see what a thread stored only after a proxy fence.

        TileLang inserts this fence if it finds the stores on the path to the copy or product, but not in another
        branch.
        """
        spot, clock = lanes.spot, frame.clock
        at = self.writes.fences[spot]
        clash = at >= clock.fenced[lanes.block, lanes.warp]
        if not clash.any():
            return
        writer = self.writes.warp[spot]
        clash &= (writer >= 0) & (at >= clock.fenced[lanes.block, np.maximum(writer, 0)])
        clash &= self.writes.at[spot] == lanes.now
        if not clash.any() or frame.shared.fenced_by_compiler(access.path):
            return
        for path in np.unique(self.writes.path[spot][clash]):
            if not frame.shared.apart(int(path), access.path):
                clash &= self.writes.path[spot] != path
        verb = 'multiplies' if access.asynchronous == 'gemm' else 'copies'
        self._report(frame, access, clash, lanes, shape, self.writes, verb, 'wrote', 'T.fence_proxy_async')

    def _require_settled(self, frame: Frame, access: Access, lanes: Lanes, shape: tuple[int, ...]) -> None:
        """An arrival does not wait for earlier reads, so a copy may overwrite what another thread is still reading."""
        spot, clock = lanes.spot, frame.clock
        reader, period = self.reads.warp[spot], self.reads.period[spot]
        known = (reader >= 0) & (period >= 0) & (self.reads.at[spot] == lanes.now)
        ended = clock.ended[lanes.block, np.maximum(reader, 0), np.maximum(period, 0)]
        seen = clock.seen[lanes.block, lanes.warp, clock.other(lanes.block, np.maximum(reader, 0))]
        clash = known & (ended > 0) & (seen == ended)
        what = 'using it, or T.fence_proxy_async, ahead of its arrival'
        self._report(frame, access, clash, lanes, shape, self.reads, 'copies over', 'read', what)

    def _changes(self) -> list[tuple[Trace, str]]:
        """The traces of changes, each with the word for an error."""
        changes = [(self.writes, 'wrote')]
        return changes if self.atomics is None else [*changes, (self.atomics, 'updated atomically')]

    def update(self, frame: Frame, access: Access, place: Place, mask: Mask) -> None:
        """Check and record atomic updates. They may overlap each other, but not plain reads or writes."""
        if frame.clock.alone and not access.contended and self.readers is None:
            return
        lanes, shape = self._lanes(frame, access, place, mask)
        if lanes is None:
            return
        for trace, earlier in ((self.writes, 'wrote'), (self.reads, 'read')):
            clash = trace.unordered(frame.clock, lanes)
            self._report(frame, access, clash, lanes, shape, trace, 'updates atomically', earlier)
        if self.atomics is None:
            self.atomics = Trace(self.shape)
        self.atomics.note(lanes, merge=True)

    def after_write(self, frame: Frame, access: Access, seen: Any) -> None:
        """Record writes; lanes of one statement that wrote different values to one element race."""
        if seen is None:
            return
        lanes, shape = seen
        self.writes.note_write(lanes, _unlike(self._stored(access, lanes), lanes.raw))
        spot = lanes.spot
        self.writes.path[spot] = access.path
        self.writes.fences[spot] = -1 if access.asynchronous == 'tma' else frame.clock.fences
        lost = (self.writes.agent[spot] != lanes.agent) & (_unlike(self._stored(access, lanes), lanes.raw))
        self._report(frame, access, lost, lanes, shape, self.writes, 'writes', 'wrote')

    def send(self, frame: Frame, access: Access, place: Place, mask: Mask, away: np.ndarray) -> None:
        """Check and record data sent to the block that is `away` blocks further on.

        Reads and writes there must be ordered before it. A later read must wait for the barrier that counts the sent
        bytes.
        """
        lanes, shape = self._lanes(frame, access, place, mask)
        if lanes is None:
            return
        clock, cells = frame.clock, self.shape
        if self.readers is None:
            self.readers = np.zeros((*cells, clock.seen.shape[1]), np.int64)
        rows = np.broadcast_to(away, shape).reshape(-1)[lanes.position]
        sender, lanes.block, lanes.cell = lanes.block, lanes.block + rows, lanes.cell - rows * cells[1]
        lanes.spot = spot = lanes.block * cells[1] + lanes.cell
        there = clock.other(lanes.block, 0)[:, None] + np.arange(clock.others)
        known = clock.seen[sender[:, None], lanes.warp[:, None], there]  # the knowledge of the receiving block
        verb = "sends to another block's"
        if not known[:, :-1].any(axis=1).all():
            text = f'{verb} {access.buffer.name} before a barrier of the cluster says that the block has begun'
            frame.report(DataRace, text, access.site, buffer=access.buffer.name)
        wrote = self.writes.warp[spot]
        clash = (wrote >= 0) & (self.writes.stamp[spot] > known[np.arange(len(wrote)), np.maximum(wrote, 0)])
        self._report(frame, access, clash, lanes, shape, self.writes, verb, 'wrote')
        clash = (self.readers[lanes.block, lanes.cell] > known[:, :-1]).any(axis=1)
        self._report(frame, access, clash, lanes, shape, self.reads, verb, 'read')
        lanes.agent = np.full_like(lanes.agent, ANOTHER_BLOCK)
        lanes.warp = np.full_like(lanes.warp, clock.others - 1)
        lanes.now, lanes.stamp = clock.blocks[lanes.block], clock.sent[lanes.block]
        self.writes.note(lanes, merge=False)
        meet = np.ones(len(lanes.block), bool)
        meet[np.unique(spot, return_index=True)[1]] = False
        self._report(frame, access, meet, lanes, shape, self.writes, verb, 'wrote')

    def _all_keep(self, access: Access, place: Place, mask: Mask, value: Any) -> bool:
        """Whether every lane reads back its own value after a trial store, so no two lanes write different values."""
        dtype = access.buffer.dtype
        raw = encoder(dtype)(value)
        self.memory.write_raw(place, raw, dtype, mask)
        differs = _unlike(self.memory.read_raw(place, dtype), raw)
        return not (differs if mask is None else differs & mask).any()

    def _stored(self, access: Access, lanes: Lanes) -> np.ndarray:
        dtype = access.buffer.dtype
        cells = self.memory.typed(dtype.storage)
        if cells.shape == self.shape and not dtype.packed:
            return cells.reshape(-1)[lanes.spot]
        element = lanes.cell // (dtype.bits // self.unit)
        return _half(cells[lanes.block, element >> 1], element) if dtype.packed else cells[lanes.block, element]

    def _lanes(
        self, frame: Frame, access: Access, place: Place, mask: Mask, value: Any = None
    ) -> tuple[Lanes | None, tuple[int, ...]]:
        raw = None
        if value is not None:
            raw = encoder(access.buffer.dtype)(value)
            raw = raw.reshape((1,) * (2 + len(place.extents))) if raw.ndim == 0 else raw
        spread = self._spread(frame, access, place, mask, () if raw is None else raw.shape)
        if not spread.position.size:
            return None, spread.shape
        clock, per = frame.clock, access.buffer.dtype.bits // self.unit
        count = len(spread.block)
        if raw is None:
            bits = np.zeros(count, np.uint8)
        else:
            bits = np.broadcast_to(raw, spread.shape).reshape(-1)
            bits = (bits if mask is None else bits[spread.position[::per]]).repeat(per)
        row = spread.block * clock.warps.shape[1] + spread.warp
        now, warp_now, stamp = clock.blocks[spread.block], clock.warps.reshape(-1)[row], clock.stamps.reshape(-1)[row]
        parts = spread.block, spread.cell, spread.agent, spread.warp, now, warp_now, stamp, spread.position
        return Lanes(*parts, bits, spread.spot), spread.shape

    def _spread(self, frame: Frame, access: Access, place: Place, mask: Mask, stored: tuple[int, ...]) -> Spread:
        """The lanes of an access, remembered if neither a mask nor the place depends on threads."""
        if mask is not None or frame.mask is not None or not isinstance(place.base, int):
            return self._new_spread(frame, access, place, mask, stored)
        extents = tuple(access.extents(frame))
        key = (id(access), place.base, place.extents, place.steps, extents, stored, frame.blocks, frame.threads)
        found = self.spreads.get(key)
        if found is None:
            if len(self.spreads) >= _MOST_SPREADS:
                self.spreads.clear()
            found = self.spreads[key] = self._new_spread(frame, access, place, mask, stored)
        return found

    def _new_spread(self, frame: Frame, access: Access, place: Place, mask: Mask, stored: tuple[int, ...]) -> Spread:
        agent = _agents(frame, access)
        flat = place.flat()
        lead = (frame.blocks,) + (1,) * (flat.ndim - 1)
        shape = np.broadcast_shapes(flat.shape, agent.shape, lead, stored)
        size = int(np.prod(shape[1:]))
        cell, agent = (np.broadcast_to(part, shape).reshape(-1) for part in (flat, agent))
        if mask is None:
            position = np.arange(shape[0] * size)
            block = np.repeat(np.arange(shape[0]), size)
        else:
            position = np.flatnonzero(np.broadcast_to(any_over(mask, shape), shape))
            block = position // max(1, size)
            cell, agent = cell[position], agent[position]
        warp = (first_thread(frame) // 32)[block]
        if agent.size and (agent[0] < _TILE or (agent < _TILE).any()):
            warp = np.where((agent >= 0) & (agent < _TILE), agent // 32, warp)
        per = access.buffer.dtype.bits // self.unit
        if per > 1:  # one entry for each of the cells that an element covers
            cell = (cell[:, None] * per + np.arange(per)).reshape(-1)
            block, agent, warp, position = (np.repeat(part, per) for part in (block, agent, warp, position))
        spot = _as_slice(block * self.shape[1] + cell)
        return Spread(access, shape, block, cell, agent, warp, position, spot)

    def _report(
        self,
        frame: Frame,
        access: Access,
        clash: np.ndarray,
        lanes: Lanes,
        shape: tuple[int, ...],
        trace: Trace,
        verb: str,
        earlier: str,
        missing: str = 'a barrier between',
    ) -> None:
        if not clash.any():
            return
        first = int(np.argmax(clash))
        lane = tuple(int(part) for part in np.unravel_index(int(lanes.position[first]), shape))
        index = access.index_at(frame, lane)
        me, them = (int(lanes.agent[first]), int(trace.agent[lanes.block[first] * self.shape[1] + lanes.cell[first]]))
        text = f'{_agent_name(me, verb)} {access.buffer.name}{list(index)}, which {_agent_name(them, earlier)}'
        frame.report(
            DataRace,
            f'{text} without {missing}',
            access.site,
            (lane[0], me if 0 <= me < _TILE else -1),
            access.buffer.name,
            index,
        )


def _as_slice(spot: np.ndarray) -> np.ndarray | slice:
    """A slice for numbers that follow each other, because it is faster than an array of them."""
    size = len(spot)
    if size and spot[-1] - spot[0] == size - 1 and bool((spot[1:] - spot[:-1] == 1).all()):
        return slice(int(spot[0]), int(spot[0]) + size)
    return spot


def _half(byte: np.ndarray, element: np.ndarray) -> np.ndarray:
    """The 4-bit element within a byte that holds two."""
    return byte >> ((element & 1) << 2).astype(np.uint8) & 15


def _agent_name(agent: int, verb: str) -> str:
    if agent >= _TILE:
        return f'another thread {verb}' if verb in _PAST else f'one thread {verb}'
    if agent == ANOTHER_BLOCK:
        return 'another block sent'
    if agent < 0:
        return f'other threads {verb}'
    return f'thread {agent} {verb}'


def _agents(frame: Frame, access: Access) -> np.ndarray:
    """The agent (thread or block) of each lane's access."""
    extents = access.extents(frame)
    if not extents:
        return np.arange(frame.threads, dtype=np.int64).reshape(1, -1)
    if access.everyone:
        return np.full((1,) * access.ndim, SEVERAL, np.int64)
    if access.buffer.scope == 'shared' and access.private:
        return np.arange(frame.threads, dtype=np.int64).reshape((1, -1) + (1,) * len(extents))
    moving = tuple(extent for extent in extents if extent > 1)
    shape_id = hash((access.asynchronous, *moving)) & 0xFFF
    count = np.arange(int(np.prod(extents)), dtype=np.int64).reshape((1, 1, *extents))
    agents = count + _TILE * (1 + shape_id)
    if frame.mask is None or frame.mask.shape[1] == 1:
        return agents
    warp = (first_thread(frame) // 32).reshape((-1,) + (1,) * (agents.ndim - 1))  # roles have different threads
    return agents + (warp << 53)


def _merge(before: np.ndarray, agent: np.ndarray) -> np.ndarray:
    """The readers of an element after one more read: one thread, several of one warp, or several."""
    warp_before = np.where(before <= _SEVERAL_OF_WARP, _SEVERAL_OF_WARP - before, before // 32)
    one_warp = (agent >= 0) & (agent < _TILE) & (before < _TILE) & (before != SEVERAL) & (warp_before == agent // 32)
    several = np.where(one_warp, _SEVERAL_OF_WARP - agent // 32, SEVERAL)
    return np.where((before == NOBODY) | (before == agent), agent, several)


def check_all_arrived(frame: Frame, site: Site) -> None:
    """Check that no data is in flight to a block that ends: the block must have waited for all of it."""
    clock, block = frame.clock, np.arange(frame.blocks)
    late = clock.sent - 1 > clock.seen[block, :, clock.other(block, clock.others - 1)].max(axis=1)
    if late.any():
        text = 'a block can end before all that other blocks send to it has come'
        frame.report(DataRace, text, site, (int(np.argmax(late)), -1))


def _apart(frame: Frame, place: Place, value: Any) -> bool:
    """Whether all lanes of a store surely address different elements."""
    span = 1
    for step, extent in sorted(zip(place.steps, place.extents, strict=True)):
        if extent > 1:
            if step < span:
                return False
            span = step * (extent - 1) + span
    if isinstance(place.base, int):
        shape = (1, 1, *place.extents)
        different = frame.blocks == 1
    else:
        shape = np.broadcast_shapes(place.base.shape, (1, 1, *place.extents))
        if any(have > 1 and extent > 1 for have, extent in zip(place.base.shape[2:], place.extents, strict=False)):
            return False
        starts = np.sort(place.base, axis=None)
        different = shape[0] == frame.blocks and bool((starts[1:] - starts[:-1] >= span).all())
    have = np.shape(value)
    fits = not have or (
        len(have) == len(shape) and all(one in (1, want) for one, want in zip(have, shape, strict=True))
    )
    return different and fits


class GlobalMarks:
    """The block that wrote and the blocks that read every element of a tensor, since the last grid barrier."""

    def __init__(self, memory: ByteMemory, unit: int) -> None:
        self.memory = memory
        self.unit = unit
        self.cells = max(1, memory.size * 8 // unit)
        self.before: np.ndarray | None = None  # elements that the previous kernel wrote
        self.inherited: np.ndarray | None = None  # elements that the previous kernel of another program wrote
        self.reset()

    def keep_for_next_kernel(self) -> None:
        """Keep the writes of a kernel that ended: the next kernel may start before they are visible."""
        self.before = self.writer != NOBODY
        if self.inherited is not None:
            self.before, self.inherited = self.before | self.inherited, None

    def reset(self) -> None:
        """Clear all marks, because a grid barrier has ordered the blocks."""
        self.writer = np.full(self.cells, NOBODY, np.int32)
        self.stamps: dict[str, np.ndarray] = {}  # by 'wrote' and 'read': how often the block had released before
        self.__dict__.pop('reader', None)
        self.read_from = self.written_to = False

    @cached_property
    def reader(self) -> np.ndarray:
        """The block that read each element, made when the first one does."""
        return np.full(self.cells, NOBODY, np.int32)

    def read(self, frame: Frame, access: Access, place: Place, mask: Mask) -> None:
        """Record reads; reading what another block wrote is a race."""
        lanes = self._lanes(frame, access, place, mask)
        if lanes is None:
            return
        cell, block, lane_shape, _ = lanes
        if self.before is not None and frame.early is not None and (frame.early & active_threads(frame)).any():
            self._require_wait(frame, access, cell, lane_shape)
        other = self.writer[cell]
        clash = self._unordered(frame, (other != NOBODY) & (other != block), cell, block, other, 'wrote')
        self._report(frame, access, clash, lane_shape, block, other, 'reads', 'wrote')
        self.read_from = True
        self._stamp(frame, cell, block, 'read')
        before = self.reader[cell]
        self.reader[cell] = np.where((before == NOBODY) | (before == block), block, SEVERAL)
        met = self.reader[cell] != block
        self.reader[cell[met]] = SEVERAL

    def _require_wait(
        self, frame: Frame, access: Access, cell: np.ndarray, position: tuple[np.ndarray, tuple[int, ...]]
    ) -> None:
        """Raise if threads read what the previous kernel wrote before they have called T.pdl_sync."""
        places, shape = position
        hasty = (frame.early & active_threads(frame)).any(axis=1)
        block = np.unravel_index(places, shape)[0]
        clash = hasty[block] if self.before is None else hasty[block] & self.before[cell]
        if not clash.any():
            return
        lane = tuple(int(part) for part in np.unravel_index(int(places[int(np.argmax(clash))]), shape))
        index = access.index_at(frame, lane)
        text = f'{access.buffer.name}{list(index)} is read before T.pdl_sync, and the kernel before wrote it'
        frame.report(DataRace, text, access.site, (lane[0], -1), access.buffer.name, index)

    def before_write(self, frame: Frame, access: Access, place: Place, mask: Mask, value: Any) -> Any:
        """Check writes against accesses of other blocks; returns the argument of `after_write`."""
        if mask is None:
            apart = access.buffer.dtype.bits == self.unit and _apart(frame, place, value)
            if self._claim(frame, access, place, apart) and (apart or self._all_keep(access, place, value)):
                return None
        lanes = self._lanes(frame, access, place, mask, value)
        if lanes is None:
            return None
        cell, block, lane_shape, raw = lanes
        changed = _unlike(self._stored(access, cell), raw)
        for marks, earlier in ((self.writer, 'wrote'), *([(self.reader, 'read')] if self.read_from else [])):
            other = marks[cell]
            clash = changed & (other != NOBODY) & (other != block)
            clash = self._unordered(frame, clash, cell, block, other, earlier)
            self._report(frame, access, clash, lane_shape, block, other, 'writes', earlier)
        return lanes

    def after_write(self, frame: Frame, access: Access, lanes: Any) -> None:
        """Record writes; lanes that wrote different values to one element in one statement race."""
        if lanes is None:
            return
        cell, block, lane_shape, raw = lanes
        self.written_to = True
        self.writer[cell] = block
        self._stamp(frame, cell, block, 'wrote')
        winner = self.writer[cell]
        clash = _unlike(self._stored(access, cell), raw)
        self._report(frame, access, clash, lane_shape, block, winner, 'writes', 'wrote')

    def _all_keep(self, access: Access, place: Place, value: Any) -> bool:
        """Whether every lane reads back its own value after a trial store."""
        dtype = access.buffer.dtype
        raw = encoder(dtype)(value)
        self.memory.write_raw(place, raw, dtype, None)
        return not np.any(_unlike(self.memory.read_raw(place, dtype), raw))

    def _claim(self, frame: Frame, access: Access, place: Place, apart: bool) -> bool:
        """The common case: no other block accessed these elements; mark them as owned by this block."""
        if access.buffer.dtype.bits != self.unit or frame.shared.flags.released:
            return False
        block: Any = np.arange(frame.first_block, frame.first_block + frame.blocks, dtype=np.int32)
        block = block.reshape((-1,) + (1,) * (access.ndim - 1))
        if self.read_from:
            other = gather(self.reader.reshape(1, -1), place, False)
            if ((other != NOBODY) & (other != block)).any():
                return False
        written = self.writer.reshape(1, -1)
        before: Any = NOBODY
        if self.written_to or not apart:
            before = np.array(gather(written, place, False))
            if ((before != NOBODY) & (before != block)).any():
                return False
        self.written_to = True
        scatter(written, place, block, None, False)
        if apart or (gather(written, place, False) == block).all():
            return True
        scatter(written, place, before, None, False)
        return False

    def _stamp(self, frame: Frame, cell: np.ndarray, block: np.ndarray, done: str) -> None:
        """Record how often the blocks of accesses have released so far."""
        flags = frame.shared.flags
        if flags.released:
            stamps = self.stamps.setdefault(done, np.zeros(self.cells, np.int32))
            numbers, inverse = np.unique(block, return_inverse=True)
            stamps[cell] = flags.count(numbers)[inverse.reshape(-1)]

    def _unordered(
        self, frame: Frame, clash: np.ndarray, cell: np.ndarray, block: np.ndarray, other: np.ndarray, earlier: str
    ) -> np.ndarray:
        """The clashes that no flag orders; of several readers, each may have set one."""
        flags = frame.shared.flags
        if not flags.known or not clash.any():
            return clash
        stamps = self.stamps.get(earlier)
        before = 0 if stamps is None else stamps[cell]
        return clash & ~(flags.knows(block, other) > before) & (other != SEVERAL)

    def _stored(self, access: Access, cell: np.ndarray) -> np.ndarray:
        dtype = access.buffer.dtype
        line = self.memory.typed(dtype.storage).reshape(-1)
        element = cell // (dtype.bits // self.unit)
        return _half(line[element >> 1], element) if dtype.packed else line[element]

    def _lanes(self, frame: Frame, access: Access, place: Place, mask: Mask, value: Any = None) -> Any:
        dtype = access.buffer.dtype
        flat = place.flat()
        shape = np.broadcast_shapes(flat.shape, (frame.blocks,) + (1,) * (flat.ndim - 1))
        raw = None
        if value is not None:
            raw = encoder(dtype)(value)
            raw = raw.reshape((1,) * flat.ndim) if raw.ndim == 0 else raw
            shape = np.broadcast_shapes(shape, raw.shape)
        if mask is not None and value is not None:
            shape = np.broadcast_shapes(shape, expand(mask, flat.ndim).shape)
        active = np.ones(shape, bool) if mask is None else np.broadcast_to(any_over(mask, shape), shape)
        position = np.flatnonzero(active)
        if not position.size:
            return None
        block = (frame.first_block + position // int(np.prod(shape[1:]))).astype(np.int32)
        cell = np.broadcast_to(flat, shape).reshape(-1)[position]
        if raw is not None:
            raw = np.broadcast_to(raw, shape).reshape(-1)[position]
        per = dtype.bits // self.unit
        if per > 1:
            block, position = np.repeat(block, per), np.repeat(position, per)
            cell = np.repeat(cell, per) * per + np.tile(np.arange(per), len(cell))
            raw = None if raw is None else np.repeat(raw, per)
        return cell, block, (position, shape), raw

    def _report(
        self,
        frame: Frame,
        access: Access,
        clash: np.ndarray,
        position: tuple[np.ndarray, tuple[int, ...]],
        block: np.ndarray,
        other: np.ndarray,
        verb: str,
        earlier: str,
    ) -> None:
        if not clash.any():
            return
        first = int(np.argmax(clash))
        places, shape = position
        lane = tuple(int(part) for part in np.unravel_index(int(places[first]), shape))
        index = access.index_at(frame, lane)
        them = f'block number {int(other[first])}' if other[first] >= 0 else 'other blocks'
        them = 'another thread of it' if other[first] == block[first] else them
        text = f'block number {int(block[first])} {verb} {access.buffer.name}{list(index)}, which {them} {earlier}'
        frame.report(
            DataRace,
            f'{text}, and nothing orders the two',
            access.site,
            (lane[0], lane[1] if shape[1] > 1 else -1),
            access.buffer.name,
            index,
        )
