"""Observe every access of a kernel: the observer interface, and `watch`, which uses it.

An `Observer` has one method, `access(event)`. The interpreter calls it once per statement and buffer, for all lanes of
the statement together. The arrays of an `AccessEvent` have one entry per active lane; they are computed when read.
Without an observer, a run has the cost of one comparison per statement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from tile_kernels.interpreter.engine.lanes import expand

BANKS, BANK_BYTES, SECTOR_BYTES, WARP = 32, 4, 32, 32


class Observer(Protocol):
    """An object that receives the accesses of a kernel."""

    def access(self, event: AccessEvent) -> None:
        """Receive the access of one statement to one buffer; the observer cannot change the run."""


class AccessEvent:
    """All lanes of one load, store or update.

    Attributes:
        action: 'load', 'store', or 'update' (an atomic or an accumulation: a load and a store).
        kernel: Name of the kernel.
        file: Source file of the statement.
        line: Source line of the statement.
        buffer: Name of the buffer.
        scope: 'global', 'shared', 'fragment' or 'local'.
        dtype: Type of an element, such as 'float16'.
        itemsize: Bytes of an element.
    """

    def __init__(self, action: str, frame: Any, access: Any, place: Any, value: Any, mask: Any) -> None:
        self.action = action
        self.kernel, self.file, self.line = access.site.kernel, access.site.file, access.site.line
        self.buffer, self.scope = access.buffer.name, access.buffer.scope
        self.dtype, self.itemsize = access.buffer.dtype.name, access.buffer.dtype.storage.itemsize
        self._bits = access.buffer.dtype.bits
        self._frame, self._access, self._place, self._value, self._mask = frame, access, place, value, mask

    @cached_property
    def _lanes(self) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
        """Shape over lanes, element of every lane, and the numbers of the active lanes."""
        frame, access = self._frame, self._access
        flat = self._place.flat()
        mask = None if self._mask is None else expand(self._mask, flat.ndim)
        shape = [max(pair) for pair in zip(flat.shape, (1,) * flat.ndim if mask is None else mask.shape, strict=True)]
        shape[0] = frame.blocks
        shape[2:] = access.extents(frame)
        if flat.ndim == 2 or access.private:
            shape[1] = frame.threads
        full = tuple(shape)
        active = np.ones(full, bool) if mask is None else np.broadcast_to(mask, full)
        return full, np.broadcast_to(flat, full), np.flatnonzero(active)

    def _along(self, axis: int) -> np.ndarray:
        shape, _, lanes = self._lanes
        return np.unravel_index(lanes, shape)[axis]

    @property
    def count(self) -> int:
        """Number of active lanes."""
        return len(self._lanes[2])

    @cached_property
    def block(self) -> np.ndarray:
        """(lanes, axes of the grid): coordinates of the block of each lane."""
        row = self._along(0)
        return np.stack([np.asarray(ids)[row if len(ids) > 1 else 0 * row] for ids in self._frame.block_ids], axis=1)

    @cached_property
    def thread(self) -> np.ndarray:
        """Thread of each lane; -1 in tile operations and T.Parallel, where TileLang's layout decides."""
        shape, _, lanes = self._lanes
        if shape[1] == 1 and self._frame.threads > 1:
            return np.full(len(lanes), -1)
        return self._along(1)

    @cached_property
    def lane(self) -> np.ndarray:
        """Number of each thread within its warp; -1 where the thread is unknown."""
        return np.where(self.thread < 0, -1, self.thread % WARP)

    @cached_property
    def iteration(self) -> np.ndarray:
        """(lanes, axes): coordinates in the enclosing parallel loops, and within the tile of a tile operation."""
        shape, _, lanes = self._lanes
        return (
            np.stack(np.unravel_index(lanes, shape)[2:], axis=1) if len(shape) > 2 else np.zeros((len(lanes), 0), int)
        )

    @cached_property
    def element(self) -> np.ndarray:
        """Number of the element within its buffer's memory."""
        _, flat, lanes = self._lanes
        return flat.reshape(-1)[lanes]

    @cached_property
    def index(self) -> np.ndarray:
        """(lanes, dimensions): the index of each element."""
        shape, strides = self._access.buffer.layout(self._frame)
        rest: Any = self.element
        if self._access.buffer.offset is not None:
            rest = rest - np.asarray(self._access.buffer.offset(self._frame)).flat[0]
        found = []
        for extent, stride in zip(shape, strides, strict=True):
            found.append(rest // max(stride, 1) % max(extent, 1) if stride else np.zeros_like(rest))
        return np.stack(found, axis=1) if found else np.zeros((self.count, 0), int)

    @cached_property
    def address(self) -> np.ndarray:
        """Byte offset of each element from the start of its buffer's memory."""
        return self.element * self._bits // 8

    @property
    def bank(self) -> np.ndarray:
        """Bank of shared memory of each element, before any swizzle."""
        return self.address // BANK_BYTES % BANKS

    @property
    def sector(self) -> np.ndarray:
        """32-byte sector of global memory of each element, counted from the start of the buffer."""
        return self.address // SECTOR_BYTES

    @cached_property
    def value(self) -> np.ndarray:
        """The value that each lane loads, stores or contributes."""
        shape, _, lanes = self._lanes
        given = self._value
        if isinstance(given, tuple):  # a vector
            return np.stack([self._spread(part, shape, lanes) for part in given], axis=1)
        return self._spread(given, shape, lanes)

    @staticmethod
    def _spread(value: Any, shape: tuple[int, ...], lanes: np.ndarray) -> np.ndarray:
        array = np.asarray(value)
        array = expand(array, len(shape)) if array.ndim else array
        wide = np.broadcast_shapes(array.shape, shape)
        return np.broadcast_to(array, wide).reshape(-1)[lanes] if wide == shape else np.resize(array, len(lanes))


@dataclass(frozen=True)
class Touch:
    """One element accessed by one lane: the argument of a `watch` callback.

    Attributes:
        action: 'load', 'store' or 'update'.
        line: Source line.
        buffer: Name of the buffer.
        index: Index of the element.
        block: Coordinates of the block.
        thread: Number of the thread; None in tile operations and T.Parallel.
        iteration: Coordinates in the enclosing parallel loops.
        value: The value that is loaded, stored or contributed.
    """

    action: str
    line: int
    buffer: str
    index: tuple[int, ...]
    block: tuple[int, ...]
    thread: int | None
    iteration: tuple[int, ...]
    value: Any

    def __str__(self) -> str:
        who = f'block {self.block}' + (f', thread {self.thread}' if self.thread is not None else '')
        spot = ', '.join(str(part) for part in self.index)
        return f'line {self.line}: {self.action} {self.buffer}[{spot}] = {self.value} ({who})'


class Watcher:
    """An observer that calls a function for every element accessed at chosen lines or in chosen buffers."""

    def __init__(self, callback: Callable[[Touch], Any], at: int | str | Iterable[int | str] | None = None) -> None:
        self.callback = callback
        chosen = [at] if isinstance(at, (int, str)) else list(at or ())
        self.lines = {part for part in chosen if isinstance(part, int)}
        self.buffers = {part for part in chosen if isinstance(part, str)}

    def access(self, event: AccessEvent) -> None:
        """Call the function for every lane of a chosen access."""
        if (self.lines or self.buffers) and event.line not in self.lines and event.buffer not in self.buffers:
            return
        for index, block, thread, iteration, value in zip(
            event.index, event.block, event.thread, event.iteration, event.value, strict=True
        ):
            self.callback(
                Touch(
                    event.action,
                    event.line,
                    event.buffer,
                    tuple(int(part) for part in index),
                    tuple(int(part) for part in block),
                    int(thread) if thread >= 0 else None,
                    tuple(int(part) for part in iteration),
                    value.item() if np.ndim(value) == 0 else value,
                )
            )


class LastWriter:
    """An observer that remembers which block and thread wrote an element last.

    Attributes:
        line: the line that wrote it, or 0.
        block: coordinates of the block.
        thread: the thread; -1 in tile operations and T.Parallel, where TileLang's layout decides.
    """

    def __init__(self, buffer: str, element: int) -> None:
        self.buffer, self.element = buffer, element
        self.line, self.thread = 0, -1
        self.block: tuple[int, ...] = (0,)

    def access(self, event: AccessEvent) -> None:
        """Look for the element among those that are written."""
        if event.buffer != self.buffer or event.action == 'load':
            return
        for lane in np.flatnonzero(event.element == self.element)[-1:]:
            self.line, self.thread = event.line, int(event.thread[lane])
            self.block = tuple(int(part) for part in event.block[lane])

    def __str__(self) -> str:
        thread = f', thread {self.thread}' if self.thread >= 0 else ''
        block = ', '.join(map(str, self.block))
        return f'block {block}{thread} wrote it in line {self.line}' if self.line else 'no thread wrote it'


class Several:
    """An observer that consists of several."""

    def __init__(self, observers: list[Observer]) -> None:
        self.observers = observers

    def access(self, event: AccessEvent) -> None:
        """Forward the event to all of them."""
        for observer in self.observers:
            observer.access(event)


class Counter:
    """An observer that counts, per source line and buffer, the work of the hardware.

    Attributes:
        rows: (line, buffer, action) -> [lanes, bytes, shared-memory wavefronts, 32-byte sectors]. The last two count
            accesses with known threads; vector widths and swizzles are not modelled.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[int, str, str], list[int]] = {}

    def access(self, event: AccessEvent) -> None:
        """Count one access."""
        row = self.rows.setdefault((event.line, event.buffer, event.action), [0, 0, 0, 0])
        row[0] += event.count
        row[1] += event.count * event._bits // 8
        if event.scope in ('shared', 'global') and event.count and event.thread[0] >= 0:
            warp = event._along(0) * (1 << 20) + event.thread // WARP
            if event.scope == 'shared':
                row[2] += _wavefronts(warp, event.address // BANK_BYTES)
            else:
                row[3] += len(np.unique(np.stack([warp, event.sector]), axis=1).T)


def _wavefronts(warp: np.ndarray, word: np.ndarray) -> int:
    """Shared-memory wavefronts: for each warp, the largest number of words in one bank."""
    words = np.unique(np.stack([warp, word]), axis=1)
    banks, counts = np.unique(np.stack([words[0], words[1] % BANKS]), axis=1, return_counts=True)
    total = 0
    for one in np.unique(banks[0]):
        total += int(counts[banks[0] == one].max())
    return total
