"""Compare counts with formulas and predictions with recorded times; needs no GPU.

    python -m tile_kernels.sight.validate              V0, V1 on a sample of 60 records, V4
    python -m tile_kernels.sight.validate --all        V1 on all records; those in works.jsonl are not counted again
    python -m tile_kernels.sight.validate --all --fit  and the constants that fit the records best

V0 compares counts with formulas. V1 compares predicted and recorded times, with each term of the model switched off.
V2 ranks the configs of recorded sweeps, V3 compares counts with ncu. V4 asks whether kernels fit.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import tile_kernels
from tile_kernels.core import cache
from tile_kernels.core.errors import TileKernelsError
from tile_kernels.core.gpus import GPUS, Gpu
from tile_kernels.core.knobs import cache_dir
from tile_kernels.core.launch import Launch, on_gpu
from tile_kernels.core.registry import case_by_id, find_op, find_ops, launches_of, typical_case
from tile_kernels.sight.count import count, launch_sizes
from tile_kernels.sight.exact import cases
from tile_kernels.sight.limits import reason_against
from tile_kernels.sight.lower import Lowered, lower
from tile_kernels.sight.model import TERMS, Work, demands, floor_us, time_us, work_of
from tile_kernels.sight.ranking import EVENT_US, Load, ranking_us
from tile_kernels.sight.subject import Subject, of_launch

RESULTS = Path(tile_kernels.__file__).parents[1] / 'benchmarks' / 'results'
Record = dict[str, Any]
#: What `tools/sight_records.py` writes on a machine with a GPU.
SWEEPS, COUNTERS = RESULTS / 'sight' / 'sweeps.jsonl', RESULTS / 'sight' / 'ncu.jsonl'

#: The counted work of records, which it also writes; the site predicts times from it.
WORKS = RESULTS / 'sight' / 'works.jsonl'

#: The roofline to beat: a constant and two speeds on the bytes that ops declare.
BASELINE = {'event_us': 4.8, 'stream_bandwidth': 4.2e12, 'half_rate': 0.8e15}
#: The part of the error beyond which a record is counted as far off.
FAR = 0.25


@dataclass(frozen=True)
class Timed:
    """A recorded case with the work of its launches, or the reason why it was not counted."""

    op: str
    case: str
    us: float
    graph_us: float | None
    works: tuple[Work, ...] = ()
    problem: str = ''

    @property
    def held_out(self) -> bool:
        """Whether no constant was fitted on this shape."""
        return hashlib.sha256(f'{self.op}|{self.case}'.encode()).digest()[-1] % 2 == 1


def latest(device: str = 'h200') -> list[dict[str, Any]]:
    """The latest record of each op and case."""
    path = RESULTS / f'{device}.jsonl'
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return list({(record['op'], record['case']): record for record in records}.values())


def sample(records: Sequence[dict[str, Any]], number: int, seed: int = 0) -> list[dict[str, Any]]:
    """So many records, at random but repeatably."""
    return random.Random(seed).sample(records, min(number, len(records)))


def timed(record: Record, gpu: Gpu, known: Mapping[tuple[str, str], Record] = MappingProxyType({})) -> Timed:
    """Count the launches of a record, unless they are known and their code has not changed since."""
    about = record['op'], record['case'], record['us'], record.get('graph_us')
    try:
        op = find_op(record['op'])
        case = case_by_id(op, record['case'])
        with on_gpu(gpu):
            launches = launches_of(op, case)
        line = known.get((record['op'], record['case']), {})
        if line.get('code') == code_of(launches):
            return Timed(*about, tuple(Work(**work) for work in line['works']))
        subjects = [of_launch(launch, gpu) for launch in launches]
        counted = [(subject, count(subject, _lowered(subject))) for subject in subjects]
    except TileKernelsError as error:
        return Timed(*about, problem=str(error))
    return Timed(*about, tuple(work_of(subject, counts) for subject, counts in counted))


def code_of(launches: Iterable[Launch]) -> str:
    """A digest of the code, static arguments and configs of launches: with the same digest, counts are the same."""
    words = [
        f'{cache.code_digest(cache_dir(), launch.kernel.builder, launch.static)} {launch.static} {launch.config}'
        for launch in launches
    ]
    return hashlib.sha256('\n'.join(words).encode()).hexdigest()[:16]


def known_works(path: Path = WORKS) -> dict[tuple[str, str], Record]:
    """The work of cases that is on file, by op and case."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(line['op'], line['case']): line for line in lines}


def with_works(records: Iterable[Record]) -> list[Timed]:
    """The records whose work is on file."""
    known = known_works()
    pairs = [(r, known[r['op'], r['case']]) for r in records if (r['op'], r['case']) in known]
    return [
        Timed(r['op'], r['case'], r['us'], r.get('graph_us'), tuple(Work(**work) for work in line['works']))
        for r, line in pairs
    ]


#: Kernels that were lowered last; cases that differ only in their sizes share one.
_recent: dict[tuple, Lowered] = {}


