"""Operations between blocks of a cluster: remote mbarrier arrivals, copies that signal one, multicast, pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import (
    Frame,
    active_threads,
    agreed,
    cluster_distance,
    cluster_of,
    cluster_rank,
    first_thread,
)
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.meaning.mbarriers import BarrierOperand


@op('tl.ptx_arrive_cluster_barrier')
def _arrive_remote(compiler: Compiler, call: Any) -> Closure:
    """Every active thread arrives at the mbarrier of the block of a given rank in its cluster."""
    operand, rank = BarrierOperand(compiler, call.args[0]), compiler.expr(call.args[1])
    compiler.whole_cluster = True

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
    away = cluster_distance(frame, dims, rank)
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
    compiler.whole_cluster = True
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


class Pair:
    """Two blocks of a cluster that work on one product (`cta_group::2`): the first, of even rank, issues it."""

    def __init__(self, compiler: Compiler) -> None:
        compiler.whole_cluster = True
        self.dims = compiler.cluster_dims
        if int(np.prod(self.dims)) % 2:
            raise compiler.unsupported(f'a product of two blocks in clusters of {self.dims}')

    def rows(self, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
        """For every block of the batch, the rows of the first and the second block of its pair."""
        rank = cluster_rank(frame, self.dims)
        even = rank - rank % 2
        here = np.arange(frame.blocks)
        first, second = (cluster_distance(frame, self.dims, (even + k).reshape(-1, 1))[:, 0] for k in (0, 1))
        return here + first, here + second

    def of_first(self, frame: Frame, value: Any) -> Any:
        """A value per block, as the first block of each pair has it."""
        if not isinstance(value, np.ndarray) or value.ndim == 0 or value.shape[0] == 1:
            return value
        return value[self.rows(frame)[0]]

    def side_by_side(self, frame: Frame, value: np.ndarray) -> np.ndarray:
        """The columns of the first block's matrix, then those of the second's."""
        value = np.broadcast_to(value, (frame.blocks, *value.shape[1:]))
        first, second = self.rows(frame)
        return np.concatenate([value[first], value[second]], axis=-1)

    def issuing(self, frame: Frame) -> np.ndarray:
        """Rows of the first blocks with an active thread."""
        active = active_threads(frame).any(axis=1)
        return np.flatnonzero(active & (self.rows(frame)[0] == np.arange(frame.blocks)))

    def signal(self, frame: Frame, operand: BarrierOperand) -> None:
        """One arrival at the mbarriers of both blocks."""
        leaders = self.issuing(frame)
        to = np.concatenate([leaders, self.rows(frame)[1][leaders]])
        number = np.asarray(agreed(frame, operand.number(frame)))
        numbers = np.broadcast_to(number[:, 0] if number.ndim else number, (frame.blocks,))[leaders]
        numbers = np.concatenate([numbers, numbers])
        barriers = frame.memory[operand.slot]
        np.add.at(barriers.arrived, (to, numbers), 1)
        if frame.clock is not None and len(leaders):
            warps = first_thread(frame)[leaders] // 32
            frame.clock.send(operand.slot, numbers, np.tile(leaders, 2), np.tile(warps, 2), to)
        barriers.advance(frame)
