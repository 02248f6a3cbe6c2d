"""Run a Python file with TileLang kernels without a GPU: `python -m tile_kernels.interpreter FILE.py [arguments]`."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from tile_kernels.core.knobs import knobs
from tile_kernels.interpreter.api import CHECKS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the file with interpreted kernels and a simulated GPU."""
    parser = argparse.ArgumentParser('python -m tile_kernels.interpreter', description=__doc__)
    parser.add_argument('--checks', choices=CHECKS, default=knobs.checks)
    parser.add_argument('--capability', default='9.0', help='compute capability of the GPU that is imitated')
    parser.add_argument('--sms', type=int, default=132, help='its number of streaming multiprocessors')
    parser.add_argument('file', help='the program')
    parser.add_argument('arguments', nargs=argparse.REMAINDER, help='its arguments')
    args = parser.parse_args(argv)
    major, minor = (int(part) for part in args.capability.split('.'))

    from tile_kernels.interpreter.cuda_device import fake_cuda
    from tile_kernels.interpreter.jit_hook import interpreting

    kept, sys.argv = sys.argv, [args.file, *args.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(args.file)))
    try:
        with fake_cuda((major, minor), args.sms), interpreting(args.checks):
            runpy.run_path(args.file, run_name='__main__')
    finally:
        sys.argv = kept
        sys.path.pop(0)
    return 0


if __name__ == '__main__':
    sys.exit(main())
