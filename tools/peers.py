"""Measure our ops beside every peer library that can be imported: same inputs, outputs compared, one process, in turns.

    python tools/peers.py [FAMILY | OP ...] [--json FILE] [--seconds N] [--jobs N] [--list]

First several processes run every call once, so that all compilers fill their caches. Then one process measures alone.
Each record is written at once, and the most important cases come first, so a run that ends early keeps its best part.
Peers are optional. One that is absent, refuses a shape, fails, hangs or computes something else has a record that says
so. Without a GPU, small cases are compared only.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import itertools
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:  # run as a script; workers import this file as tools.peers
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from tile_kernels.cli.bench import check_writable, circumstances, write_records  # noqa: E402
from tile_kernels.core.cases import Case, case_id, case_seed  # noqa: E402
from tile_kernels.core.errors import ArgumentError  # noqa: E402
from tile_kernels.core.workers import Child, Failed, Here, sentence  # noqa: E402
from tile_kernels.testing.bench import benchmark_kernel, graph_time, host_time  # noqa: E402
from tile_kernels.testing.records import Record  # noqa: E402
from tools.peer_products import ATTENTION, LINEAR, PRODUCTS  # noqa: E402
from tools.peer_rows import CASTS, MHC, MOE, NORM, ROWWISE  # noqa: E402
from tools.peer_work import OURS, PACKAGES, Call, Draw, Work  # noqa: E402

#: Seconds after which a call that compiles, and a case that is measured, are given up.
COMPILE_S, CASE_S = 200.0, 60.0
#: The largest part of the time that compiling may take.
COMPILE_SHARE = 0.5
#: Times that all take a turn, and milliseconds of timed calls in a turn.
TURNS, TURN_MS = 3, 12.0
#: Words of errors by which peers refuse a shape, dtype or device.
REFUSALS = ('support', 'must be', 'refuse', 'not implemented', 'only ', 'not available', 'no available kernel')

Outcome = dict[str, Any]

#: Everything that is measured, the most important first.
WORKS: Sequence[Work] = [
    *NORM,
    *CASTS[:2],
    *ROWWISE[:3],
    *PRODUCTS[:3],
    *ATTENTION,
    *LINEAR,
    *MOE,
    *MHC,
    *ROWWISE[3:],
    *PRODUCTS[3:],
    *CASTS[2:],
]


# One case -----------------------------------------------------------------------------------


def participants(work: Work) -> dict[str, Callable[..., Any]]:
    """We and the peers, by name."""
    return {OURS: work.ours, **work.peers}


def missing(peer: str) -> str:
    """Which package a peer lacks; empty if it has all."""
    package = PACKAGES.get(peer.split()[0].rstrip(','), 'torch')
    return '' if importlib.util.find_spec(package) else package


def inputs_of(work: Work, case: Case, device: str) -> dict[str, Any]:
    """Fresh inputs; the same in every process."""
    return work.make(Draw(device, case_seed(work.key, case)), **case)


def verdict(error: Exception) -> Outcome:
    """What an error of a peer means."""
    synchronize()  # after an illegal access nothing else can run in this process, and this raises
    text = sentence(error)[:200]
    if isinstance(error, ImportError):
        return {'status': 'absent', 'reason': text}
    plain = isinstance(error, (ValueError, AssertionError, NotImplementedError))
    said = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in REFUSALS)
    return {'status': 'refused' if plain or said else 'failed', 'reason': text}


def relative_error(found: Any, truth: Any) -> float:
    """Largest |found - truth| / |truth| of the tensors; of integers the share that differs."""
    pairs = list(zip(_tensors(found), _tensors(truth), strict=True))
    return max(map(_distance, *zip(*pairs, strict=True)), default=math.inf)


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def _distance(found: Tensor, truth: Tensor) -> float:
    if found.shape != truth.shape:
        raise AssertionError(f'the result has the shape {tuple(found.shape)}, expected {tuple(truth.shape)}')
    if not truth.is_floating_point():
        return (found != truth).double().mean().item()
    size = torch.linalg.vector_norm(truth.float()).item() or 1.0
    error = torch.linalg.vector_norm(found.float() - truth.float()).item() / size
    return error if math.isfinite(error) else math.inf


def started(work: Work, peer: str, given: dict[str, Any]) -> Call:
    """The call of a participant."""
    made = participants(work)[peer](**given)
    return made if isinstance(made, Call) else Call(made)


def prepare(works: Sequence[Work], key: str, case: Case, peer: str, device: str) -> None:
    """Run a call twice, so that everything is compiled."""
    work = find(works, key)
    with torch.no_grad():
        call = started(work, peer, inputs_of(work, case, device))
        for _ in range(2):
            call.run()
        synchronize()
    del call
    release()


def compare(work: Work, peer: str, given: dict[str, Any], truth: Any) -> tuple[Call | None, Outcome]:
    """The call of a participant if it agrees with the truth, and what there is to say about it."""
    lacks = missing(peer)
    if lacks:
        return None, {'status': 'absent', 'reason': f'no module {lacks}'}
    try:
        call = started(work, peer, given)
        found = relative_error(work.part(call.read(call.run())), truth)
        synchronize()
    except Exception as error:
        return None, verdict(error)
    if not found <= work.bound:
        return None, {'status': 'differs', 'reason': f'relative error {found:.2g}'}
    return call, {'status': 'ok', 'error': float(f'{found:.3g}')}


def measure(
    works: Sequence[Work], key: str, case: Case, without: dict[str, str], notes: str, device: str
) -> list[Record]:
    """Records of one case; `notes` is a file that always names who runs, for the case of a crash."""
    work = find(works, key)
    outcomes: dict[str, Outcome] = {name: {'status': 'failed', 'reason': why} for name, why in without.items()}
    calls: dict[str, Call] = {}
    with torch.no_grad():
        given = inputs_of(work, case, device)
        truth = work.truth(**given)
        for peer in participants(work):
            if peer not in without:
                Path(notes).write_text(peer)
                call, outcomes[peer] = compare(work, peer, given, truth)
                if call is not None:
                    calls[peer] = call
        del truth
        for peer, times in take_turns(calls, notes, device, graph=not work.gradient).items():
            outcomes[peer] |= times
    del given, calls
    release()
    order = [peer for peer in participants(work) if peer in outcomes]
    return [{'op': work.op, 'work': work.key, 'case': case_id(case), 'peer': p, **outcomes[p]} for p in order]


def take_turns(calls: dict[str, Call], notes: str, device: str, graph: bool) -> dict[str, Outcome]:
    """Times of all calls, each measured in several short turns; who fails drops out."""
    times: dict[str, dict[str, list[float]]] = {peer: {} for peer in calls}
    failed: dict[str, Outcome] = {}
    for turn, (peer, call) in itertools.product(range(TURNS), calls.items()):
        if peer not in failed:
            Path(notes).write_text(peer)
            try:
                for name, found in one_turn(call, device, graph and turn > 0).items():
                    times[peer].setdefault(name, []).extend(found)
            except Exception as error:
                failed[peer] = verdict(error) | {'status': 'failed'}
    return {peer: failed.get(peer) or summary(times[peer], device) for peer in calls}


def one_turn(call: Call, device: str, graph: bool) -> dict[str, list[float]]:
    """Milliseconds: events with a cold L2 cache, in a graph, on the host."""
    on_gpu = device == 'cuda'
    warmup, rep = (TURN_MS / 3, TURN_MS) if on_gpu else (0.0, 0.1)
    where = f'cuda:{torch.cuda.current_device()}' if on_gpu else device
    found = {'us': list(benchmark_kernel(call.run, warmup=warmup, rep=rep, num_bytes=0, device=where).times)}
    if on_gpu:
        found['host_us'] = [host_time(call.run, calls=50, rep=4)]
        if graph:
            found['graph_us'] = captured(call)
    return found


def captured(call: Call) -> list[float]:
    """Time in a graph; empty if the call cannot be captured."""
    try:
        return [graph_time(call.run, calls=50, rep=8)]
    except Exception:
        synchronize()
        return []


def summary(times: dict[str, list[float]], device: str) -> Outcome:
    """Medians and spread in microseconds; on a CPU a name that nobody takes for the time of a kernel."""
    cold = [1e3 * x for x in times['us']]
    if device == 'cpu':
        return {'wall_us': round(statistics.median(cold), 1)}
    low, *_, high = statistics.quantiles(cold, n=5, method='inclusive')
    found = {'us': statistics.median(cold), 'p20_us': low, 'p80_us': high}
    found |= {name: 1e3 * statistics.median(times[name]) for name in ('graph_us', 'host_us') if times.get(name)}
    return {name: round(value, 3) for name, value in found.items()}


def find(works: Sequence[Work], key: str) -> Work:
    """The work with a key."""
    return next(work for work in works or WORKS if work.key == key)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release() -> None:
    """Give memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# A round ------------------------------------------------------------------------------------


