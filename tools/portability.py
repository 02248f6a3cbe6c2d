"""Lowers the kernels of every op for every target without a GPU, and writes `docs/support.json` and `docs/support.md`.

    python -m tools.portability --work FOLDER                   lower and write; a second call resumes in the folder
    python -m tools.portability --work FOLDER --targets sm_80   lower for some targets only, and write nothing
    python -m tools.portability                                 write the page again from the JSON

Lowering generates the CUDA or HIP source; neither nvcc nor hipcc runs. Each kernel is lowered once for each target. It
gets the arguments of the first smoke case that launches it there. The result tells shared memory and threads.
`runs and timed` comes from `benchmarks/results/h200.jsonl` only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from tile_kernels.cli.bench import GPU_TIMER, git, read_records
from tile_kernels.core import nvcc
from tile_kernels.core.errors import TileKernelsError, UnsupportedError
from tile_kernels.core.gpus import gpu_named
from tile_kernels.core.launch import Launch, on_gpu
from tile_kernels.core.op import Op
from tile_kernels.core.registry import load_ops
from tools.docs.api import markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / 'docs' / 'support.json'
PAGE = ROOT / 'docs' / 'support.md'

#: What is lowered for: NVIDIA from Ampere on, AMD from MI300 on.
TARGETS = ('sm_80', 'sm_86', 'sm_89', 'sm_90a', 'sm_100a', 'sm_120a', 'gfx942', 'gfx950')

#: The target of the GPU with records.
TIMED_TARGET, TIMED_RECORDS = 'sm_90a', ROOT / 'benchmarks' / 'results' / 'h200.jsonl'

#: Threads of a block, at most, on every target.
MAX_THREADS = 1024

#: Bytes of the types that TileLang declares in static shared memory.
STATIC_BYTES = {'uint64_t': 8, 'Barrier': 8, 'float': 4, 'int': 4, 'uint': 4, 'bfloat16_t': 2, 'half_t': 2}

#: The result of a kernel on a target: shared bytes and threads of a block, or the reason why there are none.
Result = dict[str, Any]


# Kernels of a target ------------------------------------------------------------------------


def launches(target: str) -> tuple[dict[str, Launch], dict[str, list[str]], dict[str, str]]:
    """What the smoke cases launch on a target: a launch of every kernel, the kernels of every op, and refused ops.

    An op with a case that no kernel serves is refused there, in part or completely; the first reason counts.
    """
    found: dict[str, Launch] = {}
    used: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    for op in load_ops().values():
        names = used[op.name] = []
        for case in op.case_set.smoke if op.case_set else ():
            try:
                with on_gpu(gpu_named(target)):
                    made = op.trace_case(case)
            except UnsupportedError as error:
                refused.setdefault(op.name, sentence(error))
                continue
            for launch in made:
                found.setdefault(launch.kernel.name, launch)
                if launch.kernel.name not in names:
                    names.append(launch.kernel.name)
    return found, used, refused


def lowered(launch: Launch, target: str) -> Result:
    """Shared bytes and threads of a block of a launch on a target, or why it is refused."""
    try:
        with nvcc.quiet():
            source, dynamic = launch.kernel._lower(launch.static, launch.config, target)
    except TileKernelsError as error:
        return {'refused': sentence(error)}
    shared, threads = dynamic + static_shared(source), threads_of(source)
    most = gpu_named(target).smem_per_block
    if shared > most:
        return {'refused': f'a block needs {shared >> 10} KB of shared memory, {target} has {most >> 10} KB'}
    if threads is None:
        return {'shared': shared}
    if threads > MAX_THREADS:
        return {'refused': f'a block needs {threads} threads, {target} has {MAX_THREADS}'}
    return {'shared': shared, 'threads': threads}


def sentence(error: Exception) -> str:
    """The message of an error without the kernel and its arguments in front, at most 120 characters."""
    text = re.sub(r'^\w+_kernel(_\w+)?\([^:]*\): ', '', str(error).strip().splitlines()[-1])
    return text if len(text) <= 120 else text[:117] + '...'


def threads_of(source: str) -> int | None:
    """The largest number of threads of a block in a source; None where HIP source does not name it."""
    return max(map(int, re.findall(r'__launch_bounds__\((\d+)', source)), default=None)


def static_shared(source: str) -> int:
    """Bytes of the arrays in static shared memory of a source; a source of several kernels counts them all."""
    pattern = r'^\s*__shared__ (?:__align__\(\d+\) )?(\w+) \w+\[(\d+)\]'
    arrays = re.findall(pattern, source, re.MULTILINE)
    unknown = sorted({kind for kind, _ in arrays} - STATIC_BYTES.keys())
    if unknown:
        raise ValueError(f'add the bytes of {", ".join(unknown)} to STATIC_BYTES')
    return sum(STATIC_BYTES[kind] * int(count) for kind, count in arrays)


# Lowering everything ------------------------------------------------------------------------


def lower_target(target: str, work: Path) -> None:
    """Lower all kernels for a target; every result is a line of a file in the folder, and is not computed again."""
    path = work / f'{target}.jsonl'
    done = {line['kernel'] for line in read_records(path)} if path.exists() else set()
    found, used, refused = launches(target)
    (work / f'{target}.json').write_text(json.dumps({'ops': used, 'refused': refused}))
    with path.open('a') as lines:
        for name, launch in found.items():
            if name not in done:
                lines.write(json.dumps({'kernel': name, **lowered(launch, target)}) + '\n')
                lines.flush()


def collected(work: Path) -> dict[str, Any]:
    """The JSON of all targets in a folder."""
    targets = {}
    for target in TARGETS:
        own = json.loads((work / f'{target}.json').read_text())
        kernels = {line.pop('kernel'): line for line in read_records(work / f'{target}.jsonl')}
        targets[target] = {**own, 'kernels': dict(sorted(kernels.items()))}
    made: dict[str, Any] = {'tilelang': nvcc.tilelang_version(), 'commit': git('rev-parse', '--short=10', 'HEAD')}
    made['counts'] = {
        target: dict(Counter('refused' if 'refused' in r else 'lowers' for r in own['kernels'].values()))
        for target, own in targets.items()
    }
    return made | {'targets': targets}


def text_of(results: dict[str, Any]) -> str:
    """The JSON with a line for each kernel and op, so that changes are easy to read."""
    text = json.dumps(results, indent=1)
    return (
        re.sub(r'([\[{])\s+([^\[\]{}]*?)\s+([\]}])', lambda m: m[1] + re.sub(r'\n\s+', ' ', m[2]) + m[3], text) + '\n'
    )


# The page -----------------------------------------------------------------------------------


def page(results: dict[str, Any]) -> str:
    """The support matrix: ops, targets, states and reasons."""
    timed = {r['op'] for r in read_records(TIMED_RECORDS) if r.get('timer') == GPU_TIMER and 'sweep' not in r}
    reasons: dict[str, int] = {}
    rows = [
        (
            f'[{op.name}](ops/{op.name}.md)',
            dtypes(op),
            *(cell(op.name, target, results, timed, reasons) for target in TARGETS),
        )
        for op in sorted(load_ops().values(), key=lambda op: op.name)
    ]
    counts = [
        (target, own.get('lowers', 0), own.get('refused', 0), sum(row[2 + i] == 'timed' for row in rows))
        for i, (target, own) in enumerate(results['counts'].items())
    ]
    listed = [(number, reason) for reason, number in reasons.items()]
    return (
        '\n\n'.join(
            (
                '<!-- Generated by `python -m tools.portability`; do not edit. -->',
                '# Support',
                f'By `python -m tools.portability`. TileLang {results["tilelang"]}, commit {results["commit"]}.',
                STATES,
                markdown(('target', 'kernels that lower', 'kernels refused', 'ops timed'), counts),
                '## Ops',
                markdown(('op', 'dtypes', *TARGETS), rows),
                '## Reasons',
                markdown(('number', 'refused because'), listed),
            )
        )
        + '\n'
    )


STATES = """Each kernel is lowered with the arguments of one smoke case; other arguments may need more shared memory.

