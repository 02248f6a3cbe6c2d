"""One timer for all benchmarks: median of CUDA-event timings with a cold L2, next to a copy of the same bytes.

This project compares ops by `pct_of_copy`: the time of a device-to-device copy of the same bytes, divided by the time
of the op. The copy reads each input once and writes each output once; the same timer measures it in the same run. On a
CPU, wall time replaces events.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.core.errors import ArgumentError, UnsupportedError
from tile_kernels.testing.numeric import count_bytes
from tile_kernels.testing.params import dtype_to_str, format_param_id, get_cast_params, make_param_id, make_param_key
from tile_kernels.testing.poison import unpoisoned

__all__ = [
    'BenchResult',
    'benchmark_kernel',
    'dtype_to_str',
    'empty_suppress',
    'format_ms',
    'format_param_id',
    'get_cast_params',
    'graph_time',
    'host_time',
    'make_param_id',
    'make_param_key',
    'print_average_perf',
    'suppress_stdout_stderr',
]

#: Bytes written before every timed launch: more than twice the L2 of any supported GPU.
FLUSH_BYTES = 256 << 20

#: Larger copies have the same bandwidth as this one, so their time is scaled, which saves memory.
COPY_LIMIT_BYTES = 1 << 30

#: A graph, and a burst of calls whose host time is measured, take at most about this many milliseconds on the device.
MOST_MS = 20.0

MIN_TIMED_CALLS, MAX_TIMED_CALLS = 5, 2000


@dataclass(frozen=True)
class BenchResult:
    """Times of one call in milliseconds, and the rates that follow from its bytes and operations."""

    times: tuple[float, ...]
    num_bytes: int
    flops: int | None = None
    copy: float | None = None
    device: str = 'cpu'

    @property
    def mean(self) -> float:
        """Mean time of a call in ms."""
        return statistics.fmean(self.times)

    @property
    def median(self) -> float:
        """Median time of a call in ms."""
        return statistics.median(self.times)

    @property
    def p20(self) -> float:
        """20th percentile of the times in ms."""
        return self._percentile(20)

    @property
    def p80(self) -> float:
        """80th percentile of the times in ms."""
        return self._percentile(80)

    @property
    def gbps(self) -> float:
        """Gigabytes per second at the median."""
        return self.num_bytes / self.median * 1e-6

    @property
    def tflops(self) -> float | None:
        """Tera floating-point operations per second at the median; None when `flops` was not given."""
        return None if self.flops is None else self.flops / self.median * 1e-9

    @property
    def pct_of_copy(self) -> float | None:
        """Time of a copy of the same bytes in percent of the median; None if there is nothing to copy."""
        return None if self.copy is None else 100 * self.copy / self.median

    def _percentile(self, percent: int) -> float:
        return statistics.quantiles(self.times, n=100, method='inclusive')[percent - 1]

    def __str__(self) -> str:
        parts = [
            f'{format_ms(self.median)} (p20 {format_ms(self.p20)}, p80 {format_ms(self.p80)})',
            f'{self.gbps:.0f} GB/s',
        ]
        if self.tflops is not None:
            parts.append(f'{self.tflops:.3g} TFLOP/s')
        if self.pct_of_copy is not None:
            parts.append(f'{self.pct_of_copy:.0f} % of copy')
        return f'{", ".join(parts)} on {self.device}'


def format_ms(milliseconds: float) -> str:
    """Three significant digits in a suitable unit: `2.31 us`, `28.7 us`, `1.25 ms`."""
    value, unit = (milliseconds * 1e3, 'us') if milliseconds < 1 else (milliseconds, 'ms')
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f'{value:.{digits}f} {unit}'


@unpoisoned()
def benchmark_kernel(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    warmup: float = 25,
    rep: float = 100,
    *,
    num_bytes: int | None = None,
    flops: int | None = None,
    device: str | torch.device | None = None,
) -> BenchResult:
    """Time `fn(*args, **kwargs)` and a copy of the same bytes.

    Args:
        fn: the function to time; it is called often, so it must not depend on the number of calls.
        args: its positional arguments.
        kwargs: its keyword arguments.
        warmup: milliseconds of untimed calls, after one call that may compile.
        rep: milliseconds of timed calls (at least 5 calls, at most 2000).
        num_bytes: bytes that the call must move; default: every tensor of arguments and result once.
        flops: floating-point operations of the call, for `tflops`.
        device: device of the call; default: the device of its first tensor.

    Returns:
        `BenchResult` with `mean`, `median`, `p20`, `p80` in ms, `gbps`, `tflops` and `pct_of_copy`.
    """
    kwargs = kwargs or {}
    if isinstance(args, torch.Tensor):
        raise ArgumentError(
            'testing.benchmark_kernel: args must be a tuple of arguments, got a tensor; write args=(x,)'
        )
    result = fn(*args, **kwargs)
    device = _device_of(args, kwargs, result) if device is None else torch.device(device)
    if num_bytes is None:
        num_bytes = count_bytes(args, kwargs, result)
    del result

    times = _times(lambda: fn(*args, **kwargs), device, warmup, rep)
    copy = _copy_time(num_bytes, device, warmup, rep) if num_bytes else None
    return BenchResult(tuple(times), num_bytes, flops, copy, _device_name(device))


@unpoisoned()
def graph_time(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    calls: int = 100,
    rep: int = 20,
) -> float:
    """Milliseconds per call inside a replayed CUDA graph: device time without the host, L2 warm.

    The graph has `calls` calls; fewer if they take long.
    """
    _need_cuda('graph_time')
    kwargs = kwargs or {}
    calls = _fewer(calls, lambda: fn(*args, **kwargs))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compile and grow the workspaces before the capture
            fn(*args, **kwargs)
    torch.cuda.current_stream().wait_stream(stream)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn(*args, **kwargs)
    graph.replay()
    return statistics.median(_event_times(graph.replay, rep)) / calls


@unpoisoned()
def host_time(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    calls: int = 100,
    rep: int = 20,
) -> float:
    """Milliseconds that Python needs to issue one call, while nothing waits for the GPU.

    The median of `rep` averages over `calls` calls; over fewer calls if they take long.
    """
    kwargs = kwargs or {}
    calls = _fewer(calls, lambda: fn(*args, **kwargs))
    times = []
    for _ in range(rep):
        _synchronize()  # an empty launch queue: a full one would block the host
        start = time.perf_counter()
        for _ in range(calls):
            fn(*args, **kwargs)
        times.append((time.perf_counter() - start) / calls * 1e3)
    _synchronize()
    return statistics.median(times)


# Timers --------------------------------------------------------------------------------------


def _times(call: Callable[[], Any], device: torch.device, warmup: float, rep: float) -> list[float]:
    if device.type != 'cuda':
        return _wall_times(call, warmup, rep)
    with torch.cuda.device(device):
        return _cold_event_times(call, warmup, rep)


def _wall_times(call: Callable[[], Any], warmup: float, rep: float) -> list[float]:
    end = time.perf_counter() + warmup * 1e-3
    while time.perf_counter() < end:
        call()
    times: list[float] = []
    end = time.perf_counter() + rep * 1e-3
    while len(times) < MIN_TIMED_CALLS or (time.perf_counter() < end and len(times) < MAX_TIMED_CALLS):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _cold_event_times(call: Callable[[], Any], warmup: float, rep: float) -> list[float]:
    """Event timings with the L2 flushed before each call; all calls are enqueued without waits."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device='cuda')
    host, device = _issue_and_run_time(call)
    flush_host, flush_device = _issue_and_run_time(lambda: flush.fill_(1))
    # While the GPU writes the flush buffer, the host runs ahead, so that the events time the device alone. A slow host
    # needs more than one write for that. Recording the three events takes the host 0.01 to 0.03 ms. On a shared machine
    # the host may slow down by half at any time.
    flushes = math.ceil(2 * (host + 0.02) / max(flush_device - flush_host, 0.01))
    flushes = min(flushes, 32)

    spare = torch.cuda.Event(enable_timing=True)

    def prepare() -> None:
        for _ in range(flushes):
            flush.fill_(1)
        spare.record()  # the first event after a kernel may be late, which would add 0.7 us to every second call

    each = max(host, device) + flushes * flush_device
    for _ in range(min(math.ceil(warmup / each), MAX_TIMED_CALLS)):
        prepare()
        call()
    return _event_times(call, min(max(math.ceil(rep / each), MIN_TIMED_CALLS), MAX_TIMED_CALLS), prepare)