def chosen(works: Sequence[Work], names: Sequence[str], device: str) -> list[tuple[Work, Case]]:
    """Cases of the named ops or families, first the first case of every work, then the second ones."""
    for name in names:
        if not any(matches(work, name) for work in works):
            known = ', '.join(dict.fromkeys(work.op.partition('.')[0] for work in works))
            raise ArgumentError(f'op must be an op or a family that has peers, got {name!r}; families are {known}')
    own = [work for work in works if not names or any(matches(work, name) for name in names)]
    columns = [work.cases if device == 'cuda' else [work.tiny] for work in own]
    ranks = itertools.zip_longest(*columns)
    return [(work, case) for rank in ranks for work, case in zip(own, rank, strict=True) if case is not None]


def matches(work: Work, name: str) -> bool:
    """Whether a name from the command line means this work."""
    return name in (work.op, work.key, *work.op.split('.'))


def compile_all(plan: list[tuple[Work, Case]], jobs: int, until: float, device: str) -> dict[tuple, str]:
    """Run every call once, in several processes; returns why calls failed whose process had to be ended."""
    local = threading.local()
    dead: dict[tuple, str] = {}
    children: list[Child] = []

    def task(work: Work, case: Case, peer: str) -> None:
        left = until - time.monotonic()
        if left <= 0:
            return
        if not hasattr(local, 'child'):
            local.child = Child()
            children.append(local.child)
        try:
            local.child.call(prepare, (), work.key, case, peer, device, limit=min(COMPILE_S, max(left, 1)))
        except Failed as error:
            if 'its process ended' in str(error) or ('longer than' in str(error) and time.monotonic() < until):
                dead[work.key, case_id(case), peer] = str(error)

    tasks = [(work, case, peer) for work, case in plan for peer in participants(work) if not missing(peer)]
    # A call of fla tries many configs, which takes minutes. Later cases find most of what they need compiled.
    tasks.sort(key=lambda one: (one[0].cases.index(one[1]) > 0, not one[2].startswith('fla')))
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda one: task(*one), tasks))
        list(pool.map(Child.close, children))
    return dead


