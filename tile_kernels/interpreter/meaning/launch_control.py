"""Cluster launch control: a running cluster takes over the work of one that has not started."""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, active_threads, agreed, cluster_distance
from tile_kernels.interpreter.engine.translate import Closure, Compiler, is_const, op
from tile_kernels.interpreter.meaning.element_ops import shifted
from tile_kernels.interpreter.meaning.mbarriers import BarrierOperand
from tile_kernels.interpreter.meaning.tcgen05_ops import _barrier_of
from tile_kernels.interpreter.memory.access import Access, Buffer, Dim

_WORDS = 4  # of a response: x, y and z of the first block, and whether there is one
_BYTES = 16


@op('tl.clc_try_cancel', 'tl.clc_try_cancel_multicast')
def _try_cancel(compiler: Compiler, call: Any) -> Closure:
    """Ask for a cluster that has not started; the response arrives in shared memory, and its bytes at an mbarrier.

    With multicast, every block of the cluster receives it.
    """
    words = _response(compiler, call.args[0])
    operand = BarrierOperand(compiler, _barrier_of(compiler, call.args[1]))
    operand.storage.counts_bytes = True
    compiler.takes_over = compiler.whole_cluster = True
    dims = compiler.cluster_dims
    size = int(np.prod(dims))
    if any(extent > 1 for extent in dims[1:]):
        raise compiler.unsupported(f'T.clc_try_cancel in clusters of {dims}')
    multicast = str(call.op.name).endswith('multicast')

    def run(frame: Frame) -> None:
        asking = np.flatnonzero(active_threads(frame).any(axis=1))
        number = np.asarray(agreed(frame, operand.number(frame)))
        numbers = np.broadcast_to(number[:, 0] if number.ndim else number, (frame.blocks,))
        answers = np.zeros((_WORDS, frame.blocks), np.uint32)
        receives = np.zeros(frame.blocks, bool)
        slots = np.zeros(frame.blocks, np.int64)
        first = np.arange(frame.blocks) + cluster_distance(frame, dims, 0)[:, 0]
        for row in asking:
            answer = _next_cluster(frame, size)
            rows = first[row] + np.arange(size) if multicast else np.array([row])
            answers[:, rows], receives[rows], slots[rows] = np.array(answer)[:, None], True, numbers[row]
        for word, access in enumerate(words):
            access.store(frame, answers[word][:, None], receives[:, None])
        barriers = frame.memory[operand.slot]
        np.add.at(barriers.sent, (np.flatnonzero(receives), slots[receives]), _BYTES)
        if frame.clock is not None:
            frame.clock.release(operand.slot, operand.index(frame), frame.mask)
        barriers.advance(frame)

    return run


@op('tl.clc_is_canceled', 'tl.clc_get_first_ctaid_x', 'tl.clc_get_first_ctaid_y', 'tl.clc_get_first_ctaid_z')
def _query(compiler: Compiler, call: Any) -> Closure:
    """A part of a response."""
    name = str(call.op.name)
    access = _response(compiler, call.args[0])[3 if name.endswith('canceled') else 'xyz'.index(name[-1])]
    kind = np.int32 if name.endswith('canceled') else np.uint32
    return lambda frame: access.load(frame, frame.mask).astype(kind)


def _next_cluster(frame: Frame, size: int) -> tuple[int, ...]:
    """Coordinates of the next cluster that has not started, which now never does; zeros if all have."""
    waiting = frame.shared.waiting
    if waiting >= int(np.prod(frame.grid)):
        return 0, 0, 0, 0
    frame.shared.waiting = waiting + size
    place = []
    for extent in [*frame.grid, 1, 1][:3]:
        place.append(waiting % extent)
        waiting //= extent
    return (*place, 1)


def _response(compiler: Compiler, pointer: Any) -> list[Access]:
    """The four words at a pointer to shared memory."""
    name = str(pointer.op.name) if type(pointer).__name__ == 'Call' else ''
    if name in ('tl.access_ptr', 'tirx.address_of'):
        load = pointer.args[0]
        made = [compiler.access(load.buffer, shifted(load.indices, word)) for word in range(_WORDS)]
    elif name == 'tirx.tvm_access_ptr' and pointer.args[1] in compiler.storages:
        storage, offset = compiler.storages[pointer.args[1]], compiler.expr(pointer.args[2])
        fixed = ((storage.size if is_const(storage.size) else 0,), (1,))
        view = Buffer(storage.name, storage.slot, storage.dtype, storage.scope, lambda frame: fixed, None, None, fixed)  # type: ignore[arg-type, return-value]
        checked = compiler.options.checks != 'none'
        made = []
        for word in range(_WORDS):
            made.append(Access(view, [Dim(_moved(offset, word), (), 'none')], compiler.ndim, compiler.site, checked))
    else:
        raise compiler.unsupported(f'the response of T.clc_try_cancel at {pointer}')
    if made[0].buffer.scope != 'shared' or made[0].buffer.dtype.bits != 32:
        raise compiler.unsupported(f'the response of T.clc_try_cancel in {made[0].buffer.name}')
    for access in made:
        access.atomic = True  # the response comes from outside the block; its mbarrier orders it
    return made


def _moved(offset: Closure, distance: int) -> Closure:
    return lambda frame: offset(frame) + distance
