"""A complete GPU run: compile everything in parallel, test, sanitize, measure twice; results as JSON lines.

    python tools/gpu_check.py [--out DIR] [--steps doctor,precompile,test,cases,sanitize,bench] [OP ...]

Users can run every step as a separate command. The script runs the steps in order, continues after a failure, and ends
with one line per step. `outputs` (the record that the interpreter must match) and `sweep` (configs) run only if named.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
CLI = [sys.executable, '-m', 'tile_kernels']
PYTEST = [sys.executable, '-m', 'pytest', '-q', '--no-header', '-p', 'no:cacheprovider']
#: Processes that use the GPU at the same time in the steps `cases` and `sanitize`.
SHARDS = 8
#: Explicit plugins, with autoloading off, so that every machine uses the same ones.
PLUGINS = ['-p', 'xdist.plugin', '-p', 'tile_kernels.testing.plugin']


def device() -> str:
    """The GPU name in results files: `NVIDIA H200` is `h200`."""
    query = ['nvidia-smi', '--query-gpu=name', '--format=csv,noheader', '--id=0']
    name = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return name.strip().lower().removeprefix('nvidia ').replace(' ', '-')


def commands(step: str, ops: list[str], out: Path, inputs: list[str]) -> list[list[str]]:
    """The commands of a step."""
    workers = ['-n', str(min(8, os.cpu_count() or 1))]
    sanitizer = shutil.which('compute-sanitizer') or 'compute-sanitizer'
    run_cases = [sys.executable, str(ROOT / 'tools' / 'run_cases.py'), *ops]
    shards = [f'{index}/{SHARDS}' for index in range(SHARDS)]
    if step == 'bench':  # twice: the difference is the spread
        return [[*CLI, 'bench', *ops, '--json', str(out / f'{device()}.jsonl')]] * 2
    return {
        'doctor': [[*CLI, 'doctor']],
        'outputs': [[sys.executable, 'tools/gpu_outputs.py', *inputs, '--out', str(out / 'gpu_outputs.json')]],
        'precompile': [[*CLI, 'precompile', *ops, '--jobs', str(os.cpu_count() or 1)]],
        'test': [
            [*PYTEST, *PLUGINS, *workers, 'tests/test_contract.py', 'tests/gpu', 'tests/interpreter/test_examples.py']
        ],
        'cases': [[*run_cases, '--level', 'full', '--isolate', '60', '--shard', shard] for shard in shards],
        'sanitize': [
            [sanitizer, '--tool', tool, '--error-exitcode', '9', *run_cases, '--shard', shard]
            for tool in ('memcheck', 'racecheck', 'initcheck')
            for shard in shards
        ],
        'sweep': [[*CLI, 'tune', *ops, '--all', '--store', 'none', '--json', str(out / 'sweep.jsonl')]],
    }[step]


def run(command: list[str], environment: dict[str, str]) -> int:
    """Run a command in the project's root; returns its exit status."""
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    """Run the steps; returns 1 if any command failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('ops', nargs='*', help='restrict precompile, sanitize and bench to these ops')
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks' / 'results')
    parser.add_argument('--inputs', type=Path, help='inputs for the step outputs, from tools/gpu_outputs.py')
    parser.add_argument('--steps', default='doctor,precompile,test,cases,sanitize,bench')
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    inputs = ['--inputs', str(arguments.inputs)] if arguments.inputs else []

    environment = {**os.environ, 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1'}
    summary = []
    for step in arguments.steps.split(','):
        start, given = time.perf_counter(), commands(step, arguments.ops, arguments.out, inputs)
        print(
            f'\n=== {step}: {" ".join(given[0])}' + (f' and {len(given) - 1} more' if len(given) > 1 else ''),
            flush=True,
        )
        # timings run alone; correctness checks may run in parallel
        with ThreadPoolExecutor(1 if step in ('bench', 'sweep') else SHARDS) as pool:
            codes = list(pool.map(lambda command: run(command, environment), given))
        summary.append((step, max(codes), time.perf_counter() - start))
    print()
    for step, code, seconds in summary:
        print(f'{step:12} {"ok" if code == 0 else f"FAILED ({code})":12} {seconds:6.1f} s')
    return int(any(code for _, code, _ in summary))


if __name__ == '__main__':
    sys.exit(main())
