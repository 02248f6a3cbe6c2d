"""Record on a GPU what `python -m tile_kernels.sight.validate` compares with: sweeps of configs, and counters of ncu.

    python tools/sight_records.py            # V2 and V3, five minutes on one GPU and 16 cores
    python tools/sight_records.py sweeps     # goes on where an earlier run ended
    python tools/sight_records.py ncu
    python tools/sight_records.py works      # what each recorded case asks of a GPU; needs none

Results go to `benchmarks/results/sight`.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import json
import math
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tile_kernels.cli.bench import circumstances, write_records
from tile_kernels.core import nvcc
from tile_kernels.core.errors import ArgumentError, CompileError, TileKernelsError
from tile_kernels.core.gpus import GPUS, Gpu
from tile_kernels.core.jit import Config
from tile_kernels.core.launch import on_gpu
from tile_kernels.core.registry import case_by_id, find_op, launches_of
from tile_kernels.core.workers import Child, Failed, spread
from tile_kernels.sight.count import count
from tile_kernels.sight.limits import occupancy
from tile_kernels.sight.lower import lower
from tile_kernels.sight.subject import Subject, resolve
from tile_kernels.sight.validate import COUNTERS, SWEEPS, WORKS, code_of, known_works, latest, timed
from tile_kernels.testing.records import Record
from tile_kernels.tuning.rank import Estimate, estimate
from tile_kernels.tuning.runs import Run, Times, check, gpu_times
from tile_kernels.tuning.space import KernelProblem, parameters_of
from tools.sight_kernels import COUNTED, KERNELS, drawn, problem_of

#: What ncu reports, by the name that it is compared with.
METRICS = {
    'dram_bytes': 'dram__bytes.sum',
    'dram_read_bytes': 'dram__bytes_read.sum',
    'l2_sectors': 'lts__t_sectors_srcunit_tex_op_read.sum,lts__t_sectors_srcunit_tex_op_write.sum',
    'sm_sectors': 'l1tex__m_xbar2l1tex_read_sectors.sum,l1tex__m_l1tex2xbar_write_sectors.sum',
    'load_wavefronts': 'l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum',
    'store_wavefronts': 'l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum',
    'shared_wavefronts': 'l1tex__data_pipe_lsu_wavefronts_mem_shared.sum',
    'registers': 'launch__registers_per_thread',
    'warps': 'sm__warps_active.avg.per_cycle_active',
}


#: Milliseconds of warm-up and of timed calls, and replays of a graph: a few cold calls, whose median counts.
EFFORT = (2.0, 10.0, 5)
#: The most seconds for one compilation, and for one check or timing.
COMPILING_S, TIMING_S = 60.0, 30.0
#: The most seconds for counting one case.
COUNTING_S = 60.0
#: A config of a sweep: kernel, place of the problem, config.
Job = tuple[str, int, Config]


def compiled(name: str, place: int, config: Config, folder: Path) -> tuple[Run, Estimate]:
    """Predict and compile a config, in a process without a GPU."""
    problem = problem_of(name, place)
    guess = estimate(problem.subjects(config))
    if guess.against is not None:
        raise ArgumentError(guess.against)
    if isinstance(problem, KernelProblem):
        problem.describe(_folder_of(name, place, folder), guess)
    (reason,) = problem.compile([config], 1, math.inf)
    if reason is not None:
        raise CompileError(reason)
    return problem.run(config), guess


def measured(name: str, place: int, folder: Path, run: Run, guess: Estimate) -> Times:
    """Check and time a config, in the process that has the GPU."""
    prepared(name, place, _folder_of(name, place, folder), guess)
    check(run, None)
    return gpu_times(run, EFFORT)


_prepared: set[Path] = set()


def prepared(name: str, place: int, folder: Path, guess: Estimate) -> None:
    """Write the inputs and expected outputs of a problem, once in a process: one that was killed may have left half."""
    if folder not in _prepared:
        folder.mkdir(exist_ok=True)
        problem_of(name, place).prepare(folder, guess)
        _prepared.add(folder)


def _folder_of(name: str, place: int, folder: Path) -> Path:
    return folder / f'{name}-{place}'


def record_sweeps(path: Path, seconds: float, number: int, jobs: int, commit: str | None = None) -> int:
    """Time configs of every sweep that the file lacks; each is written at once. Returns how many were timed.

    Processes compile while one times, so the file grows from the first seconds. Every kernel gets its first problem
    before any gets its second.
    """
    nvcc.require_tilelang()
    importlib.import_module('tilelang')  # processes then load it when they start, and send its objects
    end = time.monotonic() + seconds
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(line['op'], line['case'], json.dumps(line['config'])) for line in lines}
    sweeps = [(name, place) for place in range(3) for name in KERNELS]
    waiting: list[Job] = [(*sweep, config) for sweep in sweeps for config in drawn(*sweep, number)]
    waiting = [job for job in waiting if (job[0], case_of(*job[:2]), json.dumps(job[2])) not in known][::-1]
    ready: queue.SimpleQueue[tuple[Job, tuple[Run, Estimate] | str] | None] = queue.SimpleQueue()
    timer, compilers = Child(), [Child() for _ in range(jobs)]

    def work(child: Child, folder: Path) -> None:
        try:
            while (left := end - time.monotonic()) > 0:
                job = waiting.pop()
                try:
                    ready.put((job, child.call(compiled, *job, folder, limit=min(left, COMPILING_S))))
                except Failed as failure:
                    ready.put((job, str(failure)))
        except (IndexError, OSError):  # nothing is left, or the end closed the pipe
            return
        finally:
            ready.put(None)

    count = 0
    with tempfile.TemporaryDirectory(prefix='tile_kernels-sweeps-') as name:
        for child in compilers:
            threading.Thread(target=work, args=(child, Path(name)), daemon=True).start()
        try:
            about = timer.call(circumstances, 'cuda', commit, limit=COMPILING_S)
            for job, made in in_order(ready, jobs):
                if (left := end - time.monotonic()) <= 0:
                    break
                record = timed_record(job, made, timer, Path(name), left)
                if record is not None:
                    write_records(path, [record | about])
                    count += record['us'] is not None
        finally:
            for child in (timer, *compilers):
                child.close()
    return count


def in_order(ready: queue.SimpleQueue[Any], jobs: int) -> Iterator[tuple[Job, Any]]:
    """What the compiling processes finish; the problem of the last one first, because its tensors are loaded."""
    found: list[tuple[Job, Any]] = []
    running, last = jobs, None
    while running or found:
        while running and (not found or not ready.empty()):
            made = ready.get()
            if made is None:
                running -= 1
            else:
                found.append(made)
        if found:
            found.sort(key=lambda item: item[0][:2] != last)
            last = found[0][0][:2]
            yield found.pop(0)


def timed_record(job: Job, made: tuple[Run, Estimate] | str, timer: Child, folder: Path, left: float) -> Record | None:
    """The record of a config, or None if the time ended before it."""
    name, place, config = job
    record: Record = {'op': name, 'case': case_of(name, place), 'config': config, 'predicted_us': None}
    blank: list[Any] = [None] * 4
    times, problem = Times(*blank), made if isinstance(made, str) else None
    if not isinstance(made, str):
        run, guess = made
        loads = [asdict(load) for load in guess.loads]
        record |= {'predicted_us': round(guess.us, 3), 'loads': loads}
        limit = min(left, TIMING_S)
        try:
            times = timer.call(measured, name, place, folder, run, guess, limit=limit)
        except Failed as failure:
            problem = str(failure)
    if problem is not None and 'took longer' in problem and left < COMPILING_S:
        return None
    return (
        record
        | {'us': times.us, 'p20_us': times.p20, 'p80_us': times.p80, 'graph_us': times.graph_us}
        | {'problem': problem}
    )


def case_of(name: str, place: int) -> str:
    """A problem in words."""
    return ' '.join(f'{key}={value}' for key, value in KERNELS[name].problems[place].items())


def counted(place: int) -> dict[str, float]:
    """What ncu must find for a kernel; compiles it under the name by which ncu finds it, in a process without a GPU."""
    subject = subject_of(place)
    lowered = lower(subject)
    (counts,) = count(subject, lowered)
    ours = [a for a in counts.accesses if a.space == 'shared' and a.how in ('load', 'store', 'atomic', 'ldmatrix')]
    found = nvcc.resources(lowered.source, subject.gpu.target)
    held = occupancy(counts, subject.gpu, found['registers'], found['static_shared'])
    executable(place)
    return {
        'dram_bytes': counts.distinct(),
        'l2_sectors': sum(a.sectors for a in counts.accesses if a.space == 'global'),
        'shared_wavefronts': sum(a.wavefronts for a in ours),
        'registers': found['registers'],
        'warps': min(held.warps, counts.blocks * counts.threads / 32 / subject.gpu.sms),
    }


def subject_of(place: int) -> Subject:
    """A kernel of `COUNTED`."""
    builder, named = list(COUNTED.values())[place]
    (subject,) = resolve(builder, device='h200', **named)
    return subject


def executable(place: int) -> Any:
    """The kernel, compiled or from TileLang's cache."""
    import tilelang

    subject = subject_of(place)
    named = subject.prim_func.with_attr('global_symbol', f'case{place}')
    return tilelang.compile(named, target={'kind': 'cuda', 'arch': subject.gpu.target})


