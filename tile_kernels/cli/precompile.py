"""Compile the kernels of ops ahead of time, for any architecture, without a GPU."""

from __future__ import annotations

import argparse

from tile_kernels.cli import console
from tile_kernels.core.collect import collect_function
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.gpus import GPUS
from tile_kernels.core.precompile import precompile
from tile_kernels.core.registry import words_to_case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `precompile`."""
    parser.add_argument('ops', nargs='*', metavar='OP', help='ops or families (default: all)')
    parser.add_argument(
        '--model',
        metavar='FILE.py:FUNCTION',
        help='compile what this function launches on fake tensors; it may take a number of tokens',
    )
    parser.add_argument(
        '--op', nargs='+', action='append', metavar='WORD', help='OP KEY=VALUE ...: an op with these sizes and options'
    )
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
    if sum(map(bool, (ops, args.model, args.op))) > 1:
        raise ArgumentError('precompile: give ops, --model or --op, not several of them')
    if args.model:
        done = collect_function(args.model).precompile(archs, out=args.out, jobs=args.jobs)
    else:
        cases: dict[str, list[dict[str, str]]] = {}
        for name, *words in args.op or ():
            cases.setdefault(name, []).append(words_to_case(words))
        done = precompile(cases or ops or None, archs=archs, out=args.out, jobs=args.jobs)
    out = console.output()
    for variant, reason in done.failures.items():
        out.print(f'failed: {variant}: {reason}', markup=False, soft_wrap=True)
    out.print(str(done), markup=False, soft_wrap=True)
    out.print(
        f'Use them with TK_CACHE_DIR={done.folder}; the directory may be read-only.', markup=False, soft_wrap=True
    )
    return 1 if done.failures else 0
