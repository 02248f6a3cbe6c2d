"""A learner's kernel beside the answer and our op: lines, counts, predicted time."""

from __future__ import annotations

import ast
import inspect
import tempfile
from pathlib import Path

from tile_kernels.core.explain import size
from tile_kernels.core.gpus import GPUS
from tile_kernels.core.launch import on_gpu
from tile_kernels.core.registry import find_op, launches_of, typical_case
from tile_kernels.learn.checks import Failed, counted_numbers, load, numbers_of
from tile_kernels.learn.pack import packed
from tile_kernels.learn.track import Exercise
from tile_kernels.sight.count import count
from tile_kernels.sight.lower import lower
from tile_kernels.sight.model import Work, time_us, work_of
from tile_kernels.sight.subject import of_launch


def lines_of_code(source: str) -> int:
    """Lines that hold code: no comments, docstrings and blank lines."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case (
                ast.Module(body=[ast.Expr(value=ast.Constant(value=str())), _, *_])
                | ast.FunctionDef(body=[ast.Expr(value=ast.Constant(value=str())), _, *_])
            ):
                del node.body[0]
    return len(ast.unparse(tree).splitlines())


def of_file(exercise: Exercise, path: Path) -> dict[str, float]:
    """Lines and counts of a file with the exercise's builder."""
    return {'lines of code': lines_of_code(path.read_text())} | counted_numbers(load(exercise, path))


def of_op(exercise: Exercise) -> dict[str, float]:
    """Lines of our op, and its counts for the same problem if the exercise names it."""
    op = find_op(exercise.ours)
    source = Path(str(inspect.getsourcefile(op.fn))).read_text()
    found: dict[str, float] = {'lines of code': lines_of_code(source)}
    if exercise.ours_case is None:
        return found
    gpu = GPUS[exercise.devices[0]]
    with on_gpu(gpu):
        launches = launches_of(op, typical_case(op, exercise.ours_case))
    counted, works = [], list[Work]()
    for launch in launches:
        subject = of_launch(launch, gpu)
        each = count(subject, lower(subject))
        works.append(work_of(subject, each))
        counted += each
    return found | numbers_of(counted, time_us(works, gpu))


def compared(exercise: Exercise, key: str, path: Path) -> tuple[list[str], list[list[str]], list[str]]:
    """Names of columns, rows with their heading, and sentences about the differences."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f'{key}.py'
        model.write_text(packed('answers', f'{key}_{exercise.name}'))
        columns = {'answer': of_file(exercise, model), exercise.ours: of_op(exercise)}
    words = []
    try:
        columns = {'yours': of_file(exercise, path)} | columns
        words = differences(columns['yours'], columns['answer'])
    except Failed as failure:
        words = [f'yours cannot be counted yet: {failure.args[0]}']
    names = list(columns['answer'])
    rows = [[name, *(_cell(name, column.get(name)) for column in columns.values())] for name in names]
    words.append(f'counts at {exercise.lean_case.label}; times are predicted for an {exercise.devices[0].upper()}')
    if exercise.ours_case is None:
        words.append(f'{exercise.ours} solves a neighboring problem, so only its lines are listed')
    return list(columns), rows, words


def differences(mine: dict[str, float], best: dict[str, float]) -> list[str]:
    """What costs at least a tenth more than in the answer."""
    return [
        f'yours has {mine[name] / value:.2g} times the {name} of the answer'
        if value
        else f'yours has {name}: {mine[name]:g}'
        for name, value in best.items()
        if name not in ('lines of code', 'predicted us') and mine[name] > 1.1 * value
    ]


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return '–'
    return size(int(value)) if name.startswith('bytes') else f'{value:.4g}'
