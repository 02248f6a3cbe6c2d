"""Find the fastest config of a kernel: ranked by prediction, checked against a reference, timed on the GPU."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import tuned
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.jit import Config
from tile_kernels.core.nvcc import tilelang_version
from tile_kernels.core.op import Op
from tile_kernels.core.registry import cases_of, find_op, typical_case
from tile_kernels.tuning.result import Best, Bests, Options, Trial, decide
from tile_kernels.tuning.search import Lab, explore
from tile_kernels.tuning.search import store as store_best
from tile_kernels.tuning.space import MATCH, KernelProblem, OpProblem, Problem, Target

__all__ = ['Best', 'Bests', 'Trial', 'decide', 'tune']

STORES = ('user', 'shipped', 'none')


def __dir__() -> list[str]:
    return __all__


def tune(
    kernel: Any,
    args: Sequence[Any] = (),
    *,
    space: Mapping[str, Sequence[Any]] | None = None,
    where: Callable[[Config], Any] | None = None,
    reference: Callable[..., Any] | None = None,
    inputs: Sequence[Tensor] | Callable[[], Sequence[Tensor]] | None = None,
    match: str | dict[str, Any] | None = None,
    cases: Iterable[Mapping[str, Any]] | None = None,
    budget: float = 120.0,
    trials: int | None = None,
    rank: str = 'us',
    every: bool = False,
    allow_numeric: bool = False,
    jobs: int | None = None,
    device: str | None = None,
    dry_run: bool = False,
    store: str = 'user',
    again: bool = False,
    seed: int = 0,
    commit: str | None = None,
    progress: bool = True,
    lab: Lab | None = None,
    **named: Any,
) -> Any:
    """Find the fastest config of a kernel and store it in a table.

    Without a GPU, or with `dry_run` or `device`, configs are lowered and ranked by prediction; nothing runs.

    Args:
        kernel: a `tilelang.jit` function or a builder, or an op or its name. An op has its space, twin and tolerances.
        args: the arguments of the builder besides the config.
        space: the values of each config entry.
        where: which configs of the space to try.
        reference: plain PyTorch: it takes the tensors and scalars that the kernel reads, and returns those it writes.
        inputs: the tensors that the kernel reads; by default normal numbers, and 0 or 1 for integers.
        match: `'bitwise'`, or bounds like `dict(rtol=1e-2, rms=1e-2)`: `rtol` |x| + `rms` times the root mean square.
        cases: cases of an op, as entries to change in its first benchmark case (default: all benchmark cases).
        budget: seconds for each kernel and case.
        trials: the most configs to time.
        rank: the time that counts: `'us'`, or `'graph_us'` inside a CUDA graph.
        every: time every config that fits, not only the most promising ones.
        allow_numeric: accept configs that change result bits.
        jobs: the most processes that lower and compile (default: one per CPU core).
        device: the known GPU to rank for, e.g. `'h100'`.
        dry_run: only rank.
        store: the table for the result: `'user'`, `'shipped'` (in the package) or `'none'`.
        again: for a user's kernel, tune even if the table has a result.
        seed: of random configs and inputs.
        commit: the commit that table entries name (default: the version of the package).
        progress: show the progress on stderr.
        lab: what checks and times instead of a GPU, for tests.
        **named: named arguments of the builder, and its dynamic extents.

    Returns:
        A `Best` for a user's kernel, for an op `Bests`, a list of them.
    """
    options = Options(budget, trials, rank, jobs, every, allow_numeric, seed)
    if store not in STORES:
        raise ArgumentError(f'tune: store must be one of {", ".join(STORES)}, got {store!r}')
    target = Target.here(device)
    if lab is not None:
        target = Target(target.gpu, target.table, 'cpu')
    elif torch.cuda.is_available() and device is None and not dry_run:
        lab = Lab()
    if dry_run:
        lab = None
    done = functools.partial(_solve, options=options, lab=lab, where=store, commit=commit, show=progress)
    if isinstance(kernel, (str, Op)):
        op = find_op(kernel) if isinstance(kernel, str) else kernel
        chosen = cases_of(op).bench if cases is None else [typical_case(op, case) for case in cases]
        found = Bests()
        for part in (part for case in chosen for part in OpProblem.all_of(op, case, target)):
            try:
                found.append(done(part))
            except ArgumentError as error:
                found.failures[part.name] = str(error)
                continue
            if found[-1].interrupted:
                break
        return found
    if not space:
        raise ArgumentError('tune: space must name config entries and their values, e.g. dict(threads=(128, 256))')
    problem = KernelProblem(
        kernel, tuple(args), named, space, target, where, reference, inputs, match or dict(MATCH), seed
    )
    return (None if again or lab is None else _stored(problem, options)) or done(problem)


def _solve(problem: Problem, options: Options, lab: Lab | None, where: str, commit: str | None, show: bool) -> Best:
    """Search one problem, decide and store."""
    found = explore(problem, options, lab, show)
    found.choice = decide(found.board.values(), options.rank)
    if found.interrupted:
        if found.choice is None:
            raise KeyboardInterrupt
        found.note = 'interrupted: decided by what was measured, and not stored'
    elif lab is not None and found.choice is None:
        reason = next(t.problem for t in found.trials if t.problem is not None)
        raise ArgumentError(f'tune: {problem.name} has no config that runs and agrees with its reference; {reason}')
    elif where != 'none':
        found.stored = store_best(found, where, _about(commit))
    return found


def _about(commit: str | None) -> dict[str, Any]:
    import tile_kernels

    now = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%dT%H:%M:%SZ')
    commit = commit or f'version {tile_kernels.__version__}'
    return {'tilelang': tilelang_version(), 'commit': commit, 'date': now}


def _stored(problem: KernelProblem, options: Options) -> Best | None:
    """The result of an earlier run with the same code, arguments and space."""
    (key,) = problem.entries('user')
    wanted = key | {'tilelang': tilelang_version()}
    for entry in tuned.read(tuned.table('user', problem.target.table, problem.kernel_name)):
        if all(entry.get(name) == value for name, value in wanted.items()) and entry['config'] in problem.configs:
            times = {name: entry[f'{name}_us'] for name in ('p20', 'p80', 'graph')}
            trial = Trial(
                entry['config'], 0, us=entry['us'], p20=times['p20'], p80=times['p80'], graph_us=times['graph']
            )
            note = f'found in your table, measured {entry["date"]}: {entry["us"]:.4g} us; again=True measures anew'
            return Best(problem, options, {0: trial}, choice=trial, note=note, stored=True)
    return None
