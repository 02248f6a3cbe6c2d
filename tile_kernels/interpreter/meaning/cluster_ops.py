"""Operations between blocks of a cluster: remote mbarrier arrivals, copies that signal one, multicast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, cluster_of, cluster_rank
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.meaning.mbarriers import BarrierOperand


@op('tl.ptx_arrive_cluster_barrier')
def _arrive_remote(compiler: Compiler, call: Any) -> Closure:
    """Every active thread arrives at the mbarrier of the block of a given rank in its cluster."""
    operand, rank = BarrierOperand(compiler, call.args[0]), compiler.expr(call.args[1])
    compiler.whole_grid = True

    def run(frame: Frame) -> None:
        shape = (frame.blocks, frame.threads)
        lanes = np.ones(shape, bool) if frame.mask is None else np.broadcast_to(frame.mask, shape)
        _signal(frame, operand, np.asarray(rank(frame)), lanes, compiler.cluster_dims)

    return run


def signal_after_copy(compiler: Compiler, barrier: Any, rank: Any) -> Callable[[Frame], None]:
    """The action at the end of a copy to another block: one arrival at the mbarrier there."""
    operand, wanted = BarrierOperand(compiler, barrier), compiler.expr(rank)

    def run(frame: Frame) -> None:
        shape = (frame.blocks, frame.threads)
        lanes = np.ones(shape, bool) if frame.mask is None else np.broadcast_to(frame.mask, shape)
        first = np.zeros(shape, bool)
        first[np.arange(frame.blocks), lanes.argmax(axis=1)] = True
        _signal(frame, operand, np.asarray(wanted(frame)), lanes & first, compiler.cluster_dims)

    return run


def _signal(frame: Frame, operand: BarrierOperand, rank: np.ndarray, lanes: np.ndarray, dims: tuple[int, ...]) -> None:
    away = rank - cluster_rank(frame, dims).reshape(-1, 1)
    to = np.broadcast_to(np.arange(frame.blocks)[:, None] + away, lanes.shape)[lanes]
    numbers = np.broadcast_to(operand.number(frame), lanes.shape)[lanes]
    barriers = frame.memory[operand.slot]
    np.add.at(barriers.arrived, (to, numbers), 1)
    if frame.clock is not None:
        senders, threads = np.nonzero(lanes)
        frame.clock.send(operand.slot, numbers, senders, threads // 32, to)
    barriers.advance(frame)


def multicast(compiler: Compiler, mask: Any) -> Callable[[Frame, Any], Any]:
    """The data that each block of a cluster receives: blocks in the mask get what the first of them loads."""
    compiler.whole_grid = True
    chosen = int(mask)
    source = (chosen & -chosen).bit_length() - 1

    def pick(frame: Frame, value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.ndim == 0 or value.shape[0] == 1:
            return value
        rank, cluster = cluster_rank(frame, compiler.cluster_dims), cluster_of(frame, compiler.cluster_dims)
        rows = np.arange(frame.blocks)
        first = np.zeros(int(cluster.max()) + 1, np.intp)
        first[cluster[rank == source]] = rows[rank == source]
        member = (chosen >> rank) & 1 == 1
        return value[np.where(member, first[cluster], rows)]

    return pick
