"""Time what the first call of an op adds to a process whose cache already holds the kernel.

    python -m tools.first_call moe.topk_gate gemm.grouped_gemm

Every op is timed in processes of its own: digest of the code, search in the cache, import of the runtime, load of the
library. With a GPU, also the whole first call and the second one. Imports of torch and of this package come before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

CHILDREN = 5


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds on the clock and of the CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def child(name: str, build: bool) -> None:
    """Load the kernels of one op; print milliseconds, one line per step."""
    import torch

    from tile_kernels.core.gpus import arch_of
    from tile_kernels.core.registry import cases_of, load_ops

    op = load_ops()[name]
    cases = cases_of(op)
    case = cases.bench[0]
    arch = arch_of(0) if torch.cuda.is_available() else 'sm_90a'
    launch = op.trace_case(case)[0]
    if build:
        launch.kernel.library(launch.static, launch.config, arch)
        return
    steps: dict[str, Callable[[], object]] = {
        'find': lambda: launch.kernel.library(launch.static, launch.config, arch),
        'runtime': lambda: __import__('tvm_ffi'),
        'load': lambda: launch.kernel.load(launch.static, launch.config, arch),
    }
    if torch.cuda.is_available():
        given = cases.arguments(op.name, case, 'cuda')

        def call() -> None:
            op.call(**given)
            torch.cuda.synchronize()

        torch.cuda.synchronize()
        steps = dict.fromkeys(('first call', 'second call'), call)
    for step, action in steps.items():
        print(step, *timed(action), sep='\t')


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('ops', nargs='+', metavar='OP')
    parser.add_argument('--child', choices=('build', 'time'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.ops[0], args.child == 'build')
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {'TK_CACHE_DIR': folder, 'TK_LOG': 'error'}
        for name in args.ops:
            command = [sys.executable, '-m', 'tools.first_call', name, '--child']
            subprocess.run([*command, 'build'], env=environment, check=True)
            found: dict[str, list[tuple[float, float]]] = {}
            for _ in range(CHILDREN):
                run = subprocess.run([*command, 'time'], env=environment, check=True, capture_output=True, text=True)
                for line in run.stdout.splitlines():
                    step, wall, cpu = line.split('\t')
                    found.setdefault(step, []).append((float(wall), float(cpu)))
            for step, times in found.items():
                wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
                print(f'{name:32} {step:12} {wall:7.1f} ms, {cpu:6.1f} ms of the CPU')


if __name__ == '__main__':
    main()