def _event_times(call: Callable[[], Any], count: int, prepare: Callable[[], Any] | None = None) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in events:
        if prepare is not None:
            prepare()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _issue_and_run_time(call: Callable[[], Any], calls: int = 5) -> tuple[float, float]:
    """Rough milliseconds of one call: on the host to issue it, and until the device has finished."""
    call()
    _synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    issued = time.perf_counter()
    _synchronize()
    return (issued - start) / calls * 1e3, (time.perf_counter() - start) / calls * 1e3


def _fewer(calls: int, call: Callable[[], Any]) -> int:
    """As many calls as run in `MOST_MS`, at least one; runs some calls to find out."""
    _, each = _issue_and_run_time(call, 2)
    return max(min(calls, int(MOST_MS / each)), 1)


def _copy_time(num_bytes: int, device: torch.device, warmup: float, rep: float) -> float:
    """Median milliseconds of a copy that reads half of `num_bytes` and writes the other half, in 8-byte words."""
    words = max(min(num_bytes, COPY_LIMIT_BYTES) // 16, 1)
    generator = torch.Generator(device).manual_seed(0)  # zeros may be faster than data; the caller's seed is not used
    source = torch.empty(words, dtype=torch.int64, device=device).random_(generator=generator)
    target = torch.empty_like(source)
    median = statistics.median(_times(lambda: target.copy_(source), device, warmup, rep))
    return median * num_bytes / (16 * words) if num_bytes >= 16 else median


def _device_of(*values: Any) -> torch.device:
    """Device of the first tensor; without a tensor, the GPU if there is one."""
    for leaf in torch.utils._pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _need_cuda(what: str) -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f'{what}: needs a CUDA device, found none; benchmark_kernel and host_time run on a CPU too'
        )


# Output --------------------------------------------------------------------------------------


def print_average_perf(results: Iterable[BenchResult]) -> None:
    """Print the mean time and bandwidth of several results as one line."""
    results = list(results)
    if not results:
        return
    shares = [r.pct_of_copy for r in results if r.pct_of_copy is not None]
    line = f'average of {len(results)}: {format_ms(statistics.fmean(r.median for r in results))}'
    line += f', {statistics.fmean(r.gbps for r in results):.0f} GB/s'
    if shares:
        line += f', {statistics.fmean(shares):.0f} % of copy'
    sys.stdout.write(line + '\n')


@contextmanager
def suppress_stdout_stderr() -> Iterator[None]:
    """Discard everything written to stdout and stderr, including the output of compilers started inside."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(os.devnull, 'w') as null, redirect_stdout(null), redirect_stderr(null):
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
        try:
            yield
        finally:
            for stream, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, stream)
                os.close(copy)


empty_suppress = nullcontext
