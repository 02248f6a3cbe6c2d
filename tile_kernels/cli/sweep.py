"""Try every config of a kernel's space on the cases of an op, to rate the choice of `choose`.

All variants are compiled first, in parallel. Each config must agree with the twin before it is timed. A config that
fails to compile, run or agree is reported and left out. A quick round times all configs; a longer round times the best
ones and the chosen one.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tile_kernels.cli import console
from tile_kernels.core.cases import Case, case_id
from tile_kernels.core.errors import ArgumentError, TileKernelsError, UnsupportedError
from tile_kernels.core.explain import config_words
from tile_kernels.core.gpus import arch_of
from tile_kernels.core.jit import Config, Kernel
from tile_kernels.core.launch import Launch, forced_config
from tile_kernels.core.op import Op
from tile_kernels.core.precompile import Variant, compile_variants
from tile_kernels.core.registry import cases_of
from tile_kernels.testing.bench import benchmark_kernel, graph_time
from tile_kernels.testing.contract import check_kernel

#: Milliseconds of warm-up and timed calls, and replays of a graph of 20 calls, in the quick and the long round.
QUICK, LONG = (2.0, 10.0, 5), (10.0, 60.0, 20)

#: `choose` is good if it is within this factor of the best config.
TOLERANCE = 1.1

#: (op, arguments, round) -> microseconds of a call with a cold L2, and inside a CUDA graph.
Timer = Callable[[Op, dict[str, Any], tuple[float, float, int]], tuple[float, float]]


@dataclass(frozen=True)
class Trial:
    """One config on one case: its times, or the problem that prevented them."""

    config: Config
    chosen: bool
    us: float | None = None
    graph_us: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Subject:
    """A kernel with a space, as launched by one case of an op."""

    op: Op
    case: Case
    kernel: Kernel
    launches: tuple[Launch, ...]

    @property
    def configs(self) -> list[Config]:
        """Every config of the space, the chosen one first."""
        chosen = self.launches[0].config
        space = [
            dict(zip(self.kernel.space, values, strict=True))
            for values in itertools.product(*self.kernel.space.values())
        ]
        return [chosen] + [config for config in space if config != chosen]

    def __str__(self) -> str:
        return f'{self.op.name}[{case_id(self.case)}] {self.kernel.name}'


class DeviceLost(Exception):
    """A kernel left the GPU in an error state; nothing more can run in this process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `bench` for a sweep."""
    group = parser.add_argument_group('sweep')
    group.add_argument('--sweep', action='store_true', help="time every config of the kernels' spaces instead")
    group.add_argument('--top', type=int, metavar='N', help='configs to print per case (default 5)')
    group.add_argument('--rank', choices=('us', 'graph_us'), help='what counts (default us)')
    group.add_argument('--jobs', type=int, metavar='N', help='compilations at a time (default: one per CPU core)')


def refuse_arguments(args: argparse.Namespace) -> None:
    """Reject arguments that have no effect without `--sweep`."""
    for name in ('top', 'rank', 'jobs'):
        if getattr(args, name) is not None:
            raise ArgumentError(f'--{name} is for a sweep, add --sweep or leave it out')


def run(chosen: Iterable[tuple[Op, Case]], device: str, args: argparse.Namespace, context: dict[str, Any]) -> int:
    """Sweep the cases; print the best configs next to the chosen one."""
    from tile_kernels.cli.bench import write_records

    if device != 'cuda':
        raise UnsupportedError('--sweep times kernels and needs a GPU; without one see explain and show')
    found = subjects(chosen)
    top, rank = args.top or 5, args.rank or 'us'
    failures = compile_all(found, arch_of(torch.cuda.current_device()), args.jobs)
    out = console.output()
    behind: list[str] = []
    with console.progress() as bar:
        task = bar.add_task('', total=sum(len(subject.configs) for subject in found))
        for subject in found:
            bar.update(task, description=str(subject))
            try:
                trials = sweep(subject, device, gpu_times, rank, top, failures, lambda: bar.advance(task))
            except DeviceLost as error:
                out.print(f'stopped: {subject}: {error}', style='red', markup=False, soft_wrap=True)
                return 1
            if args.json:
                write_records(args.json, [record(subject, trial) | context for trial in trials])
            report(out, subject, trials, rank, top)
            if (factor := slowdown(trials, rank)) is not None and factor > TOLERANCE:
                behind.append(f'{subject}: {factor:.2f}x')
    out.print(f'choose is within {TOLERANCE - 1:.0%} of the best in {len(found) - len(behind)} of {len(found)} sweeps.')
    for line in behind:
        out.print(f'slower: {line}', style='yellow', markup=False, soft_wrap=True)
    return 0


def subjects(chosen: Iterable[tuple[Op, Case]]) -> list[Subject]:
    """The kernels with several configs, per case."""
    found = []
    for op, case in chosen:
        by_kernel: dict[Kernel, list[Launch]] = {}
        for launch in op.trace_case(case):
            by_kernel.setdefault(launch.kernel, []).append(launch)
        found += [Subject(op, case, kernel, tuple(of)) for kernel, of in by_kernel.items() if kernel.space]
    return found


def compile_all(found: Iterable[Subject], arch: str, jobs: int | None) -> dict[Variant, str]:
    """Compile every config of every subject; returns the failed ones with the reasons."""
    variants = [
        variant for subject in found for config in subject.configs for variant in variants_of(subject, config, arch)
    ]
    return compile_variants(list(dict.fromkeys(variants)), jobs, progress=True)


def variants_of(subject: Subject, config: Config, arch: str) -> list[Variant]:
    """The variants of a config of a subject."""
    return [Variant(subject.kernel, launch.static, tuple(config.items()), arch) for launch in subject.launches]


def sweep(
    subject: Subject,
    device: str,
    timer: Timer,
    rank: str = 'us',
    top: int = 5,
    failures: dict[Variant, str] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Trials of every config, the best first and the failed ones last."""
    refused = {(v.static, v.config): reason for v, reason in (failures or {}).items() if v.kernel is subject.kernel}
    trials = []
    for config in subject.configs:
        keys = [(launch.static, tuple(config.items())) for launch in subject.launches]
        reason = next((refused[key] for key in keys if key in refused), None)
        trial = Trial(config, config == subject.launches[0].config, problem=reason)
        trials.append(trial if reason else attempt(subject, trial, device, timer, QUICK))
        advance()
    trials.sort(key=lambda trial: _key(trial, rank))
    again = [trial for place, trial in enumerate(trials) if (place < top or trial.chosen) and trial.problem is None]
    longer = {id(trial): attempt(subject, trial, device, timer, LONG, check=False) for trial in again}
    # only equally timed configs are ranked together: first the retimed ones, then the rest of the quick round
    first = sorted(longer.values(), key=lambda trial: _key(trial, rank))
    return first + [trial for trial in trials if id(trial) not in longer]


