"""Profile a script: time per op and kernel, and a trace; or the command that profiles its kernels with ncu."""

from __future__ import annotations

import argparse
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tile_kernels.cli import console
from tile_kernels.core.errors import ArgumentError

#: Device functions that TileLang generates end like this: `matmul_kernel`, `matmul_kernel_1`.
KERNELS = 'regex:_kernel(_[0-9]+)?$'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `profile`."""
    parser.add_argument('--trace', metavar='FILE', type=Path, help='write a trace for chrome://tracing or Perfetto')
    parser.add_argument('--sort', default='device', metavar='KEY', help='device, host, calls, mean, gap or name')
    parser.add_argument('--ncu', action='store_true', help='run the script under ncu, or print the command')
    parser.add_argument('--json', action='store_true', help='print the records as JSON instead of a table')
    parser.add_argument('script', metavar='SCRIPT.py', type=Path, help='the script to run')
    parser.add_argument('args', metavar='ARGS', nargs=argparse.REMAINDER, help='its arguments')


def run(args: argparse.Namespace) -> int:
    """Run the script and print the summary."""
    import torch

    from tile_kernels import profiler

    if not args.script.is_file():
        raise ArgumentError(f'profile: {args.script} does not exist')
    if args.ncu:
        command = ncu_command(args.script, args.args)
        sys.stdout.write(f'{shlex.join(command)}\n')
        runs = torch.cuda.is_available() and shutil.which('ncu') is not None
        return subprocess.run(command, check=False).returncode if runs else 0
    before, sys.argv = sys.argv, [str(args.script), *args.args]
    sys.path.insert(0, str(args.script.resolve().parent))
    status = 0
    try:
        with profiler.profile() as found:
            try:
                runpy.run_path(str(args.script), run_name='__main__')
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
        sys.path.pop(0)
    if args.json:
        console.json_out(found.records)
    else:
        found.summary(args.sort)
    if args.trace is not None:
        found.export_chrome_trace(args.trace)
        (sys.stderr if args.json else sys.stdout).write(f'trace: {args.trace}\n')
    return status


def ncu_command(script: Path, args: Sequence[str]) -> list[str]:
    """The command that profiles the TileLang kernels of a script with ncu, the first ten launches."""
    words = ['ncu', '--set', 'full', '--import-source', 'yes', '--kernel-name', KERNELS, '--launch-count', '10']
    return [*words, '--export', script.stem, '--force-overwrite', sys.executable, str(script), *args]
