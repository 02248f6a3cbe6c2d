"""The progress bar of long work. This module imports rich, so import it only to show a bar."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

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


def progress_of(show: bool) -> Any:
    """A progress bar on a terminal, lines in a log, or nothing."""
    if show and not sys.stderr.isatty():
        return Lines()
    bar = progress_bar()
    bar.disable = bar.disable or not show
    return bar


class Lines:
    """Progress as lines on stderr, for logs: at most one every 10 s and one at the end, with the time left."""

    EVERY_S = 10.0

    def __init__(self) -> None:
        self.done = self.total = 0
        self.what = ''
        self.start = self.last = time.monotonic()
        self.lock = threading.Lock()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def add_task(self, what: str, total: int) -> int:
        """Begin; there is one task."""
        self.what, self.total = what, total
        return 0

    def update(self, task: int, description: str) -> None:
        """Change the text before the numbers."""
        self.what = description

    def advance(self, task: int) -> None:
        """Count one item, and print a line if it is time."""
        with self.lock:
            self.done += 1
            now = time.monotonic()
            if self.done < self.total and now - self.last < self.EVERY_S:
                return
            self.last, spent = now, now - self.start
            left = spent / self.done * (self.total - self.done)
            ahead = f', about {left:.0f} s left' if self.done < self.total else ''
            sys.stderr.write(f'{self.what} {self.done} of {self.total}, {spent:.0f} s{ahead}\n')
            sys.stderr.flush()
