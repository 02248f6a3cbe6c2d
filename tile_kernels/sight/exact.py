"""Kernels whose counts a formula gives exactly, for `python -m tile_kernels.sight.validate` and the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tile_kernels.core.lang import T
from tile_kernels.sight.count import Counts, count
from tile_kernels.sight.lower import lower
from tile_kernels.sight.subject import resolve

BLOCKS, THREADS = 64, 128
WARPS = BLOCKS * THREADS // 32


@dataclass(frozen=True)
class Exact:
    """A kernel, and what its counts must be by name; the names are those of `measured`."""

    name: str
    builder: Callable[..., Any]
    args: tuple
    expected: Mapping[str, float]
    device: str = 'h200'

    def measured(self) -> dict[str, float]:
        """The counts of the kernel by the names of `expected`."""
        (subject,) = resolve(self.builder, *self.args, device=self.device)
        (found,) = count(subject, lower(subject))
        return {name: _number(found, name) for name in self.expected}


def _number(counts: Counts, name: str) -> float:
    """A count: `flops`, `cluster`, an event, or `how space field`, e.g. `load global sectors`."""
    if name in ('cluster', 'blocks'):
        return getattr(counts, name)
    if name == 'flops':
        return sum(counts.flops.values())
    words = name.split()
    if len(words) == 1:
        return counts.events.get(name, 0)
    how, space, what = words
    return sum(getattr(a, what) for a in counts.accesses if (a.how, a.space) == (how, space))


def _strided(stride: int) -> Any:
    @T.prim_func
    def kernel(x: T.Tensor((BLOCKS * THREADS * stride,), 'float32'), y: T.Tensor((BLOCKS * THREADS,), 'float32')):
        with T.Kernel(BLOCKS, threads=THREADS) as block:
            tx = T.get_thread_binding()
            y[block * THREADS + tx] = x[(block * THREADS + tx) * stride]

    return kernel


def _vectors(lanes: int) -> Any:
    @T.prim_func
    def kernel(
        x: T.Tensor((BLOCKS * THREADS * lanes,), 'float16'), y: T.Tensor((BLOCKS * THREADS * lanes,), 'float16')
    ):
        with T.Kernel(BLOCKS, threads=THREADS) as block:
            tx = T.get_thread_binding()
            for lane in T.vectorized(lanes):
                y[(block * THREADS + tx) * lanes + lane] = x[(block * THREADS + tx) * lanes + lane]

    return kernel


def _banks(stride: int) -> Any:
    @T.prim_func
    def kernel(x: T.Tensor((BLOCKS * THREADS,), 'float32'), y: T.Tensor((BLOCKS * THREADS,), 'float32')):
        with T.Kernel(BLOCKS, threads=THREADS) as block:
            tx = T.get_thread_binding()
            tile = T.alloc_shared((THREADS * stride,), 'float32')
            tile[tx * stride] = x[block * THREADS + tx]
            T.sync_threads()
            y[block * THREADS + tx] = tile[tx * stride]

    return kernel


def _tail(size: int) -> Any:
    @T.prim_func
    def kernel(x: T.Tensor((size,), 'float32'), y: T.Tensor((size,), 'float32')):
        with T.Kernel(T.ceildiv(size, THREADS), threads=THREADS) as block:
            tx = T.get_thread_binding()
            if block * THREADS + tx < size:
                y[block * THREADS + tx] = x[block * THREADS + tx]

    return kernel


def _persistent(tiles: int, workers: int) -> Any:
    @T.prim_func
    def kernel(x: T.Tensor((tiles * THREADS,), 'float32'), y: T.Tensor((tiles * THREADS,), 'float32')):
        with T.Kernel(workers, threads=THREADS) as block:
            tx = T.get_thread_binding()
            for turn in T.serial(T.ceildiv(tiles - block, workers)):
                y[(block + turn * workers) * THREADS + tx] = x[(block + turn * workers) * THREADS + tx]

    return kernel


def _triangle(size: int) -> Any:
    @T.prim_func
    def kernel(x: T.Tensor((size * THREADS,), 'float32'), y: T.Tensor((size * THREADS,), 'float32')):
        with T.Kernel(size, threads=THREADS) as block:
            tx = T.get_thread_binding()
            for turn in T.serial(block + 1):
                y[turn * THREADS + tx] = x[turn * THREADS + tx]

    return kernel


def _same(kind: str) -> Any:
    @T.prim_func
    def kernel(x: T.Tensor((BLOCKS,), 'float32'), y: T.Tensor((BLOCKS * THREADS,), 'float32')):
        with T.Kernel(BLOCKS, threads=THREADS) as block:
            tx = T.get_thread_binding()
            if kind == 'atomic':
                T.atomic_add(x[block], y[block * THREADS + tx])
            elif kind == 'exp':
                y[block * THREADS + tx] = T.exp2(x[block])
            else:
                y[block * THREADS + tx] = x[block]

    return kernel


def _product(m: int, n: int, k: int, tile: int) -> Any:
    @T.prim_func
    def kernel(a: T.Tensor((m, k), 'float16'), b: T.Tensor((k, n), 'float16'), c: T.Tensor((m, n), 'float16')):
        with T.Kernel(n // tile, m // tile, threads=128) as (bx, by):
            a_shared, b_shared = T.alloc_shared((tile, 32), 'float16'), T.alloc_shared((32, tile), 'float16')
            total = T.alloc_fragment((tile, tile), 'float32')
            T.clear(total)
            for step in T.Pipelined(k // 32, num_stages=2):
                T.copy(a[by * tile, step * 32], a_shared)
                T.copy(b[step * 32, bx * tile], b_shared)
                T.gemm(a_shared, b_shared, total)
            T.copy(total, c[by * tile, bx * tile])

    return kernel


def _cluster(size: int) -> Any:
    @T.prim_func
    def kernel(x: T.Tensor((BLOCKS * THREADS,), 'float32'), y: T.Tensor((BLOCKS * THREADS,), 'float32')):
        with T.Kernel(BLOCKS, threads=THREADS, cluster_dims=(size, 1, 1)) as block:
            tx = T.get_thread_binding()
            y[block * THREADS + tx] = x[block * THREADS + tx]

    return kernel


def cases() -> Iterator[Exact]:
    """Kernels with the counts that formulas give."""
    words = 4 * BLOCKS * THREADS
    for stride in (1, 2, 4, 8, 32):
        used = {'load global sectors': WARPS * min(32, 4 * stride), 'load global bytes': words}
        yield Exact(f'loads with stride {stride}', _strided, (stride,), used | {'store global sectors': WARPS * 4})
    for lanes in (1, 2, 4, 8):
        moved = 2 * BLOCKS * THREADS * lanes
        yield Exact(
            f'vectors of {2 * lanes} bytes', _vectors, (lanes,),
            {'load global bytes': moved, 'store global sectors': moved / 32, 'load global requests': WARPS},
        )  # fmt: skip
    for stride in (1, 2, 4, 8, 32, 33):
        ways = {1: 1, 33: 1}.get(stride, stride)
        both = {'store shared wavefronts': WARPS * ways, 'load shared wavefronts': WARPS * ways}
        yield Exact(f'shared memory, {ways}-way, stride {stride}', _banks, (stride,), both)
    for size in (1000, 8191):
        yield Exact(
            f'a tail of {size}', _tail, (size,), {'load global bytes': 4 * size, 'store global bytes': 4 * size}
        )
    yield Exact('persistent blocks', _persistent, (1000, 16), {'load global bytes': 4 * 1000 * THREADS})
    yield Exact('a triangle of loops', _triangle, (16,), {'load global bytes': 4 * THREADS * 16 * 17 / 2})
    yield Exact('one word for a warp', _same, ('load',), {'load global sectors': WARPS, 'load global bytes': 4 * WARPS})
    yield Exact('atomics on one word', _same, ('atomic',), {'atomic global requests': WARPS})
    yield Exact('special functions', _same, ('exp',), {'sfu': BLOCKS * THREADS})
    m, n, k = 512, 256, 128
    for tile in (64, 128):
        loads = 2 * m * k * (n // tile) + 2 * n * k * (m // tile)
        shape, flops = (m, n, k, tile), {'flops': 2 * m * n * k}
        yield Exact(f'wgmma and TMA, tile {tile}', _product, shape, flops | {'tma_load global bytes': loads})
        asynchronous = flops | {'cp.async global bytes': loads}
        yield Exact(f'mma and cp.async, tile {tile}', _product, shape, asynchronous, 'a100')
    for size in (2, 8):
        yield Exact(f'clusters of {size}', _cluster, (size,), {'cluster': size, 'load global bytes': words})
