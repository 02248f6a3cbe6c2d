"""What one-launch layers and clusters would gain: barriers, flags, launches, prefetches, and a GEMM by pairs of blocks.

    python tools/scale_probe.py [--json FILE]

The results are JSON lines. `cluster_gemm` is the example of that name, beside `gemm` on the same matrices. The script
needs a GPU to measure. Without one, its kernels run in the interpreter, which is what their test does.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tile_kernels.core.lang import T, begin_early

ROUNDS = 1000
CHAIN = 8
MEGABYTES = (10, 25, 50, 100)
LINE = 128  # bytes of a cache line
REPEATS = 20
PRODUCTS = ((8192, 8192, 8192), (4096, 7168, 2048), (2048, 4096, 7168))  # m, n, k
EXAMPLE = Path(__file__).parent.parent / 'examples' / 'cluster_gemm.py'

PREFETCH = """
static __device__ __forceinline__ void prefetch_lines(const void *start, int number) {
#pragma unroll
  for (int i = 0; i < number; ++i)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char *>(start) + 128 * i));
}
"""


def grid_barrier(blocks: int, rounds: int) -> Any:
    """`rounds` grid barriers of the cooperative launch."""

    @T.prim_func
    def grid_barrier(done: T.Tensor((blocks,), 'int32')):
        with T.Kernel(blocks, threads=128) as pid:
            count = T.alloc_var('int32', init=0)
            for _ in T.serial(rounds):
                T.sync_grid()
                count += 1
            if T.get_thread_binding() == 0:
                done[pid] = count

    return grid_barrier


def counter_barrier(blocks: int, rounds: int) -> Any:
    """`rounds` barriers by a counter in global memory, which must be 0 at the start."""

    @T.prim_func
    def counter_barrier(counter: T.Tensor((1,), 'int32'), done: T.Tensor((blocks,), 'int32')):
        with T.Kernel(blocks, threads=128) as pid:
            count = T.alloc_var('int32', init=0)
            for i in T.serial(rounds):
                T.sync_threads()
                if T.get_thread_binding() == 0:
                    T.atomic_add(counter[0], 1, memory_order='release')
                    while T.atomic_load(counter[0], memory_order='acquire') < (i + 1) * blocks:
                        pass
                T.sync_threads()
                count += 1
            if T.get_thread_binding() == 0:
                done[pid] = count

    return counter_barrier


def hand_over(rounds: int) -> Any:
    """Two blocks pass a number to each other, `rounds` times there and back. The flags must be 0 at the start."""

    @T.prim_func
    def hand_over(flags: T.Tensor((2, 32), 'int32'), done: T.Tensor((2,), 'int32')):
        with T.Kernel(2, threads=32) as pid:
            if T.get_thread_binding() == 0:
                for i in T.serial(rounds):
                    if pid == 0:
                        T.atomic_store(flags[1, 0], i + 1, memory_order='release')
                    while T.atomic_load(flags[pid, 0], memory_order='acquire') < i + 1:
                        pass
                    if pid == 1:
                        T.atomic_store(flags[0, 0], i + 1, memory_order='release')
                done[pid] = flags[pid, 0]

    return hand_over


def tiny(early: bool) -> Any:
    """One block that adds 1 to 128 numbers; with `early`, by programmatic dependent launch (PDL)."""

    @T.prim_func
    def tiny(x: T.Tensor((128,), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=128):
            if early:
                begin_early()
            for i in T.Parallel(128):
                y[i] = x[i] + T.float32(1)

    return tiny


def prefetch(blocks: int, lines: int) -> Any:
    """Every thread prefetches its lines into the L2 cache."""
    per_block = -(-lines // blocks)

    @T.prim_func
    def prefetch(x: T.Tensor((lines, LINE // 4), 'float32'), done: T.Tensor((blocks,), 'int32')):
        with T.Kernel(blocks, threads=128) as pid:
            T.import_source(PREFETCH)
            thread = T.get_thread_binding()
            for i in T.serial(T.ceildiv(per_block, 128)):
                if i * 128 + thread < per_block and pid * per_block + i * 128 + thread < lines:
                    T.evaluate(
                        T.call_extern(
                            'handle', 'prefetch_lines', T.address_of(x[pid * per_block + i * 128 + thread, 0]), 1
                        )
                    )
            if thread == 0:
                done[pid] = 1

    return prefetch


def microseconds(run: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> float:
    """Median time of a call on the GPU."""
    found = []
    for _ in range(REPEATS):
        prepare()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1000)
    return statistics.median(found)


def _in_turn(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    first()
    second()


def in_graph(run: Callable[[], None]) -> Callable[[], None]:
    """The calls as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def products() -> dict[str, float]:
    """Times of `gemm` and of the cluster GEMM, whose results must agree."""
    import tilelang

    import tile_kernels
    from tile_kernels.cli.files import definitions

    _, example = definitions(f'{EXAMPLE}:cluster_gemm_kernel', ['PASS_CONFIGS'])
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    found = {}
    for m, n, k in PRODUCTS:
        program = example['cluster_gemm_kernel'](m, n, k, num_sms=sms // 2 * 2)
        kernel = tilelang.compile(program, pass_configs=example['PASS_CONFIGS'])
        a, b = (torch.randn(rows, k, device='cuda', dtype=torch.bfloat16) for rows in (m, n))
        c = torch.full((m, n), float('nan'), device='cuda', dtype=torch.bfloat16)
        kernel(a, b, c)
        torch.testing.assert_close(c, a @ b.T, rtol=2e-2, atol=2e-2)
        for _ in range(2):  # in turn, so that both meet the same clock
            for name, run in (
                ('cluster_gemm', functools.partial(kernel, a, b, c)),
                ('gemm', functools.partial(tile_kernels.gemm.gemm, a, b)),
            ):
                found[f'{name}_{m}x{n}x{k}'] = microseconds(run)
    return found


def measure() -> dict[str, float]:
    """All numbers, in microseconds unless their name says otherwise."""
    from tile_kernels.scale.devices import compiled_for

    device = torch.cuda.current_device()
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    done, counter = (torch.zeros(sms, dtype=torch.int32, device='cuda') for _ in range(2))
    flags = torch.zeros(2, 32, dtype=torch.int32, device='cuda')
    found: dict[str, float] = {}

    def per_round(build: Callable[[int], Any], *args: torch.Tensor) -> float:
        times = []
        for rounds in (ROUNDS, 2 * ROUNDS):
            call = compiled_for(build(rounds), device).call
            times.append(microseconds(functools.partial(call, *args), lambda: [t.zero_() for t in args]))
        return (times[1] - times[0]) / ROUNDS

    found['grid_barrier'] = per_round(lambda rounds: grid_barrier(sms, rounds), done)
    found['counter_barrier'] = per_round(lambda rounds: counter_barrier(sms, rounds), counter[:1], done)
    found['hand_over'] = per_round(hand_over, flags, done[:2]) / 2
    x, y = torch.zeros(128, device='cuda'), torch.zeros(128, device='cuda')
    for early, name in ((False, 'chain'), (True, 'chain_pdl')):
        call = compiled_for(tiny(early), device).call

        def chain(call: Any = call) -> None:
            for i in range(CHAIN):
                call(*((x, y) if i % 2 == 0 else (y, x)))

        found[f'{name}_of_{CHAIN}'] = microseconds(in_graph(chain))
    flush = torch.zeros(256 << 20, dtype=torch.uint8, device='cuda')
    for size in MEGABYTES:
        lines = (size << 20) // LINE
        data = torch.zeros(lines, LINE // 4, device='cuda')
        fetch = compiled_for(prefetch(sms, lines), device).call
        fetch_all = functools.partial(fetch, data, done)
        total = functools.partial(torch.sum, data)
        found[f'prefetch_{size}_mb'] = microseconds(fetch_all, flush.zero_)
        found[f'sum_cold_{size}_mb'] = microseconds(total, flush.zero_)
        found[f'sum_prefetched_{size}_mb'] = microseconds(total, functools.partial(_in_turn, flush.zero_, fetch_all))
    return found | products()


def main() -> int:
    """Measure and print; returns 1 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--json', type=Path, help='append the numbers to this file')
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print('scale_probe: needs a GPU, got none; tests/scale/test_probe.py runs its kernels in the interpreter')
        return 1
    commit = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], capture_output=True, text=True, check=False)
    record = {'gpu': torch.cuda.get_device_name(), 'commit': commit.stdout.strip(), **measure()}
    print(json.dumps(record, indent=1))
    if arguments.json:
        with arguments.json.open('a') as file:
            file.write(json.dumps(record) + '\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