| state | meaning |
|---|---|
| timed | the op runs and is timed on an H200; `benchmarks/results/h200.jsonl` has the records |
| lowers | TileLang generates the source; a block has enough shared memory and threads; nothing ran there |
| partly (n) | some kernels or smoke cases of the op are refused for reason n, the others lower |
| refused (n) | all kernels of the op are refused, for reason n |

No ROCm compiler has seen the source for gfx942 and gfx950. Threads are unchecked where it does not name them."""


def cell(op: str, target: str, results: dict[str, Any], timed: set[str], reasons: dict[str, int]) -> str:
    """The state of an op on a target; new reasons get the next number."""
    own = results['targets'][target]
    kernels = own['ops'].get(op, [])
    if any(name not in own['kernels'] for name in kernels):
        return 'not lowered yet'
    why = [own['kernels'][name]['refused'] for name in kernels if 'refused' in own['kernels'][name]]
    all_refused = len(why) == len(kernels)
    why += [own['refused'][op]] if op in own['refused'] else []
    numbers = ', '.join(str(reasons.setdefault(reason, len(reasons) + 1)) for reason in dict.fromkeys(why))
    if why:
        return f'refused ({numbers})' if all_refused else f'partly ({numbers})'
    if not kernels:
        return 'no kernel'
    return 'timed' if target == TIMED_TARGET and op in timed else 'lowers'


def dtypes(op: Op) -> str:
    """The floating dtypes of the tensors that the smoke cases pass to kernels."""
    cases = op.case_set.smoke if op.case_set else ()
    return ', '.join(sorted({name for case in cases for name in _floats(op.trace_case(case))}))


def _floats(made: Sequence[Launch]) -> Iterator[str]:
    for launch in made:
        for tensor in launch.args:
            if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point:
                yield str(tensor.dtype).removeprefix('torch.')


def main() -> int:
    """Lower what is missing in the folder, then write JSON and page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--work', type=Path, help='folder of the results so far; without it only the page is written')
    parser.add_argument('--targets', nargs='+', choices=TARGETS, help='only these; JSON and page stay as they are')
    parser.add_argument('--jobs', type=int, default=2)
    options = parser.parse_args()
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
        targets = options.targets or TARGETS
        with ProcessPoolExecutor(options.jobs) as pool:
            list(pool.map(lower_target, targets, [options.work] * len(targets)))
        if options.targets:
            return 0
        RESULTS.write_text(text_of(collected(options.work)))
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
    return 0


if __name__ == '__main__':
    sys.exit(main())
