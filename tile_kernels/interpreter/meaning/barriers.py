"""Barriers of a block, a warp, the grid or a cluster, and named barriers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, active_threads, cluster_of, cluster_rank
from tile_kernels.interpreter.engine.lanes import expand, splits_warps
from tile_kernels.interpreter.engine.roles import Waiting, wait_until
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.errors import BarrierDivergence, Site
from tile_kernels.interpreter.meaning.statements import marked


def block_barrier(compiler: Compiler) -> Callable[[Frame], None]:
    """`__syncthreads`: every running thread of the block must reach it together."""
    site = compiler.site

    def run(frame: Frame) -> None:
        _require_all_threads(frame, site, 'T.sync_threads')
        if frame.clock is not None:
            frame.clock.settle(active_threads(frame))
            frame.clock.block_sync(frame.mask)

    return run


def _require_all_threads(frame: Frame, site: Site, what: str) -> None:
    mask = frame.mask
    if mask is None or mask.shape[1] == 1:
        return
    expected = np.ones((1, 1), bool) if frame.live is None else frame.live
    missing = mask.any(axis=1, keepdims=True) & expected & ~mask
    if missing.any():
        block = int(np.argmax(missing.any(axis=1)))
        count = int(np.broadcast_to(mask, missing.shape)[block].sum())
        frame.report(
            BarrierDivergence,
            f'{what} is reached by {count} of {frame.threads} threads of the block',
            site,
            (block, -1),
        )


@op('tirx.tvm_storage_sync')
def _sync_threads(compiler: Compiler, call: Any) -> Closure:
    """Block barrier; with an id and a count, a named barrier that waits for that many threads."""
    if str(call.args[0].value) == 'warp':
        raise compiler.unsupported('a storage barrier of warp scope')
    if len(call.args) < 3:
        return block_barrier(compiler)
    number, count = compiler.expr(call.args[1]), compiler.expr(call.args[2])
    site = compiler.site

    def run(frame: Frame) -> Generator[Waiting, None, None]:
        which, wanted = int(number(frame)), int(count(frame))
        arrived = threads_per_block(frame)
        barrier, target = named_arrival(frame, which, wanted, site)
        yield from wait_until(
            frame,
            lambda: bool((barrier.generation >= target)[arrived > 0].all()),
            site,
            lambda: f'named barrier {which} ({int(barrier.arrived[arrived > 0].max())} of {wanted} arrivals)',
        )
        if frame.clock is not None:
            frame.clock.acquire('named', which, frame.mask)

    return marked(run, waits_=True)


@op('tl.named_barrier_arrive')
def _named_arrive(compiler: Compiler, call: Any) -> Closure:
    """Arrive at a named barrier without waiting."""
    number, count = compiler.expr(call.args[0]), compiler.expr(call.args[1])
    site = compiler.site

    def run(frame: Frame) -> None:
        named_arrival(frame, int(number(frame)), int(count(frame)), site)

    return run


def named_arrival(frame: Frame, number: int, count: int, site: Site) -> tuple[NamedBarrier, np.ndarray]:
    """The active threads arrive; returns the barrier and the generation to wait for."""
    barrier = frame.barriers.setdefault(number, NamedBarrier(frame.blocks))
    if frame.clock is not None:
        frame.clock.settle(active_threads(frame))
        frame.clock.release('named', number, frame.mask)
    return barrier, barrier.arrive(threads_per_block(frame), count, frame, site)


class NamedBarrier:
    """`bar.sync id, n`: opens when n threads of the block have arrived."""

    def __init__(self, blocks: int) -> None:
        self.arrived = np.zeros(blocks, np.int64)
        self.generation = np.zeros(blocks, np.int64)

    def arrive(self, threads: np.ndarray, count: int, frame: Frame, site: Site) -> np.ndarray:
        """Count arrivals; returns the generation to wait for."""
        target = self.generation + 1
        self.arrived += threads
        if (self.arrived > count).any():
            block = int(np.argmax(self.arrived > count))
            raise frame.error(
                BarrierDivergence,
                f'{int(self.arrived[block])} threads arrive at a named barrier of {count}',
                site,
                (block, -1),
            )
        full = self.arrived == count
        self.generation += full
        self.arrived[full] = 0
        frame.shared.events += 1
        return target


def threads_per_block(frame: Frame) -> np.ndarray:
    """Number of active threads in each block."""
    if frame.mask is None:
        return np.full(frame.blocks, frame.threads)
    lanes = np.broadcast_to(frame.mask, (frame.blocks, frame.threads))
    return lanes.sum(axis=1)


@op('tl.sync_warp')
def _sync_warp(compiler: Compiler, call: Any) -> Closure:
    """Order memory accesses of the threads of a warp; all of them must reach it together."""
    site = compiler.site
    whole = len(call.args) == 0

    def run(frame: Frame) -> None:
        if whole and splits_warps(frame.mask, frame.live):
            frame.report(BarrierDivergence, 'T.sync_warp is reached by only some threads of a warp', site)
        if frame.clock is not None:
            frame.clock.settle(active_threads(frame))
            frame.clock.warp_sync(frame.mask)

    return run


@op('tl.sync_grid')
def _sync_grid(compiler: Compiler, call: Any) -> Closure:
    """Grid barrier; the blocks run in one batch, so the check is that all of them reach it."""
    compiler.whole_grid = True
    site = compiler.site

    def run(frame: Frame) -> None:
        if frame.mask is not None and not frame.mask.all():
            expected = np.ones((1, 1), bool) if frame.live is None else frame.live
            if (expected & ~frame.mask).any():
                frame.report(BarrierDivergence, 'T.sync_grid is reached by only some threads of the grid', site)
        if frame.clock is not None:
            frame.clock.block_sync(None)
        frame.shared.grid_sync()

    return run


@op('tl.cluster_sync')
def _cluster_sync(compiler: Compiler, call: Any) -> Closure:
    """Cluster barrier; the blocks of a cluster run in lockstep."""
    compiler.whole_cluster = True
    barrier = block_barrier(compiler)

    def run(frame: Frame) -> None:
        barrier(frame)
        if frame.clock is not None:
            frame.clock.cluster_sync()
        frame.shared.grid_sync()

    return run


@op('tl.cluster_arrive', 'tl.cluster_arrive_relaxed')
def _cluster_arrive(compiler: Compiler, call: Any) -> Closure:
    """Arrive at the cluster barrier without waiting."""
    compiler.whole_cluster = True
    site = compiler.site

    def run(frame: Frame) -> None:
        if frame.clock is not None:
            frame.clock.release('cluster', 0, frame.mask)
        cluster_barrier(frame, compiler.cluster_dims).arrive(threads_per_block(frame), frame, site)

    return run


@op('tl.cluster_wait')
def _cluster_wait(compiler: Compiler, call: Any) -> Closure:
    """Wait until all threads of the cluster have arrived."""
    compiler.whole_cluster = True
    site = compiler.site

    def run(frame: Frame) -> Generator[Waiting, None, None]:
        barrier = cluster_barrier(frame, compiler.cluster_dims)
        here = threads_per_block(frame) > 0
        target = barrier.target[here].copy()
        yield from wait_until(
            frame,
            lambda: bool((barrier.generation[here] >= target).all()),
            site,
            lambda: f'the barrier of its cluster ({int(barrier.missing[here].max())} threads have not arrived)',
        )
        if frame.clock is not None:
            frame.clock.acquire('cluster', 0, frame.mask)

    return marked(run, waits_=True)


def cluster_barrier(frame: Frame, dims: tuple[int, ...]) -> ClusterBarrier:
    """The cluster barriers of the batch."""
    if 'cluster' not in frame.barriers:
        frame.barriers['cluster'] = ClusterBarrier(frame, dims)
    return frame.barriers['cluster']


class ClusterBarrier:
    """`barrier.cluster`, counted per block: opens when every thread of every block of a cluster has arrived.

    It orders everything that blocks did before, including blocks of other clusters.
    """

    def __init__(self, frame: Frame, dims: tuple[int, ...]) -> None:
        self.cluster = cluster_of(frame, dims)
        self.size = np.bincount(self.cluster)[self.cluster] * frame.threads
        self.missing = self.size.copy()
        self.generation = np.zeros(frame.blocks, np.int64)
        self.target = np.zeros(frame.blocks, np.int64)  # the generation to wait for

    def arrive(self, threads: np.ndarray, frame: Frame, site: Site) -> None:
        """Count arrivals of every block."""
        self.target = np.where(threads > 0, self.generation + 1, self.target)
        self.missing -= np.bincount(self.cluster, threads).astype(np.int64)[self.cluster]
        if (self.missing < 0).any():
            raise frame.error(BarrierDivergence, 'threads arrive twice at the barrier of their cluster', site)
        full = self.missing == 0
        self.generation += full
        self.missing[full] = self.size[full]
        frame.shared.events += 1
        if full.any():
            frame.shared.grid_sync()


@op('tl.block_rank_in_cluster')
def _cluster_rank(compiler: Compiler, call: Any) -> Closure:
    """Rank of a block in its cluster."""
    compiler.whole_cluster = True
    ndim = compiler.ndim
    return lambda frame: expand(cluster_rank(frame, compiler.cluster_dims).reshape(-1, 1), ndim)