def _lowered(subject: Subject) -> Lowered:
    launch: Any = subject.launch
    key = launch.kernel.name, str(launch.static), str(launch.config)
    if key not in _recent:
        while len(_recent) >= 8:
            _recent.pop(next(iter(_recent)))
        _recent[key] = lower(subject)
    return _recent[key]


@dataclass(frozen=True)
class Errors:
    """Relative errors of predicted times."""

    median: float
    p90: float
    far: int
    of: int

    def __str__(self) -> str:
        return f'median {self.median:6.1%}  p90 {self.p90:6.1%}  beyond {FAR:.0%}: {self.far} of {self.of}'


def errors(found: Iterable[Timed], gpu: Gpu, off: Collection[str] = (), graph: bool = False) -> Errors:
    """The errors of the predictions without the terms `off`."""
    pairs = [(t.graph_us if graph else t.us, time_us(t.works, gpu, off, graph)) for t in found if t.works]
    wrong = np.array([abs(predicted / us - 1) for us, predicted in pairs if us])
    return Errors(float(np.median(wrong)), float(np.percentile(wrong, 90)), int((wrong > FAR).sum()), len(wrong))


def error_rows(found: Sequence[Timed], gpu: Gpu) -> list[tuple[str, Errors, Errors]]:
    """The errors of the roofline, of the model and of the model without each term: of all and of held-out shapes."""
    held = [t for t in found if t.held_out]
    rows: list[tuple[str, Gpu, Collection[str]]] = [
        ('roofline, two constants', baseline(gpu), TERMS),
        ('model', gpu, ()),
        *((f'without {term}', gpu, (term,)) for term in TERMS),
    ]
    return [(name, errors(found, on, off), errors(held, on, off)) for name, on, off in rows]


def baseline(gpu: Gpu) -> Gpu:
    """The GPU with the constants of the roofline."""
    return replace(gpu, speeds={**gpu.speeds, **BASELINE})


def fit(found: Sequence[Timed], gpu: Gpu) -> dict[str, float]:
    """The constants with the least errors on the shapes that are not held out; one after the other, on a grid.

    Too few records are bound by products to fit their rate.
    """
    used = [t for t in found if not t.held_out]
    speeds = dict(gpu.speeds)

    def cost(trial: dict[str, float]) -> float:
        e = errors(used, replace(gpu, speeds=trial))
        return e.median + e.p90 / 2 + e.far / e.of / 2

    best = cost(speeds)
    for name in [name for name in speeds if name not in ('graph_us', 'half_rate')] * 2:
        for factor in (0.7, 0.8, 0.9, 0.95, 0.975, 1.025, 1.05, 1.1, 1.25, 1.4):
            trial = speeds | {name: speeds[name] * factor}
            if (now := cost(trial)) < best - 1e-4:
                best, speeds = now, trial
    return speeds


def deciding(found: Iterable[Timed], gpu: Gpu) -> Counter[str]:
    """By resource, how many records it takes the longest time of for some launch of at least a microsecond."""
    counts: Counter[str] = Counter()
    for t in found:
        needs = [demands(work, gpu) for work in t.works]
        counts.update({max(n, key=lambda name: n[name]) for n in needs if max(n.values()) > 1})
    return counts


def floors_above(found: Iterable[Timed], gpu: Gpu) -> list[str]:
    """The cases that were faster than their floor."""
    return [f'{t.op} {t.case}' for t in found if t.works and sum(floor_us(w, gpu) for w in t.works) > t.us]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The rank correlation; equal values share their mean rank."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, place, number = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(number) - (number - 1) / 2)[place]

    one, two = ranks(a), ranks(b)
    return float(np.corrcoef(one, two)[0, 1]) if one.std() and two.std() else 0.0


def sweeps(path: Path = SWEEPS, gpu: Gpu = GPUS['h200']) -> list[dict[str, Any]]:
    """For each recorded sweep its rank correlation, and how far the first and the best of five choices are off.

    The recorded loads are ranked again, so this judges the ranking of today.
    """
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record.get('us') and record.get('predicted_us'):
            loads = [Load(**load) for load in record.get('loads', ())]
            again = sum(EVENT_US + ranking_us(load, gpu) for load in loads)
            groups.setdefault((record['op'], record.get('case', '')), []).append(
                record | {'predicted_us': again or record['predicted_us']}
            )
    rows = []
    for (op, case), trials in groups.items():
        times, ordered = [t['us'] for t in trials], sorted(trials, key=lambda t: t['predicted_us'])
        best = min(times)
        first, five = ordered[0]['us'] / best - 1, min(t['us'] for t in ordered[:5]) / best - 1
        agreement = spearman(times, [t['predicted_us'] for t in trials])
        rows.append({'op': op, 'case': case, 'configs': len(trials), 'rank': agreement, 'first': first, 'five': five})
    return rows


