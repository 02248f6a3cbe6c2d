"""Races on symmetric tensors: every access of every block, and the order that signals create between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.checks.races import NOBODY, GlobalMarks
from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.lanes import Mask
from tile_kernels.interpreter.errors import DataRace, RemoteRace, StaleRead
from tile_kernels.interpreter.memory.access import Access
from tile_kernels.interpreter.memory.buffers import ByteMemory, Place

_NEVER = -1


class RemoteMarks(GlobalMarks):
    """The last write of every element, and the last read by every block.

    Unlike for tensors of one device, every reader is kept, and a write that changes nothing is a write.
    """

    def __init__(self, memory: ByteMemory, unit: int, world: Any) -> None:
        self.world = world
        super().__init__(memory, unit)
        self.written_at = np.zeros(self.cells, np.int32)  # how often the writer had released before
        self.former = np.full(self.cells, NOBODY, np.int32)  # the writer before the last, and its releases
        self.former_at = np.zeros(self.cells, np.int32)
        self.ever_read = np.zeros(self.cells, bool)
        self.readers: dict[int, np.ndarray] = {}  # the same for the last read of each block; _NEVER: none
        self.early: dict[int, np.ndarray] = {}  # whether nothing had been written when the block read

    def _lanes(self, frame: Frame, access: Access, place: Place, mask: Mask, value: Any = None) -> Any:
        """The accessed elements; the blocks of a cluster, which order themselves, count as its first."""
        lanes = super()._lanes(frame, access, place, mask, value)
        if lanes is None:
            return None
        cell, block, position, raw = lanes
        _, first, cluster = np.unique(frame.clock.cluster, return_index=True, return_inverse=True)
        return cell, frame.first_block + first[cluster][block - frame.first_block], position, raw

    def read(self, frame: Frame, access: Access, place: Place, mask: Mask) -> None:
        """Record reads; a read of what another block wrote must come after a signal of that block."""
        lanes = self._lanes(frame, access, place, mask)
        if lanes is None:
            return
        cell, block, position, _ = lanes
        other = self.writer[cell]
        clash = (other != NOBODY) & (other != block)
        if clash.any():
            knows = frame.shared.flags.knows
            clash &= knows(block, other) <= self.written_at[cell]
            former = self.former[cell]
            again = clash & (former != NOBODY) & (knows(block, former) > self.former_at[cell])
            self._report_clash(frame, access, again, cell, position, other, 'reads', 'wrote again', RemoteRace)
            self._report_clash(frame, access, clash & ~again, cell, position, other, 'reads', 'wrote', StaleRead)
        self.ever_read[cell] = True
        for one in np.unique(block):
            mine = cell[block == one]
            stamps = self.readers.setdefault(int(one), np.full(self.cells, _NEVER, np.int32))
            stamps[mine] = frame.shared.flags.released.get(int(one), 0)
            self.early.setdefault(int(one), np.zeros(self.cells, bool))[mine] = self.writer[mine] == NOBODY

    def before_write(self, frame: Frame, access: Access, place: Place, mask: Mask, value: Any) -> Any:
        """Check writes against the last write and all reads; returns the argument of `after_write`."""
        lanes = self._lanes(frame, access, place, mask, value)
        if lanes is None:
            return None
        cell, block, position, _ = lanes
        other = self.writer[cell]
        clash = (other != NOBODY) & (other != block)
        if clash.any():
            clash &= frame.shared.flags.knows(block, other) <= self.written_at[cell]
            self._report_clash(frame, access, clash, cell, position, other, 'writes', 'wrote', RemoteRace)
        for reader, stamps in self.readers.items() if self.ever_read[cell].any() else ():
            clash = (stamps[cell] != _NEVER) & (block != reader)
            if not clash.any():
                continue
            them = np.full(len(block), reader)
            clash &= frame.shared.flags.knows(block, them) <= stamps[cell]
            early = clash & self.early[reader][cell]
            self._report_clash(frame, access, early, cell, position, them, 'writes', 'read before', StaleRead)
            self._report_clash(frame, access, clash & ~early, cell, position, them, 'writes', 'read', RemoteRace)
        return lanes

    def after_write(self, frame: Frame, access: Access, lanes: Any) -> None:
        """Record writes; lanes that wrote different values to one element in one statement race."""
        if lanes is None:
            return
        cell, block = lanes[:2]
        self.former[cell], self.former_at[cell] = self.writer[cell], self.written_at[cell]
        super().after_write(frame, access, lanes)
        counts = frame.shared.flags.released
        for one in np.unique(block):
            self.written_at[cell[block == one]] = counts.get(int(one), 0)

    def _report_clash(
        self,
        frame: Frame,
        access: Access,
        clash: np.ndarray,
        cell: np.ndarray,
        position: tuple[np.ndarray, tuple[int, ...]],
        other: np.ndarray,
        verb: str,
        earlier: str,
        kind: type[DataRace],
    ) -> None:
        if not clash.any():
            return
        first = int(np.argmax(clash))
        places, shape = position
        lane = tuple(int(part) for part in np.unravel_index(int(places[first]), shape))
        index = access.index_at(frame, lane)
        owner, name = self.world.owner(self.memory, int(cell[first]) * self.unit // 8)
        peer = self.world.rank_of(int(other[first]))
        if peer == frame.rank:
            kind, them = DataRace, 'another block of this rank'
        else:
            them = f'rank {peer}'
        text = f'rank {frame.rank} {verb} {name}{list(index)} of rank {owner}, which {them} {earlier}'
        lane = (lane[0], lane[1] if shape[1] > 1 else -1)
        text = f'{text}, and no signal or barrier orders the two'
        others = tuple(dict.fromkeys(rank for rank in (peer, owner) if rank != frame.rank))
        frame.report(kind, text, access.site, lane, name, index, others)
