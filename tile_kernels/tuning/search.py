"""The search: lower, rank, compile, check and time the configs of a problem, then decide."""

from __future__ import annotations

import functools
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.explain import config_words
from tile_kernels.core.jit import Config
from tile_kernels.core.workers import Child, Failed, Here, spread
from tile_kernels.tuning import tables
from tile_kernels.tuning.rank import Estimate, estimate
from tile_kernels.tuning.result import Best, Options, Trial
from tile_kernels.tuning.runs import Effort, Timer, check, gpu_times
from tile_kernels.tuning.space import OpProblem, Problem

#: Milliseconds of warm-up and of timed calls, and graph replays, of the first and of the last round.
QUICK, LONG = (2.0, 10.0, 5), (10.0, 60.0, 20)
#: So many configs reach the last round.
FINALISTS = 4
#: The share of the budget after which no further config is lowered.
LOWERING_SHARE = 0.4
#: Seconds for the first check; a slow reference raises the limit of the others.
FIRST_S = 60.0


@dataclass(frozen=True)
class Lab:
    """What checks and times configs; tests replace the GPU by the interpreter and the clock by a table."""

    timer: Timer = gpu_times
    runner: Callable[[], Child | Here] = Child


def explore(problem: Problem, options: Options, lab: Lab | None, show: bool = False) -> Best:
    """Search; without a lab only rank. Ctrl-C ends a search early and keeps what was measured."""
    until = time.monotonic() + options.budget
    found = Best(problem, options, {place: Trial(c, place) for place, c in enumerate(problem.configs)})
    with Progress(show, problem.name) as progress:
        estimates = _examine(found, until if lab is None else until - (1 - LOWERING_SHARE) * options.budget, progress)
        kept = shortlist([t for t in found.board.values() if t.problem is None], problem.in_force, options)
        if lab is None:
            return found
        with tempfile.TemporaryDirectory(prefix='tile_kernels-tune-') as folder:
            try:
                problem.prepare(Path(folder), estimates[kept[0].place])
                kept = _compile(found, kept, until, progress)
                _race(found, kept, lab, Path(folder), until, progress)
            except KeyboardInterrupt:
                found.interrupted = True
    return found


def _examine(found: Best, until: float, progress: Progress) -> dict[int, Estimate]:
    """Lower and predict all configs; drop those that do not lower or fit, and those equal to an earlier one."""
    problem, board = found.problem, found.board
    order = list(board)
    random.Random(found.options.seed).shuffle(order)  # if the budget ends early, a sample was lowered
    order.sort(key=lambda place: board[place].config != problem.in_force)
    progress.begin('2 lower', len(order), until)
    makers = [functools.partial(lambda c: (problem.subjects(c),), board[place].config) for place in order]
    results = dict(zip(order, spread(estimate, makers, found.options.jobs, progress.advance, until), strict=True))
    first: dict[str, int] = {}
    estimates = {}
    for place in sorted(results):
        result, trial = results[place], board[place]
        if isinstance(result, Failed) or result.against is not None:
            board[place] = replace(trial, problem=str(result if isinstance(result, Failed) else result.against))
            continue
        same = first.setdefault(result.source, place)
        estimates[place] = result
        words = f'same code as {config_words(board[same].config)}' if same != place else None
        board[place] = replace(trial, predicted=result.us, problem=words)
    declared = {'in the space': problem.declared} if problem.declared != len(board) else {}
    found.steps |= declared | {'configs': len(board), 'fit': len(estimates), 'differ': len(first)}
    if not estimates:
        raise ArgumentError(f'tune: {problem.name} has no config that can run; the first: {board[0].problem}')
    return estimates


def shortlist(trials: Sequence[Trial], in_force: Config | None, options: Options) -> list[Trial]:
    """The configs to time: the best 20 % by prediction, at least 8, the one in force, and 10 % at random.

    The first one sets the bits: it is the one in force, or the first declared.
    """
    base = min(trials, key=lambda t: (t.config != in_force, t.place))
    ranked = sorted(trials, key=lambda t: (t is not base, t.predicted, t.place))
    if options.every:
        return ranked[: options.trials]
    count = max(8, math.ceil(0.2 * len(ranked)))
    rest = ranked[count:]
    drawn = random.Random(options.seed).sample(rest, min(math.ceil(0.1 * len(ranked)), len(rest)))
    return (ranked[:count] + sorted(drawn, key=rest.index))[: options.trials]


