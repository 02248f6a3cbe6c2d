"""Loops bound to the threads of a block, and reductions over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.lanes import expand
from tile_kernels.interpreter.engine.translate import Closure, Compiler, is_const, op
from tile_kernels.interpreter.errors import BarrierDivergence
from tile_kernels.interpreter.memory.dtypes import narrower, rounder

_TAGS = ('threadIdx.x', 'threadIdx.y', 'threadIdx.z')


def thread_axis(dims: tuple[int, int, int], axis: int) -> np.ndarray:
    """threadIdx.x, .y or .z of every thread of a block, as (1, threads)."""
    below = int(np.prod(dims[:axis], dtype=np.int64)) if axis else 1
    return ((np.arange(int(np.prod(dims))) // below) % dims[axis]).astype(np.int32).reshape(1, -1)


def bound_loop(compiler: Compiler, node: Any) -> Callable[[Frame], Any]:
    """A loop over the threads of one axis: every thread runs the body once, with its own number."""
    tag = str(node.thread_binding.thread_tag)
    if tag not in _TAGS:
        raise compiler.unsupported(f'thread binding {tag} inside a kernel')
    axis = _TAGS.index(tag)
    extent = compiler.thread_dims[axis]
    if not is_const(node.extent) or int(node.extent) != extent or int(node.min):
        raise compiler.unsupported(
            f'a loop bound to {tag} of {node.extent} iterations in a block with {extent} threads'
        )
    slot = compiler.new_slot(node.loop_var)
    body = compiler.stmt(node.body)
    values: Any = thread_axis(compiler.thread_dims, axis) if extent > 1 else 0
    ndim = compiler.ndim

    if getattr(body, 'waits', False):

        def run_waiting(frame: Frame) -> Any:
            frame.env[slot] = expand(values, ndim)
            yield from body(frame)

        return run_waiting

    def run(frame: Frame) -> None:
        frame.env[slot] = expand(values, ndim)
        body(frame)

    return run


class _Reducer:
    """The combiner of a `T.comm_reducer` for two tuples of values."""

    def __init__(self, compiler: Compiler, node: Any) -> None:
        self.left = [compiler.new_slot(var) for var in node.lhs]
        self.right = [compiler.new_slot(var) for var in node.rhs]
        self.results = [compiler.expr(part) for part in node.result]
        self.identity = [compiler.expr(part) for part in node.identity_element]
        dtypes = [compiler.dtype(part) for part in node.result]
        self.dtypes = dtypes
        self.finish = [rounder(dtype) if dtype.is_float else narrower(dtype) for dtype in dtypes]

    def combine(self, frame: Frame, left: list[Any], right: list[Any]) -> list[Any]:
        """Combine element by element."""
        for slot, value in zip(self.left + self.right, left + right, strict=True):
            frame.env[slot] = value
        found = [result(frame) for result in self.results]
        return [value if finish is None else finish(value) for value, finish in zip(found, self.finish, strict=True)]


def reduce_scope(compiler: Compiler, node: Any) -> Any:
    """`T.attr(T.comm_reducer(...), 'reduce_scope', ...)`: sets the combiner of the reductions inside."""
    outer = getattr(compiler, 'reducer', None)
    compiler.reducer = _Reducer(compiler, node.node)  # type: ignore[attr-defined]
    try:
        return compiler.stmt(node.body)
    finally:
        compiler.reducer = outer  # type: ignore[attr-defined]


@op('tirx.tvm_thread_allreduce')
def _allreduce(compiler: Compiler, call: Any) -> Closure:
    """Combine a value of all threads along some axes of the block; each thread gets the result."""
    reducer: _Reducer | None = getattr(compiler, 'reducer', None)
    if reducer is None:
        raise compiler.unsupported('T.tvm_thread_allreduce without a reduce_scope')
    if compiler.depth:
        raise compiler.unsupported('T.tvm_thread_allreduce inside T.Parallel')
    count = int(call.args[0])
    values = [compiler.expr(part) for part in call.args[1 : 1 + count]]
    condition = compiler.expr(call.args[1 + count])
    targets = [compiler.access(part.buffer, list(part.indices)) for part in call.args[2 + count : 2 + 2 * count]]
    indices = [compiler.expr(part) for part in call.args[2 + 2 * count :]]
    dims, site = compiler.thread_dims, compiler.site
    checked = compiler.options.checks != 'none'

    def axes_of(frame: Frame) -> list[int]:
        found = []
        for index in indices:
            number = index(frame)
            for axis in range(3):
                if dims[axis] > 1 and np.array_equal(
                    np.broadcast_to(number, (1, frame.threads)), thread_axis(dims, axis)
                ):
                    found.append(axis)
        return found

    def spread(frame: Frame, value: Any, dtype: Any) -> np.ndarray:
        """A value as (blocks, z, y, x)."""
        lanes = np.broadcast_to(np.asarray(value, dtype.value), (frame.blocks, frame.threads))
        return lanes.reshape(frame.blocks, dims[2], dims[1], dims[0])

    def run(frame: Frame) -> None:
        if checked and frame.mask is not None and not _whole(frame):
            frame.report(BarrierDivergence, 'T.tvm_thread_allreduce is reached by only some threads of the block', site)
        holds = condition(frame)
        parts = []
        for value, identity, dtype in zip(values, reducer.identity, reducer.dtypes, strict=True):
            given = spread(frame, value(frame), dtype)
            if isinstance(holds, np.ndarray) or not holds:
                given = np.where(spread(frame, holds, _Bool), given, np.asarray(identity(frame), dtype.value))
            parts.append(given)
        for axis in axes_of(frame):
            parts = _halve(frame, reducer, parts, 3 - axis)
        for part, target in zip(parts, targets, strict=True):
            whole = np.broadcast_to(part, (frame.blocks, dims[2], dims[1], dims[0]))
            target.store(frame, whole.reshape(frame.blocks, frame.threads).copy(), frame.mask)

    return run


class _Bool:
    value = np.dtype(bool)


def _whole(frame: Frame) -> bool:
    lanes = np.broadcast_to(frame.mask, (frame.blocks, frame.threads))
    return bool((lanes.all(axis=1) | ~lanes.any(axis=1)).all())


def _halve(frame: Frame, reducer: _Reducer, parts: list[np.ndarray], axis: int) -> list[np.ndarray]:
    """Combine along an axis like shuffles: repeatedly combine the upper half of the threads with the lower half."""
    size = parts[0].shape[axis]
    padded = 1 << (size - 1).bit_length()
    if padded > size:
        parts = [
            np.concatenate([part, _filling(frame, identity, dtype, part, axis, padded - size)], axis=axis)
            for part, identity, dtype in zip(parts, reducer.identity, reducer.dtypes, strict=True)
        ]
    while padded > 1:
        padded //= 2
        lower = [np.take(part, range(padded), axis=axis) for part in parts]
        upper = [np.take(part, range(padded, 2 * padded), axis=axis) for part in parts]
        combined = reducer.combine(frame, lower, upper)
        parts = [np.broadcast_to(value, part.shape) for value, part in zip(combined, lower, strict=True)]
    return parts


def _filling(frame: Frame, identity: Closure, dtype: Any, part: np.ndarray, axis: int, count: int) -> np.ndarray:
    shape = [*part.shape]
    shape[axis] = count
    return np.full(shape, identity(frame), dtype.value)
