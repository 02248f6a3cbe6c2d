"""Run one example on a CPU through the interpreter and, where there is a GPU, on the GPU as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tile_kernels.interpreter import interpret


@dataclass(frozen=True)
class Example:
    """A kernel, its tensors, and what PyTorch says the outputs must be.

    Attributes:
        kernel: The TileLang program.
        inputs: Its leading parameters.
        outputs: Its trailing parameters, written in place.
        expected: One tensor per output.
        tolerance: Largest error relative to the largest expected value; 0 asks for equal bits, which is what a
            kernel owes whenever its arithmetic is exact.
        pass_configs: Compiler switches of the kernel.
    """

    kernel: Any
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    expected: Sequence[Tensor]
    tolerance: float = 0.0
    pass_configs: Mapping[str, Any] = field(default_factory=dict)


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value, 0 only for equal tensors."""
    if torch.equal(actual, expected):
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-30))


def run_interpreted(example: Example, checks: str = 'all') -> list[Tensor]:
    """Run the example on the CPU and return its outputs."""
    outputs = [output.clone() for output in example.outputs]
    interpret(example.kernel, *example.inputs, *outputs, checks=checks, pass_configs=dict(example.pass_configs))
    return outputs


def run_compiled(example: Example) -> list[Tensor]:
    """Compile the example for the GPU of this machine, run it and return its outputs."""
    import tilelang

    kernel = tilelang.compile(example.kernel, pass_configs=dict(example.pass_configs))
    outputs = [output.cuda() for output in example.outputs]
    kernel(*(tensor.cuda() for tensor in example.inputs), *outputs)
    return [output.cpu() for output in outputs]


def verify(name: str, outputs: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> str:
    """Compare outputs with what is expected and return one line about it.

    Raises:
        ValueError: An output is further away than the tolerance allows.
    """
    worst = max(error(output, wanted) for output, wanted in zip(outputs, expected, strict=True))
    if not worst <= tolerance:
        raise ValueError(f'{name}: relative error {worst:.2e} is above {tolerance:.0e}')
    return f'{name}: equal bits' if worst == 0 else f'{name}: relative error {worst:.1e}'


def main(name: str, example: Example) -> None:
    """Run the example wherever it can run here and print one line per machine."""
    interpreted = run_interpreted(example)
    print(verify(f'{name} interpreter vs PyTorch', interpreted, example.expected, example.tolerance))
    if torch.cuda.is_available():
        compiled = run_compiled(example)
        print(verify(f'{name} GPU vs PyTorch', compiled, example.expected, example.tolerance))
        print(verify(f'{name} GPU vs interpreter', compiled, interpreted, 2 * example.tolerance))
