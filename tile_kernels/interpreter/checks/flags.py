"""The order between blocks that flags create: one block releases at an element, another acquires from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.lanes import Mask, both

Scopes = tuple[int | str | None, ...]  # 'system', and the rank of a device (None if only one runs)

_ACQUIRE, _RELEASE = frozenset({1, 2, 4, 5}), frozenset({3, 4, 5})  # numbers of TileLang's memory orders


class Flags:
    """What every block knows of the others: how often each has released, as far as it has acquired."""

    def __init__(self) -> None:
        self.released: dict[int, int] = {}
        self.known: dict[int, dict[int, int]] = {}
        self.published: dict[tuple[Any, int | str | None], dict[int, int]] = {}  # by place and scope
        self.fenced: dict[int, dict[int, int]] = {}  # what a block knew at its last fence for all devices
        self.loaded: dict[int, set[Any]] = {}  # places of the atomic loads of a block since then

    def count(self, blocks: np.ndarray) -> np.ndarray:
        """Number of releases of each of these blocks so far."""
        return np.array([self.released.get(int(block), 0) for block in blocks], np.int32)

    def knows(self, blocks: np.ndarray, others: np.ndarray) -> np.ndarray:
        """For each pair, the number of releases of the other block that the first one has acquired."""
        pairs, inverse = np.unique(np.stack([blocks, others]), axis=1, return_inverse=True)
        counts = [self.known.get(int(block), {}).get(int(other), 0) for block, other in pairs.T]
        return np.array(counts, np.int32)[inverse.reshape(-1)]

    def release(self, block: int, place: Any, scopes: Scopes) -> None:
        """A block publishes what it did and knows, to the devices of some scopes."""
        self.released[block] = self.released.get(block, 0) + 1
        mine = self.known.setdefault(block, {})
        mine[block] = self.released[block]
        for scope in scopes:
            _merge(self.published.setdefault((place, scope), {}), mine)

    def acquire(self, block: int, place: Any, scopes: Scopes) -> None:
        """A block learns what was published."""
        for scope in scopes:
            if (place, scope) in self.published:
                _merge(self.known.setdefault(block, {}), self.published[place, scope])

    def fence(self, block: int) -> None:
        """A fence for all devices: it completes earlier atomic loads of the block and begins later stores."""
        for place in self.loaded.pop(block, set()):
            self.acquire(block, place, ('system',))
        self.release(block, None, ())
        self.fenced[block] = dict(self.known[block])

    def touch(self, block: int, place: Any, loads: bool, stores: bool) -> None:
        """An atomic access of a block, which a fence may make one of system scope."""
        if loads:
            self.loaded.setdefault(block, set()).add(place)
        if stores and block in self.fenced:
            _merge(self.published.setdefault((place, 'system'), {}), self.fenced[block])

    def hand_over(self, before: Iterable[int], after: Iterable[int]) -> None:
        """The blocks of a kernel that ended come before those of the next one on their device."""
        everything: dict[int, int] = {}
        for block in before:
            self.released[block] = self.released.get(block, 0) + 1
            _merge(everything, self.known.get(block, {}))
            everything[block] = self.released[block]
        for block in after:
            _merge(self.known.setdefault(block, {}), everything)


def _merge(into: dict[int, int], news: dict[int, int]) -> None:
    for block, count in news.items():
        into[block] = max(into.get(block, 0), count)


def note_order(frame: Frame, access: Any, order: int, loads: bool = True, stores: bool = True) -> None:
    """Record what an atomic access with a memory order does to the order between the blocks of a device."""
    if access.buffer.scope != 'global' or frame.clock is None:
        return
    if order not in _ACQUIRE | _RELEASE and frame.shared.world is None:
        return
    place = access.locate(frame, frame.mask)
    mask: Mask = both(frame.mask, place.ok)
    flat = place.flat()
    lanes = (frame.blocks, *(1,) * (flat.ndim - 1))
    shape = np.broadcast_shapes(flat.shape, lanes, () if mask is None else mask.shape)
    active = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
    start, size = access.memory(frame).data.ctypes.data, access.buffer.dtype.storage.itemsize
    address = start + np.broadcast_to(flat, shape)[active] * size
    places = list(set(zip(np.nonzero(active)[0].tolist(), address.tolist(), strict=True)))
    if order in _ACQUIRE | _RELEASE:
        note_flags(frame, places, order in _ACQUIRE, order in _RELEASE, (frame.rank,))
    if frame.shared.world is not None:
        for row, place in places:
            frame.shared.flags.touch(frame.first_block + row, place, loads, stores)


def note_flags(frame: Frame, places: list[tuple[int, Any]], acquires: bool, releases: bool, scopes: Scopes) -> None:
    """Blocks acquire from, or release at, places in memory; each is given with the block's row in the batch."""
    flags = frame.shared.flags
    for row, place in places:
        # What the blocks of a cluster tell each other by mbarriers is not followed: they know and publish together.
        for block in frame.first_block + np.flatnonzero(frame.clock.cluster == frame.clock.cluster[row]):
            if acquires:
                flags.acquire(int(block), place, scopes)
            if releases:
                flags.release(int(block), place, scopes)
