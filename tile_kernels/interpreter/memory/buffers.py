"""Memory: bytes of global, shared and fragment buffers, and the private values of threads."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.lanes import Mask, both, expand, select
from tile_kernels.interpreter.memory.dtypes import DType, bits_of, decoder, encoder


@dataclass(slots=True)
class Place:
    """The target of an access: element `base + sum(axis * step)`, with one axis per enclosing parallel loop.

    `base` is an integer or an array over lanes; `extents[k]` is 1 if the target does not depend on axis k. `ok` marks
    the lanes whose index is inside the buffer (None: all of them).
    """

    base: Any
    extents: tuple[int, ...]
    steps: tuple[int, ...]
    ok: Mask = None
    tile_axes: int = 0  # number of axes of the tile operation; the others belong to parallel loops

    def flat(self) -> np.ndarray:
        """Element number of every lane."""
        ndim = 2 + len(self.extents)
        index = np.asarray(self.base, dtype=np.intp)
        index = index.reshape(index.shape + (1,) * (ndim - index.ndim)) if index.ndim else index.reshape((1,) * ndim)
        for axis, (extent, step) in enumerate(zip(self.extents, self.steps, strict=True)):
            if extent > 1:
                shape = [1] * ndim
                shape[2 + axis] = extent
                index = index + (np.arange(extent, dtype=np.intp) * step).reshape(shape)
        return index


class ByteMemory:
    """Raw bytes, one row per block (shared, fragment) or one row for all (global)."""

    stage = ''  # state of a reducer: 'open' from its start to its end, then 'done'
    partial = False  # of a reducer in the older syntax: threads hold parts of the result

    def __init__(self, data: np.ndarray, per_block: bool, size: int) -> None:
        self.data = data
        self.per_block = per_block
        self.size = size  # bytes of a row that belong to the buffer; the rest is padding
        self.written: np.ndarray | None = None  # 0xFF per written byte, while something is still unwritten
        self.race: Any = None
        self.pending: Any = None
        self._typed: dict[tuple[str, bool], np.ndarray] = {}
        self._reads_since_scan = 0

    @classmethod
    def of_blocks(cls, blocks: int, size: int, track_writes: bool) -> ByteMemory:
        """Fresh memory of `size` bytes for each of `blocks` blocks; its contents are arbitrary, as on a GPU."""
        padded = -(-size // 16) * 16
        memory = cls(np.full((blocks, padded), 0xA5, np.uint8), True, size)
        if track_writes:
            memory.track_writes()
            if memory.written is not None:
                memory.written[:, size:] = 0xFF
        return memory

    def track_writes(self) -> None:
        """From now on, record which bytes are written."""
        if self.size:
            self.written = np.zeros(self.data.shape, np.uint8)

    def typed(self, storage: np.dtype, shadow: bool = False) -> np.ndarray:
        """The bytes (or their write marks) as (rows, elements) of a storage type."""
        key = (storage.str, shadow)
        view = self._typed.get(key)
        if view is None:
            source: Any = self.written if shadow else self.data
            whole = source.shape[1] // storage.itemsize * storage.itemsize
            view = self._typed[key] = source[:, :whole].view(storage)
        return view

    def read(self, place: Place, dtype: DType) -> np.ndarray:
        """Values at a `Place`; the result may be a view, so callers that keep it must copy it."""
        return decoder(dtype)(self.read_raw(place, dtype))

    def read_raw(self, place: Place, dtype: DType, shadow: bool = False) -> np.ndarray:
        """Stored bits at a `Place`."""
        if not dtype.packed:
            return gather(self.typed(_raw_type(dtype, shadow), shadow), place, self.per_block)
        flat = place.flat()
        byte = gather(self.typed(dtype.storage, shadow), _plain(flat >> 1, place), self.per_block)
        return (byte >> ((flat & 1) << 2).astype(np.uint8)) & 15

    def write(self, place: Place, value: Any, dtype: DType, mask: Mask) -> None:
        """Store values (already of `dtype`) for the lanes in `mask`."""
        raw = encoder(dtype)(value)
        self.write_raw(place, raw, dtype, mask)
        if self.written is not None:
            self._mark(place, dtype, mask)

    def write_raw(self, place: Place, raw: np.ndarray, dtype: DType, mask: Mask, shadow: bool = False) -> None:
        """Store bits for the lanes in `mask`."""
        if dtype.packed:
            self._write_nibbles(place, raw, mask, shadow)
        else:
            scatter(self.typed(_raw_type(dtype, shadow), shadow), place, raw, mask, self.per_block)

    def unwritten(self, place: Place, dtype: DType) -> np.ndarray | None:
        """Lanes that would read an unwritten element, or None if every element of the memory is written."""
        if self.written is None:
            return None
        self._reads_since_scan += 1
        if self._reads_since_scan >= 4:
            self._reads_since_scan = 0
            if (self.written == 0xFF).all():
                self.written = None
                return None
        full = 15 if dtype.packed else (1 << (8 * dtype.storage.itemsize)) - 1
        return self.read_raw(place, dtype, shadow=True) != full

    def _mark(self, place: Place, dtype: DType, mask: Mask) -> None:
        if mask is None and not dtype.packed and covers(place, self.size // dtype.storage.itemsize):
            self.written = None
            return
        full = 15 if dtype.packed else (1 << (8 * dtype.storage.itemsize)) - 1
        self.write_raw(place, np.asarray(full, _raw_type(dtype, True)), dtype, mask, shadow=True)

    def _write_nibbles(self, place: Place, raw: np.ndarray, mask: Mask, shadow: bool) -> None:
        flat = place.flat()
        cells = self.typed(np.dtype(np.uint8), shadow)
        rows, length = cells.shape
        if self.per_block and rows > 1:
            flat = flat + (np.arange(rows) * (2 * length)).reshape((rows,) + (1,) * (flat.ndim - 1))
        flat, raw = np.broadcast_arrays(flat, raw)
        active = np.broadcast_to(mask, flat.shape) if mask is not None else np.ones(flat.shape, bool)
        line = cells.reshape(-1)
        for odd in (0, 1):  # one half of a byte after the other, so that neither overwrites the other
            chosen = active & ((flat & 1) == odd)
            byte = flat[chosen] >> 1
            line[byte] = (line[byte] & (0x0F if odd else 0xF0)) | (raw[chosen] & 15) << (4 * odd)


class ReplicatedMemory(ByteMemory):
    """A fragment with one copy per thread, because single elements of it are used outside T.Parallel.

    One row per block represents all copies until a store makes them differ (`spread`).
    """

    def __init__(self, blocks: int, threads: int, size: int, track_writes: bool) -> None:
        fresh = ByteMemory.of_blocks(blocks, size, track_writes)
        super().__init__(fresh.data, True, size)
        self.written = fresh.written
        self.threads = threads
        self.lines: ByteMemory | None = None  # the copies one after another, if they differ

    def spread(self) -> ByteMemory:
        """The copies of all threads of all blocks."""
        if self.lines is None:
            self.lines = ByteMemory(self._repeated(self.data), False, self.data.size * self.threads)
            if self.written is not None:
                self.lines.written = self._repeated(self.written)
        return self.lines

    def unite(self, same: bool = False) -> bool:
        """Return to one row per block, if the copies are equal or are about to be overwritten (`same`)."""
        if self.lines is None:
            return True
        copies = [self._by_thread(self.lines.data)]
        if self.lines.written is not None:
            copies.append(self._by_thread(self.lines.written))
        if not same and any((copy != copy[:, :1]).any() for copy in copies):
            return False
        self.data[...] = copies[0][:, 0]
        self.written = copies[1][:, 0].copy() if len(copies) > 1 else None
        self._typed.clear()
        self.lines = None
        return True

    def copies(self, place: Place, dtype: DType) -> Place:
        """The corresponding `Place` in every thread's copy, among the lines."""
        flat = place.flat()
        blocks = len(self.data)
        row = np.arange(blocks * self.threads).reshape((blocks, self.threads) + (1,) * (flat.ndim - 2))
        axes = (1,) * len(place.extents)
        return Place(flat + row * (self.data.shape[1] * 8 // dtype.bits), axes, (0,) * len(axes), place.ok)

    def _repeated(self, rows: np.ndarray) -> np.ndarray:
        return np.repeat(rows, self.threads, axis=0).reshape(1, -1)

    def _by_thread(self, lines: np.ndarray) -> np.ndarray:
        return lines.reshape(len(self.data), self.threads, -1)


def bytes_of(storage: Any, frame: Any) -> int:
    """The size in bytes of a declared buffer."""
    size = storage.size if isinstance(storage.size, int) else storage.size(frame)
    return -(-size * storage.dtype.bits // 8)


def workspace(storage: Any, frame: Any, options: Any) -> ByteMemory:
    """Global memory that the program allocates (`T.alloc_global`)."""
    size = bytes_of(storage, frame)
    memory = ByteMemory(np.full((1, size), 0xA5, np.uint8), False, size)
    if options.checks != 'none':
        memory.track_writes()
    return memory


def memory_at(address: int, size: int) -> ByteMemory:
    """Memory of this process at a raw pointer of a kernel."""
    cells = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return ByteMemory(cells.reshape(1, size), False, size)


class LocalMemory:
    """Private registers of every thread: one value over lanes per element (None: never written).

    A register that is viewed under several types (`unit_bits` > 0) is stored as units of that many raw bits.
    """

    def __init__(self, size: int, unit_bits: int = 0) -> None:
        self.values: list[Any] = [None] * size
        self.valid: list[Any] = [True] * size  # lanes written so far, True once all are
        self.unit_bits = unit_bits
        self.written: bool | None = True  # None: reads of what nobody wrote are no findings
        self.race: Any = None
        self.pending: Any = None

    def read(self, place: Place, dtype: DType) -> Any:
        """Values at a `Place`."""
        if isinstance(place.base, int):
            if all(extent == 1 for extent in place.extents):
                return expand(self._value(place.base, dtype), 2 + len(place.extents))
            return self._read_tile(place, dtype)
        flat = place.flat()
        result: Any = None
        for element in np.unique(flat):
            value = expand(self._value(int(element), dtype), flat.ndim)
            result = value if result is None else select(flat == element, value, result, dtype.value)
        if isinstance(result, tuple):
            return result
        return np.broadcast_to(result, np.broadcast_shapes(np.shape(result), flat.shape))

    def write(self, place: Place, value: Any, dtype: DType, mask: Mask) -> None:
        """Store values for the lanes in `mask`; other lanes keep their old values."""
        if isinstance(value, np.ndarray) and value.base is not None:
            value = value.copy()
        if isinstance(place.base, int):
            if all(extent == 1 for extent in place.extents) and not place.tile_axes:
                self._assign(place.base, value, dtype, mask)
            else:
                self._write_tile(place, value, dtype, mask)
            return
        flat = place.flat()
        for element in np.unique(flat):
            here = flat == element
            self._assign(int(element), value, dtype, both(mask, None if here.all() else here))

    def forget_inner(self, ndim: int) -> None:
        """Drop values of the iterations of a parallel loop that has ended."""
        for element, value in enumerate(self.values):
            if isinstance(value, np.ndarray) and value.ndim > ndim:
                self.values[element] = None

    def unwritten(self, place: Place, dtype: DType) -> Any:
        """Lanes that would read an unwritten register, or None if there are none."""
        if isinstance(place.base, int) and all(extent == 1 for extent in place.extents):
            elements = [place.base]
        else:
            elements = [int(one) for one in np.unique(place.flat())]
        missing = None
        ndim = 2 + len(place.extents)
        pieces = dtype.bits // self.unit_bits if self.unit_bits else 1
        for element in elements:
            for piece in range(element * pieces, (element + 1) * pieces):
                if self.values[piece] is None:
                    bad: Any = np.ones((1,) * ndim, bool)
                elif self.valid[piece] is not True:
                    bad = ~expand(self.valid[piece], ndim)
                else:
                    continue
                if len(elements) > 1:
                    bad = bad & (place.flat() == element)
                missing = bad if missing is None else missing | bad
        return missing

    def _read_tile(self, place: Place, dtype: DType) -> np.ndarray:
        """Load elements along the axes of a tile."""
        ndim = 2 + len(place.extents)
        parts = [expand(np.asarray(self._value(element, dtype)), ndim) for _, element in _elements(place)]
        parts = [part.reshape((1,) * ndim) if part.ndim == 0 else part for part in parts]
        shape = np.broadcast_shapes(*[part.shape for part in parts])
        moving = [2 + axis for axis, extent in enumerate(place.extents) if extent > 1]
        result = np.empty([place.extents[a - 2] if a in moving else n for a, n in enumerate(shape)], parts[0].dtype)
        for (position, _), part in zip(_elements(place), parts, strict=True):
            where = (slice(None), slice(None), *_slices(position))
            result[where] = part
        return result

    def _write_tile(self, place: Place, value: Any, dtype: DType, mask: Mask) -> None:
        """Store each element from its position along the axes of a tile."""
        for position, element in _elements(place):
            where = (slice(None), slice(None), *_slices(position))
            self._assign(element, _drop(value, where, place.tile_axes), dtype, _drop(mask, where, place.tile_axes))

    def _value(self, element: int, dtype: DType) -> Any:
        if self.unit_bits:
            return self._join(element, dtype)
        value = self.values[element]
        if value is not None:
            return value
        zero = dtype.value.type(0) if dtype.is_float else 0
        return zero if dtype.lanes == 1 else (zero,) * dtype.lanes

    def _assign(self, element: int, value: Any, dtype: DType, mask: Mask) -> None:
        if self.unit_bits:
            for piece, part in enumerate(self._split(value, dtype), element * (dtype.bits // self.unit_bits)):
                self._set(piece, part, part.dtype.type(0), mask, part.dtype)
        else:
            self._set(element, value, self._value(element, dtype) if mask is not None else None, mask, dtype.value)

    def _set(self, element: int, value: Any, empty: Any, mask: Mask, kind: np.dtype) -> None:
        if mask is None:
            self.values[element] = value
            self.valid[element] = True
            return
        old = self.values[element]
        self.values[element] = select(mask, value, expand(empty if old is None else old, mask.ndim), kind)
        if old is None:
            self.valid[element] = mask
        elif self.valid[element] is not True:
            self.valid[element] = expand(self.valid[element], mask.ndim) | mask

    def _split(self, value: Any, dtype: DType) -> list[Any]:
        raw = bits_of(value, dtype)
        low = raw.dtype.type((1 << self.unit_bits) - 1)
        return [raw >> raw.dtype.type(shift) & low for shift in range(0, dtype.bits, self.unit_bits)]

    def _join(self, element: int, dtype: DType) -> Any:
        pieces = dtype.bits // self.unit_bits
        word = np.dtype(f'uint{max(8, dtype.bits)}')
        raw: Any = word.type(0)
        for piece in range(pieces):
            part = self.values[element * pieces + piece]
            if part is not None:
                raw = raw | np.asarray(part).astype(word) << word.type(piece * self.unit_bits)
        return decoder(dtype)(np.atleast_1d(raw).view(dtype.storage).reshape(np.shape(raw)))


def _elements(place: Place) -> list[tuple[tuple[int, ...], int]]:
    """(position along the axes, element number) for a `Place` with a scalar base."""
    return [
        (position, place.base + sum(at * step for at, step in zip(position, place.steps, strict=True)))
        for position in np.ndindex(*place.extents)
    ]


def _slices(position: tuple[int, ...]) -> list[slice]:
    return [slice(at, at + 1) for at in position]


def _drop(value: Any, where: tuple[slice, ...], tile_axes: int) -> Any:
    """The part of a value at one position of a tile, without the axes of the tile."""
    if not isinstance(value, np.ndarray):
        return value
    value = expand(value, len(where))
    spot = tuple(part if axis < 2 or value.shape[axis] > 1 else slice(None) for axis, part in enumerate(where))
    found = value[spot]
    return found.reshape(found.shape[: found.ndim - tile_axes]).copy()


def _raw_type(dtype: DType, shadow: bool) -> np.dtype:
    return np.dtype(f'uint{dtype.storage.itemsize * 8}') if shadow else dtype.storage


def _plain(flat: np.ndarray, place: Place) -> Place:
    return Place(flat, (1,) * len(place.extents), (0,) * len(place.extents))


def covers(place: Place, size: int) -> bool:
    """Whether a store fills a whole row: as many distinct elements as the row has."""
    if not isinstance(place.base, int):
        return False
    reach = sorted((step, extent) for extent, step in zip(place.extents, place.steps, strict=True) if extent > 1)
    count = 1
    for step, extent in reach:
        if step != count:
            return False
        count *= extent
    return count == size


def _strided(cells: np.ndarray, place: Place, per_block: bool) -> np.ndarray:
    """A view over all lanes of a `Place` whose base is the same for every lane."""
    rows, item = cells.shape[0], cells.itemsize
    lead = rows if per_block else 1
    steps = tuple(step * item for step in place.steps)
    return np.ndarray(
        (lead, 1, *place.extents),
        cells.dtype,
        buffer=cells,
        offset=place.base * item,
        strides=(cells.strides[0], 0, *steps),
    )


def _windows(cells: np.ndarray, place: Place, per_block: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """(windows, starts): the lanes of a `Place` as contiguous windows with a small index, if it has that form."""
    base = place.base
    lead = base.ndim
    while lead > 1 and base.shape[lead - 1] == 1:
        lead -= 1
    if any(extent > 1 for extent in place.extents[: max(0, lead - 2)]):
        return None
    rows, length = cells.shape
    starts = base.reshape(base.shape[:lead]).astype(np.intp, copy=False)
    if per_block and rows > 1:
        starts = starts + (np.arange(rows) * length).reshape((rows,) + (1,) * (lead - 1))
    tail = place.extents[max(0, lead - 2) :]
    steps = place.steps[max(0, lead - 2) :]
    span = sum((extent - 1) * step for extent, step in zip(tail, steps, strict=True))
    if any(step < 0 for step in steps):
        return None
    item = cells.itemsize
    count = rows * length - span
    if lead == 1:
        tail, steps = (1, *tail), (0, *steps)
    windows = np.ndarray((count, *tail), cells.dtype, buffer=cells, strides=(item, *(step * item for step in steps)))
    return windows, starts


def gather(cells: np.ndarray, place: Place, per_block: bool) -> np.ndarray:
    """Elements of (rows, elements) at a `Place`, over lanes."""
    if isinstance(place.base, int):
        return _strided(cells, place, per_block)
    found = _windows(cells, place, per_block)
    if found is not None:
        windows, starts = found
        return windows[starts]
    return cells.reshape(-1)[_flat_lines(cells, place, per_block)]


def scatter(cells: np.ndarray, place: Place, raw: np.ndarray, mask: Mask, per_block: bool) -> None:
    """Write elements of (rows, elements) at a `Place`, for the lanes in `mask`."""
    shape = (cells.shape[0] if per_block else 1, 1, *place.extents)
    if isinstance(place.base, int):
        view = _strided(cells, place, per_block)
        if mask is not None and _fits(raw, shape):
            np.copyto(view, raw, where=any_over(mask, shape))
            return
        if mask is None:
            view[...] = _last_of(raw, shape)
            return
    elif mask is None:
        found = _windows(cells, place, per_block)
        if found is not None:
            windows, starts = found
            shape = starts.shape + windows.shape[1:]
            if _fits(raw, shape):
                windows[starts] = raw
                return
    flat = _flat_lines(cells, place, per_block)
    line = cells.reshape(-1)
    if mask is None:
        flat, raw = np.broadcast_arrays(flat, raw)
        line[flat] = raw
        return
    flat, raw, mask = np.broadcast_arrays(flat, raw, mask)
    line[flat[mask]] = raw[mask]


def _flat_lines(cells: np.ndarray, place: Place, per_block: bool) -> np.ndarray:
    flat = place.flat()
    rows, length = cells.shape
    if per_block and rows > 1:
        flat = flat + (np.arange(rows) * length).reshape((rows,) + (1,) * (flat.ndim - 1))
    return flat


def _fits(raw: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether `raw` broadcasts to `shape` without enlarging it."""
    if raw.ndim > len(shape):
        return False
    return all(have in (1, want) for have, want in zip(reversed(raw.shape), reversed(shape), strict=False))


def any_over(mask: Any, shape: tuple[int, ...]) -> Any:
    """Reduce a mask to `shape`: an element is active if any of its lanes is active."""
    mask = expand(mask, len(shape))
    for axis, extent in enumerate(shape):
        if extent == 1 and mask.shape[axis] > 1:
            mask = mask.any(axis=axis, keepdims=True)
    return mask


def _last_of(raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The value of the last lane for each element that several lanes write."""
    if raw.ndim != len(shape):
        return raw
    for axis, extent in enumerate(shape):
        if extent == 1 and raw.shape[axis] > 1:
            raw = np.take(raw, [-1], axis=axis)
    return raw
