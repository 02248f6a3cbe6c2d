"""Trials of configs, the decision among them, and the result that `tune` returns."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.explain import config_words
from tile_kernels.core.jit import Config
from tile_kernels.tuning.space import OpProblem, Problem

#: Configs are told apart if their medians differ by more than this share and by more than the spread.
NOISE = 0.02


@dataclass(frozen=True)
class Options:
    """How to search, as the arguments of `tune`; `limit` is for one check or one timing, in seconds."""

    budget: float = 120.0
    trials: int | None = None
    rank: str = 'us'
    jobs: int | None = None
    every: bool = False
    allow_numeric: bool = False
    seed: int = 0
    limit: float = 10.0

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ArgumentError(f'tune: budget must be positive seconds, got {self.budget}')
        if self.rank not in ('us', 'graph_us'):
            raise ArgumentError(f'tune: rank must be us or graph_us, got {self.rank!r}')
        for name in ('trials', 'jobs'):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ArgumentError(f'tune: {name} must be at least 1, got {value}')


@dataclass(frozen=True)
class Trial:
    """One config: what was predicted, measured, or the problem that prevented it.

    Attributes:
        config: the config.
        place: its place in the declared order.
        predicted: predicted microseconds.
        us: median microseconds with a cold L2.
        p20: 20th percentile.
        p80: 80th percentile.
        graph_us: microseconds inside a CUDA graph.
        rounds: how many rounds of timing it took part in.
        problem: why it has no time.
    """

    config: Config
    place: int
    predicted: float = math.inf
    us: float | None = None
    p20: float | None = None
    p80: float | None = None
    graph_us: float | None = None
    rounds: int = 0
    problem: str | None = None

    def time(self, rank: str) -> float:
        """The measured time that counts; infinite without one."""
        value = getattr(self, rank)
        return math.inf if value is None else value

    def noise(self, rank: str) -> float:
        """The difference in time below which another config is as good."""
        spread = (self.p80 or 0.0) - (self.p20 or 0.0) if rank == 'us' else 0.0
        return max(NOISE * self.time(rank), spread)


def decide(trials: Iterable[Trial], rank: str = 'us') -> Trial | None:
    """The best trial: of those as good as the fastest the first in (predicted, declared) order.

    Only trials of the last round compete. The same trials give the same choice, in whatever order.
    """
    timed = [trial for trial in trials if trial.problem is None and trial.time(rank) < math.inf]
    last = max((trial.rounds for trial in timed), default=0)
    timed = [trial for trial in timed if trial.rounds == last]
    if not timed:
        return None
    fastest = min(timed, key=lambda trial: (trial.time(rank), trial.place))
    as_good = [trial for trial in timed if trial.time(rank) <= fastest.time(rank) + fastest.noise(rank)]
    return min(as_good, key=lambda trial: (trial.predicted, trial.place))


@dataclass
class Best:
    """The result of tuning one kernel; prints as a table.

    Attributes:
        problem: what was tuned.
        options: how.
        board: the trials by their place in the declared order.
        steps: how many configs each step left.
        choice: the best trial; None if nothing was timed.
        note: where the result comes from, if it was not simply measured.
        stored: whether a table holds it now.
        interrupted: whether Ctrl-C ended the search.
    """

    problem: Problem
    options: Options
    board: dict[int, Trial]
    steps: dict[str, int] = field(default_factory=dict)
    choice: Trial | None = None
    note: str = ''
    stored: bool = False
    interrupted: bool = False

    @property
    def name(self) -> str:
        """What was tuned, in words."""
        return self.problem.name

    @property
    def trials(self) -> list[Trial]:
        """Every config: the best, those of the latest round by time, those without a time by prediction, the others."""
        rank = self.options.rank

        def key(t: Trial) -> tuple:
            return t is not self.choice, t.problem is not None, -t.rounds, t.time(rank), t.predicted, t.place

        return sorted(self.board.values(), key=key)

    @property
    def config(self) -> Config:
        """The best config; without measurements the one with the shortest predicted time."""
        return self.trials[0].config

    @property
    def us(self) -> float | None:
        """The time of the best config that counts, in microseconds; None if nothing was timed."""
        return None if self.choice is None else self.choice.time(self.options.rank)

    @property
    def before(self) -> Trial | None:
        """The trial of the config that was in force."""
        return next((t for t in self.board.values() if t.config == self.problem.in_force), None)

    @property
    def gain(self) -> float | None:
        """Time of the config that was in force over the time of the best; None if one was not timed."""
        slow = math.inf if self.before is None else self.before.time(self.options.rank)
        return None if self.us is None or slow == math.inf else slow / self.us

    @functools.cached_property
    def kernel(self) -> Any:
        """The kernel with the best config, ready to be called; for an op its `Kernel`."""
        return self.problem.kernel(self.config)

    def records(self) -> list[dict[str, Any]]:
        """The trials as lines of a results file."""
        in_force = self.problem.in_force
        about = {'sweep': self.problem.kernel_name, 'op': self.name.partition('[')[0]}
        if isinstance(self.problem, OpProblem):
            about['case'] = self.name.partition('[')[2].partition(']')[0]
        return [
            about
            | {'config': t.config, 'chosen': t.config == in_force, 'best': t is self.choice}
            | {'predicted_us': None if t.predicted == math.inf else round(t.predicted, 3)}
            | {'us': t.us, 'p20_us': t.p20, 'p80_us': t.p80, 'graph_us': t.graph_us, 'problem': t.problem}
            for t in self.trials
        ]

    def table(self, top: int = 8) -> str:
        """The best configs, the one in force, and why others were left out."""
        in_force, best = self.problem.in_force, self.config
        lines = [f'{self.name} on {self.problem.target.table}']
        lines += [', '.join(f'{count} {step}' for step, count in self.steps.items())] if self.steps else []
        good = [t for t in self.trials if t.problem is None]
        names = list(best)
        measured = ('us', 'graph us') if self.us is not None else ()
        rows = [[*measured, 'predicted', *names, '']]
        for place, t in enumerate(good):
            if place < top or t.config == in_force:
                mark = ' '.join(w for w, c in (('best', best), ('in force', in_force)) if t.config == c)
                times = (t.us, t.graph_us, t.predicted)[0 if measured else 2 :]
                rows.append([*map(_number, times), *(str(t.config[n]) for n in names), mark])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        cells = [[c.rjust(w) for c, w in zip(row, widths[:-1], strict=False)] + [row[-1]] for row in rows]
        lines += ['  '.join(row).rstrip() for row in cells] if len(rows) > 1 else []
        refused: dict[str, list[Trial]] = {}
        for t in self.trials:
            if t.problem is not None and not t.problem.startswith('same code as'):
                refused.setdefault(t.problem, []).append(t)
        for reason, of in sorted(refused.items(), key=lambda item: item[1][0].place)[:top]:
            more = f' and {len(of) - 1} more' if len(of) > 1 else ''
            lines.append(f'left out: {config_words(of[0].config)}{more}: {reason}')
        gain = f', {self.gain:.2f}x as fast as the config in force' if self.gain else ''
        result = 'ranked by prediction, nothing was timed' if self.us is None else f'best {_number(self.us)} us{gain}'
        return '\n'.join([*lines, self.note or result])

    def __str__(self) -> str:
        return self.table()


class Bests(list[Best]):
    """The results for the kernels and cases of an op; prints one table after the other.

    Attributes:
        failures: the reasons for kernels and cases without a result, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failures: dict[str, str] = {}

    def __str__(self) -> str:
        parts = [*map(str, self), *(f'{name}: {reason}' for name, reason in self.failures.items())]
        return '\n\n'.join(parts) or 'no kernel of these cases has several configs'


def _number(value: float | None) -> str:
    return '–' if value is None or value == math.inf else f'{value:.4g}' if value < 1e4 else f'{value:.0f}'
