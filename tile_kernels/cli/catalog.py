"""List the ops: what each does, the dtypes and formats it is tested with, whether it has a backward."""

from __future__ import annotations

import argparse

import torch

from tile_kernels.cli import console
from tile_kernels.cli.selection import all_cases, find_ops
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.op import Op


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `list`."""
    parser.add_argument('ops', nargs='*', metavar='OP', help='ops or families (default: all)')


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    rows = [(op.name, headline(op), ', '.join(kinds(op)), 'yes' if op.backward else None) for op in find_ops(args.ops)]
    console.output().print(console.table(('op', '~what it does', '~dtypes and formats', 'backward'), rows))
    return 0


def headline(op: Op) -> str:
    """First line of an op's docstring."""
    return (op.__doc__ or '').strip().partition('\n')[0]


def kinds(op: Op) -> list[str]:
    """Dtypes among the op's cases, and the elements its quantisation formats store."""
    cases = all_cases(op)
    dtypes = [
        str(value).removeprefix('torch.') for case in cases for value in case.values() if isinstance(value, torch.dtype)
    ]
    names = [param.name for param in op.params if param.type is QuantFormat]
    formats = [QuantFormat.parse(case[name]).data.name for case in cases for name in names if name in case]
    return list(dict.fromkeys(dtypes + formats))
