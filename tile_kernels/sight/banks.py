"""Which lanes of a warp meet in which bank of shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

import numpy as np
from numpy.typing import NDArray

from tile_kernels.sight.count import Access, count, wavefronts
from tile_kernels.sight.layouts import BANK_BYTES, BANKS, BufferLayout
from tile_kernels.sight.lower import lower
from tile_kernels.sight.subject import Subject

#: How a warp may read a tile: one element of 32 columns or of 32 rows, or 16 bytes of 8 rows.
PATTERNS = ('row', 'column', 'ldmatrix')


@dataclass(frozen=True)
class Lanes:
    """One execution of a shared access by a warp.

    Attributes:
        name: what reads or writes, e.g. `'line 17: load A_shared, 4 bytes'`.
        address: the byte address of each active lane.
        lane: the number of each active lane.
        width: bytes of a lane.
    """

    name: str
    address: NDArray[np.int64] = field(repr=False)
    lane: NDArray[np.int64] = field(repr=False)
    width: int

    @property
    def ways(self) -> int:
        """How many times longer the access takes than without bank conflicts, rounded up."""
        used, least = self._wavefronts(self.lane >= 0)
        return -(-used // max(1, least))

    def _wavefronts(self, chosen: NDArray[np.bool_]) -> tuple[int, int]:
        place, active = np.zeros(32, np.int64), np.zeros(32, bool)
        place[self.lane[chosen]], active[self.lane[chosen]] = self.address[chosen], True
        return wavefronts(place, self.width, active)

    def met(self) -> list[list[list[int]]]:
        """For each bank the lanes that want each of its words; of the lanes that are served together, the slowest."""
        together = 32 // min(4, max(1, self.width // BANK_BYTES))
        groups = [self.lane // together == group for group in range(32 // together)]
        worst = max(groups, key=lambda chosen: self._wavefronts(chosen)[0] if chosen.any() else 0)
        found: list[dict[int, list[int]]] = [{} for _ in range(BANKS)]
        for lane, address in zip(self.lane[worst].tolist(), self.address[worst].tolist(), strict=True):
            for word in range(address // BANK_BYTES, (address + self.width - 1) // BANK_BYTES + 1):
                found[word % BANKS].setdefault(word, []).append(lane)
        return [list(words.values()) for words in found]


def matrix(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last two axes; a single axis is wrapped into rows of up to 64."""
    if values.ndim == 1:
        return values.reshape(-1, gcd(len(values), 64))
    return values[(0,) * (values.ndim - 2)]


def run_length(follows: NDArray[np.bool_], most: int) -> int:
    """The largest power of two so that all aligned runs of a row lie together; `follows[i, j]` joins j and j + 1."""
    size = 1
    while size < most and (follows.shape[1] + 1) % (2 * size) == 0 and follows[:, size - 1 :: 2 * size].all():
        size *= 2
    return size


def pattern(layout: BufferLayout, name: str) -> Lanes | None:
    """The execution of a pattern with the most conflicts over the places of a tile; None if the tile forbids it."""
    offsets = matrix(layout.offsets)
    places, width, reach = offsets * layout.bits // 8, max(1, layout.bits // 8), 32
    if name == 'ldmatrix':
        size, width, reach = 128 // layout.bits, 16, 8
        if run_length(np.diff(offsets, axis=1) == 1, size) < size:
            return None
        places = places[:, ::size]
    found = []
    for line in (places if name == 'row' else places.T)[:64]:
        for start in range(0, min(len(line), 256), reach):
            address = line[start : start + reach]
            found.append(Lanes(f'{name} of {layout.buffer}', address, np.arange(len(address)), width))
    return max(found, key=lambda lanes: lanes.ways)


def executions(subject: Subject) -> dict[str, list[Lanes]]:
    """For each shared buffer of a kernel and each access to it the execution with the most conflicts."""
    found: dict[str, dict[str, Lanes]] = {}

    def watch(access: Access, address: NDArray[np.int64], active: NDArray[np.bool_], weight: float) -> None:
        if access.space != 'shared' or access.width > 16:
            return
        name = f'line {access.line}: {access.how} {access.buffer}, {access.width} bytes'
        known = found.setdefault(access.buffer, {})
        for place, chosen in zip(address.reshape(-1, 32), active.reshape(-1, 32), strict=True):
            lanes = Lanes(name, place[chosen], np.flatnonzero(chosen), access.width)
            if chosen.any() and (name not in known or lanes.ways > known[name].ways):
                known[name] = lanes

    count(subject, lower(subject), watch)
    return {buffer: list(known.values()) for buffer, known in found.items()}
