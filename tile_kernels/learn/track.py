"""The exercises of the learning track: what one is, and where to find it."""

from __future__ import annotations

import functools
import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tile_kernels.core.errors import ArgumentError

ROOT = Path(__file__).parent / 'exercises'

LEVELS = ('beginner', 'intermediate', 'expert')

#: Shape and dtype of tensors that the check allocates.
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Case:
    """One call of the kernel.

    Attributes:
        label: what is special about it, e.g. 'a tail in rows'.
        static: keyword arguments of the learner's builder.
        sizes: what `inputs` and `outputs` need besides `static`.
    """

    label: str
    static: dict[str, Any]
    sizes: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """A size or a static argument."""
        return self.sizes[name] if name in self.sizes else self.static[name]


@dataclass(frozen=True)
class Condition:
    """A condition on exact counts.

    Attributes:
        sentence: what must hold, e.g. 'x is read once'.
        against: takes `lean.Facts`; returns None, or what was counted instead, in one sentence.
    """

    sentence: str
    against: Callable[[Any], str | None]


@dataclass(frozen=True)
class Target:
    """What the kernel should reach on a GPU.

    Attributes:
        kind: 'copy' (percent of a copy of the same bytes), 'tflops', 'us' (in a graph), or 'ratio' (times faster than
            the baseline, both in a graph).
        value: the number to reach; provisional until it is measured.
        case: the shape.
        flops: operations of one call, for 'tflops'.
        baseline: for 'ratio', what is timed beside the kernel: `baseline(case, **inputs)`.
    """

    kind: str
    value: float
    case: Case
    flops: float = 0.0
    baseline: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        number: from 1 on.
        name: the name of its folder, without the number.
        title: the task in a few words.
        level: 'beginner', 'intermediate' or 'expert'.
        entry: the function of `task.py`; `builder(**static)` returns a PrimFunc, or a tuple of them in launch order.
        launches: for every launch the names of its arguments in order: inputs, outputs and workspaces.
        inputs: makes tensors or numbers from the case and a seeded generator; also called on fake tensors.
        outputs: shapes and dtypes of the outputs, which the check fills with NaN or nonsense.
        reference: `reference(case, **inputs)` returns the expected outputs by name, in plain PyTorch.
        cases: small calls; at least four.
        lean: conditions on counts at `lean_case`.
        lean_case: a model-sized call, which is only lowered and counted.
        target: what to reach on a GPU.
        ours: the op of this package for the same problem, or the nearest one, e.g. 'transpose.batched_transpose'.
        ours_case: entries of the op's case that make it as large as `lean_case`; None compares lines only.
        bound: the allowed absolute error of an output, as a number or tensor; None means the same bits.
        workspaces: shapes and dtypes of further tensors.
        strict: whether an access outside of a tensor is an error even where TileLang guards it by itself.
        devices: the GPUs it must lower for; counts are those of the first.
        real: whether counts need the values of index tensors; then `inputs` makes real tensors for `lean_case`.
        zeroed: the workspaces that start as zero; the others start as nonsense.
        bug: what the planted bug is about, in one line.
        docs: the section of the docs that explains the idea, e.g. 'layouts-and-lint.md#layouts'.
    """

    number: int
    name: str
    title: str
    level: str
    entry: str
    launches: tuple[tuple[str, ...], ...]
    inputs: Callable[[Case, torch.Generator], dict[str, Any]]
    outputs: Callable[[Case], Shapes]
    reference: Callable[..., dict[str, torch.Tensor]]
    cases: tuple[Case, ...]
    lean: tuple[Condition, ...]
    lean_case: Case
    target: Target
    ours: str
    ours_case: dict[str, Any] | None = None
    bound: Callable[[Case, str, torch.Tensor], Any] | None = None
    workspaces: Callable[[Case], Shapes] | None = None
    zeroed: tuple[str, ...] = ()
    strict: bool = False
    devices: tuple[str, ...] = ('h200', 'a100')
    real: bool = False
    bug: str | None = None
    docs: str = 'writing-an-op.md#traps-of-tilelang-0115'

    @property
    def label(self) -> str:
        """Its number and name, as its folder is called."""
        return f'{self.number:02d}_{self.name}'

    @property
    def folder(self) -> Path:
        """The folder with its files."""
        return ROOT / self.label

    def text(self, file: str) -> str:
        """One of its files, e.g. `lesson.md`."""
        return (self.folder / file).read_text(encoding='utf-8')

    def hints(self) -> list[str]:
        """The hints in order; headings separate them."""
        parts = re.split(r'^#+ .*$', self.text('hints.md'), flags=re.MULTILINE)
        return [part.strip() for part in parts if part.strip()]


@functools.cache
def exercises() -> dict[int, Exercise]:
    """All exercises by number."""
    found = [runpy.run_path(str(path))['EXERCISE'] for path in sorted(ROOT.glob('[0-9][0-9]_*/spec.py'))]
    return {exercise.number: exercise for exercise in found}


def parse(name: str | int) -> tuple[Exercise, bool]:
    """The exercise of a name such as `5`, '05' or '05b', and whether its planted bug is meant."""
    match = re.fullmatch(r'0*(\d+)(b?)', str(name).strip().lower())
    exercise = exercises().get(int(match[1])) if match else None
    if match is None or exercise is None or (match[2] and exercise.bug is None):
        known = ', '.join(f'{number:02d}' for number in exercises())
        raise ArgumentError(f'learn: the exercise must be one of {known}, or with a b for its bug, got {str(name)!r}')
    return exercise, bool(match[2])
