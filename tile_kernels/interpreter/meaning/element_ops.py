"""Single elements of memory: pointers to them, atomics, wide loads and stores."""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.checks.flags import note_order
from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.lanes import both
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.meaning.accumulate import contribute, full_lanes, note_atomic, scatter_in_turn
from tile_kernels.interpreter.memory.dtypes import caster, dtype_of


def pointed(compiler: Compiler, node: Any) -> Any:
    """The element access of a `T.access_ptr`, `T.address_of` or plain load."""
    kind = type(node).__name__
    if kind == 'Call' and str(node.op.name) in ('tl.access_ptr', 'tirx.address_of'):
        return node.args[0]
    if kind == 'BufferLoad':
        return node
    raise compiler.unsupported(f'pointer {node}')


ATOMICS = {'add': 'sum', 'max': 'max', 'min': 'min', 'or': 'bitor'}


@op(
    'tl.atomic_add_elem_op',
    'tl.atomic_max_elem_op',
    'tl.atomic_min_elem_op',
    'tl.atomic_or_elem_op',
    'tl.atomic_add_ret_elem_op',
    'tl.atomic_max_ret_elem_op',
    'tl.atomic_min_ret_elem_op',
)
def _atomic(compiler: Compiler, call: Any) -> Closure:
    """Atomic `x = op(x, v)`, once per active thread (per iteration inside T.Parallel); `_ret` returns the old x."""
    words = str(call.op.name).removeprefix('tl.atomic_').split('_')
    name, returns = ATOMICS[words[0]], words[1] == 'ret'
    load = pointed(compiler, call.args[0])
    access = compiler.access(load.buffer, list(load.indices))
    access.atomic = True
    value = compiler.expr(call.args[1])
    dtype = access.buffer.dtype
    convert = caster(dtype_of(compiler.dtype(call.args[1]).name), dtype_of(dtype.name))
    inside = compiler.depth > 0

    order = _order(call, 2)

    def run(frame: Frame) -> Any:
        threads = 1 if inside else frame.threads
        given = convert(value(frame))
        note_order(frame, access, order)
        if not returns:
            contribute(frame, access, given, name, frame.mask, threads)
            return None
        lanes = full_lanes(frame, given, dtype, access.ndim, access.extents(frame), threads)
        place = access.locate(frame, frame.mask)
        mask = both(frame.mask, place.ok)
        access.watch_read(frame, access.memory(frame), place, mask)
        note_atomic(frame, access, access.memory(frame), place, mask)
        if frame.shared.observer is not None:
            access.observe(frame, 'update', place, given, mask)
        return scatter_in_turn(access.memory(frame), place, lanes, name, mask, dtype)

    return run


@op('tl.atomic_load_elem_op')
def _atomic_load(compiler: Compiler, call: Any) -> Closure:
    """Read one element atomically."""
    load = pointed(compiler, call.args[0])
    access = compiler.access(load.buffer, list(load.indices))
    access.atomic = True
    order = _order(call, 1)

    def run(frame: Frame) -> Any:
        note_order(frame, access, order, stores=False)
        return access.load(frame, frame.mask)

    return run


def _order(call: Any, position: int) -> int:
    """The number of an atomic's memory order; relaxed if it has none."""
    given: Any = call.args[position] if len(call.args) > position else None
    return int(given) if type(given).__name__ == 'IntImm' else 0


@op('tl.atomic_store_elem_op')
def _atomic_store(compiler: Compiler, call: Any) -> Closure:
    """Write one element atomically."""
    load = pointed(compiler, call.args[0])
    access = compiler.access(load.buffer, list(load.indices))
    access.atomic = True
    value = compiler.expr(call.args[1])
    convert = caster(dtype_of(compiler.dtype(call.args[1]).name), dtype_of(access.buffer.dtype.name))
    order = _order(call, 2)

    def run(frame: Frame) -> None:
        note_order(frame, access, order, loads=False)
        access.store(frame, convert(value(frame)), frame.mask)

    return run


