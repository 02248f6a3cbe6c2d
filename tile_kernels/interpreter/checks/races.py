"""Races: who touched which element when, and what orders it.

Two accesses to one element race if one of them writes another value, different threads (blocks) make them, and no
barrier lies between. Threads of a block are told apart by number; iterations of a parallel loop and elements of a tile
operation, whose threads only the compiler knows, count as one thread each, and as the same one in loops of equal shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.clock import Clock
from tile_kernels.interpreter.engine.frame import Frame, first_thread
from tile_kernels.interpreter.engine.lanes import Mask, expand
from tile_kernels.interpreter.errors import DataRace, Site
from tile_kernels.interpreter.memory.access import Access
from tile_kernels.interpreter.memory.buffers import ByteMemory, Place, any_over, gather, scatter
from tile_kernels.interpreter.memory.dtypes import encoder

NOBODY = -1
SEVERAL = -2
ANOTHER_BLOCK = -3
_SEVERAL_OF_WARP = -10  # minus the warp: several threads, all of that warp
_TILE = 1 << 40  # agents of tiles and parallel loops start here


def _unlike(stored: Any, written: Any) -> Any:
    """Whether a write changes what is stored; writing a NaN over a NaN does not."""
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
    now: np.ndarray  # barriers its block has passed
    warp_now: np.ndarray  # barriers its warp has passed
    stamp: np.ndarray
    position: np.ndarray  # place in the lane array
    raw: np.ndarray  # what a store writes (empty for loads)

    def repeat(self, count: int) -> Lanes:
        """One entry for each of the cells an element covers."""
        parts = {name: np.repeat(part, count) for name, part in vars(self).items()}
        parts['cell'] = parts['cell'] * count + np.tile(np.arange(count), len(self.cell))
        return Lanes(**parts)


class Trace:
    """The last accesses of one kind (reads or writes) to every element of a shared buffer."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.agent = np.full(shape, NOBODY, np.int64)
        self.at = np.full(shape, -1, np.int64)
        self.warp = np.full(shape, -1, np.int64)
        self.warp_at = np.zeros(shape, np.int64)
        self.stamp = np.zeros(shape, np.int64)

    def unordered(self, clock: Clock, lanes: Lanes) -> Any:
        """Lanes that nothing orders after the last access of another thread to their element."""
        spot = lanes.block, lanes.cell
        other = self.agent[spot]
        clash: Any = ((self.at[spot] == lanes.now) | (other == ANOTHER_BLOCK)) & (other != lanes.agent)
        if not clash.any():
            return clash
        # a barrier of the warp lies between two of its threads
        several = np.where(other <= _SEVERAL_OF_WARP, _SEVERAL_OF_WARP - other, other // 32)
        known = ((other >= 0) & (other < _TILE)) | (other <= _SEVERAL_OF_WARP)
        clash &= ~(
            known & (lanes.agent < _TILE) & (several == lanes.agent // 32) & (self.warp_at[spot] < lanes.warp_now)
        )
        # an mbarrier or a barrier of a role lies between two warps; of several warps nothing is known
        warp = self.warp[spot]
        seen = clock.seen[lanes.block, lanes.warp, clock.other(lanes.block, np.maximum(warp, 0))]
        clash &= ~((warp >= 0) & (seen >= self.stamp[spot])) & ~((warp < 0) & bool(clock.published))
        return clash

    def note(self, lanes: Lanes, merge: bool) -> None:
        """Remember these accesses, beside earlier ones of the same epoch (`merge`) or instead of them."""
        spot = lanes.block, lanes.cell
        fresh = self.at[spot] != lanes.now
        self.warp[spot] = np.where(fresh | (not merge) | (self.warp[spot] == lanes.warp), lanes.warp, -1)
        if merge:
            self.agent[spot] = _merge(np.where(fresh, NOBODY, self.agent[spot]), lanes.agent)
            for _ in range(2):  # lanes of one statement that met at an element
                self.agent[spot] = _merge(self.agent[spot], lanes.agent)
            self.warp[spot] = np.where(self.warp[spot] == lanes.warp, lanes.warp, -1)
        else:
            self.agent[spot] = lanes.agent
        self.at[spot], self.warp_at[spot], self.stamp[spot] = (lanes.now, lanes.warp_now, lanes.stamp)


class SharedMarks:
    """Who wrote and read every element of a shared buffer, and when."""

    def __init__(self, memory: ByteMemory, unit: int) -> None:
        shape = (memory.data.shape[0], memory.data.shape[1] // unit)
        self.unit = unit
        self.memory = memory
        self.writes, self.reads = Trace(shape), Trace(shape)
        self.readers: np.ndarray | None = None  # stamp of the last read of every warp, once a block has sent here

    def read(self, frame: Frame, access: Access, place: Place, mask: Mask) -> None:
        """Note reads; a read of what another thread wrote since the last barrier is a race."""
        if frame.clock.alone and not access.contended and self.readers is None:
            return
        lanes, shape = self._lanes(frame, access, place, mask)
        if lanes is None:
            return
        self._report(
            frame, access, self.writes.unordered(frame.clock, lanes), lanes, shape, self.writes, 'reads', 'wrote'
        )
        self.reads.note(lanes, merge=True)
        if self.readers is not None:
            self.readers[lanes.block, lanes.cell, lanes.warp] = lanes.stamp

    def before_write(self, frame: Frame, access: Access, place: Place, mask: Mask, value: Any) -> Any:
        """Check writes against earlier accesses; gives what `after_write` needs."""
        if frame.clock.alone and not access.contended and (access.extra or self._all_keep(access, place, mask, value)):
            return None
        lanes, shape = self._lanes(frame, access, place, mask, value)
        if lanes is None:
            return None
        changed = _unlike(self._stored(access, lanes), lanes.raw)
        for trace, earlier in ((self.writes, 'wrote'), (self.reads, 'read')):
            clash = changed & trace.unordered(frame.clock, lanes)
            self._report(frame, access, clash, lanes, shape, trace, 'writes', earlier)
        return lanes, shape

    def after_write(self, frame: Frame, access: Access, seen: Any) -> None:
        """Note writes; lanes of one statement that wrote different values to one element race."""
        if seen is None:
            return
        lanes, shape = seen
        self.writes.note(lanes, merge=False)
        lost = (self.writes.agent[lanes.block, lanes.cell] != lanes.agent) & (
            _unlike(self._stored(access, lanes), lanes.raw)
        )
        self._report(frame, access, lost, lanes, shape, self.writes, 'writes', 'wrote')

    def send(self, frame: Frame, access: Access, place: Place, mask: Mask, away: np.ndarray) -> None:
        """Check and note what goes to the block `away` blocks further on.

        What was read and written there must be ordered before; a read must come after a wait for the barrier that
        counts what is sent.
        """
        lanes, shape = self._lanes(frame, access, place, mask)
        if lanes is None:
            return
        clock, cells = frame.clock, self.writes.agent.shape
        if self.readers is None:
            self.readers = np.zeros((*cells, clock.seen.shape[1]), np.int64)
        rows = np.broadcast_to(away, shape).reshape(-1)[lanes.position]
        sender, lanes.block, lanes.cell = lanes.block, lanes.block + rows, lanes.cell - rows * cells[1]
        spot = lanes.block, lanes.cell
        there = clock.other(lanes.block, 0)[:, None] + np.arange(clock.others)
        known = clock.seen[sender[:, None], lanes.warp[:, None], there]  # of the block it goes to
        verb = "sends to another block's"
        if not known[:, :-1].any(axis=1).all():
            text = f'{verb} {access.buffer.name} before a barrier of the cluster says that the block has begun'
            frame.report(DataRace, text, access.site, buffer=access.buffer.name)
        wrote = self.writes.warp[spot]
        clash = (wrote >= 0) & (self.writes.stamp[spot] > known[np.arange(len(wrote)), np.maximum(wrote, 0)])
        self._report(frame, access, clash, lanes, shape, self.writes, verb, 'wrote')
        clash = (self.readers[spot] > known[:, :-1]).any(axis=1)
        self._report(frame, access, clash, lanes, shape, self.reads, verb, 'read')
        lanes.agent = np.full_like(lanes.agent, ANOTHER_BLOCK)
        lanes.warp = np.full_like(lanes.warp, clock.others - 1)
        lanes.now, lanes.stamp = clock.blocks[lanes.block], clock.sent[lanes.block]
        self.writes.note(lanes, merge=False)
        meet = np.ones(len(lanes.block), bool)
        meet[np.unique(lanes.block * cells[1] + lanes.cell, return_index=True)[1]] = False
        self._report(frame, access, meet, lanes, shape, self.writes, verb, 'wrote')

    def _all_keep(self, access: Access, place: Place, mask: Mask, value: Any) -> bool:
        """Whether after a trial store every lane finds its own value: then no two lanes disagree about an element."""
        dtype = access.buffer.dtype
        if dtype.packed:
            return False
        raw = encoder(dtype)(value)
        self.memory.write_raw(place, raw, dtype, mask)
        differs = _unlike(self.memory.read_raw(place, dtype), raw)
        return not (differs if mask is None else differs & mask).any()

    def _stored(self, access: Access, lanes: Lanes) -> np.ndarray:
        cells = self.memory.typed(access.buffer.dtype.storage)
        return cells[lanes.block, lanes.cell // max(1, access.buffer.dtype.storage.itemsize // self.unit)]

    def _lanes(
        self, frame: Frame, access: Access, place: Place, mask: Mask, value: Any = None
    ) -> tuple[Lanes | None, tuple[int, ...]]:
        agent = _agents(frame, access)
        flat = place.flat()
        shape = np.broadcast_shapes(flat.shape, agent.shape, (frame.blocks,) + (1,) * (flat.ndim - 1))
        raw = np.zeros((1,) * flat.ndim, np.uint8)
        if value is not None:
            raw = encoder(access.buffer.dtype)(value)
            raw = raw.reshape((1,) * flat.ndim) if raw.ndim == 0 else raw
            shape = np.broadcast_shapes(shape, raw.shape)
        active = np.ones(shape, bool) if mask is None else np.broadcast_to(any_over(mask, shape), shape)
        position = np.flatnonzero(active)
        if not position.size:
            return None, shape
        block = position // int(np.prod(shape[1:]))
        cell, agent, raw = (np.broadcast_to(part, shape).reshape(-1)[position] for part in (flat, agent, raw))
        warp = np.where((agent >= 0) & (agent < _TILE), agent // 32, first_thread(frame)[block] // 32)
        clock = frame.clock
        lanes = Lanes(
            block,
            cell >> 1 if access.buffer.dtype.packed else cell,
            agent,
            warp,
            clock.blocks[block],
            clock.warps[block, warp],
            clock.stamps[block, warp],
            position,
            raw,
        )
        per = access.buffer.dtype.storage.itemsize // self.unit
        return lanes if per == 1 else lanes.repeat(per), shape

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
    ) -> None:
        if not clash.any():
            return
        first = int(np.argmax(clash))
        lane = tuple(int(part) for part in np.unravel_index(int(lanes.position[first]), shape))
        index = access.index_at(frame, lane)
        me, them = (int(lanes.agent[first]), int(trace.agent[lanes.block[first], lanes.cell[first]]))
        text = f'{_agent_name(me, verb)} {access.buffer.name}{list(index)}, which {_agent_name(them, earlier)}'
        frame.report(
            DataRace,
            f'{text} without a barrier between',
            access.site,
            (lane[0], me if 0 <= me < _TILE else -1),
            access.buffer.name,
            index,
        )


def _agent_name(agent: int, verb: str) -> str:
    if agent >= _TILE:
        return f'another thread {verb}' if verb in ('wrote', 'read') else f'one thread {verb}'
    if agent == ANOTHER_BLOCK:
        return 'another block sent'
    if agent < 0:
        return f'other threads {verb}'
    return f'thread {agent} {verb}'


def _agents(frame: Frame, access: Access) -> np.ndarray:
    """Who makes each lane's access."""
    extents = access.extents(frame)
    if not extents:
        return np.arange(frame.threads, dtype=np.int64).reshape(1, -1)
    if access.everyone:
        return np.full((1,) * access.ndim, SEVERAL, np.int64)
    if access.buffer.scope == 'shared' and access.private:
        return np.arange(frame.threads, dtype=np.int64).reshape((1, -1) + (1,) * len(extents))
    moving = tuple(extent for extent in extents if extent > 1)
    shape_id = hash(moving) & 0xFFF
    count = np.arange(int(np.prod(extents)), dtype=np.int64).reshape((1, 1, *extents))
    return count + _TILE * (1 + shape_id)


def _merge(before: np.ndarray, agent: np.ndarray) -> np.ndarray:
    """Readers of an element after one more: the same, several of one warp, or several."""
    warp_before = np.where(before <= _SEVERAL_OF_WARP, _SEVERAL_OF_WARP - before, before // 32)
    one_warp = (agent >= 0) & (agent < _TILE) & (before < _TILE) & (before != SEVERAL) & (warp_before == agent // 32)
    several = np.where(one_warp, _SEVERAL_OF_WARP - agent // 32, SEVERAL)
    return np.where((before == NOBODY) | (before == agent), agent, several)


def check_all_arrived(frame: Frame, site: Site) -> None:
    """Nothing may be on its way to a block that ends: it must have waited for all that was sent to it."""
    clock, block = frame.clock, np.arange(frame.blocks)
    late = clock.sent - 1 > clock.seen[block, :, clock.other(block, clock.others - 1)].max(axis=1)
    if late.any():
        text = 'a block can end before all that other blocks send to it has come'
        frame.report(DataRace, text, site, (int(np.argmax(late)), -1))


class GlobalMarks:
    """Which block wrote and which blocks read every element of a tensor, since the last barrier of the grid."""

    def __init__(self, memory: ByteMemory, unit: int) -> None:
        self.memory = memory
        self.unit = unit
        self.cells = max(1, memory.size // unit)
        self.reset()

    def reset(self) -> None:
        """Forget: the blocks have waited for each other."""
        self.writer = np.full(self.cells, NOBODY, np.int32)
        self.reader = np.full(self.cells, NOBODY, np.int32)

    def read(self, frame: Frame, access: Access, place: Place, mask: Mask) -> None:
        """Note reads; a read of what another block wrote is a race."""
        lanes = self._lanes(frame, access, place, mask)
        if lanes is None:
            return
        cell, block, lane_shape, _ = lanes
        other = self.writer[cell]
        self._report(frame, access, (other != NOBODY) & (other != block), lane_shape, block, other, 'reads', 'wrote')
        before = self.reader[cell]
        self.reader[cell] = np.where((before == NOBODY) | (before == block), block, SEVERAL)
        met = self.reader[cell] != block
        self.reader[cell[met]] = SEVERAL

    def before_write(self, frame: Frame, access: Access, place: Place, mask: Mask, value: Any) -> Any:
        """Check writes against accesses of other blocks; gives what `after_write` needs."""
        if mask is None and self._claim(frame, access, place) and self._all_keep(access, place, value):
            return None
        lanes = self._lanes(frame, access, place, mask, value)
        if lanes is None:
            return None
        cell, block, lane_shape, raw = lanes
        changed = _unlike(self._stored(access, cell), raw)
        for marks, earlier in ((self.writer, 'wrote'), (self.reader, 'read')):
            other = marks[cell]
            clash = changed & (other != NOBODY) & (other != block)
            self._report(frame, access, clash, lane_shape, block, other, 'writes', earlier)
        return lanes

    def after_write(self, frame: Frame, access: Access, lanes: Any) -> None:
        """Note writes; lanes that wrote different values to one element in one statement race."""
        if lanes is None:
            return
        cell, block, lane_shape, raw = lanes
        self.writer[cell] = block
        winner = self.writer[cell]
        clash = _unlike(self._stored(access, cell), raw)
        self._report(frame, access, clash, lane_shape, block, winner, 'writes', 'wrote')

    def _all_keep(self, access: Access, place: Place, value: Any) -> bool:
        """Whether after a trial store every lane finds its own value."""
        dtype = access.buffer.dtype
        raw = encoder(dtype)(value)
        self.memory.write_raw(place, raw, dtype, None)
        return not np.any(_unlike(self.memory.read_raw(place, dtype), raw))

    def _claim(self, frame: Frame, access: Access, place: Place) -> bool:
        """The common case: nobody else touched these elements; make them this block's own."""
        if access.buffer.dtype.packed or access.buffer.dtype.storage.itemsize != self.unit:
            return False
        block: Any = np.arange(frame.first_block, frame.first_block + frame.blocks, dtype=np.int32)
        block = block.reshape((-1,) + (1,) * (access.ndim - 1))
        for marks in (self.writer, self.reader):
            other = gather(marks.reshape(1, -1), place, False)
            if ((other != NOBODY) & (other != block)).any():
                return False
        before = gather(self.writer.reshape(1, -1), place, False).copy()
        scatter(self.writer.reshape(1, -1), place, block, None, False)
        if (gather(self.writer.reshape(1, -1), place, False) == block).all():
            return True
        scatter(self.writer.reshape(1, -1), place, before, None, False)
        return False

    def _stored(self, access: Access, cell: np.ndarray) -> np.ndarray:
        dtype = access.buffer.dtype
        line = self.memory.typed(dtype.storage).reshape(-1)
        per = max(1, dtype.storage.itemsize // self.unit)
        return line[cell // per]

    def _lanes(self, frame: Frame, access: Access, place: Place, mask: Mask, value: Any = None) -> Any:
        dtype = access.buffer.dtype
        flat = place.flat()
        if dtype.packed:
            return None  # two elements share a byte; whole bytes are checked where they are written as such
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
        per = dtype.storage.itemsize // self.unit
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