def fitting(names: Iterable[str] | None = None, gpu: Gpu = GPUS['h200']) -> list[str]:
    """Kernels of the library that the GPU cannot launch, each in one sentence, on the first case of each op."""
    found = []
    for op in find_ops(names or ()):
        if op.case_set is None or not op.case_set.bench:
            continue
        with on_gpu(gpu):
            launches = launches_of(op, typical_case(op))
        for launch in launches:
            subject = of_launch(launch, gpu)
            sizes = launch_sizes(subject, _lowered(subject))
            found += [reason for c in sizes if (reason := reason_against(c, gpu)) is not None]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; returns 1 if a count differs from its formula or a kernel does not fit."""
    parser = argparse.ArgumentParser(
        'python -m tile_kernels.sight.validate', description=(__doc__ or '').partition('\n')[0]
    )
    parser.add_argument('--all', action='store_true', help='all records and all ops')
    parser.add_argument('--records', type=int, default=60, metavar='N', help='records of the sample (default 60)')
    parser.add_argument('--seed', type=int, default=0, help='seed of the sample')
    parser.add_argument('--fit', action='store_true', help='also fit the constants')
    args = parser.parse_args(argv)
    say = functools.partial(print, file=sys.stdout, flush=True)
    exact = list(cases())
    wrong = [case for case in exact if case.measured() != case.expected]
    say(f'V0  {len(exact) - len(wrong)} of {len(exact)} kernels have exactly the counts of their formulas')
    for case in wrong:
        say(f'    {case.name}: {case.measured()}, not {case.expected}')
    gpu = GPUS['h200']
    known = known_works() if args.all else {}
    chosen = [r for r in latest() if (r['op'], r['case']) in known]
    if args.all:
        say(f'V1  {len(latest()) - len(chosen)} records are left out; python tools/sight_records.py works counts them')
    else:
        chosen = sample(latest(), args.records, args.seed)
    found = [timed(record, gpu, known) for record in chosen]
    _print_times(found, gpu, say)
    if args.fit:
        say('    fitted on the shapes that are not held out:')
        for name, value in fit(found, gpu).items():
            say(f'    {name:<18}{value:.4g}')
    _print_sweeps(say)
    _print_counters(say)
    refused = fitting(None if args.all else ['transpose', 'rand'])
    say(f'V4  {len(refused)} kernels of the {"library" if args.all else "sample of ops"} do not fit the {gpu.name}')
    for reason in refused:
        say(f'    {reason}')
    return int(bool(wrong or refused))


def counters(path: Path = COUNTERS) -> dict[str, dict[str, float]]:
    """By kernel, counted over measured values: registers, sectors, wavefronts, bytes of device memory and warps.

    Of sectors, bytes and wavefronts only a million or more are compared. A thread has at least 16 registers, because
    the hardware gives them in such steps.
    """
    found: dict[str, dict[str, float]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        counted, measured = record['counted'], record['measured']
        counted['registers'] = max(16, counted['registers'])
        found[record['kernel']] = {
            name: counted[name] / measured[name]
            for name in ('registers', 'l2_sectors', 'shared_wavefronts', 'dram_bytes', 'warps')
            if name in ('registers', 'warps') or counted[name] >= 1e6
        }
    return found


def _print_counters(say: Any) -> None:
    if not COUNTERS.exists():
        say('V3  counters of ncu: ' + _not_recorded(COUNTERS))
        return
    found, bars = counters(), dict(registers=0.0, l2_sectors=0.1, shared_wavefronts=0.1, dram_bytes=0.05, warps=0.05)
    for name, bar in bars.items():
        ratios = {kernel: of[name] for kernel, of in found.items() if name in of}
        far = [f'{kernel} {ratio:.2f}' for kernel, ratio in ratios.items() if abs(ratio - 1) > bar]
        say(f'V3  {name}: {len(ratios) - len(far)} of {len(ratios)} kernels within {bar:.0%} of ncu')
        if far:
            say(f'    counted / measured of the others: {", ".join(far)}')


def _not_recorded(path: Path) -> str:
    return f'not recorded; run python tools/sight_records.py on a GPU, which writes {path.name}'


def _print_times(found: Sequence[Timed], gpu: Gpu, say: Any) -> None:
    good = [t for t in found if t.works]
    if not any(t.held_out for t in good):
        say('V1  no records: benchmarks/results is not in the package')
        return
    say(f'V1  {len(good)} records, {len(found) - len(good)} have no case any more')
    for name, every, kept in error_rows(good, gpu):
        say(f'    {name:<26}{every}')
        say(f'    {"  held-out shapes":<26}{kept}')
    say(f'    {"in a CUDA graph":<26}{errors(good, gpu, graph=True)}')
    decided = ', '.join(f'{name} {number}' for name, number in deciding(good, gpu).most_common())
    say(f'    what takes longest, by records: {decided}')
    above = floors_above(good, gpu)
    say(f'    {len(above)} records are faster than their floor' + ''.join(f'\n      {name}' for name in above))


def _print_sweeps(say: Any) -> None:
    if not SWEEPS.exists():
        say('V2  sweeps: ' + _not_recorded(SWEEPS))
        return
    rows = sweeps()
    say(f'V2  {len(rows)} sweeps, median rank correlation {np.median([row["rank"] for row in rows]):.2f}')
    for row in rows:
        off = f'first {row["first"]:.0%} and best of five {row["five"]:.0%} off'
        say(f'    {row["op"]} {row["case"]}: {row["rank"]:.2f}, {off}')


if __name__ == '__main__':
    sys.exit(main())
