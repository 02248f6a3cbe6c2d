"""Several contributions to one element: atomics, reducers, and sums written with T.Parallel."""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.checks.races import SharedMarks
from tile_kernels.interpreter.engine.frame import Frame, active_threads
from tile_kernels.interpreter.engine.lanes import Mask, both, expand, select
from tile_kernels.interpreter.engine.translate import Closure, Compiler, same_indices
from tile_kernels.interpreter.meaning.expressions import maximum, minimum
from tile_kernels.interpreter.memory.access import Access, is_local
from tile_kernels.interpreter.memory.buffers import Place, ReplicatedMemory
from tile_kernels.interpreter.memory.dtypes import DType, dtype_of, rounder

COMBINE: dict[str, Any] = {
    'sum': np.add,
    'max': np.fmax,
    'min': np.fmin,
    'mul': np.multiply,
    'bitand': np.bitwise_and,
    'bitor': np.bitwise_or,
    'bitxor': np.bitwise_xor,
}


def identity(name: str, dtype: DType) -> Any:
    """The identity element of a combination."""
    if name in ('max', 'min'):
        if dtype.is_float:
            return dtype.value.type(-np.inf if name == 'max' else np.inf)
        if dtype.kind == 'bool':
            return name == 'min'
        info = np.iinfo(dtype.storage)
        return int(info.min if name == 'max' else info.max)
    if name == 'bitand':
        return True if dtype.kind == 'bool' else -1 if dtype.kind == 'int' else (1 << dtype.bits) - 1
    if dtype.is_float:
        return dtype.value.type(1 if name == 'mul' else 0)
    return 1 if name == 'mul' else 0


def reduce_axes(name: str, value: np.ndarray, axes: tuple[int, ...], dtype: DType, keepdims: bool = True) -> np.ndarray:
    """Combine all lanes along some axes."""
    ufunc: Any = COMBINE[name]
    if name == 'sum' and dtype.kind in ('int', 'uint'):
        return ufunc.reduce(value, axis=axes, keepdims=keepdims, dtype=value.dtype)
    if dtype.kind == 'bool' and name in ('max', 'min', 'sum'):
        ufunc = np.logical_and if name == 'min' else np.logical_or
    return ufunc.reduce(value, axis=axes, keepdims=keepdims)


def pair(name: str, left: Any, right: Any, dtype: DType) -> Any:
    """Combine two values."""
    if dtype.is_float and name in ('max', 'min'):
        return (maximum if name == 'max' else minimum)(left, right)
    result = COMBINE[name](left, right)
    rounding = rounder(dtype) if dtype.is_float else None
    return result if rounding is None else rounding(result)


def full_lanes(frame: Frame, value: Any, dtype: DType, ndim: int, extents: list[int], threads: int) -> np.ndarray:
    """A value broadcast over every block, `threads` threads and every parallel iteration."""
    array: Any = np.asarray(value, dtype=dtype.value)
    array = expand(array, ndim) if array.ndim else array.reshape((1,) * ndim)
    return np.broadcast_to(array, (frame.blocks, max(threads, array.shape[1]), *extents))


def contribute(
    frame: Frame, access: Access, value: Any, name: str, mask: Mask, threads: int, ordered: bool = True
) -> None:
    """Combine the contribution of every active lane into the element it addresses.

    With `ordered`, several contributions to one element are allowed (atomics, reducers); otherwise they race.
    """
    dtype = access.buffer.dtype
    memory = access.memory(frame)
    extents = access.extents(frame)
    place = access.locate(frame, mask)
    mask = both(mask, place.ok)
    if (
        threads == 1
        and mask is not None
        and np.shape(mask)[1] > 1
        and not _by_thread(value)
        and not _by_thread(place.base)
    ):
        mask = mask.any(axis=1, keepdims=True)  # threads of a branch share the iterations of T.Parallel
    if access.vector_bytes:
        access.check_aligned(frame, memory, place, mask)
    if isinstance(memory, ReplicatedMemory) and not memory.unite():
        raise access.depends(frame, (0, -1), 'accumulated by threads together')
    _watch(frame, access, memory, place, mask, ordered)
    if frame.shared.observer is not None:
        access.observe(frame, 'update', place, value, mask)
    lanes = full_lanes(frame, value, dtype, access.ndim, extents, threads)
    if mask is not None:
        lanes = select(mask, lanes, identity(name, dtype), dtype.value)
    if is_local(memory):
        _contribute_privately(frame, access, place, lanes, name)
        return
    shape = np.broadcast_shapes(np.shape(place.base) or (1,) * access.ndim, (1, 1, *place.extents))
    first = 1 if memory.per_block else 0
    idle = tuple(axis for axis in range(first, access.ndim) if shape[axis] == 1 and lanes.shape[axis] > 1)
    if idle:
        lanes = reduce_axes(name, lanes, idle, dtype)
        lanes = _rounded(lanes, dtype)
        mask = None if mask is None else expand(mask, access.ndim).any(axis=idle, keepdims=True)
    if isinstance(place.base, int):
        old = memory.read(place, dtype)
        memory.write(place, pair(name, old, lanes, dtype), dtype, mask)
        return
    scatter_in_turn(memory, place, lanes, name, mask, dtype)


