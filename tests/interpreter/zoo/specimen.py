"""What a zoo entry is: one kernel with a switch, wrong in one way when the switch is on and right when it is off."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

SPECIMENS: list[Specimen] = []
INNOCENTS: list[Callable[[], Launch]] = []


@dataclass(frozen=True)
class Launch:
    """A kernel and what to call it with."""

    kernel: Any
    tensors: tuple[Tensor, ...]
    pass_configs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Specimen:
    """A builder `build(bug)` and the finding its wrong form must produce at one of the lines marked `# BUG`."""

    name: str
    finding: str
    build: Callable[[bool], Launch]
    buffer: str | None

    @property
    def bug_lines(self) -> set[int]:
        """Line numbers of the guilty statements."""
        lines, first = inspect.getsourcelines(self.build)
        return {first + offset for offset, line in enumerate(lines) if line.rstrip().endswith('# BUG')}


def specimen(finding: str, buffer: str | None = None) -> Callable[[Callable[[bool], Launch]], Callable[[bool], Launch]]:
    """Enter a builder into the zoo under the name of its finding and of the buffer it is about."""

    def enter(build: Callable[[bool], Launch]) -> Callable[[bool], Launch]:
        SPECIMENS.append(Specimen(build.__name__, finding, build, buffer))
        return build

    return enter


def innocent(build: Callable[[], Launch]) -> Callable[[], Launch]:
    """Enter a builder whose kernel looks suspicious and is right."""
    INNOCENTS.append(build)
    return build
