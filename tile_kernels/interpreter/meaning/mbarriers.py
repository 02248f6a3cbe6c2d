"""mbarriers: they count arrivals, a full count completes a phase, and a wait names the parity of the phase."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.lanes import lane_of
from tile_kernels.interpreter.engine.roles import Waiting, wait_until
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.errors import OutOfBounds
from tile_kernels.interpreter.meaning.barriers import threads_per_block
from tile_kernels.interpreter.meaning.statements import marked


class Barriers:
    """The mbarriers of one buffer: expected arrivals, arrivals so far, completed phases, for every block.

    Bytes count only if blocks of a cluster send them; copies are complete when their arrival is announced.
    """

    written = None
    pending = None
    race = None

    def __init__(self, counts: np.ndarray) -> None:
        self.counts = counts
        self.arrived = np.zeros(counts.shape, np.int64)
        self.phase = np.zeros(counts.shape, np.int64)
        self.expected = np.zeros(counts.shape, np.int64)  # bytes of this phase: expected, and sent so far
        self.sent = np.zeros(counts.shape, np.int64)

    def arrive(self, frame: Frame, index: Any, threads: np.ndarray, bytes_: Any = 0) -> None:
        """Count arrivals, each of which may add expected bytes."""
        np.add.at(self.arrived, _pairs(frame, index), threads)
        if np.any(bytes_):
            np.add.at(self.expected, _pairs(frame, index), threads * bytes_)
        self.advance(frame)

    def send(self, frame: Frame, index: Any, away: np.ndarray, bytes_: int, slot: Any) -> None:
        """Count bytes of every active thread at a barrier of the block that is `away` blocks further on."""
        shape = (frame.blocks, frame.threads)
        lanes = np.ones(shape, bool) if frame.mask is None else np.broadcast_to(frame.mask, shape)
        to = np.broadcast_to(np.arange(frame.blocks)[:, None] + away, shape)[lanes]
        numbers = np.broadcast_to(index, shape)[lanes]
        np.add.at(self.sent, (to, numbers), bytes_)
        if frame.clock is not None:
            senders, threads = np.nonzero(lanes)
            frame.clock.send(slot, numbers, senders, threads // 32, to)
        self.advance(frame)

    def advance(self, frame: Frame) -> None:
        """Move barriers with full counts to their next phase."""
        full = (self.arrived >= self.counts) & (self.sent >= self.expected)
        self.phase += np.where(full, self.arrived // self.counts, 0)
        self.arrived = np.where(full, self.arrived % self.counts, self.arrived)
        self.sent = np.where(full, self.sent - self.expected, self.sent)
        self.expected = np.where(full, 0, self.expected)
        frame.shared.events += 1


def new_barriers(storage: Any, frame: Frame) -> Barriers:
    """Barriers of a batch, as `T.alloc_barrier` initializes them."""
    counts = np.array([int(count(frame)) for count in storage.counts], np.int64)
    return Barriers(np.broadcast_to(counts, (frame.blocks, len(counts))).copy())


def _pairs(frame: Frame, index: Any) -> tuple[np.ndarray, np.ndarray]:
    """(block, barrier) coordinates of an index over lanes."""
    lanes = np.broadcast_to(np.asarray(index), (frame.blocks, np.shape(index)[1] if np.ndim(index) else 1))
    return np.broadcast_to(np.arange(frame.blocks)[:, None], lanes.shape), lanes


class BarrierOperand:
    """A reference to one mbarrier: its buffer and index."""

    def __init__(self, compiler: Compiler, node: Any) -> None:
        while type(node).__name__ == 'Call' and str(node.op.name) in ('tl.access_ptr', 'tirx.address_of', 'tl.region'):
            node = node.args[0]
        if type(node).__name__ == 'BufferRegion':
            index = node.region[0].min
        elif type(node).__name__ == 'BufferLoad':
            index = node.indices[0]
        else:
            raise compiler.unsupported(f'mbarrier operand {node}')
        view = compiler.buffer(node.buffer)
        self.slot, self.name = view.slot, view.name
        self.index = compiler.expr(index)
        self.storage = compiler.storages[node.buffer.data]
        self.site = compiler.site

    def number(self, frame: Frame) -> Any:
        """The index of the barrier for each active lane, 0 for the others."""
        index, size = self.index(frame), frame.memory[self.slot].counts.shape[1]
        if np.ndim(index) and np.shape(index)[1] > 1 and frame.mask is not None:
            index = np.where(frame.mask, index, 0)
        outside = np.broadcast_to((np.asarray(index) < 0) | (np.asarray(index) >= size), (frame.blocks, frame.threads))
        if frame.mask is not None:
            outside = outside & frame.mask
        if outside.any():
            block, lane = lane_of(outside)
            found = int(np.broadcast_to(index, outside.shape)[block, lane])
            text = f'there is no mbarrier {self.name}[{found}], the last is {self.name}[{size - 1}]'
            raise frame.error(OutOfBounds, text, self.site, (block, lane), buffer=self.name, index=(found,))
        return index

    def arrive(self, frame: Frame, bytes_: Any = 0) -> None:
        """One arrival per active thread."""
        index = self.number(frame)
        if frame.clock is not None:
            frame.clock.release(self.slot, index, frame.mask)
        barriers: Barriers = frame.memory[self.slot]
        if np.ndim(index) and np.shape(index)[1] > 1:
            lanes = np.ones((1, 1), bool) if frame.mask is None else frame.mask
            shape = (frame.blocks, frame.threads)
            barriers.arrive(
                frame, np.broadcast_to(index, shape), np.broadcast_to(lanes, shape).astype(np.int64), bytes_
            )
        else:
            barriers.arrive(frame, index, threads_per_block(frame)[:, None], bytes_)


@op('tirx.ptx_arrive_barrier', 'tirx.ptx_arrive_barrier_expect_tx')
def _arrive(compiler: Compiler, call: Any) -> Closure:
    """Arrive at an mbarrier; expected bytes are sent by other blocks, or belong to copies that are complete."""
    operand = BarrierOperand(compiler, call.args[0])
    expected = compiler.expr(call.args[1]) if str(call.op.name) == 'tirx.ptx_arrive_barrier_expect_tx' else None

    def run(frame: Frame) -> None:
        if expected is not None and operand.storage.counts_bytes:
            operand.arrive(frame, expected(frame))
        else:
            operand.arrive(frame)

    return run


@op('tl.mbarrier_expect_tx')
def _expect_bytes(compiler: Compiler, call: Any) -> Closure:
    """Expect bytes: those of copies that are already complete."""
    return lambda frame: None


@op('tl.ptx_cp_async_barrier_noinc', 'tirx.ptx_cp_async_barrier')
def _arrive_after_copies(compiler: Compiler, call: Any) -> Closure:
    """Arrive after the thread's earlier cp.async copies are complete."""
    operand = BarrierOperand(compiler, call.args[0])

    def run(frame: Frame) -> None:
        if frame.async_groups is not None:
            frame.async_groups.tie_to_barrier(frame, operand)
        operand.arrive(frame)

    return run


