"""Time a learner's kernel on a GPU, and compare it with the target of the exercise.

`tools/learn_targets.py` times our answers and writes `targets.json`. A target in there is at most 95 % of what our
answer reached, so it can be beaten. An exercise without a measured target has a provisional one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tile_kernels.core.errors import ArgumentError, UnsupportedError
from tile_kernels.learn.checks import Submission, arguments, made_by_check
from tile_kernels.learn.track import Case, Exercise
from tile_kernels.testing.bench import benchmark_kernel, graph_time

#: What the kinds of targets are called, and whether more is better.
KINDS = {
    'copy': ('% of copy', True),
    'tflops': ('TFLOP/s', True),
    'us': ('us', False),
    'ratio': ('times as fast', True),
}

#: The measured targets by the number of the exercise: what our answer reached, on which GPU, at which commit.
TARGETS = Path(__file__).parent / 'targets.json'

#: A target is this share of the speed of our answer.
SHARE = 0.95


def target_of(exercise: Exercise) -> tuple[float, bool]:
    """The number to reach, and whether it was measured; otherwise it is provisional."""
    known = json.loads(TARGETS.read_text(encoding='utf-8')) if TARGETS.exists() else {}
    found = known.get(f'{exercise.number:02d}')
    if found is None:
        return exercise.target.value, False
    return share_of(found['reached'], KINDS[exercise.target.kind][1]), True


def share_of(reached: float, more: bool) -> float:
    """What `SHARE` of the speed of our answer is, rounded to three digits towards the easier side."""
    value = reached * SHARE if more else reached / SHARE
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return round((math.floor if more else math.ceil)(value / step) * step, 9)


def need_gpu() -> None:
    """Raise if there is no GPU."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            'learn: speed needs a GPU, found none; tile-kernels learn compare predicts the time of your kernel'
        )


def launcher(submission: Submission, case: Case, tensors: dict[str, Any]) -> Callable[[], None]:
    """A function that launches the compiled kernels of a case on tensors of the GPU."""
    import tilelang

    kernels = submission.kernels(case, {})
    calls = [
        (tilelang.compile(function, pass_configs=kernels.pass_configs), [tensors[name] for name in names])
        for function, names in zip(kernels.functions, submission.exercise.launches, strict=True)
    ]

    def call() -> None:
        for kernel, given in calls:
            kernel(*given)

    return call


def measure(submission: Submission) -> tuple[float, str]:
    """The number that the target is about, and one line about it."""
    return timed(submission.exercise, *prepared(submission))


def prepared(submission: Submission) -> tuple[dict[str, Any], Callable[[], None]]:
    """The tensors of the target's case and a function that launches the compiled kernels on them."""
    need_gpu()
    case = submission.exercise.target.case
    tensors = arguments(submission.exercise, case, 'cuda')
    return tensors, launcher(submission, case, tensors)


def timed(exercise: Exercise, tensors: dict[str, Any], call: Callable[[], None]) -> tuple[float, str]:
    """The number that the target is about, and one line about it."""
    target = exercise.target
    made = made_by_check(exercise, target.case)
    inputs = {name: x for name, x in tensors.items() if name not in made}
    moved = [x for x in inputs.values() if isinstance(x, torch.Tensor)]
    moved += [tensors[name] for name in exercise.outputs(target.case)]
    result = benchmark_kernel(call, num_bytes=sum(x.numel() * x.element_size() for x in moved), device='cuda')
    if target.kind == 'copy':
        number = result.pct_of_copy or 0.0
    elif target.kind == 'tflops':
        number = target.flops / result.median * 1e-9
    elif target.kind == 'us':
        number = 1e3 * graph_time(call)
    elif target.baseline is not None:
        number = graph_time(target.baseline, (target.case,), inputs) / graph_time(call)
    else:
        raise ArgumentError(f'learn: exercise {exercise.label} names nothing to compare its time with')
    unit, more = KINDS[target.kind]
    wanted, measured = target_of(exercise)
    verdict = 'reached' if (number >= wanted if more else number <= wanted) else 'not reached'
    kind = 'target' if measured else 'provisional target'
    return number, f'{number:.3g} {unit}, {kind} {wanted:g} {unit}: {verdict} ({result})'
