"""Threads and warps: thread numbers, shuffles, votes, matches, warp reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, active_threads
from tile_kernels.interpreter.engine.lanes import axis_values, expand, lane_of, splits_warps
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.errors import BarrierDivergence
from tile_kernels.interpreter.meaning.accumulate import pair
from tile_kernels.interpreter.meaning.barriers import block_barrier
from tile_kernels.interpreter.memory.dtypes import dtype_of

WARP = 32


@op('tl.launch_thread_idx')
def _thread_index(compiler: Compiler, call: Any) -> Closure:
    """threadIdx.x, .y or .z."""
    axis = int(call.args[0])
    dims = compiler.thread_dims
    if dims[axis] == 1:
        return lambda frame: 0
    below = int(np.prod(dims[:axis], dtype=np.int64)) if axis else 1
    values = ((np.arange(int(np.prod(dims))) // below) % dims[axis]).astype(np.int32).reshape(1, -1)
    ndim = compiler.ndim
    return lambda frame: expand(values, ndim)


def thread_number(frame: Frame, ndim: int) -> np.ndarray:
    """Linear number of each thread of a block."""
    return axis_values(frame.threads, 1, ndim)


@op('tl.get_lane_idx')
def _lane_index(compiler: Compiler, call: Any) -> Closure:
    """Number of a thread within its warp."""
    return _thread_arithmetic(compiler, call, lambda thread, size: thread % size)


@op('tl.get_warp_idx', 'tl.get_warp_idx_sync')
def _warp_index(compiler: Compiler, call: Any) -> Closure:
    """Number of the warp of a thread."""
    return _thread_arithmetic(compiler, call, lambda thread, size: thread // size)


def _thread_arithmetic(compiler: Compiler, call: Any, function: Callable[[Any, int], Any]) -> Closure:
    size = int(call.args[0]) if len(call.args) else WARP
    ndim = compiler.ndim
    return lambda frame: function(thread_number(frame, ndim), size)


@op('tl.get_warp_group_idx')
def _warp_group_index(compiler: Compiler, call: Any) -> Closure:
    """Number of the warp group (four warps) of a thread."""
    sizes = [int(part) for part in call.args]
    span = (sizes[0] if sizes else WARP) * (sizes[1] if len(sizes) > 1 else 4)
    ndim = compiler.ndim
    return lambda frame: thread_number(frame, ndim) // span


@op('tl.tl_shuffle_elect')
def _elect(compiler: Compiler, call: Any) -> Closure:
    """True for one thread of each group of the given size (0: of the block)."""
    size = int(call.args[0])
    ndim = compiler.ndim

    def run(frame: Frame) -> np.ndarray:
        return thread_number(frame, ndim) % (size or frame.threads) == 0

    return run


def by_warp(frame: Frame, value: Any, dtype: Any, ndim: int) -> np.ndarray:
    """A value as (blocks, warps, 32, ...), repeating the last thread to fill the last warp."""
    if frame.clock is not None:
        frame.clock.settle(active_threads(frame))
    array: Any = np.asarray(value, dtype=dtype)
    array = expand(array, ndim) if array.ndim else array.reshape((1,) * ndim)
    array = np.broadcast_to(array, (array.shape[0], frame.threads, *array.shape[2:]))
    spare = -frame.threads % WARP
    if spare:
        array = np.concatenate([array, np.repeat(array[:, -1:], spare, axis=1)], axis=1)
    return array.reshape(array.shape[0], -1, WARP, *array.shape[2:])


def by_thread(frame: Frame, value: np.ndarray) -> np.ndarray:
    """Convert (blocks, warps, 32, ...) back to (blocks, threads, ...)."""
    flat = value.reshape(value.shape[0], -1, *value.shape[3:])
    return flat[:, : frame.threads]


def _varies(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.shape[1] > 1


@op(
    'tl.shfl_sync',
    'tl.shfl_xor_sync',
    'tl.shfl_up_sync',
    'tl.shfl_down_sync',
    'tirx.tvm_warp_shuffle',
    'tirx.tvm_warp_shuffle_up',
    'tirx.tvm_warp_shuffle_down',
    'tirx.tvm_warp_shuffle_xor',
)
def _shuffle(compiler: Compiler, call: Any) -> Closure:
    """The value of another lane of the warp; a lane whose source is outside its segment keeps its own value."""
    words = str(call.op.name).removeprefix('tirx.tvm_warp_shuffle').removeprefix('tl.shfl')
    kind = words.removesuffix('sync').strip('_')
    named, value, amount, width = (compiler.expr(part) for part in call.args[:4])
    ndim = compiler.ndim
    lane = np.arange(WARP)
    site, checked = compiler.site, compiler.options.checks != 'none'

    def run(frame: Frame) -> Any:
        given, by, size = value(frame), amount(frame), width(frame)
        if checked and frame.mask is not None and splits_warps(frame.mask):
            require_partners(frame, by, size)
            require_named(frame)
        if isinstance(given, tuple):
            return tuple(move(frame, part, by, size) for part in given)
        return move(frame, given, by, size)

    def require_partners(frame: Frame, by: Any, size: Any) -> None:
        """Check that every active lane reads an active lane."""
        active = np.broadcast_to(frame.mask, (frame.mask.shape[0], frame.threads, *frame.mask.shape[2:]))
        lonely = active & ~move(frame, active, by, size)
        if lonely.any():
            frame.report(BarrierDivergence, 'a shuffle reads a lane that takes no part', site, lane_of(lonely))

    def require_named(frame: Frame) -> None:
        """Check that every lane of the mask that has not returned takes part; a GPU may wait for it forever."""
        active = active_by_warp(frame, ndim)
        live = np.ones((1, 1), bool) if frame.live is None else frame.live
        awaited = by_warp(frame, live, bool, ndim) & active.any(axis=2, keepdims=True) & ~active
        position = lane.reshape((1, 1, WARP) + (1,) * (ndim - 2))
        awaited = awaited & (by_warp(frame, named(frame), np.int64, ndim) >> position & 1 == 1)
        if awaited.any():
            message = 'the mask of a shuffle has a lane that takes no part'
            frame.report(BarrierDivergence, message, site, lane_of(by_thread(frame, awaited)))

    def move(frame: Frame, given: Any, by: Any, size: Any) -> Any:
        if not _varies(given):
            return given
        warps = by_warp(frame, given, given.dtype, ndim)
        first = lane // size * size
        if isinstance(by, np.ndarray):
            shift = by_warp(frame, by, np.int64, ndim)
            own = lane.reshape((1, 1, WARP) + (1,) * (ndim - 2))
            start = first.reshape(own.shape)
        else:
            shift, own, start = int(by), lane, first  # type: ignore[assignment]
        source = {
            '': lambda: start + shift % size,
            'xor': lambda: own ^ shift,
            'up': lambda: np.where(own - shift < start, own, own - shift),
            'down': lambda: np.where(own + shift >= start + size, own, own + shift),
        }[kind]()
        if kind == 'xor':
            source = np.where(source >= start + size, own, source)
        if isinstance(by, np.ndarray):
            shape = np.broadcast_shapes(warps.shape, source.shape)
            picked = np.take_along_axis(np.broadcast_to(warps, shape), np.broadcast_to(source, shape), axis=2)
        else:
            picked = warps[:, :, source]
        return by_thread(frame, picked)

    return run


@op('tl.warp_reduce_sum', 'tl.warp_reduce_max', 'tl.warp_reduce_min', 'tl.warp_reduce_bitand', 'tl.warp_reduce_bitor')
def _warp_reduce(compiler: Compiler, call: Any) -> Closure:
    """The combination of all 32 lanes, in every lane, with the same butterfly as the GPU (so sums round equally)."""
    name = str(call.op.name).removeprefix('tl.warp_reduce_')
    value = compiler.expr(call.args[0])
    dtype = dtype_of(compiler.dtype(call).name)
    ndim = compiler.ndim
    partners = [np.arange(WARP) ^ distance for distance in (16, 8, 4, 2, 1)]
    site, checked = compiler.site, compiler.options.checks != 'none'

    def run(frame: Frame) -> Any:
        given = value(frame)
        if checked and splits_warps(frame.mask):
            frame.report(BarrierDivergence, f'T.warp_reduce_{name} runs on a part of a warp', site)
        warps = by_warp(frame, given, dtype.value, ndim)
        for partner in partners:
            warps = pair(name, warps, warps[:, :, partner], dtype)
        return by_thread(frame, warps)

    return run


def active_by_warp(frame: Frame, ndim: int) -> np.ndarray:
    """Which lanes of each warp are running."""
    mask = np.ones((1,) * ndim, bool) if frame.mask is None else frame.mask
    warps = by_warp(frame, mask, bool, ndim)
    spare = -frame.threads % WARP
    if spare:
        warps = warps.copy()
        warps[:, -1, WARP - spare :] = False
    return warps


@op('tl.ballot', 'tl.ballot_sync', 'tl.activemask', 'tirx.tvm_warp_activemask', 'tl.any_sync', 'tl.all_sync')
def _vote(compiler: Compiler, call: Any) -> Closure:
    """A bit mask of the lanes for which a condition holds, or whether it holds for any or all lanes."""
    kind = str(call.op.name).removeprefix('tirx.tvm_warp_').removeprefix('tl.').removesuffix('_sync')
    predicate = compiler.expr(call.args[-1]) if len(call.args) else (lambda frame: True)
    ndim = compiler.ndim
    weights = (np.uint64(1) << np.arange(WARP, dtype=np.uint64)).reshape((1, 1, WARP) + (1,) * (ndim - 2))

    def run(frame: Frame) -> Any:
        holds = by_warp(frame, predicate(frame), bool, ndim)
        active = active_by_warp(frame, ndim)
        if kind == 'any':
            result = (holds & active).any(axis=2, keepdims=True).astype(np.int32)
        elif kind == 'all':
            result = (holds | ~active).all(axis=2, keepdims=True).astype(np.int32)
        else:
            result = np.where(holds & active, weights, np.uint64(0)).sum(axis=2, keepdims=True, dtype=np.uint64)
        shape = (*result.shape[:2], WARP, *result.shape[3:])
        return by_thread(frame, np.broadcast_to(result, shape))

    return run


@op('tl.match_any_sync', 'tl.match_all_sync')
def _match(compiler: Compiler, call: Any) -> Closure:
    """A bit mask of the lanes with the same value as this one; for `all`, 0 unless every lane has it."""
    value = compiler.expr(call.args[1])
    dtype = dtype_of(compiler.dtype(call.args[1]).name)
    everyone = 'all' in str(call.op.name)
    ndim = compiler.ndim

    def run(frame: Frame) -> np.ndarray:
        warps = by_warp(frame, value(frame), dtype.value, ndim)
        active = active_by_warp(frame, ndim)
        shape = np.broadcast_shapes(warps.shape, active.shape)
        warps, active = np.broadcast_to(warps, shape), np.broadcast_to(active, shape)
        same = (warps[:, :, :, None] == warps[:, :, None, :]) & active[:, :, None, :]
        weights = (np.uint32(1) << np.arange(WARP, dtype=np.uint32)).reshape((1, 1, 1, WARP) + (1,) * (ndim - 2))
        bits = np.where(same, weights, np.uint32(0)).sum(axis=3, dtype=np.uint32)
        if everyone:
            complete = (same | ~active[:, :, None, :]).all(axis=3)
            bits = np.where(complete, bits, np.uint32(0))
        return by_thread(frame, bits)

    return run


@op('tl.syncthreads_count', 'tl.syncthreads_and', 'tl.syncthreads_or')
def _block_vote(compiler: Compiler, call: Any) -> Closure:
    """A block barrier that also counts the threads for which a condition holds."""
    kind = str(call.op.name).rsplit('_', 1)[1]
    predicate = compiler.expr(call.args[0])
    barrier = block_barrier(compiler)
    ndim = compiler.ndim

    def run(frame: Frame) -> Any:
        barrier(frame)
        holds = np.asarray(predicate(frame)) != 0
        holds = expand(holds, ndim) if holds.ndim else holds.reshape((1,) * ndim)
        holds = np.broadcast_to(holds, (frame.blocks, frame.threads, *holds.shape[2:]))
        live = True if frame.mask is None else frame.mask
        if kind == 'count':
            return (holds & live).sum(axis=1, keepdims=True, dtype=np.int32)
        if kind == 'and':
            return (holds | ~np.asarray(live)).all(axis=1, keepdims=True).astype(np.int32)
        return (holds & live).any(axis=1, keepdims=True).astype(np.int32)

    return run
