"""Time a learner's kernel on a GPU, and compare it with the target of the exercise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tile_kernels.core.errors import ArgumentError, UnsupportedError
from tile_kernels.learn.checks import Submission, arguments
from tile_kernels.testing.bench import benchmark_kernel, graph_time

#: What the kinds of targets are called, and whether more is better.
KINDS = {
    'copy': ('% of copy', True),
    'tflops': ('TFLOP/s', True),
    'us': ('us', False),
    'ratio': ('times as fast', True),
}


def need_gpu() -> None:
    """Raise if there is no GPU."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            'learn: speed needs a GPU, found none; tile-kernels learn compare predicts the time of your kernel'
        )


def launcher(submission: Submission, tensors: dict[str, Any]) -> Callable[[], None]:
    """A function that launches the compiled kernels on tensors of the GPU."""
    import tilelang

    exercise = submission.exercise
    kernels = submission.kernels(exercise.target.case, {})
    calls = [
        (tilelang.compile(function, pass_configs=kernels.pass_configs), [tensors[name] for name in names])
        for function, names in zip(kernels.functions, exercise.launches, strict=True)
    ]

    def call() -> None:
        for kernel, given in calls:
            kernel(*given)

    return call


def measure(submission: Submission) -> tuple[float, str]:
    """The number that the target is about, and one line about it."""
    need_gpu()
    exercise, target = submission.exercise, submission.exercise.target
    tensors = arguments(exercise, target.case, 'cuda')
    call = launcher(submission, tensors)
    inputs = {name: tensors[name] for name in exercise.inputs(target.case, torch.Generator())}
    moved = [x for x in inputs.values() if isinstance(x, torch.Tensor)] + [
        tensors[n] for n in exercise.outputs(target.case)
    ]
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
    verdict = 'reached' if (number >= target.value if more else number <= target.value) else 'not reached'
    return number, f'{number:.3g} {unit}, target {target.value:g} {unit}: {verdict} ({result})'
