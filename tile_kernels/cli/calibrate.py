"""Measure the speeds of this machine's GPU in less than a minute, for the predictions of `explain` and `sight`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from tile_kernels.cli.bench import git
from tile_kernels.testing.bench import benchmark_kernel, graph_time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `calibrate`."""
    parser.add_argument('--commit', help='commit that the file names, where the package is not in a git checkout')
    parser.add_argument('--json', action='store_true', help='print the file as JSON')


def compiled(prim_func: Any) -> Any:
    """A micro-kernel, ready to run on the GPU."""
    import tilelang

    from tile_kernels.core.gpus import cuda_gpu

    target = {'kind': 'cuda', 'arch': cuda_gpu(0).target}
    return tilelang.compile(prim_func, target=target, execution_backend='tvm_ffi')


def run(args: argparse.Namespace) -> int:
    """Measure, write the device file, and print it."""
    from tile_kernels.sight.calibrate import Timer, calibrate

    timer = Timer(
        lambda call: 1e3 * benchmark_kernel(call, warmup=5, rep=50, num_bytes=0, device='cuda').median,
        lambda call: 1e3 * graph_time(call, calls=20, rep=10),
        compiled,
    )
    path = calibrate(timer, args.commit or git('rev-parse', '--short', 'HEAD') or 'unknown')
    about = json.loads(path.read_text())
    if args.json:
        sys.stdout.write(path.read_text() + '\n')
        return 0
    for name, (value, _) in about['numbers'].items():
        sys.stdout.write(f'{name:<18}{value:.4g}\n')
    sys.stdout.write(f'written to {path}\n')
    return 0
