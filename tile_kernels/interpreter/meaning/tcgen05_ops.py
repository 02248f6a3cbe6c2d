"""Blackwell's matrix products: accumulators are in tensor memory, and mbarriers signal their completion.

Accumulators in tensor memory are modelled without lanes and columns. Scale factors have both: a copy from shared memory
repeats 32 rows of four words in four groups of lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.checks.asynchronous import AsyncGroups
from tile_kernels.interpreter.engine.frame import Frame, active_threads, agreed, first_thread
from tile_kernels.interpreter.engine.lanes import Mask, expand
from tile_kernels.interpreter.engine.translate import Closure, Compiler, is_const, op
from tile_kernels.interpreter.errors import BarrierDivergence
from tile_kernels.interpreter.meaning.cluster_ops import Pair
from tile_kernels.interpreter.meaning.mbarriers import BarrierOperand
from tile_kernels.interpreter.meaning.scaled_gemm import SCALE_HINTS, scales_in_shared, scales_in_tensor_memory
from tile_kernels.interpreter.meaning.tile_ops import collective, matrix_product
from tile_kernels.interpreter.memory.access import Access, Buffer, Dim

_KIND = 'tcgen05'
_WORDS, _ROWS, _COLUMNS = 128, 32, 4  # scale factors that one instruction copies
_LANES = 128


@op('tl.tileop.tcgen05_gemm')
def _gemm(compiler: Compiler, call: Any) -> Closure:
    """`C += A @ B` in tensor memory, followed by one arrival at the mbarrier, if there is one.

    With two blocks, each has its own rows of A and C and one half of the columns of B.
    """
    return _issued(compiler, call, matrix_product(compiler, call, pair := _pair_of(compiler, call)), pair)


@op('tl.tileop.tcgen05_gemm_blockscaled', 'tl.tileop.gemm_blockscaled')
def _gemm_scaled(compiler: Compiler, call: Any) -> Closure:
    """The same, with a scale factor for each group of K elements of a row of A and a column of B."""
    pair = _pair_of(compiler, call)
    in_tensor_memory = str(call.args[13].args[0].buffer.scope()) == 'shared.tmem'
    scaling = (scales_in_tensor_memory if in_tensor_memory else scales_in_shared)(compiler, call, pair)
    product = matrix_product(compiler, call, pair, scaling, SCALE_HINTS)
    return _issued(compiler, call, product, pair)


def _notes(call: Any) -> dict[str, Any]:
    return {str(key): value for key, value in dict(call.annotations or {}).items()}


def _pair_of(compiler: Compiler, call: Any) -> Pair | None:
    return Pair(compiler) if int(_notes(call).get('use_2cta', 0)) else None


def _issued(compiler: Compiler, call: Any, product: Closure, pair: Pair | None) -> Closure:
    barrier = call.args[10] if len(call.args) > 10 else None
    operand = None
    if type(barrier).__name__ in ('BufferLoad', 'BufferRegion') or type(barrier).__name__ == 'Call':
        operand = BarrierOperand(compiler, barrier)
    if operand is None:
        return product

    def run(frame: Frame) -> None:
        product(frame)
        _complete(frame, operand, pair)

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
    """One arrival at an mbarrier after all earlier products; with two blocks, at the mbarriers of both."""
    pair = _pair_of(compiler, call)
    operand = BarrierOperand(compiler, _barrier_of(compiler, call.args[0]))
    return lambda frame: _complete(frame, operand, pair)


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


def _complete(frame: Frame, operand: BarrierOperand, pair: Pair | None) -> None:
    """Products in flight complete with the next phase of a barrier, at which they arrive."""
    _tie(frame, operand, pair)
    if pair is None:
        _arrive_once(frame, operand)
    else:
        pair.signal(frame, operand)


def _tie(frame: Frame, operand: BarrierOperand, pair: Pair | None) -> None:
    if frame.async_groups is None:
        return
    index: Any = np.asarray(agreed(frame, operand.index(frame)))
    index = np.broadcast_to(index[:, 0] if index.ndim else index, (frame.blocks,))
    index = np.where(active_threads(frame).any(axis=1), index, -1)  # other blocks are elsewhere
    if pair is not None:
        index = pair.of_first(frame, index)
    for flight in frame.async_groups.flights:
        if flight.kind == _KIND:
            flight.barriers.append((operand.slot, index))


def _arrive_once(frame: Frame, operand: BarrierOperand) -> None:
    """One arrival for each participating block, whichever of its threads issues the product."""
    taking_part: Any = active_threads(frame).any(axis=1)
    index = agreed(frame, operand.number(frame))
    if frame.clock is not None:
        frame.clock.release(operand.slot, index, frame.mask)
    frame.memory[operand.slot].arrive(frame, index, taking_part.astype(np.int64)[:, None])


# ---- scale factors ---------------------------------------------------------------------------------------------


@op('tl.ptx_tcgen05_sf_warp_transpose')
def _transpose_words(compiler: Compiler, call: Any) -> Closure:
    """A warp transposes 128 words in shared memory from 4 x 32 to 32 x 4."""
    source = _chunk(compiler, call.args[0], (_COLUMNS, _ROWS), None)
    target = _chunk(compiler, call.args[0], (_ROWS, _COLUMNS), None)
    source.atomic = True  # it reads what it is about to overwrite
    compiler.generic.add(source.path)
    site, checked = compiler.site, compiler.options.checks != 'none'

    def run(frame: Frame) -> None:
        count = active_threads(frame).sum(axis=1)
        if checked and ((count != 0) & (count != _ROWS)).any():
            text = f'T.tcgen05_sf_warp_transpose runs on {int(count.max())} threads of a block and needs one warp'
            frame.report(BarrierDivergence, text, site)
        mask = collective(frame, frame.mask, 2)
        words = source.load(frame, mask)
        target.store(frame, np.ascontiguousarray(words.swapaxes(-1, -2)), mask)

    return run


@op('tl.ptx_tcgen05_cp_warpx4')
def _copy_words(compiler: Compiler, call: Any) -> Closure:
    """Copy 32 rows of four words from shared memory to four columns of tensor memory, once per group of 32 lanes."""
    pair = _pair_of(compiler, call)
    source = _chunk(compiler, call.args[0], (1, _ROWS, _COLUMNS), pair)
    storage = compiler.storages.get(call.args[1])
    if storage is None or len(storage.shape) != 2 or storage.shape[0] != _LANES or storage.dtype.bits != 32:
        raise compiler.unsupported(f'T.tcgen05_cp_warpx4 to {call.args[1]}')
    column, depth = compiler.expr(call.args[2]), compiler.depth
    fixed = (storage.shape, (storage.shape[1], 1))
    view = Buffer(storage.name, storage.slot, storage.dtype, storage.scope, lambda frame: fixed, None, None, fixed)
    dims = [
        Dim(lambda frame: 0, ((depth, _ROWS), (depth + 1, 1)), 'none'),
        Dim(lambda frame: _start(frame, column, pair), ((depth + 2, 1),), 'none'),
    ]
    target = Access(view, dims, compiler.ndim + 3, compiler.site, compiler.options.checks != 'none')
    target.extra = tuple(_always(extent) for extent in (_LANES // _ROWS, _ROWS, _COLUMNS))

    def run(frame: Frame) -> None:
        mask = collective(frame, frame.mask, 3)
        if pair is not None and mask is not None:
            mask = pair.of_first(frame, mask)
        words = source.load(frame, mask)
        target.store(frame, np.broadcast_to(words, (*words.shape[:2], 4, *words.shape[3:])), mask)

    return run


def _chunk(compiler: Compiler, pointer: Any, shape: tuple[int, ...], pair: Pair | None) -> Access:
    """The 128 words of shared memory at a pointer, as an array of the given shape."""
    if pointer in compiler.pointers:
        storage, offset = compiler.storages.get(compiler.pointers[pointer]), compiler.variable(pointer)
    elif type(pointer).__name__ == 'Call' and str(pointer.op.name) == 'tirx.tvm_access_ptr':
        storage, offset = compiler.storages.get(pointer.args[1]), compiler.expr(pointer.args[2])
    else:
        raise compiler.unsupported(f'scale factors at {pointer}')
    if storage is None or storage.scope != 'shared' or storage.dtype.bits != 32 or not is_const(storage.size):
        raise compiler.unsupported(f'scale factors at {pointer}')
    fixed = ((int(storage.size),), (1,))  # type: ignore[arg-type]
    view = Buffer(storage.name, storage.slot, storage.dtype, 'shared', lambda frame: fixed, None, None, fixed)
    steps = np.cumprod([1, *reversed(shape[1:])])[::-1]
    terms = tuple((compiler.depth + axis, int(step)) for axis, step in enumerate(steps))
    dims = [Dim(lambda frame: _start(frame, offset, pair), terms, 'none')]
    made = Access(view, dims, compiler.ndim + len(shape), compiler.site, compiler.options.checks != 'none')
    made.extra = tuple(_always(extent) for extent in shape)
    made.atomic = pair is not None
    made.path = compiler.path_number()
    return made


def _always(number: int) -> Closure:
    return lambda frame: number


def _start(frame: Frame, offset: Closure, pair: Pair | None) -> Any:
    """A coordinate on which the threads agree."""
    found = agreed(frame, offset(frame))
    return expand(found if pair is None else pair.of_first(frame, found), 2)