@op('tl.atomic_addx2_elem_op', 'tl.atomic_addx4_elem_op', 'tl.atomic_addx2_ret_elem_op', 'tl.atomic_addx4_ret_elem_op')
def _atomic_vector(compiler: Compiler, call: Any) -> Closure:
    """Two or four adjacent atomic additions."""
    name = str(call.op.name)
    count, returns = int(name.split('addx')[1][0]), '_ret_' in name
    target, source = pointed(compiler, call.args[0]), pointed(compiler, call.args[1])
    pairs = []
    for lane in range(count):
        into = compiler.access(target.buffer, shifted(target.indices, lane))
        into.atomic = True
        into.vector_bytes = 0 if lane else count * into.buffer.dtype.bits // 8
        pairs.append((into, compiler.access(source.buffer, shifted(source.indices, lane))))
    inside = compiler.depth > 0

    def run(frame: Frame) -> Any:
        threads = 1 if inside else frame.threads
        old = []
        for into, value in pairs:
            given = value.load(frame, frame.mask)
            if not returns:
                contribute(frame, into, given, 'sum', frame.mask, threads)
                continue
            dtype = into.buffer.dtype
            lanes = full_lanes(frame, given, dtype, into.ndim, into.extents(frame), threads)
            place = into.locate(frame, frame.mask)
            mask = both(frame.mask, place.ok)
            into.watch_read(frame, into.memory(frame), place, mask)
            note_atomic(frame, into, into.memory(frame), place, mask)
            old.append(scatter_in_turn(into.memory(frame), place, lanes, 'sum', mask, dtype))
        return tuple(old)

    return run


def shifted(indices: Any, lane: int) -> list[Any]:
    """The index list of the element `lane` positions after the given one."""
    parts = [index.base if type(index).__name__ == 'Ramp' else index for index in indices]
    return [*parts[:-1], parts[-1] + lane if lane else parts[-1]]


@op('tl.ldg32', 'tl.ldg64', 'tl.ldg128', 'tl.ldg256', 'tl.lds32', 'tl.lds64', 'tl.lds128')
def _load_words(compiler: Compiler, call: Any) -> Closure:
    """Load a vector of 32-bit words; 0 if the predicate is false."""
    parts = _words(compiler, call)
    predicate = compiler.expr(call.args[1]) if len(call.args) > 1 else (lambda frame: True)

    def run(frame: Frame) -> Any:
        wanted = predicate(frame)
        if not isinstance(wanted, np.ndarray):
            loaded = [part.load(frame, frame.mask).copy() if wanted else 0 for part in parts]
        else:
            mask = both(frame.mask, wanted)
            loaded = [np.where(wanted, part.load(frame, mask), np.uint32(0)) for part in parts]
        return tuple(loaded) if len(loaded) > 1 else loaded[0]

    return run


@op('tl.stg32', 'tl.stg64', 'tl.stg128', 'tl.stg256', 'tl.sts32', 'tl.sts64', 'tl.sts128')
def _store_words(compiler: Compiler, call: Any) -> Closure:
    """Store a vector of 32-bit words if the predicate is true."""
    parts = _words(compiler, call)
    value = compiler.expr(call.args[1])
    predicate = compiler.expr(call.args[2]) if len(call.args) > 2 else (lambda frame: True)

    def run(frame: Frame) -> None:
        wanted = predicate(frame)
        if not isinstance(wanted, np.ndarray) and not wanted:
            return
        mask = both(frame.mask, wanted) if isinstance(wanted, np.ndarray) else frame.mask
        given = value(frame)
        for part, word in zip(parts, given if isinstance(given, tuple) else (given,), strict=True):
            part.store(frame, word, mask)

    return run


def _words(compiler: Compiler, call: Any) -> list[Any]:
    """Accesses to the 32-bit words behind a pointer argument; they are never guarded."""
    count = int(''.join(filter(str.isdigit, str(call.op.name)))) // 32
    pointer = call.args[0]
    if type(pointer).__name__ != 'Call' or str(pointer.op.name) != 'tirx.tvm_access_ptr':
        raise compiler.unsupported(f'pointer {pointer} of {call.op.name}')
    bits = dtype_of(str(pointer.args[0].dtype)).bits
    start = compiler.expr(pointer.args[2])
    first = compiler.words(pointer.args[1], dtype_of('uint32'), lambda frame: start(frame) * bits // 32)
    parts = [first.moved(word) for word in range(count)]
    first.vector_bytes = count * 4
    return parts


@op('tl.any_of', 'tl.all_of')
def _any_all(compiler: Compiler, call: Any) -> Closure:
    """Whether any (all) of several adjacent elements are non-zero."""
    load = pointed(compiler, call.args[0])
    access = compiler.access(load.buffer, list(load.indices))
    count = int(call.args[1])
    everything = str(call.op.name) == 'tl.all_of'
    if len(load.buffer.shape) > 1 and count > int(load.buffer.shape[-1]):
        raise compiler.unsupported(f'{call.op.name} over several dimensions')
    parts = [access.moved(element) for element in range(count)]

    def run(frame: Frame) -> Any:
        result: Any = everything
        for part in parts:
            holds = part.load(frame, frame.mask) != 0
            result = result & holds if everything else result | holds
        return result

    return run


@op('tl.__ldg')
def _load_cached(compiler: Compiler, call: Any) -> Closure:
    """A load through the read-only cache."""
    return compiler.expr(call.args[0])
