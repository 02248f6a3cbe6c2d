"""Check a learner's kernel: right, covered, fits, lean. The first failure ends the check with one sentence."""

from __future__ import annotations

import importlib.util
import itertools
import linecache
import math
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tile_kernels.core import nvcc
from tile_kernels.core.errors import ArgumentError, CompileError, TileKernelsError, UnsupportedError
from tile_kernels.interpreter import Branch, InterpreterError, interpret
from tile_kernels.interpreter.observe import LastWriter
from tile_kernels.learn.lean import Facts
from tile_kernels.learn.track import Case, Exercise, Shapes
from tile_kernels.sight.count import Counts, count
from tile_kernels.sight.errors import explain_error
from tile_kernels.sight.limits import reason_against
from tile_kernels.sight.lower import Lowered, lower
from tile_kernels.sight.model import time_us, work_of
from tile_kernels.sight.subject import Subject, resolve

STEPS = ('right', 'covered', 'fits', 'lean')
SEED = 20


@dataclass
class Result:
    """What a check found.

    Attributes:
        exercise: the exercise.
        bug: whether its planted bug was checked.
        failed: the step that failed, or None.
        words: why it failed, one sentence in each line.
        notes: what the passed steps found, by step.
        numbers: bytes, sectors and other counts at the lean case.
    """

    exercise: Exercise
    bug: bool = False
    failed: str | None = None
    words: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """'lean', 'right' or 'started'; a bug that makes a kernel slow is no kernel that is right."""
        if self.bug:
            return 'lean' if self.failed is None else 'started'
        return 'lean' if self.failed is None else 'right' if self.failed == 'lean' else 'started'

    @property
    def headline(self) -> str:
        """One line: the state, the exercise, and why a step failed."""
        from tile_kernels.learn.report import SIGNS, name_of

        reason = f': {self.failed}: {self.words[0]}' if self.failed is not None else ''
        title = f'bug: {self.exercise.bug}' if self.bug else self.exercise.title
        return f'{SIGNS[self.state]} {name_of(self)} {title}{reason}'

    def __str__(self) -> str:
        from tile_kernels.learn.report import report

        return report(self)


class Failed(Exception):
    """A step failed; its arguments are the sentences."""


@dataclass(frozen=True)
class Kernels:
    """The kernels that a learner's builder returned for one set of static arguments."""

    functions: tuple[Any, ...]
    pass_configs: dict[str, Any]


@dataclass(frozen=True)
class Submission:
    """A learner's builder, and the file that it is in."""

    exercise: Exercise
    builder: Any
    file: str

    def kernels(self, case: Case, known: dict[str, Kernels]) -> Kernels:
        """The kernels of a case; the same static arguments are built once."""
        key = repr(sorted(case.static.items()))
        if key not in known:
            known[key] = self._build(case)
        return known[key]

    def _build(self, case: Case) -> Kernels:
        get = getattr(self.builder, 'get_tir', self.builder)  # of a @tilelang.jit function
        try:
            with nvcc.quiet():
                made = get(**case.static)
        except NotImplementedError as error:
            raise Failed(f'{self.exercise.entry} is not finished: {error}{_at(error, self.file)}') from error
        except Exception as error:
            reason = str(explain_error(error)).partition('\n')[0]
            raise Failed(
                f'{self.exercise.entry} failed with {type(error).__name__}: {reason}{_at(error, self.file)}'
            ) from error
        functions = made if isinstance(made, (tuple, list)) else (made,)
        functions = tuple(getattr(function, 'prim_func', function) for function in functions)
        wanted = self.exercise.launches
        if not all(hasattr(function, 'buffer_map') for function in functions):
            got = type(next(f for f in functions if not hasattr(f, 'buffer_map'))).__name__
            raise Failed(f'{self.exercise.entry} must return a kernel, a function below @T.prim_func, got {got}')
        if len(functions) != len(wanted):
            raise Failed(f'{self.exercise.entry} must return {len(wanted)} kernels, got {len(functions)}')
        for function, names in zip(functions, wanted, strict=True):
            if len(function.params) != len(names):
                listed = ', '.join(names)
                raise Failed(f'the kernel must take {len(names)} arguments ({listed}), got {len(function.params)}')
        configs = getattr(self.builder, 'pass_configs', None) or {}
        return Kernels(functions, {str(getattr(key, 'value', key)): value for key, value in configs.items()})


def load(exercise: Exercise, path: Path) -> Submission:
    """The builder in a file, read afresh."""
    linecache.checkcache(str(path))
    module = _module(path)
    builder = getattr(module, exercise.entry, None)
    if not callable(builder):
        raise Failed(f'{path.name} must define the function {exercise.entry}')
    return Submission(exercise, builder, str(path))