def measure_all(
    plan: list[tuple[Work, Case]], runner: Child | Here, dead: dict[tuple, str], until: float, device: str
) -> Iterator[list[Record]]:
    """Records of one case after the other; a participant that ends its process is left out and the case repeated."""
    works: Sequence[Work] = () if isinstance(runner, Child) else [work for work, _ in plan]
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / 'running'
        for work, case in plan:
            without = {p: why for (key, name, p), why in dead.items() if (key, name) == (work.key, case_id(case))}
            while time.monotonic() < until:
                notes.write_text('')
                limit = min(CASE_S, max(until - time.monotonic(), 5.0)) + 10.0
                try:
                    found = runner.call(measure, works, work.key, case, without, str(notes), device, limit=limit)
                except Failed as error:
                    guilty = notes.read_text()
                    if not guilty or guilty in without:
                        reason = {'status': 'failed', 'reason': f'inputs: {error}'[:200]}
                        yield [{'op': work.op, 'work': work.key, 'case': case_id(case), 'peer': OURS, **reason}]
                        break
                    without[guilty] = str(error)
                    continue
                yield found
                break


def run_round(
    plan: list[tuple[Work, Case]], path: Path | None, seconds: float, jobs: int, commit: str | None = None
) -> list[Record]:
    """Compile, then measure; every record is written when it is there."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    start = time.monotonic()
    context = circumstances(device, commit) | {'versions': versions()}
    dead: dict[tuple, str] = {}
    if device == 'cuda' and jobs > 1:
        dead = compile_all(plan, jobs, start + COMPILE_SHARE * seconds, device)
        print(f'compiled in {time.monotonic() - start:.0f} s', flush=True)
    runner: Child | Here = Child() if device == 'cuda' else Here()
    records: list[Record] = []
    try:
        for found in measure_all(plan, runner, dead, start + seconds, device):
            made = [record | context for record in found]
            records += made
            if path is not None:
                write_records(path, made)
            print(progress(found), flush=True)
    finally:
        runner.close()
    left = len(plan) - len({(r['work'], r['case']) for r in records})
    if left:
        print(f'time is up: {left} of {len(plan)} cases were not measured', flush=True)
    return records


def versions() -> dict[str, str]:
    """Versions of the peers that are there."""
    found = {}
    for name, module in PACKAGES.items():
        if importlib.util.find_spec(module):
            owners = importlib.metadata.packages_distributions().get(module, [])
            found[name] = importlib.metadata.version(owners[0]) if owners else 'unknown'
    return found


# Words --------------------------------------------------------------------------------------


def progress(found: list[Record]) -> str:
    """One line about a case."""
    parts = [f'{r["peer"]} {r["us"]:.1f}' if 'us' in r else f'{r["peer"]} {r["status"]}' for r in found]
    return f'{found[0]["work"]} {found[0]["case"]}: {"; ".join(parts)}'


def best_ratios(records: Iterable[Record]) -> list[Record]:
    """For each case our times, the best peer, and its times as multiples of ours."""
    cases: dict[tuple, list[Record]] = {}
    for record in records:
        if record['status'] == 'ok' and 'us' in record:
            cases.setdefault((record['work'], record['case']), []).append(record)
    rows = []
    for found in cases.values():
        ours = next((r for r in found if r['peer'] == OURS), None)
        others = [r for r in found if r['peer'] != OURS]
        if ours and others:
            row: Record = {'ours': ours, 'best': min(others, key=lambda r: r['us'])}
            for name in ('us', 'graph_us', 'host_us'):
                times = [r[name] for r in others if name in r]
                row[name] = min(times) / ours[name] if times and name in ours else None
            rows.append(row)
    return rows


def report(records: list[Record]) -> str:
    """The table at the end, at most 100 columns wide; a factor above 1 means that we are faster."""
    rows = best_ratios(records)
    heading = ('op and case', 'ours us', 'best us', 'best peer', 'cold', 'graph', 'host')
    lines = [_line(heading)] if rows else []
    for row in rows:
        ours, best = row['ours'], row['best']
        where = f'{ours["work"].partition(".")[2]} {ours["case"]}'
        factors = [f'{row[name]:.2f}' if row[name] else '' for name in ('us', 'graph_us', 'host_us')]
        lines.append(_line((where, f'{ours["us"]:.1f}', f'{best["us"]:.1f}', best['peer'], *factors)))
    for name, words in (('us', 'cold'), ('graph_us', 'in a graph'), ('host_us', 'on the host')):
        found = [row[name] for row in rows if row[name]]
        if found:
            lost = sum(x < 0.97 for x in found)
            mean = statistics.geometric_mean(found)
            lines.append(f'{words}: {mean:.2f} x the best peer in {len(found)} cases, slower by over 3 % in {lost}')
    said = Counter((r['peer'], r['status'], r.get('reason', '')[:60]) for r in records if r['status'] != 'ok')
    lines += [f'{peer}: {status} in {n} cases: {why}'[:100] for (peer, status, why), n in said.most_common(40)]
    agreed = sum(r['status'] == 'ok' for r in records)
    return '\n'.join([*lines, f'{len(records)} records, {agreed} agree with the truth'])


def _line(cells: Sequence[str]) -> str:
    first, ours, best, peer, *factors = cells
    return f'{first[:44]:44} {ours:>8} {best:>8} {peer[:16]:16} ' + ' '.join(f'{x:>5}' for x in factors)


def main(argv: Sequence[str] | None = None, works: Sequence[Work] = WORKS) -> int:
    """The command line; returns 1 if a call of ours failed or disagreed."""
    parser = argparse.ArgumentParser('python tools/peers.py', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('ops', nargs='*', metavar='FAMILY | OP', help='what to measure (default: everything)')
    parser.add_argument(
        '--json', type=Path, metavar='FILE', help='append the records to FILE, one JSON object per line'
    )
    parser.add_argument('--seconds', type=float, default=600.0, help='time for everything (default 600)')
    parser.add_argument('--jobs', type=int, default=os.cpu_count() or 1, help='processes that compile')
    parser.add_argument('--commit', help='commit that the records carry, where there is no git')
    parser.add_argument('--list', action='store_true', help='print what would be measured, and which peers are there')
    args = parser.parse_args(argv)
    try:
        plan = chosen(works, args.ops, 'cuda' if args.list or torch.cuda.is_available() else 'cpu')
        if args.json is not None:
            check_writable(args.json)
    except ArgumentError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list:
        for work, case in plan:
            print(f'{work.key} {case_id(case)}: {", ".join(p for p in work.peers if not missing(p))}')
        return 0
    # Every worker would start as many compilers as there are cores.
    os.environ.setdefault('TORCHINDUCTOR_COMPILE_THREADS', '1')
    records = run_round(plan, args.json, args.seconds, args.jobs, args.commit)
    print(report(records))
    return int(any(r['peer'] == OURS and r['status'] != 'ok' for r in records))


if __name__ == '__main__':
    from tools import peers  # workers find functions by the name of their module

    sys.exit(peers.main())