def _by_thread(value: Any) -> bool:
    """Whether a value differs between threads."""
    return np.ndim(value) > 1 and np.shape(value)[1] > 1


def _watch(frame: Frame, access: Access, memory: Any, place: Place, mask: Mask, ordered: bool) -> None:
    """Check the read of an update against the state of the memory."""
    race, memory.race = memory.race, None if ordered else memory.race
    try:
        access.watch_read(frame, memory, place, mask)
    finally:
        memory.race = race
    note_atomic(frame, access, memory, place, mask)


def note_atomic(frame: Frame, access: Access, memory: Any, place: Place, mask: Mask) -> None:
    """Check an atomic update against plain accesses of other threads."""
    if access.atomic and isinstance(memory.race, SharedMarks):
        memory.race.update(frame, access, place, mask)


def scatter_in_turn(memory: Any, place: Place, lanes: np.ndarray, name: str, mask: Mask, dtype: DType) -> np.ndarray:
    """Apply lanes of one element one after another; returns the old value that each lane saw."""
    flat = place.flat()
    if memory.per_block:
        rows = memory.data.shape[0]
        row = np.arange(rows).reshape((rows,) + (1,) * (flat.ndim - 1))
        span = int(flat.max()) + 1 if flat.size else 1
        key = flat + row * span
    else:
        key = flat
    shape = np.broadcast_shapes(key.shape, lanes.shape, np.shape(mask) if mask is not None else ())
    key, where, lanes = (np.broadcast_to(part, shape) for part in (key, flat, lanes))
    active = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
    picks = np.flatnonzero(active)
    keys = key.reshape(-1)[picks]
    order = np.argsort(keys, kind='stable')
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if ordered.size else np.zeros(0, np.intp)
    rank = np.empty(len(picks), np.intp)
    rank[order] = np.arange(len(picks)) - np.repeat(starts, np.diff(np.r_[starts, len(picks)]))
    found = np.zeros(shape, dtype.value).reshape(-1)
    blocks = np.broadcast_to(np.arange(shape[0]).reshape((-1,) + (1,) * (len(shape) - 1)), shape).reshape(-1)
    for turn in range(int(rank.max()) + 1 if rank.size else 0):
        lane = picks[rank == turn]
        spot = _Cells(memory, dtype, where.reshape(-1)[lane], blocks[lane])
        old = spot.read()
        found[lane] = old
        spot.write(lanes.reshape(-1)[lane] if name == 'store' else pair(name, old, lanes.reshape(-1)[lane], dtype))
    return found.reshape(shape)


class _Cells:
    """A list of elements of a memory, addressed one by one."""

    def __init__(self, memory: Any, dtype: DType, flat: np.ndarray, blocks: np.ndarray) -> None:
        self.memory, self.dtype = memory, dtype
        row = blocks if memory.per_block else 0
        self.flat = flat + row * memory.typed(dtype.storage).shape[1]

    def read(self) -> np.ndarray:
        from tile_kernels.interpreter.memory.dtypes import decoder

        return decoder(self.dtype)(self.memory.typed(self.dtype.storage).reshape(-1)[self.flat])

    def write(self, value: Any) -> None:
        from tile_kernels.interpreter.memory.dtypes import encoder

        self.memory.typed(self.dtype.storage).reshape(-1)[self.flat] = encoder(self.dtype)(value)
        if self.memory.written is not None:
            marks = np.dtype(f'uint{self.dtype.storage.itemsize * 8}')
            self.memory.typed(marks, shadow=True).reshape(-1)[self.flat] = np.iinfo(marks).max


