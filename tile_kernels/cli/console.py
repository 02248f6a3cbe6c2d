"""Output of the commands: tables and progress, coloured on a terminal and plain text elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from tile_kernels.core.explain import size as size
from tile_kernels.core.progress import progress_bar as progress

__all__ = ['json_out', 'number', 'output', 'progress', 'size', 'table', 'waiting']

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


def number(value: float | None) -> str | None:
    """A number with three significant digits, without an exponent for usual values."""
    if value is None:
        return None
    magnitude = abs(value)
    if magnitude != 0 and not 1e-3 <= magnitude < 1e6:
        return f'{value:.2e}'
    return f'{value:.{0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3}f}'