_numbers = itertools.count()


def _module(path: Path) -> ModuleType:
    name = f'_tile_kernels_learn_{next(_numbers)}'
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ArgumentError(f'learn: the file must be Python, got {path}')
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # TileLang looks a kernel's names up there
    try:
        # our own future imports must not hold in it: TileLang needs annotations as values
        exec(compile(path.read_bytes(), str(path), 'exec', dont_inherit=True), module.__dict__)
    except SyntaxError as error:
        raise Failed(f'{path.name} is not Python: {error.msg} (line {error.lineno})') from error
    except Exception as error:
        raise Failed(
            f'{path.name} cannot be imported: {type(error).__name__}: {error}{_at(error, str(path))}'
        ) from error
    return module


def _at(error: BaseException, file: str) -> str:
    """The last line of the learner's file on the way to an error."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f' (line {lines[-1]})' if lines else ''


def check_submission(submission: Submission, bug: bool = False, resources: bool = False) -> Result:
    """Run the steps in order until one fails; `resources` also compiles with nvcc, if it is there."""
    result = Result(submission.exercise, bug)
    known: dict[str, Kernels] = {}
    step = STEPS[0]
    try:
        branches = _right(submission, known, result)
        step = 'covered'
        _covered(branches, submission, result)
        step = 'fits'
        facts = _fits(submission, known, result, resources)
        step = 'lean'
        _lean(submission.exercise, facts, result)
    except Failed as failure:
        result.failed, result.words = step, list(failure.args)
    return result


# Right ------------------------------------------------------------------------------------------


def poisoned(shapes: Shapes, zeroed: tuple[str, ...] = (), device: str = 'cpu') -> dict[str, Tensor]:
    """Tensors whose bytes are nonsense: NaN for floats, large values for integers."""
    made = {}
    for name, (shape, dtype) in shapes.items():
        made[name] = torch.zeros(shape, dtype=dtype, device=device)
        if name not in zeroed and made[name].numel():
            made[name].view(torch.uint8).fill_(127 if dtype != torch.bool else 1)
            if dtype.is_floating_point:
                made[name].copy_(torch.full((), math.nan).to(dtype))
    return made


def made_by_check(exercise: Exercise, case: Case) -> Shapes:
    """Shapes of the tensors that the check allocates: outputs and workspaces."""
    return exercise.outputs(case) | (exercise.workspaces(case) if exercise.workspaces else {})


def arguments(exercise: Exercise, case: Case, device: str = 'cpu') -> dict[str, Any]:
    """Inputs, outputs and workspaces of a case by name."""
    inputs = exercise.inputs(case, torch.Generator().manual_seed(SEED))
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    return moved | poisoned(made_by_check(exercise, case), exercise.zeroed, device)


def _right(submission: Submission, known: dict[str, Kernels], result: Result) -> list[Branch]:
    exercise = submission.exercise
    branches: list[Branch] = []
    for case in exercise.cases:
        tensors = arguments(exercise, case)
        written = made_by_check(exercise, case)
        inputs = {name: x for name, x in tensors.items() if name not in written}
        before = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
        try:
            branches += _run(submission, case, known, tensors)
            expected = exercise.reference(case, **before)
            _compare(submission, case, known, tensors, expected)
            for name, x in before.items():
                if isinstance(x, Tensor) and _wrong(tensors[name], x, None).any():
                    raise Failed(f'the kernel changes its input {name}')
        except Failed as failure:
            raise Failed(f'{case.label}{_sizes(case)}: {failure.args[0]}', *failure.args[1:]) from failure
    result.notes['right'] = f'{len(exercise.cases)} cases: {", ".join(case.label for case in exercise.cases)}'
    return branches


def _sizes(case: Case) -> str:
    numbers = [f'{name}={value}' for name, value in (case.static | case.sizes).items() if type(value) is int]
    return f' ({", ".join(numbers)})' if numbers else ''


def _run(
    submission: Submission, case: Case, known: dict[str, Kernels], tensors: dict[str, Any], observers: Any = None
) -> list[Branch]:
    """Run every launch of a case in the interpreter."""
    exercise = submission.exercise
    kernels = submission.kernels(case, known)
    branches: list[Branch] = []
    for number, (function, names) in enumerate(zip(kernels.functions, exercise.launches, strict=True)):
        try:
            report = interpret(
                function,
                *(tensors[name] for name in names),
                checks='all',
                strict=exercise.strict,
                pass_configs=kernels.pass_configs,
                observer=None if observers is None else observers[number],
            )
        except InterpreterError as error:
            text = str(error).removeprefix(f'{error.kernel}: ')
            text = text.replace(f', at {submission.file}:{error.line}', f', in line {error.line}')
            raise Failed(f'{type(error).__name__}: {text}') from error
        except (TypeError, ValueError) as error:  # the tensors do not fit the kernel's parameters
            raise Failed(str(error).partition('\n')[0]) from error
        branches += report.branches
    return branches


def _bits(x: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def _wrong(got: Tensor, expected: Tensor, allowed: Any) -> Tensor:
    """Where two tensors differ: in their bits, or by more than what is allowed; NaN equals NaN."""
    if not got.dtype.is_floating_point:
        return got != expected
    differ = _bits(got) != _bits(expected)
    a, b = got.double(), expected.double()
    if allowed is not None:
        near = (a - b).abs() <= torch.as_tensor(allowed, dtype=torch.float64)
        differ &= ~(near | (a == b))
    return differ & ~(a.isnan() & b.isnan())


def _compare(
    submission: Submission, case: Case, known: dict[str, Kernels], tensors: dict[str, Any], expected: dict[str, Tensor]
) -> None:
    exercise = submission.exercise
    for name, wanted in expected.items():
        got = tensors[name]
        allowed = exercise.bound(case, name, wanted) if exercise.bound is not None else None
        wrong = _wrong(got, wanted.to(got.dtype), allowed)
        if not wrong.any():
            continue
        flat = int(wrong.reshape(-1).to(torch.uint8).argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape))
        place = f'{name}[{", ".join(map(str, index))}]'
        number, right = got[index].item(), wanted[index].item()
        within = ' (allowed error exceeded)' if allowed is not None else ''
        who = _writer(submission, case, known, name, flat)
        raise Failed(
            f'{place} is {number:.9g}, expected {right:.9g}{within}; {who}',
            f'{int(wrong.sum())} of {got.numel()} elements of {name} are wrong',
        )


def _writer(submission: Submission, case: Case, known: dict[str, Kernels], name: str, flat: int) -> str:
    """Which block, thread and line wrote an element last; the case runs again for it."""
    exercise = submission.exercise
    found = 'no thread wrote it'
    functions = submission.kernels(case, known).functions
    names = [
        str(function.buffer_map[function.params[launch.index(name)]].name) if name in launch else ''
        for function, launch in zip(functions, exercise.launches, strict=True)
    ]
    observers = [LastWriter(own, flat) for own in names]
    _run(submission, case, known, arguments(exercise, case), observers)
    for observer in observers:
        found = str(observer) if observer.line else found
    return found


# Covered ----------------------------------------------------------------------------------------


def _covered(branches: list[Branch], submission: Submission, result: Result) -> None:
    own = [branch for branch in branches if Path(branch.file).name == Path(submission.file).name]
    ran = {(branch.line, branch.side) for branch in own if branch.ran}
    for branch in own:
        if (branch.line, branch.side) in ran:
            continue
        truth = 'true' if branch.side == 'then' else 'false'
        text = linecache.getline(submission.file, branch.line).strip()
        raise Failed(
            f'no case makes the condition {truth} in line {branch.line}: {text}',
            'remove the condition, or correct it: it decides nothing',
        )
    lines = {branch.line for branch in own}
    result.notes['covered'] = f'both sides of {len(lines)} conditions ran' if lines else 'there are no conditions'


# Fits -------------------------------------------------------------------------------------------


def _subjects(
    submission: Submission, kernels: Kernels, case: Case, device: str
) -> tuple[list[Subject], dict[str, Any]]:
    """The launches of a case on a GPU, and the arguments that they are counted for."""
    exercise = submission.exercise
    with nullcontext() if exercise.real else FakeTensorMode():
        tensors = arguments(exercise, case)
    found = []
    for function, names in zip(kernels.functions, exercise.launches, strict=True):
        given = [tensors[name] for name in names]
        try:
            found += resolve(function, *given, device=device, pass_configs=kernels.pass_configs)
        except TileKernelsError as error:
            raise Failed(str(error)) from error
    return found, tensors


def _lowered(subjects: list[Subject], device: str) -> list[Lowered]:
    try:
        return [lower(subject) for subject in subjects]
    except CompileError as error:
        raise Failed(f'{device}: {error}') from error


def _shared(lowered: Lowered) -> int:
    return max(int(function.attrs.get('dyn_shared_memory_buf', 0)) for function in lowered.functions.values())


def _fits(submission: Submission, known: dict[str, Kernels], result: Result, resources: bool) -> Facts:
    """Lower the launches for every GPU, and count them on the first."""
    exercise, case = submission.exercise, submission.exercise.lean_case
    kernels = submission.kernels(case, known)
    first, *others = exercise.devices
    subjects, tensors = _subjects(submission, kernels, case, first)
    lowered = _lowered(subjects, first)
    counted = [count(subject, each) for subject, each in zip(subjects, lowered, strict=True)]
    limits = [(counts, subject.gpu) for subject, each in zip(subjects, counted, strict=True) for counts in each]
    for device in others:
        there, _ = _subjects(submission, kernels, case, device)
        for subject, each, counts in zip(there, _lowered(there, device), counted, strict=True):
            limits.append((replace(counts[0], shared=_shared(each)), subject.gpu))
    reason = next(filter(None, (reason_against(*each) for each in limits)), None)
    if reason is not None:
        raise Failed(reason)
    works = [work_of(subject, each) for subject, each in zip(subjects, counted, strict=True)]
    us = time_us(works, subjects[0].gpu)
    every = [
        _renamed(counts, _names(subject, names))
        for subject, each, names in zip(subjects, counted, exercise.launches, strict=True)
        for counts in each
    ]
    result.numbers = numbers_of(every, us)
    shared = max(counts.shared for counts in every) / 1024
    note = f'{" and ".join(exercise.devices)}: {every[0].threads} threads and {shared:.3g} KB of shared memory a block'
    result.notes['fits'] = note + (
        _compiled([each.source for each in lowered], subjects[0], first) if resources else ''
    )
    sizes = {name: x.numel() * x.element_size() for name, x in tensors.items() if isinstance(x, Tensor)}
    return Facts(case, tuple(every), tuple(each.source for each in lowered), sizes)


def _compiled(sources: list[str], subject: Subject, device: str) -> str:
    """Registers of a thread by nvcc; spills are a failure."""
    try:
        found = [nvcc.resources(source, subject.gpu.target) for source in sources]
    except UnsupportedError:
        return ''
    except CompileError as error:
        raise Failed(f'{device}: nvcc: {error}') from error
    spills = sum(each['spill_stores'] + each['spill_loads'] for each in found)
    if spills:
        raise Failed(f'{device}: a thread needs too many registers: {spills} bytes spill to memory')
    return f'; {max(each["registers"] for each in found)} registers a thread'


def _names(subject: Subject, names: tuple[str, ...]) -> dict[str, str]:
    """Names of the exercise by those that the learner gave the parameters."""
    function = subject.prim_func
    own = [function.buffer_map[p].name if p in function.buffer_map else p.name for p in function.params]
    return dict(zip(map(str, own), names, strict=True))


def _renamed(counts: Counts, names: dict[str, str]) -> Counts:
    accesses = [replace(a, buffer=names.get(a.buffer, a.buffer)) if a.space == 'global' else a for a in counts.accesses]
    return replace(counts, accesses=accesses)


def numbers_of(counted: list[Counts], us: float) -> dict[str, float]:
    """Totals of all launches."""
    accesses = [a for counts in counted for a in counts.accesses]
    return {
        'bytes read': float(sum(a.bytes for a in accesses if a.space == 'global' and not a.writes)),
        'bytes written': float(sum(a.bytes for a in accesses if a.space == 'global' and a.writes)),
        'sectors': float(sum(a.sectors for a in accesses)),
        'shared-memory passes': float(sum(a.wavefronts for a in accesses)),
        'product FLOP': float(sum(sum(counts.flops.values()) for counts in counted)),
        'launches': len(counted),
        'predicted us': us,
    }


# Lean -------------------------------------------------------------------------------------------


def _lean(exercise: Exercise, facts: Facts, result: Result) -> None:
    for condition in exercise.lean:
        against = condition.against(facts)
        if against is not None:
            raise Failed(against, f'to be lean: {condition.sentence}')
    result.notes['lean'] = ', '.join(condition.sentence for condition in exercise.lean)


def counted_numbers(submission: Submission) -> dict[str, float]:
    """The counts of a kernel at its lean case."""
    result = Result(submission.exercise)
    _fits(submission, {}, result, resources=False)
    return result.numbers


def check_file(exercise: Exercise, path: Path, bug: bool = False, resources: bool = False) -> Result:
    """Check the builder in a file."""
    try:
        return check_submission(load(exercise, path), bug, resources)
    except Failed as failure:
        return Result(exercise, bug, STEPS[0], list(failure.args))


def check_builder(exercise: Exercise, kernel: Callable[..., Any], bug: bool = False) -> Result:
    """Check a builder that exists already, as in a notebook."""
    function = getattr(kernel, 'orig_func', kernel)
    code = getattr(function, '__code__', None)
    file = code.co_filename if code is not None else ''
    return check_submission(Submission(exercise, kernel, file), bug)
