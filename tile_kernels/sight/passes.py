"""The compiler passes that changed a kernel: seconds, lines, and the diff of one."""

from __future__ import annotations

import difflib
import time
from dataclasses import dataclass, field
from typing import Any

from tile_kernels.core.errors import ArgumentError
from tile_kernels.sight.layouts import lower_observed
from tile_kernels.sight.subject import Subject, resolve


@dataclass(frozen=True)
class Pass:
    """One run of a compiler pass that changed the kernel.

    Attributes:
        kernel: the name of the kernel.
        name: the name of the pass.
        seconds: the duration, including the passes that it calls.
        added: lines of TIR that the pass added.
        removed: lines of TIR that the pass removed.
        diff: the changed lines as a unified diff.
    """

    kernel: str
    name: str
    seconds: float
    added: int
    removed: int
    diff: str = field(repr=False)

    def __str__(self) -> str:
        return f'{self.name:<48}{self.seconds:8.3f} s {"+" + str(self.added):>6} {"-" + str(self.removed):>6}'


def passes(kernel: Any, *args: Any, name: str | None = None, device: str = 'h200', **named: Any) -> list[Pass]:
    """The passes that changed a kernel, in the order in which they ended.

    Args:
        kernel: a kernel, a builder or an op, as `tile_kernels.sight.subject.resolve` takes it.
        args: arguments of the kernel or the builder.
        name: only the runs of this pass, e.g. `'tl.LayoutInference'` or `'LayoutInference'`.
        device: the GPU to compile for.
        named: dynamic extents, arguments of the builder or entries of the case.
    """
    subjects = resolve(kernel, *args, device=device, **named)
    found = [item for subject in subjects for item in passes_of(subject)]
    if name is None:
        return found
    chosen = [item for item in found if name in (item.name, item.name.rpartition('.')[2])]
    if not chosen:
        known = ', '.join(dict.fromkeys(item.name for item in found))
        raise ArgumentError(f'passes: name must be a pass that changed the kernel, got {name!r}; those are {known}')
    return chosen


def passes_of(subject: Subject) -> list[Pass]:
    """The passes that changed one launch."""
    started: list[tuple[str, float]] = []
    found: list[Pass] = []

    def before(module: Any, name: str) -> None:
        started.append((module.script(), time.perf_counter()))

    def after(module: Any, name: str) -> None:
        end = time.perf_counter()
        text, start = started.pop()
        lines = list(difflib.unified_diff(text.splitlines(), module.script().splitlines(), lineterm='', n=1))[2:]
        if lines:
            added = sum(line.startswith('+') for line in lines)
            removed = sum(line.startswith('-') for line in lines)
            found.append(Pass(subject.name, name, end - start, added, removed, '\n'.join(lines)))

    lower_observed(subject, after, before)
    return found
