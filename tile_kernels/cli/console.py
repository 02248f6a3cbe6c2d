"""Output of the commands: tables and progress, coloured on a terminal and plain text elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.status import Status
from rich.table import Table
from rich.text import Text

from tile_kernels.core.explain import size as size
from tile_kernels.core.progress import progress_bar as progress

__all__ = ['json_out', 'number', 'output', 'progress', 'size', 'table', 'waiting', 'wide_or_tall']

#: Columns of plain text: enough that no table wraps in a log file.
PLAIN_WIDTH = 1000


def output() -> Console:
    """The console of stdout."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def json_out(value: Any) -> None:
    """Print a value as JSON; what JSON lacks becomes text."""
    sys.stdout.write(json.dumps(value, default=_plain, indent=1) + '\n')


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.item() if hasattr(value, 'item') else str(value)


def waiting(text: str) -> Status:
    """A spinner on stderr for work of unknown length; silent when stderr is not a terminal."""
    return Console(stderr=True).status(text)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], header: bool = True) -> Table:
    """A table; a column whose heading starts with '>' is aligned right, one that starts with '~' may wrap."""
    pretty = sys.stdout.isatty()
    made = Table(box=box.SIMPLE_HEAD if pretty else None, pad_edge=False, show_edge=False, show_header=header)
    for column in columns:
        made.add_column(
            column.lstrip('>~') if pretty else column.lstrip('>~').replace('\n', ' '),
            justify='right' if column.startswith('>') else 'left',
            no_wrap=not column.startswith('~'),
            overflow='fold',
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text('–' if cell is None else str(cell)) for cell in row))
    return made


def wide_or_tall(out: Console, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> RenderableType:
    """A table, or a paragraph for each row if the console is too narrow for the whole table.

    The first cell of a row is the heading of its paragraph. Each other cell has a line with the name of its column.
    """
    made = table(columns, rows)
    if out.measure(made, options=out.options.update(max_width=PLAIN_WIDTH)).maximum <= out.width:
        return made
    names = [column.lstrip('>~').replace('\n', ' ') for column in columns]
    paragraphs: list[RenderableType] = []
    for first, *others in rows:
        lines = Table.grid(padding=(0, 2, 0, 0))
        lines.add_column(no_wrap=True)
        lines.add_column(overflow='fold')
        for name, cell in zip(names[1:], others, strict=True):
            if cell not in (None, ''):
                lines.add_row(Text(name, 'dim'), cell if isinstance(cell, Text) else Text(str(cell)))
        paragraphs += [Text(str(first), 'bold'), Padding(lines, (0, 0, 0, 4))]
    return Group(*paragraphs)


def number(value: float | None) -> str | None:
    """A number with three significant digits, without an exponent for usual values."""
    if value is None:
        return None
    magnitude = abs(value)
    if magnitude != 0 and not 1e-3 <= magnitude < 1e6:
        return f'{value:.2e}'
    return f'{value:.{0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3}f}'