def _compile(found: Best, kept: list[Trial], until: float, progress: Progress) -> list[Trial]:
    """Compile the configs; those that fail get a problem."""
    progress.begin('4 compile', 1, until)
    problems = found.problem.compile([trial.config for trial in kept], found.options.jobs, until)
    progress.advance()
    for trial, reason in zip(kept, problems, strict=True):
        found.board[trial.place] = replace(trial, problem=reason)
    return [trial for trial in kept if found.board[trial.place].problem is None]


def _race(found: Best, kept: list[Trial], lab: Lab, folder: Path, until: float, progress: Progress) -> None:
    """Check and time the configs; the faster half is timed again, longer, until few are left."""
    options, board = found.options, found.board
    runner, base = lab.runner(), None if options.allow_numeric else folder / 'bits.pt'
    limit = max(options.limit, FIRST_S)

    def timed(trial: Trial, effort: Effort, checks: bool) -> Trial:
        nonlocal limit
        run, start = found.problem.run(trial.config), time.monotonic()
        try:
            if checks:
                runner.call(check, run, base, limit=limit)
                limit = min(limit, max(options.limit, 3 * (time.monotonic() - start)))
            times = runner.call(lab.timer, run, effort, limit=limit)
        except Failed as error:
            return replace(trial, problem=str(error))
        return replace(trial, rounds=trial.rounds + 1, **vars(times))

    try:
        with suppress(Failed):  # the calls below say why
            runner.call(int, limit=limit)  # a new worker takes its time
        progress.begin('6 time', len(kept), until)
        for trial in kept:
            late = time.monotonic() >= until
            board[trial.place] = (
                replace(trial, problem='the budget ended before it') if late else timed(trial, QUICK, True)
            )
            progress.advance(min(board[t.place].time(options.rank) for t in kept))
        effort, alive = QUICK, [board[t.place] for t in kept if board[t.place].problem is None]
        while alive:
            alive.sort(key=lambda t: (t.time(options.rank), t.place))
            count = max(FINALISTS, math.ceil(len(alive) / 2))
            alive = alive[:count] + [t for t in alive[count:] if t.config == found.problem.in_force]
            effort = LONG if count <= FINALISTS else (2 * effort[0], 2 * effort[1], effort[2])
            progress.begin('6 again', len(alive), until)
            fresh: list[Trial] = []
            for trial in alive:
                if time.monotonic() >= until:
                    return  # a round counts only as a whole
                fresh.append(timed(trial, effort, False))
                progress.advance(min(t.time(options.rank) for t in fresh))
            board.update({trial.place: trial for trial in fresh})
            alive = [] if effort is LONG else [trial for trial in fresh if trial.problem is None]
    finally:
        runner.close()
        found.steps['timed'] = sum(trial.rounds > 0 for trial in board.values())


def store(found: Best, where: str, about: dict[str, Any]) -> bool:
    """Put the decision into a table if it beats the config in force by more than noise; returns whether it did."""
    rank, problem, best, before = found.options.rank, found.problem, found.choice, found.before
    if best is None:
        return False
    as_good = before is not None and before.time(rank) <= best.time(rank) + best.noise(rank)
    if as_good and isinstance(problem, OpProblem):
        return False  # `choose` needs no help; of a user's kernel any result is kept
    value = {'config': best.config, 'us': best.us, 'p20_us': best.p20, 'p80_us': best.p80, 'graph_us': best.graph_us}
    value['in_force_us'] = None if before is None else before.us
    for key in problem.entries(where):
        tables.store(where, problem.target.table, problem.kernel_name, key | value | about)
    return True


class Progress:
    """The progress of a search: its step, how many configs are done, the best time, and the seconds left."""

    def __init__(self, show: bool, name: str) -> None:
        self.show, self.name = show, name
        self.bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def begin(self, step: str, total: int, until: float) -> None:
        """Begin a step."""
        self.__exit__(None, None, None)
        self.until = until
        from tile_kernels.core.progress import Lines, progress_of

        self.bar = progress_of(self.show).__enter__()
        self.in_lines = isinstance(self.bar, Lines)  # these count the seconds themselves
        self.step = f'{self.name}: {step}' if self.in_lines else step
        self.task = self.bar.add_task(self.step, total=total)

    def advance(self, best: float = math.inf) -> None:
        """Count one config."""
        fastest = f', best {best:.4g} us' if best < math.inf else ''
        left = '' if self.in_lines else f', {max(self.until - time.monotonic(), 0):.0f} s left'
        self.bar.update(self.task, description=f'{self.step}{fastest}{left}')
        self.bar.advance(self.task)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.__exit__(kind, error, trace)
            self.bar = None
