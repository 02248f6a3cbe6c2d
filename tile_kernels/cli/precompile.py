"""Compile the kernels of ops ahead of time, for any architecture, without a GPU."""

from __future__ import annotations

import argparse

from tile_kernels.cli import console
from tile_kernels.core.gpus import GPUS
from tile_kernels.core.precompile import precompile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `precompile`."""
    parser.add_argument('ops', nargs='*', metavar='OP', help='ops or families (default: all)')
    parser.add_argument(
        '--arch', nargs='+', default=['sm_90a'], metavar='ARCH', help='architectures or GPUs (default sm_90a)'
    )
    parser.add_argument('--out', metavar='DIR', help='directory to fill (default: the cache directory)')
    parser.add_argument('--jobs', type=int, metavar='N', help='compilations at a time (default: one per CPU core)')


def run(args: argparse.Namespace) -> int:
    """Compile, then print one line per failure and a summary."""
    first, *names = args.arch  # `--arch sm_90a moe`: moe is an op
    archs = [first, *(name for name in names if name.startswith('sm_') or name in GPUS)]
    ops = args.ops + [name for name in names if name not in archs]
    done = precompile(ops or None, archs=archs, out=args.out, jobs=args.jobs)
    out = console.output()
    for variant, reason in done.failures.items():
        out.print(f'failed: {variant}: {reason}', markup=False, soft_wrap=True)
    out.print(str(done), markup=False, soft_wrap=True)
    out.print(
        f'Use them with TK_CACHE_DIR={done.folder}; the directory may be read-only.', markup=False, soft_wrap=True
    )
    return 1 if done.failures else 0