@op('tl.mbarrier_wait_parity', 'tirx.ptx_wait_barrier')
def _wait(compiler: Compiler, call: Any) -> Closure:
    """Wait until the phase of the given parity is complete."""
    operand = BarrierOperand(compiler, call.args[0])
    parity = compiler.expr(call.args[1]) if len(call.args) > 1 else (lambda frame: 0)
    site = compiler.site
    pairs = compiler.cluster_dims if operand.storage.of_cluster and int(np.prod(compiler.cluster_dims)) == 2 else None

    def run(frame: Frame) -> Generator[Waiting, None, None]:
        index, phase = operand.number(frame), parity(frame)
        barriers: Barriers = frame.memory[operand.slot]
        blocks, numbers = _pairs(frame, index)
        wanted = np.broadcast_to(np.asarray(phase) & 1, np.broadcast_shapes(np.shape(phase), blocks.shape))
        idle = None if frame.mask is None else ~frame.mask

        def complete() -> bool:
            done = (barriers.phase[blocks, numbers] & 1) != wanted
            return bool(done.all() if idle is None else (done | idle).all())

        def describe() -> str:
            late = (barriers.phase[blocks, numbers] & 1) == wanted
            late = late if idle is None else late & ~idle
            block, lane = lane_of(late)
            number = int(np.broadcast_to(numbers, late.shape)[block, lane])
            arrived, count = (int(barriers.arrived[block, number]), int(barriers.counts[block, number]))
            parity_wanted = int(np.broadcast_to(wanted, late.shape)[block, lane])
            return f'parity {parity_wanted} of mbarrier {operand.name}[{number}] ({arrived} of {count} arrivals)'

        yield from wait_until(frame, complete, site, describe)
        if frame.async_groups is not None:
            frame.async_groups.barrier_passed(frame, operand.slot, numbers, pairs)
        if frame.clock is not None:
            frame.clock.acquire(operand.slot, index, frame.mask)

    return marked(run, waits_=True)
