"""One whole GPU round: compile everything in parallel, test, sanitise, measure twice; results as JSON lines.

    python tools/gpu_check.py [--out DIR] [--steps doctor,precompile,test,sanitize,bench] [OP ...]

Every step is a command a user can run alone; the script runs them in order, keeps going after a failure, and ends with
one line per step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CLI = [sys.executable, '-m', 'tile_kernels']
PYTEST = [sys.executable, '-m', 'pytest', '-q', '-x', '--no-header', '-p', 'no:cacheprovider']
#: Named, with autoloading off: the same plugins wherever this runs.
PLUGINS = ['-p', 'xdist.plugin', '-p', 'tile_kernels.testing.plugin']


def device() -> str:
    """The GPU as results files name it: `NVIDIA H200` is `h200`."""
    query = ['nvidia-smi', '--query-gpu=name', '--format=csv,noheader', '--id=0']
    name = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return name.strip().lower().removeprefix('nvidia ').replace(' ', '-')


def commands(step: str, ops: list[str], out: Path, inputs: list[str]) -> list[list[str]]:
    """The commands of a step."""
    workers = ['-n', str(min(8, os.cpu_count() or 1))]
    sanitizer = shutil.which('compute-sanitizer') or 'compute-sanitizer'
    smoke = [sys.executable, str(ROOT / 'tools' / 'smoke.py'), *ops]
    if step == 'bench':  # twice: the difference is the spread
        return [[*CLI, 'bench', *ops, '--json', str(out / f'{device()}.jsonl')]] * 2
    return {
        'doctor': [[*CLI, 'doctor']],
        'outputs': [[sys.executable, 'tools/gpu_outputs.py', *inputs, '--out', str(out / 'gpu_outputs.json')]],
        'precompile': [[*CLI, 'precompile', *ops, '--jobs', str(os.cpu_count() or 1)]],
        'test': [
            [
                *PYTEST,
                *PLUGINS,
                *workers,
                'tests/test_contract.py',
                'tests/gpu',
                'tests/moe',
                'tests/quant',
                'tests/transpose',
            ]
        ],
        'sanitize': [
            [sanitizer, '--tool', tool, '--error-exitcode', '9', *smoke]
            for tool in ('memcheck', 'racecheck', 'initcheck')
        ],
        'sweep': [[*CLI, 'bench', '--sweep', *ops, '--json', str(out / 'sweep.jsonl')]],
    }[step]


def main() -> int:
    """Run the steps; exit 1 if any command failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('ops', nargs='*', help='restrict precompile, sanitize and bench to these ops')
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks' / 'results')
    parser.add_argument('--inputs', type=Path, help='inputs for the step outputs, from tools/gpu_outputs.py')
    parser.add_argument('--steps', default='doctor,precompile,test,sanitize,bench')
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    inputs = ['--inputs', str(arguments.inputs)] if arguments.inputs else []

    environment = {**os.environ, 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1'}
    summary = []
    for step in arguments.steps.split(','):
        for command in commands(step, arguments.ops, arguments.out, inputs):
            print(f'\n=== {step}: {" ".join(command)}', flush=True)
            start = time.perf_counter()
            code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
            summary.append((step, code, time.perf_counter() - start))
    print()
    for step, code, seconds in summary:
        print(f'{step:12} {"ok" if code == 0 else f"FAILED ({code})":12} {seconds:6.1f} s')
    return int(any(code for _, code, _ in summary))


if __name__ == '__main__':
    sys.exit(main())
