"""Blackwell's matrix products: accumulators are in tensor memory, and mbarriers signal their completion.

Tensor memory is modelled as per-block memory without lanes and columns. Products of two blocks are rejected.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.checks.asynchronous import AsyncGroups
from tile_kernels.interpreter.engine.frame import Frame, agreed, first_thread
from tile_kernels.interpreter.engine.lanes import Mask
from tile_kernels.interpreter.engine.translate import OPS, Closure, Compiler, op
from tile_kernels.interpreter.meaning.mbarriers import BarrierOperand

_KIND = 'tcgen05'


@op('tl.tileop.tcgen05_gemm')
def _gemm(compiler: Compiler, call: Any) -> Closure:
    """`C += A @ B` in tensor memory, followed by one arrival at the mbarrier, if there is one."""
    notes = {str(key): value for key, value in dict(call.annotations or {}).items()}
    if int(notes.get('use_2cta', 0)):
        raise compiler.unsupported('T.tcgen05_gemm of two blocks together')
    barrier = call.args[10] if len(call.args) > 10 else None
    operand = BarrierOperand(compiler, barrier) if type(barrier).__name__ in ('BufferLoad', 'BufferRegion') else None
    product = OPS['tl.tileop.gemm'](compiler, call)
    if operand is None:
        return product

    def run(frame: Frame) -> None:
        product(frame)
        _tie(frame, operand)
        _arrive_once(frame, operand)

    return run


def tcgen05_hook(access: Any) -> Any:
    """The action after a product: its result is in flight until a wait at its mbarrier."""

    def note(frame: Frame, mask: Mask) -> None:
        if frame.async_groups is None:
            frame.async_groups = AsyncGroups(frame)
        none = np.zeros(frame.blocks, np.int64)
        frame.async_groups._add(frame, access, mask, _KIND, first_thread(frame), none, None)

    return note


@op('tl.tcgen05_mma_arrive')
def _mma_arrive(compiler: Compiler, call: Any) -> Closure:
    """One arrival at an mbarrier after all earlier products."""
    if len(call.args) > 1 and type(call.args[1]).__name__ == 'IntImm' and int(call.args[1]):
        raise compiler.unsupported('T.tcgen05_mma_arrive of two blocks together')
    operand = BarrierOperand(compiler, _barrier_of(compiler, call.args[0]))

    def run(frame: Frame) -> None:
        _tie(frame, operand)
        _arrive_once(frame, operand)

    return run


def _barrier_of(compiler: Compiler, node: Any) -> Any:
    """An mbarrier given as a raw pointer, resolved to its element."""
    if type(node).__name__ != 'Call' or str(node.op.name) != 'tirx.tvm_access_ptr':
        return node
    from tvm.tirx import BufferLoad, decl_buffer

    data, offset = node.args[1], node.args[2]
    storage = compiler.storages.get(data)
    if storage is None or storage.scope != 'barrier':
        raise compiler.unsupported(f'mbarrier operand {node}')
    whole = decl_buffer((storage.size,), 'uint64', storage.name, data=data, scope='shared.barrier')
    return BufferLoad(whole, [offset])


def _tie(frame: Frame, operand: BarrierOperand) -> None:
    """Products in flight complete with the next phase of a barrier."""
    if frame.async_groups is None:
        return
    index: Any = np.asarray(agreed(frame, operand.index(frame)))
    index = np.broadcast_to(index[:, 0] if index.ndim else index, (frame.blocks,)).copy()
    for flight in frame.async_groups.flights:
        if flight.kind == _KIND and flight.barrier is None:
            flight.barrier = (operand.slot, index)


def _arrive_once(frame: Frame, operand: BarrierOperand) -> None:
    """One arrival for each participating block, whichever of its threads issues the product."""
    shape = (frame.blocks, frame.threads)
    lanes = np.ones(shape, bool) if frame.mask is None else np.broadcast_to(frame.mask, shape)
    taking_part: Any = lanes.any(axis=1)
    index = agreed(frame, operand.number(frame))
    if frame.clock is not None:
        frame.clock.release(operand.slot, index, frame.mask)
    frame.memory[operand.slot].arrive(frame, index, taking_part.astype(np.int64)[:, None])
