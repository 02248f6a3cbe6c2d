"""The progress bar of long work. This module imports rich, so import it only to show a bar."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def progress_bar() -> Progress:
    """A progress bar on stderr that is erased at the end; silent when stderr is not a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn('{task.description}', markup=False),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
