"""Benchmark records: one line per op and case, with one format for tests, the command line and results files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tile_kernels.core.cases import Case, case_id
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.op import Op, ops
from tile_kernels.testing.bench import benchmark_kernel, graph_time, host_time
from tile_kernels.testing.contract import cases_of
from tile_kernels.testing.numeric import count_bytes

Record = dict[str, Any]

#: Milliseconds of warm-up and of timed calls; on a CPU, wall time of small cases.
DURATIONS = {'cuda': (25.0, 100.0), 'cpu': (2.0, 10.0)}


def measure_op(name: str) -> Iterator[Record]:
    """Measure an op on the GPU with its bench cases; without a GPU, on the CPU with its smoke cases."""
    if name not in ops:
        raise ArgumentError(f'benchmark: {name!r} is not an op; there are {", ".join(ops)}')
    cases = cases_of(ops[name])
    on_gpu = torch.cuda.is_available()
    for case in cases.bench if on_gpu else cases.smoke:
        yield measure(ops[name], case, 'cuda' if on_gpu else 'cpu')


def measure(op: Op, case: Case, device: str | torch.device) -> Record:
    """Time one op on one case: time with a cold L2, % of copy, time in a CUDA graph, host time."""
    cases = cases_of(op)
    arguments = cases.arguments(op.name, case, device)
    on_gpu = torch.device(device).type == 'cuda'
    warmup, rep = DURATIONS['cuda' if on_gpu else 'cpu']
    moved, flops = moved_bytes(op, arguments), cases.flops(**arguments) if cases.flops else None
    result = benchmark_kernel(op.call, kwargs=arguments, warmup=warmup, rep=rep, num_bytes=moved, flops=flops)
    record = {
        'op': op.name,
        'case': case_id(case),
        'device': result.device,
        'us': result.median * 1e3,
        'p20_us': result.p20 * 1e3,
        'p80_us': result.p80 * 1e3,
        'gbps': result.gbps,
        'pct_of_copy': result.pct_of_copy,
        **({} if flops is None else {'tflops': result.tflops}),
        'host_us': host_time(op.call, kwargs=arguments) * 1e3 if on_gpu else None,
        'graph_us': graph_time(op.call, kwargs=arguments) * 1e3 if on_gpu else None,
    }
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in record.items()}


def moved_bytes(op: Op, arguments: dict[str, Any]) -> int:
    """Bytes that a call must move: inputs read once, outputs written once, tensors changed in place both.

    Overwritten tensors are among the arguments and count once.
    """
    changed = [arguments.get(param.name) for param in op.params if param.mutated and not param.overwritten]
    return count_bytes(arguments, changed, op.call(**arguments))


def table(records: Iterable[Record]) -> list[str]:
    """The records as aligned lines, with a heading."""
    columns = ('op', 'case', 'us', 'gbps', 'pct_of_copy', 'tflops', 'graph_us', 'host_us')
    heading = ('op', 'case', 'us', 'GB/s', '% of copy', 'TFLOP/s', 'graph us', 'host us')
    rows = [heading] + [tuple(_cell(record.get(column)) for column in columns) for record in records]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return ['  '.join(_pad(cell, i, widths[i]) for i, cell in enumerate(row)).rstrip() for row in rows]


def _pad(cell: str, column: int, width: int) -> str:
    return cell.ljust(width) if column < 2 else cell.rjust(width)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f'{value:.1f}'
    return '' if value is None else str(value)
