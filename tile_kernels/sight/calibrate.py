"""Measure the speeds of a GPU with small kernels, for `sight.predict`; the result goes into the cache directory."""

from __future__ import annotations

import datetime
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tile_kernels.core import cache, nvcc
from tile_kernels.core.errors import UnsupportedError
from tile_kernels.core.gpus import Gpu, cuda_gpu
from tile_kernels.core.lang import T
from tile_kernels.core.workers import spread
from tile_kernels.sight.subject import calibrated

#: Kernels with a fixed number of blocks have so many for each SM, and so many threads.
PER_SM, THREADS = 4, 256
#: Turns of the loops that keep one unit busy.
TURNS = 512
#: Floats of the block that L2 reads repeat: 8 MB.
L2_FLOATS = 1 << 21


def empty() -> Any:
    """One block that writes one word."""

    @T.prim_func
    def empty_kernel(y: T.Tensor((32,), 'float32')):
        with T.Kernel(1, threads=32):
            y[T.get_thread_binding()] = 0.0

    return empty_kernel


def copied(size: int) -> Any:
    """A copy of floats, 16 bytes for each thread."""

    @T.prim_func
    def copy_kernel(x: T.Tensor((size,), 'float32'), y: T.Tensor((size,), 'float32')):
        with T.Kernel(size // (4 * THREADS), threads=THREADS) as block:
            tx = T.get_thread_binding()
            for lane in T.vectorized(4):
                y[(block * THREADS + tx) * 4 + lane] = x[(block * THREADS + tx) * 4 + lane]

    return copy_kernel


def repeated(blocks: int, turns: int = TURNS) -> Any:
    """Blocks that read the same 8 MB in turn, so that the L2 cache serves them."""

    @T.prim_func
    def l2_kernel(x: T.Tensor((L2_FLOATS,), 'float32'), y: T.Tensor((blocks * THREADS,), 'float32')):
        with T.Kernel(blocks, threads=THREADS) as block:
            tx = T.get_thread_binding()
            part, total = T.alloc_local((4,), 'float32'), T.alloc_local((1,), 'float32')
            total[0] = 0.0
            for turn in T.serial(turns):
                for lane in T.vectorized(4):
                    part[lane] = x[((block + turn * 61) * THREADS + tx) * 4 % L2_FLOATS + lane]
                total[0] += part[0] + part[1] + part[2] + part[3]
            y[block * THREADS + tx] = total[0]

    return l2_kernel


def banked(blocks: int, ways: int, turns: int = TURNS) -> Any:
    """Reads of shared memory in which the lanes of a warp meet `ways`-way in a bank."""

    @T.prim_func
    def shared_kernel(y: T.Tensor((blocks * THREADS,), 'float32')):
        with T.Kernel(blocks, threads=THREADS) as block:
            tx = T.get_thread_binding()
            tile, total = T.alloc_shared((2048,), 'float32'), T.alloc_local((1,), 'float32')
            for i in T.serial(2048 // THREADS):
                tile[i * THREADS + tx] = 0.0
            T.sync_threads()
            total[0] = 0.0
            for turn in T.serial(turns):
                total[0] += tile[(tx % 32 * ways + turn * 33) % 2048]
            y[block * THREADS + tx] = total[0]

    return shared_kernel


def computed(blocks: int, kind: str, turns: int = TURNS) -> Any:
    """Eight independent chains of one operation for each thread: `alu`, `sfu` or `shuffle`; or `atomic` on a word."""

    @T.prim_func
    def compute_kernel(y: T.Tensor((blocks * THREADS,), 'float32')):
        with T.Kernel(blocks, threads=THREADS) as block:
            tx = T.get_thread_binding()
            values = T.alloc_local((8,), 'float32')
            for chain in T.unroll(8):
                values[chain] = T.Cast('float32', tx + chain)
            for _ in T.serial(turns):
                for chain in T.unroll(8):
                    if kind == 'alu':
                        values[chain] = values[chain] * 0.999 + 0.5
                    elif kind == 'sfu':
                        values[chain] = T.exp2(values[chain])
                    elif kind == 'shuffle':
                        values[chain] = T.shfl_xor(values[chain], 1)
                    else:
                        T.atomic_add(y[block * THREADS + tx], values[chain])
            for chain in T.unroll(1, 8):  # every chain counts, so none can be left out
                values[0] += values[chain]
            y[block * THREADS + tx] = values[0]

    return compute_kernel


def multiplied(size: int, dtype: str = 'bfloat16', wide: bool = True) -> Any:
    """A product of square matrices with tiles of 128 x 256 by wgmma, or of 128 x 128 by mma."""
    n = 256 if wide else 128

    @T.prim_func
    def product_kernel(
        a: T.Tensor((size, size), dtype), b: T.Tensor((size, size), dtype), c: T.Tensor((size, size), 'bfloat16')
    ):
        with T.Kernel(T.ceildiv(size, n), T.ceildiv(size, 128), threads=256) as (bx, by):
            T.use_swizzle(8)
            a_shared, b_shared = T.alloc_shared((128, 64), dtype), T.alloc_shared((n, 64), dtype)
            total = T.alloc_fragment((128, n), 'float32')
            T.clear(total)
            for step in T.Pipelined(size // 64, num_stages=4 if wide else 3):
                T.copy(a[by * 128, step * 64], a_shared)
                T.copy(b[bx * n, step * 64], b_shared)
                T.gemm(a_shared, b_shared, total, transpose_B=True)
            T.copy(total, c[by * 128, bx * n])

    return product_kernel


@dataclass(frozen=True)
class Timer:
    """Microseconds of a call with a cold L2 cache, and inside a CUDA graph; tests replace them."""

    cold: Callable[[Callable[[], Any]], float]
    graph: Callable[[Callable[[], Any]], float]
    compile: Callable[[Any], Callable[..., Any]]
    device: str = 'cuda'


def measure(gpu: Gpu, timer: Timer, largest: int = 1 << 28, turns: int = TURNS, side: int = 8192) -> dict[str, float]:
    """The speeds of a GPU; `largest` is in floats, `side` of the product."""
    blocks = gpu.sms * PER_SM
    found: dict[str, float] = {}

    def floats(size: int) -> torch.Tensor:
        return torch.zeros(size, device=timer.device)

    nothing, word = timer.compile(empty()), floats(32)
    found['event_us'] = timer.cold(lambda: nothing(word))
    found['graph_us'] = timer.graph(lambda: nothing(word))
    twice = timer.cold(lambda: (nothing(word), nothing(word)))
    found['next_us'] = max(0.0, twice - found['event_us'])
    sizes = [max(4 * THREADS, largest >> shift) for shift in range(12)]
    times = []
    for size in sizes:
        kernel, x, y = timer.compile(copied(size)), floats(size), floats(size)
        times.append(timer.cold(functools.partial(kernel, x, y)))
    slope = np.polyfit([8.0 * size for size in sizes[:6]], times[:6], 1)[0]
    found['stream_bandwidth'] = 1e6 / slope
    found['copy_bandwidth'] = 8e6 * sizes[0] / times[0]
    results = floats(blocks * THREADS)

    def rate(func: Any, work: float, *args: torch.Tensor) -> float:
        kernel = timer.compile(func)
        return 1e6 * work / max(timer.cold(lambda: kernel(*args, results)) - found['event_us'], 1e-3)

    reads = blocks * THREADS * turns
    found['l2_bandwidth'] = rate(repeated(blocks, turns), 16 * reads, floats(L2_FLOATS))
    for ways in (1, 2, 4, 8):
        found[f'shared_{ways}_way'] = rate(banked(blocks, ways, turns), 4 * reads)
    for kind, each in (('alu', 2), ('sfu', 1), ('shuffle', 1), ('atomic', 1)):
        few = turns if kind != 'atomic' else max(1, turns // 64)
        found[f'{kind}_rate'] = rate(computed(blocks, kind, few), 8 * each * blocks * THREADS * few)
    for name, dtype in (('half_rate', torch.bfloat16), ('float8_rate', torch.float8_e4m3fn)):
        if name == 'float8_rate' and gpu.peaks[dtype] <= gpu.peaks[torch.bfloat16]:
            continue  # no fp8 tensor cores
        a, b = (torch.zeros(side, side, device=timer.device).to(dtype) for _ in range(2))
        c = torch.empty(side, side, dtype=torch.bfloat16, device=timer.device)
        kernel = timer.compile(multiplied(side, str(dtype).removeprefix('torch.'), gpu.has_wgmma))
        found[name] = 2e6 * side**3 / timer.cold(functools.partial(kernel, a, b, c))
    return found


def compile_all(gpu: Gpu) -> None:
    """Compile all kernels of `measure` into TileLang's cache, at the same time."""
    found: list[tuple] = []
    place = itertools.count(1)

    def note(func: Any) -> Callable[..., None]:
        found.append((func, {'kind': 'cuda', 'arch': gpu.target}))
        return lambda *args: None

    measure(gpu, Timer(lambda call: float(next(place)), lambda call: 1.0, note, 'meta'))
    spread(compile_one, [functools.partial(tuple, args) for args in found], None, each=1)


def compile_one(func: Any, target: dict[str, str]) -> None:
    """Compile a kernel, as another process does."""
    import tilelang

    tilelang.compile(func, target=target, execution_backend='tvm_ffi')


def calibrate(timer: Timer, commit: str = 'unknown') -> Path:
    """Measure the GPU of this machine and write its device file; returns the file."""
    if not torch.cuda.is_available():
        raise UnsupportedError('calibrate: there is no GPU to measure; predictions for known GPUs need none')
    gpu = cuda_gpu(torch.cuda.current_device())
    nvcc.require_tilelang()
    compile_all(gpu)
    found = measure(gpu, timer)
    day = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d')
    about = {
        'name': gpu.name,
        'arch': gpu.arch,
        'sources': {'measured': f'measured: tile-kernels calibrate, {day}, commit {commit}'},
        'numbers': {name: [float(f'{value:.4g}'), 'measured'] for name, value in found.items()},
    }
    path = calibrated(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    cache.write(path, json.dumps(about, indent=1).encode(), 0o644)
    return path