def launch() -> None:
    """Run each kernel once; ncu watches this process."""
    for place in range(len(COUNTED)):
        parameters = parameters_of(subject_of(place), Estimate(0.0, ''))
        executable(place)(*(torch.zeros(p.shape, device='cuda').to(p.dtype) for p in parameters))
    torch.cuda.synchronize()


def origin(commit: str | None) -> Record:
    """Commit, date and TileLang of this run."""
    return {
        name: value for name, value in circumstances('cpu', commit).items() if name in ('commit', 'date', 'tilelang')
    }


def record_counters(path: Path, commit: str | None = None) -> int:
    """Run ncu on the kernels, and write counted beside measured numbers; returns how many it measured."""
    if shutil.which('ncu') is None:
        raise TileKernelsError('sight_records: ncu is not on the PATH; install Nsight Compute')
    nvcc.require_tilelang()
    importlib.import_module('tilelang')
    about = origin(commit)
    makers = [functools.partial(tuple, (place,)) for place in range(len(COUNTED))]
    expected = spread(counted, makers, len(COUNTED), each=1)
    command = ['ncu', '--csv', '--print-units', 'base', '--kernel-name', 'regex:^case']
    command += ['--metrics', ','.join(METRICS.values()), sys.executable, '-m', 'tools.sight_records', '--launch']
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    found = of_csv(done.stdout)
    if not found:
        raise TileKernelsError(f'sight_records: ncu failed: {(done.stderr or done.stdout).strip()[-300:]}')
    rows = [
        {'kernel': name, 'counted': expected[place], 'measured': found[place], **about}
        for place, name in enumerate(COUNTED)
        if place in found and not isinstance(expected[place], Failed)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return len(rows)


def record_works(jobs: int, commit: str | None = None, gpu: Gpu = GPUS['h200']) -> int:
    """Count recorded cases whose code has changed or which the file lacks; returns how many.

    Each case is written when it is counted, so a run may be stopped and goes on later. One that takes longer than
    `COUNTING_S` is left out.
    """
    nvcc.require_tilelang()
    importlib.import_module('tilelang')
    about = origin(commit)
    records = latest()
    parts = [[record for record in records if record['op'] == op] for op in {record['op'] for record in records}]
    done = []

    def work(child: Child) -> None:
        with suppress(IndexError):
            while True:
                for record in parts.pop():  # cases of an op share kernels that are lowered
                    with suppress(Failed):
                        done.append(child.call(count_case, record, gpu, about, limit=COUNTING_S))
        child.close()

    threads = [threading.Thread(target=work, args=(Child(),)) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done)


def count_case(record: Record, gpu: Gpu, about: Record) -> bool:
    """Count a case and append it to the file, unless its line there still holds; returns whether it was counted."""
    known, code = known_works(), code_of_record(record, gpu)
    if code == known.get((record['op'], record['case']), {}).get('code'):
        return False
    counted = timed(record, gpu)
    line = {'op': counted.op, 'case': counted.case, **about, 'code': code}
    if counted.works:
        write_records(WORKS, [line | {'works': [asdict(work) for work in counted.works]}])
    return bool(counted.works)


def code_of_record(record: Record, gpu: Gpu) -> str:
    """The digest of the code of a recorded case."""
    op = find_op(record['op'])
    with on_gpu(gpu):
        return code_of(launches_of(op, case_by_id(op, record['case'])))


def of_csv(text: str) -> dict[int, dict[str, float]]:
    """The metrics of each kernel in the CSV of ncu, by our names; parts of a metric add up."""
    lines = text[text.index('"ID"') :].splitlines() if '"ID"' in text else []
    values: dict[int, dict[str, float]] = {}
    for row in csv.DictReader(lines):
        place = int(re.sub(r'\D', '', row['Kernel Name'].partition('_')[0]))
        values.setdefault(place, {})[row['Metric Name']] = float(row['Metric Value'].replace(',', ''))
    return {
        place: {name: sum(of.get(part, 0.0) for part in parts.split(',')) for name, parts in METRICS.items()}
        for place, of in values.items()
    }


def main() -> int:
    """Record on this machine's GPU; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
    parser.add_argument('what', nargs='*', help='sweeps, ncu or works (default: the first two)')
    parser.add_argument('--seconds', type=float, default=3600.0, help='the sweeps end after this time')
    parser.add_argument('--configs', type=int, default=28, help='configs of each sweep (default 28)')
    parser.add_argument('--jobs', type=int, default=max(1, (os.cpu_count() or 1) - 1), help='processes that compile')
    parser.add_argument('--out', type=Path, default=SWEEPS.parent, help='folder of sweeps.jsonl and ncu.jsonl')
    parser.add_argument('--commit', help='commit the records carry')
    parser.add_argument('--launch', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.launch:
        launch()
        return 0
    sys.path.insert(0, str(Path(__file__).parents[1]))  # processes import the functions of this file by that name
    from tools import sight_records

    if 'works' in args.what:
        sys.stdout.write(f'{sight_records.record_works(args.jobs, args.commit)} cases counted\n')
        return 0
    if not torch.cuda.is_available():
        sys.stderr.write('sight_records: there is no GPU; sweeps and counters need one\n')
        return 1
    if 'ncu' in (args.what or ['ncu']):
        found = sight_records.record_counters(args.out / COUNTERS.name, args.commit)
        sys.stdout.write(f'{found} of {len(COUNTED)} kernels counted by ncu\n')
    if 'sweeps' in (args.what or ['sweeps']):
        made = sight_records.record_sweeps(args.out / SWEEPS.name, args.seconds, args.configs, args.jobs, args.commit)
        sys.stdout.write(f'{made} configs timed\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
