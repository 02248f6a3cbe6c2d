"""Measure ops on their benchmark cases: time, time in a CUDA graph, GB/s, speed relative to a copy, host time.

If an op disagrees with its twin on a case, that case is not measured. Without a GPU, only the wall time of small cases
is measured, and the records say so.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import tile_kernels
from tile_kernels.cli import console
from tile_kernels.core.cases import Case, case_id
from tile_kernels.core.errors import ArgumentError, TileKernelsError
from tile_kernels.core.gpus import arch_of
from tile_kernels.core.knobs import knobs
from tile_kernels.core.op import Op
from tile_kernels.core.registry import find_ops
from tile_kernels.testing.contract import check_kernel
from tile_kernels.testing.records import Record, measure

#: How GPU records are taken; generated pages use no other records.
GPU_TIMER = 'median of CUDA events, L2 flushed'

ROOT = Path(tile_kernels.__file__).parents[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench`."""
    parser.add_argument('ops', nargs='*', metavar='OP', help='ops or families (default: all)')
    parser.add_argument(
        '--level', choices=('smoke', 'full', 'bench'), help='cases to run (default bench; smoke without a GPU)'
    )
    parser.add_argument('--base', metavar='REF', help='also measure this git revision and print the ratio')
    parser.add_argument(
        '--json', metavar='FILE', type=Path, help='append the records to FILE, one JSON object per line'
    )
    parser.add_argument('--commit', help='commit the records carry, where the package is not in a git checkout')
    parser.add_argument('--sweep', action='store_true', help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns 1 if an op disagreed with its twin."""
    if args.sweep:
        raise ArgumentError('--sweep is a command of its own now: tile-kernels tune OP --all')
    if args.json is not None:
        check_writable(args.json)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    level = args.level or ('bench' if device == 'cuda' else 'smoke')
    chosen = [
        (op, case) for op in find_ops(args.ops) if op.case_set is not None for case in getattr(op.case_set, level)
    ]
    if not chosen:
        raise ArgumentError(f'ops have no {level} cases')
    context = circumstances(device, args.commit)
    base = base_records(args.base, args.ops, level) if args.base else None
    records, refusals = measure_all(chosen, device, context, args.json)
    report(records, refusals, device, args.base, base)
    return 1 if refusals else 0


def measure_all(
    chosen: Iterable[tuple[Op, Case]], device: str, context: Record, path: Path | None = None
) -> tuple[list[Record], dict[str, str]]:
    """Records of the cases in which the op agrees with its twin, and the reasons for the other cases.

    Each record is written to `path` at once, so an interrupted run keeps its measurements.
    """
    records: list[Record] = []
    refusals: dict[str, str] = {}
    chosen = list(chosen)
    with console.progress() as bar:
        task = bar.add_task('', total=len(chosen))
        for op, case in chosen:
            name = f'{op.name}[{case_id(case)}]'
            bar.update(task, description=name)
            try:
                records.append(measure_checked(op, case, device) | context)
                if path is not None:
                    write_records(path, records[-1:])
            except (AssertionError, TileKernelsError, RuntimeError) as error:
                refusals[name] = str(error).strip().partition('\n')[0]
            bar.advance(task)
    return records, refusals


def measure_checked(op: Op, case: Case, device: str) -> Record:
    """Measure an op on a case; unless the twin itself is measured, first check the op against its twin."""
    if device == 'cuda' or knobs.interpret:
        check_kernel(op, case, device)
    record = measure(op, case, device)
    if device == 'cpu':  # leave out everything that could be mistaken for a kernel time
        return {'op': op.name, 'case': record['case'], 'wall_us': record['us']}
    launches = [{'kernel': launch.kernel.name, 'config': launch.config} for launch in op.trace_case(case)]
    return record | {'launches': launches}


def circumstances(device: str, commit: str | None = None) -> Record:
    """The common fields of all records of a run: date, code, machine."""
    shared = {
        'commit': commit or git('describe', '--always', '--dirty', '--abbrev=10') or 'unknown',
        'date': datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%dT%H:%M:%SZ'),
        'torch': torch.__version__,
        'tilelang': importlib.metadata.version('tilelang'),
    }
    if device == 'cuda':
        index = torch.cuda.current_device()
        return shared | {'device': torch.cuda.get_device_name(index), 'arch': arch_of(index), 'timer': GPU_TIMER}
    return shared | {'device': 'cpu', 'ran': 'interpreter' if knobs.interpret else 'twin', 'timer': 'wall clock'}


def git(*words: str, root: Path = ROOT) -> str | None:
    """Output of a git command in the checkout, None if it fails."""
    try:
        done = subprocess.run(['git', *words], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def check_writable(path: Path) -> None:
    """Check that records can be appended to `path`, before anything is measured."""
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open('a').close()
    except OSError as error:
        raise ArgumentError(f'--json must be a file that can be written, got {path} ({error.strerror})') from error
    if not there:
        path.unlink()  # a run without records leaves no file


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Append records to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('a') as file:
        for record in records:
            file.write(json.dumps(record, default=str) + '\n')


def read_records(path: Path) -> list[Record]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


# Another revision ---------------------------------------------------------------------------


@contextmanager
def worktree(ref: str, root: Path = ROOT) -> Iterator[Path]:
    """A temporary checkout of a revision."""
    if git('rev-parse', '--git-dir', root=root) is None:
        raise ArgumentError(f'--base needs the package in a git checkout, found none at {root}')
    if git('rev-parse', '--verify', '--quiet', f'{ref}^{{commit}}', root=root) is None:
        raise ArgumentError(f'--base must name a git revision, got {ref!r}')
    with tempfile.TemporaryDirectory(prefix='tile_kernels-base-') as folder:
        tree = Path(folder) / 'tree'
        git('worktree', 'add', '--detach', str(tree), ref, root=root)
        try:
            yield tree
        finally:
            git('worktree', 'remove', '--force', str(tree), root=root)


def base_records(ref: str, ops: list[str], level: str, root: Path = ROOT) -> list[Record]:
    """Measure another revision: run the same command in a checkout of it."""
    with worktree(ref, root) as tree, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'base.jsonl'
        words = ['bench', *ops, '--level', level, '--json', str(path)]
        command = [sys.executable, '-m', 'tile_kernels.cli.main', *words]  # -m puts the working directory first
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        if not path.exists():
            said = done.stderr.strip().splitlines()
            raise ArgumentError(f'--base {ref} could not be measured: {said[-1] if said else "it wrote no records"}')
        return read_records(path)


# Report -------------------------------------------------------------------------------------


def report(
    records: list[Record], refusals: dict[str, str], device: str, ref: str | None, base: list[Record] | None
) -> None:
    """Print the table and the rejected cases."""
    out = console.output()
    columns = {'op': 'op', 'case': '~case'}
    if device == 'cuda':
        columns |= {
            'us': '>us',
            'graph_us': '>graph us',
            'gbps': '>GB/s',
            'pct_of_copy': '>% of copy',
            'tflops': '>TFLOP/s',
            'host_us': '>host us',
        }
    else:
        columns |= {'wall_us': '>wall us', 'ran': 'ran'}
    time = 'us' if device == 'cuda' else 'wall_us'
    before = {(record['op'], record['case']): record[time] for record in base or ()}
    rows = []
    for record in records:
        row = [_cell(record.get(key)) for key in columns]
        if base is not None:
            old = before.get((record['op'], record['case']))
            row += [console.number(old), None if old is None else f'{old / record[time]:.2f}x']
        rows.append(row)
    headings = [*columns.values(), *((f'>{ref} us', '>faster') if base is not None else ())]
    out.print(console.wide_or_tall(out, headings, rows))
    for name, reason in refusals.items():
        out.print(f'refused: {name}: {reason}', style='red', markup=False, soft_wrap=True)
    if device == 'cpu':
        out.print('No GPU: these are wall-clock times of small cases on this CPU; they say nothing about the kernels.')


def _cell(value: Any) -> Any:
    return console.number(value) if isinstance(value, float) else value
