"""What a check says: at most 12 lines."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tile_kernels.learn.checks import Result

SIGNS = {'lean': '★', 'right': '✓', 'started': '◐', 'seen': '·', 'open': '○'}

MOST_LINES = 12


def report(result: Result) -> str:
    """The steps with their findings, and the next command."""
    from tile_kernels.learn.checks import STEPS

    exercise, name = result.exercise, name_of(result)
    lines = [f'{SIGNS[result.state]} {name} {exercise.bug if result.bug else exercise.title}']
    for step in STEPS:
        if step == result.failed:
            lines += _wrapped(f'  ✗ {step:<8}', result.words)
            break
        lines += _wrapped(f'  ✓ {step:<8}', [result.notes[step]])[:2]
    return '\n'.join([*lines[: MOST_LINES - 1], f'  {_next(result, name)}'])


def name_of(result: Result) -> str:
    """The number of the exercise, with a b for its bug."""
    return f'{result.exercise.number:02d}{"b" if result.bug else ""}'


def _wrapped(first: str, texts: list[str]) -> list[str]:
    width = max(80, min(shutil.get_terminal_size((120, 24)).columns, 160))
    rest = ' ' * len(first)
    lines = [line for text in texts for line in textwrap.wrap(text, width - len(first), break_on_hyphens=False) or ['']]
    return [(first if number == 0 else rest) + line for number, line in enumerate(lines)]


def _next(result: Result, name: str) -> str:
    if result.failed is None:
        return f'lean; next: tile-kernels learn compare {name}, then the next exercise'
    if result.bug:
        return f'next: repair it; tile-kernels learn reveal {name} shows how'
    if result.failed == 'lean':
        return f'right, but not lean yet; next: tile-kernels learn hint {name}'
    return f'next: tile-kernels learn hint {name}'
