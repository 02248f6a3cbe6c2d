"""Kernels of a file on the command line: `FILE.py:NAME KEY=VALUE ...`."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tile_kernels.core.errors import ArgumentError


def is_file(word: str | None) -> bool:
    """Whether a word names a kernel of a file."""
    return word is not None and '.py:' in word


def definitions(word: str, others: Iterable[str] = ()) -> tuple[str, dict[str, Any]]:
    """The name of the kernel, and what its file defines; it must define the kernel and the other names."""
    path, _, name = word.rpartition(':')
    if not Path(path).is_file():
        raise ArgumentError(f'{path} does not exist')
    sys.path.insert(0, str(Path(path).parent))  # as `python FILE` does
    try:
        defined = runpy.run_path(path, run_name='__tile_kernels__')
    finally:
        sys.path.pop(0)
    for wanted in (name, *others):
        if wanted not in defined:
            raise ArgumentError(f'{path} must define {wanted}')
    return name, defined


def values(given: dict[str, str]) -> dict[str, Any]:
    """Values of the command line as Python literals; other text stays text."""
    return {name: _value(text) for name, text in given.items()}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
