"""The order between blocks that flags create: one block releases at an element, another acquires from it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.lanes import Mask, both

_ACQUIRE, _RELEASE = frozenset({1, 2, 4, 5}), frozenset({3, 4, 5})  # numbers of TileLang's memory orders


class Flags:
    """What every block knows of the others: how often each has released, as far as it has acquired."""

    def __init__(self) -> None:
        self.released: dict[int, int] = {}
        self.known: dict[int, dict[int, int]] = {}
        self.published: dict[tuple[int, int], dict[int, int]] = {}

    def count(self, blocks: np.ndarray) -> np.ndarray:
        """Number of releases of each of these blocks so far."""
        return np.array([self.released.get(int(block), 0) for block in blocks], np.int32)

    def knows(self, blocks: np.ndarray, others: np.ndarray) -> np.ndarray:
        """For each pair, the number of releases of the other block that the first one has acquired."""
        pairs, inverse = np.unique(np.stack([blocks, others]), axis=1, return_inverse=True)
        counts = [self.known.get(int(block), {}).get(int(other), 0) for block, other in pairs.T]
        return np.array(counts, np.int32)[inverse.reshape(-1)]

    def release(self, block: int, element: tuple[int, int]) -> None:
        """A block publishes what it did and knows."""
        self.released[block] = self.released.get(block, 0) + 1
        mine = self.known.setdefault(block, {})
        mine[block] = self.released[block]
        _merge(self.published.setdefault(element, {}), mine)

    def acquire(self, block: int, element: tuple[int, int]) -> None:
        """A block learns what was published."""
        if element in self.published:
            _merge(self.known.setdefault(block, {}), self.published[element])


def _merge(into: dict[int, int], news: dict[int, int]) -> None:
    for block, count in news.items():
        into[block] = max(into.get(block, 0), count)


def note_order(frame: Frame, access: Any, order: int) -> None:
    """Record what an atomic access with a memory order does to the order between blocks."""
    if access.buffer.scope != 'global' or frame.clock is None or order not in _ACQUIRE | _RELEASE:
        return
    flags, place = frame.shared.flags, access.locate(frame, frame.mask)
    mask: Mask = both(frame.mask, place.ok)
    flat = place.flat()
    lanes = (frame.blocks, *(1,) * (flat.ndim - 1))
    shape = np.broadcast_shapes(flat.shape, lanes, () if mask is None else mask.shape)
    active = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
    rows = np.nonzero(active)[0]
    for row, element in set(zip(rows.tolist(), np.broadcast_to(flat, shape)[active].tolist(), strict=True)):
        key = (access.buffer.slot, element)
        # What the blocks of a cluster tell each other by mbarriers is not followed: they know and publish together.
        for block in frame.first_block + np.flatnonzero(frame.clock.cluster == frame.clock.cluster[row]):
            if order in _ACQUIRE:
                flags.acquire(int(block), key)
            if order in _RELEASE:
                flags.release(int(block), key)
