"""What a worker does with one config: run it from poisoned outputs, compare the result, and time it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tile_kernels.core.cases import Case
from tile_kernels.core.jit import Config, Kernel
from tile_kernels.core.launch import forced_config
from tile_kernels.core.op import Op
from tile_kernels.testing.bench import benchmark_kernel, graph_time
from tile_kernels.testing.contract import Outcome, cases_of, check_kernel, compare
from tile_kernels.testing.poison import poisoned

#: Milliseconds of warm-up and of timed calls, and replays of a graph of 20 calls.
Effort = tuple[float, float, int]


@dataclass(frozen=True)
class Times:
    """Microseconds of a call: with a cold L2 the median and two percentiles, and inside a CUDA graph."""

    us: float
    p20: float
    p80: float
    graph_us: float | None = None


class Run(Protocol):
    """One config of a problem; it can be sent to another process."""

    @property
    def config(self) -> Config:
        """The config."""

    def outcome(self) -> Outcome:
        """The outputs by name, starting from poisoned memory; raises if they differ from the reference."""

    def calling(self) -> AbstractContextManager[Callable[[], Any]]:
        """A context that holds a function to time."""


#: (run, effort) -> times.
Timer = Callable[[Run, Effort], Times]


def check(run: Run, base: Path | None) -> None:
    """Check a config against the reference, and against the bits in `base`, which the first good config writes."""
    outcome = run.outcome()
    if base is None:
        return
    if not base.exists():
        torch.save(outcome, base)
        return
    try:
        compare('bits', outcome, torch.load(base), 'bitwise')
    except AssertionError as error:
        raise AssertionError(f'changes the {error}; allow_numeric=True accepts that') from error


def gpu_times(run: Run, effort: Effort) -> Times:
    """The times of a config by the timer of `bench`."""
    warmup, rep, replays = effort
    with run.calling() as call:
        cold = benchmark_kernel(call, warmup=warmup, rep=rep, num_bytes=0, device='cuda')  # 0: no copy to time
        graph = graph_time(call, calls=20, rep=replays)
    return Times(*(round(1e3 * value, 3) for value in (cold.median, cold.p20, cold.p80, graph)))


@dataclass(frozen=True)
class OpRun:
    """A config of one kernel of an op, on a case."""

    op: Op
    case: Case
    kernel: Kernel
    config: Config
    device: str

    def outcome(self) -> Outcome:
        """The outputs of the op, which its twin confirms."""
        with forced_config(self.kernel, **self.config):
            return check_kernel(self.op, self.case, self.device)[0]

    @contextmanager
    def calling(self) -> Iterator[Callable[[], Any]]:
        """A call of the op."""
        arguments = cases_of(self.op).arguments(self.op.name, self.case, self.device)
        with forced_config(self.kernel, **self.config):
            yield functools.partial(self.op.call, **arguments)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a user's kernel: a scalar with its value, or a tensor that is given, written or both."""

    name: str
    value: float | None = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    given: bool = True
    writes: bool = False

    def poison(self, device: str) -> Tensor:
        """Memory whose bits are all ones, which is NaN for floats."""
        ones = torch.full((*self.shape, self.dtype.itemsize), 255, dtype=torch.uint8, device=device)
        return ones.view(self.dtype).squeeze(-1)


@dataclass(frozen=True)
class KernelRun:
    """A config of a user's kernel.

    Attributes:
        prim_func: the kernel with this config.
        parameters: its parameters in order.
        data: file with the inputs by name and the expected outputs by name, or None for these.
        match: how outputs must agree with the expected ones, as in `Cases`.
        compiler: arguments for `tilelang.compile`.
        returned: positions of outputs that the compiled kernel allocates and returns.
    """

    config: Config
    prim_func: Any = field(repr=False)
    parameters: tuple[Parameter, ...]
    data: Path
    match: str | dict[str, Any]
    device: str
    compiler: dict[str, Any]
    returned: tuple[int, ...] = ()

    def outcome(self) -> Outcome:
        """The outputs; on a GPU of the third run, because a race may show late."""
        inputs, expected = _stored(self.data)
        for _ in range(3 if self.device == 'cuda' else 1):
            outcome = self._execute(inputs)
            if expected is not None:
                compare('kernel and reference', outcome, expected, self.match)
        return outcome

    @contextmanager
    def calling(self) -> Iterator[Callable[[], Any]]:
        """A call of the compiled kernel on fixed tensors."""
        inputs, _ = _stored(self.data)
        args = self._arguments(inputs)
        yield functools.partial(self.compiled(), *(a for i, a in enumerate(args) if i not in self.returned))

    def compiled(self) -> Any:
        """The kernel that TileLang compiles, or loads from its cache."""
        import tilelang

        return tilelang.compile(self.prim_func, **self.compiler)

    def compile(self) -> None:
        """Compile into TileLang's cache, from where the worker that times it loads it."""
        self.compiled()

    def _arguments(self, inputs: dict[str, Tensor]) -> list[Any]:
        found: list[Any] = []
        for p in self.parameters:
            if p.value is None and p.given:
                found.append(inputs[p.name].clone() if p.writes else inputs[p.name])
            else:
                found.append(p.poison(self.device) if p.value is None else p.value)
        return found

    def _execute(self, inputs: dict[str, Tensor]) -> Outcome:
        args = self._arguments(inputs)
        if self.device == 'cpu':
            from tile_kernels.interpreter import interpret

            interpret(self.prim_func, *args, checks='races', pass_configs=self.compiler['pass_configs'])
        else:
            with poisoned():
                result = self.compiled()(*(a for i, a in enumerate(args) if i not in self.returned))
            results = result if isinstance(result, (tuple, list)) else (result,)
            for place, value in zip(self.returned, results, strict=False):
                args[place] = value
        return {p.name: a for p, a in zip(self.parameters, args, strict=True) if p.writes}


@functools.lru_cache(1)
def _stored(path: Path) -> tuple[dict[str, Tensor], Outcome | None]:
    return torch.load(path)
