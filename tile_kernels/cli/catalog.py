"""List ops and public functions: purpose, tested dtypes and formats, and whether each has a gradient."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable
from typing import Any

import torch
from rich.padding import Padding
from rich.text import Text

import tile_kernels
from tile_kernels.cli import console
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.op import Op
from tile_kernels.core.registry import all_cases, find_ops, load_ops

#: Terminals with fewer columns get two lines per name instead of a table.
TABLE_WIDTH = 160

#: Packages with public names, besides the families.
LAYERS = ('modeling', 'distributed')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `list`."""
    parser.add_argument(
        'words', nargs='*', metavar='WORD', help='an op, a family, or text to search for (default: all)'
    )


def run(args: argparse.Namespace) -> int:
    """Print the table, or on a narrow terminal two lines for each name."""
    out = console.output()
    found = sorted(find(args.words).items())
    if out.width >= TABLE_WIDTH:
        rows = [(name, 'yes' if has_gradient(it) else None, headline(it), ', '.join(kinds(it))) for name, it in found]
        out.print(console.table(('name', 'gradient', '~what it does', '~dtypes and formats'), rows))
        return 0
    for name, it in found:
        facts = ', '.join(['with gradient', *kinds(it)] if has_gradient(it) else kinds(it))
        out.print(Text.assemble((name, 'bold'), '  ', (facts, 'dim')))
        out.print(Padding(Text(headline(it)), (0, 0, 0, 4)))
    return 0


def catalog() -> dict[str, Any]:
    """All ops, and the public functions and classes that are no op of their own."""
    names: dict[str, Any] = dict(load_ops())
    known = {id(op) for op in names.values()}
    for part in (*tile_kernels.FAMILIES, *LAYERS):
        package = importlib.import_module(f'tile_kernels.{part}')
        for name in package.__all__:
            value = getattr(package, name)
            if id(value) not in known and callable(value):
                names[f'{part}.{name}'] = value
    return names


def find(words: Iterable[str]) -> dict[str, Any]:
    """What the words name: an op or public function, a family, or all names and headlines with that text."""
    names = catalog()
    words = list(words)
    if not words:
        return names
    found: dict[str, Any] = {}
    for word in words:
        chosen = {name: it for name, it in names.items() if word in (name, name.partition('.')[0])}
        text = word.lower()
        chosen = chosen or {
            name: it for name, it in names.items() if text in name.lower() or text in headline(it).lower()
        }
        found |= chosen or {op.name: op for op in find_ops([word])}  # raises, and names the nearest op
    return found


def headline(it: Any) -> str:
    """First line of a docstring."""
    return (it.__doc__ or '').strip().partition('\n')[0]


def has_gradient(it: Any) -> bool:
    """Whether an op has a gradient; a function that calls ops has theirs."""
    return isinstance(it, Op) and it.backward is not None


def kinds(it: Any) -> list[str]:
    """Dtypes in the cases of an op, and the element types of its quantization formats."""
    if not isinstance(it, Op):
        return []
    cases = all_cases(it)
    dtypes = [
        str(value).removeprefix('torch.') for case in cases for value in case.values() if isinstance(value, torch.dtype)
    ]
    names = [param.name for param in it.params if param.type is QuantFormat]
    formats = [QuantFormat.parse(case[name]).data.name for case in cases for name in names if name in case]
    return list(dict.fromkeys(dtypes + formats))