def _contribute_privately(frame: Frame, access: Access, place: Place, lanes: np.ndarray, name: str) -> None:
    """A register accumulated in T.Parallel: iterations are distributed over the threads in order."""
    dtype = access.buffer.dtype
    if not isinstance(place.base, int) or any(extent > 1 for extent in place.extents) or lanes.shape[1] > 1:
        raise access_error(frame, access)
    count = int(np.prod(lanes.shape[2:]))
    rounds = -(-count // frame.threads)
    dealt = np.full((lanes.shape[0], rounds * frame.threads), identity(name, dtype), dtype.value)
    dealt[:, :count] = lanes.reshape(lanes.shape[0], count)
    mine = reduce_axes(name, dealt.reshape(lanes.shape[0], rounds, frame.threads), (1,), dtype, keepdims=False)
    outer = Place(place.base, (), ())
    memory = access.memory(frame)
    old = memory.read(outer, dtype)
    memory.write(outer, _rounded(pair(name, old, mine, dtype), dtype), dtype, None)


def access_error(frame: Frame, access: Access) -> Exception:
    """The finding for an accumulation whose owner threads are unknown."""
    from tile_kernels.interpreter.errors import UnsupportedConstruct

    return frame.error(
        UnsupportedConstruct,
        f'accumulating into {access.buffer.name} inside T.Parallel is not supported in this form',
        access.site,
    )


def _rounded(value: Any, dtype: DType) -> Any:
    rounding = rounder(dtype) if dtype.is_float else None
    return value if rounding is None else rounding(value)


def accumulation(compiler: Compiler, node: Any) -> Closure | None:
    """`x[i] = x[i] + e` inside T.Parallel if several iterations update one element; None for other stores."""
    if not compiler.depth:
        return None
    view = compiler.buffer(node.buffer)
    name, others = _operands(node)
    access = compiler.access(node.buffer, list(node.indices))
    if view.scope == 'local':
        if name is None or view.slot in compiler.locals_written:
            compiler.write_local(view)
            return None
    elif name is None or _injective(compiler, access):
        return None
    parts = [compiler.expr(other) for other in others]
    dtype = dtype_of(view.dtype.name)

    def run(frame: Frame) -> None:
        value = parts[0](frame)
        if frame.clock is not None:
            frame.clock.settle(active_threads(frame))
        for part in parts[1:]:
            value = pair(name, value, part(frame), dtype)
        contribute(frame, access, value, name, frame.mask, 1, ordered=view.scope != 'global')

    return run


def _injective(compiler: Compiler, access: Access) -> bool:
    """Whether the accessed element depends on every parallel axis."""
    seen = {axis for dim in access.dims for axis, _ in dim.terms}
    return len(seen) == compiler.depth


def _operands(node: Any) -> tuple[str | None, list[Any]]:
    """The operator and the other operands of `x[i] = op(x[i], ...)`."""
    names = {'Add': 'sum', 'Max': 'max', 'Min': 'min', 'Mul': 'mul'}
    kind = type(node.value).__name__
    if kind not in names:
        return None, []
    leaves: list[Any] = []
    pending = [node.value]
    while pending:
        part = pending.pop()
        if type(part).__name__ == kind:
            pending += [part.b, part.a]
        else:
            leaves.append(part)
    own = [leaf for leaf in leaves if _same_element(leaf, node)]
    if len(own) != 1:
        return None, []
    return names[kind], [leaf for leaf in leaves if leaf is not own[0]]


def _same_element(leaf: Any, node: Any) -> bool:
    if type(leaf).__name__ != 'BufferLoad' or not leaf.buffer.same_as(node.buffer):
        return False
    return same_indices(list(leaf.indices), list(node.indices))
