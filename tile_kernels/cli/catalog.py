"""List the ops: purpose, tested dtypes and formats, and whether each has a backward."""

from __future__ import annotations

import argparse

import torch
from rich.padding import Padding
from rich.text import Text

from tile_kernels.cli import console
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.op import Op
from tile_kernels.core.registry import all_cases, find_ops

#: Terminals with fewer columns get two lines per op instead of a table.
TABLE_WIDTH = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `list`."""
    parser.add_argument('ops', nargs='*', metavar='OP', help='ops or families (default: all)')


def run(args: argparse.Namespace) -> int:
    """Print the table, or on a narrow terminal two lines for each op."""
    out = console.output()
    ops = sorted(find_ops(args.ops), key=lambda op: op.name)
    if out.width >= TABLE_WIDTH:
        rows = [(op.name, 'yes' if op.backward else None, headline(op), ', '.join(kinds(op))) for op in ops]
        out.print(console.table(('op', 'backward', '~what it does', '~dtypes and formats'), rows))
        return 0
    for op in ops:
        facts = ', '.join(['with backward', *kinds(op)] if op.backward else kinds(op))
        out.print(Text.assemble((op.name, 'bold'), '  ', (facts, 'dim')))
        out.print(Padding(Text(headline(op)), (0, 0, 0, 4)))
    return 0


def headline(op: Op) -> str:
    """First line of an op's docstring."""
    return (op.__doc__ or '').strip().partition('\n')[0]


def kinds(op: Op) -> list[str]:
    """Dtypes in the op's cases, and the element types of its quantization formats."""
    cases = all_cases(op)
    dtypes = [
        str(value).removeprefix('torch.') for case in cases for value in case.values() if isinstance(value, torch.dtype)
    ]
    names = [param.name for param in op.params if param.type is QuantFormat]
    formats = [QuantFormat.parse(case[name]).data.name for case in cases for name in names if name in case]
    return list(dict.fromkeys(dtypes + formats))