def attempt(
    subject: Subject, trial: Trial, device: str, timer: Timer, effort: tuple[float, float, int], check: bool = True
) -> Trial:
    """Check a config against the twin and time it; a failure becomes its problem."""
    op, case = subject.op, subject.case
    try:
        with forced_config(subject.kernel, **trial.config):
            if check:
                check_kernel(op, case, device)
            us, graph_us = timer(op, cases_of(op).arguments(op.name, case, device), effort)
    except (AssertionError, TileKernelsError, RuntimeError) as error:
        problem = str(error).strip().partition('\n')[0]
        _still_alive(device, trial.config, problem)
        return replace(trial, us=None, graph_us=None, problem=problem)
    return replace(trial, us=round(us, 3), graph_us=round(graph_us, 3))


def _still_alive(device: str, config: Config, problem: str) -> None:
    """An illegal access breaks the CUDA context: report the config that caused it and stop."""
    if device != 'cuda':
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLost(f'the GPU is in an error state after {config_words(config)}: {problem}') from error


def gpu_times(op: Op, arguments: dict[str, Any], effort: tuple[float, float, int]) -> tuple[float, float]:
    """Microseconds of a call with the timer of `bench`, and inside a replayed graph."""
    warmup, rep, replays = effort
    cold = benchmark_kernel(op, kwargs=arguments, warmup=warmup, rep=rep, num_bytes=0).median  # 0: no copy to time
    return cold * 1e3, graph_time(op, kwargs=arguments, calls=20, rep=replays) * 1e3


def _key(trial: Trial, rank: str) -> float:
    value = getattr(trial, rank)
    return float('inf') if value is None else value


def slowdown(trials: list[Trial], rank: str) -> float | None:
    """Time of the chosen config over the best; None if the chosen one has no time."""
    chosen = next(trial for trial in trials if trial.chosen)
    return None if chosen.problem is not None else _key(chosen, rank) / _key(trials[0], rank)


def record(subject: Subject, trial: Trial) -> dict[str, Any]:
    """A trial as a line of the results file."""
    return {
        'sweep': subject.kernel.name,
        'op': subject.op.name,
        'case': case_id(subject.case),
        'config': trial.config,
        'chosen': trial.chosen,
        'us': trial.us,
        'graph_us': trial.graph_us,
        'problem': trial.problem,
    }


def report(out: Any, subject: Subject, trials: list[Trial], rank: str, top: int) -> None:
    """Print the best configs and the chosen one, then the failed ones."""
    chosen = next(trial for trial in trials if trial.chosen)
    shown = [trial for place, trial in enumerate(trials) if (place < top or trial.chosen) and trial.problem is None]
    rows = [
        (
            *(trial.config.get(name) for name in subject.kernel.space),
            console.number(trial.us),
            console.number(trial.graph_us),
            None if chosen.problem else f'{_key(chosen, rank) / _key(trial, rank):.2f}x',
            'chosen' if trial.chosen else '',
        )
        for trial in shown
    ]
    out.print(f'\n{subject}', style='bold', markup=False, soft_wrap=True)
    headings = [f'>{name}' for name in subject.kernel.space]
    out.print(console.table([*headings, '>us', '>graph us', '>faster', ''], rows))
    for trial in trials:
        if trial.problem is not None:
            who = 'chosen config failed' if trial.chosen else 'left out'
            out.print(
                f'{who}: {config_words(trial.config)}: {trial.problem}',
                style='red' if trial.chosen else 'dim',
                markup=False,
            )
