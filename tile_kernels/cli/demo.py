"""Run one op of every family and check it against its twin: timed on a GPU, otherwise in the interpreter.

In a checkout, the times that were measured on an H200 stand beside them, and what PyTorch took for the same.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from tile_kernels.cli import console
from tile_kernels.cli.bench import GPU_TIMER, ROOT, read_records
from tile_kernels.core.cases import Case, case_id
from tile_kernels.core.op import Op
from tile_kernels.core.registry import cases_of, load_ops
from tile_kernels.testing.contract import check_kernel
from tile_kernels.testing.numeric import max_error
from tile_kernels.testing.records import Record, measure

#: Most bytes of a case: they fit every data-center GPU, or take a CPU one or two seconds to interpret.
MODEL_LIMIT, SMALL_LIMIT = 5 * 10**9, 160 * 10**3

#: What was measured, in a checkout; the wheel has no records.
RESULTS = ROOT / 'benchmarks' / 'results'

#: One op for each family.
SHOWN = (
    'activation.swiglu_forward',
    'attention.attend',
    'engram.gate',
    'gemm.grouped_gemm',
    'linear_attention.chunk_simple_gla',
    'mhc.pre',
    'moe.topk_gating',
    'norm.norm_forward',
    'quant.per_token_cast',
    'rand.normal_',
    'transform.rotary_embedding',
    'transpose.batched_transpose',
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`demo` takes no arguments."""


def run(args: argparse.Namespace) -> int:
    """Run, check and print; returns 1 if an op disagreed with its twin."""
    on_gpu = torch.cuda.is_available()
    shown = representatives()
    rows: list[list[Any]] = []
    problems: list[str] = []
    start = time.perf_counter()
    with console.progress() as bar:
        task = bar.add_task('', total=len(shown))
        for op in shown:
            bar.update(task, description=op.name)
            row, problem = (gpu_row if on_gpu else cpu_row)(op)
            rows.append(row)
            problems += [problem] if problem else []
            bar.advance(task)
    out = console.output()
    columns = GPU_COLUMNS if on_gpu else CPU_COLUMNS
    used = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]  # the wheel has no records
    out.print(console.table([columns[i] for i in used], [[row[i] for i in used] for row in rows]))
    for line in comparisons(RESULTS) or ['']:
        out.print(line, markup=False, soft_wrap=True)
    for problem in problems:
        out.print(problem, style='red', markup=False, soft_wrap=True)
    sentence = closing(len(rows), len(problems), on_gpu, time.perf_counter() - start)
    out.print(sentence, style='red' if problems else 'green', markup=False, soft_wrap=True)
    return 1 if problems else 0


def representatives() -> list[Op]:
    """The ops to show; all ops if the library has none of `SHOWN`."""
    known = load_ops()
    return [known[name] for name in SHOWN if name in known] or list(known.values())


def largest_case(op: Op, cases: list[Case], limit: int) -> Case:
    """The case with the most bytes within the limit; the smallest case if all exceed it."""
    sizes = [sum(launch.cost.bytes for launch in op.trace_case(case)) for case in cases]
    within = [size for size in sizes if size <= limit]
    return cases[sizes.index(max(within) if within else min(sizes))]


# Rows ---------------------------------------------------------------------------------------

GPU_COLUMNS = ('op', '~shape', '>us', '>GB/s', '>% of\ncopy', '>max\nerror')
CPU_COLUMNS = ('op', '>max\nerror', '~on an H200', '>us', '>speed')


def gpu_row(op: Op) -> tuple[list[Any], str | None]:
    """Time a model-sized case and compare it with the twin."""
    case = largest_case(op, cases_of(op).bench, MODEL_LIMIT)
    error, problem = comparison(op, case, 'cuda')
    record = measure(op, case, 'cuda') if problem is None else {}
    cells = [console.number(record.get(key)) for key in ('us', 'gbps', 'pct_of_copy')]
    return [op.name, shape_words(case), *cells, error], problem


def cpu_row(op: Op) -> tuple[list[Any], str | None]:
    """Interpret a small case and compare it with the twin; beside it, the longest time on record."""
    error, problem = comparison(op, largest_case(op, cases_of(op).smoke, SMALL_LIMIT), 'cpu')
    known = {case_id(case): case for case in cases_of(op).bench}
    measured = [r for r in recorded(RESULTS / 'h200.jsonl') if r['op'] == op.name and r['case'] in known]
    if not measured:
        return [op.name, error, None, None, None], problem
    longest = max(measured, key=lambda r: r['us'])
    return [op.name, error, shape_words(known[longest['case']]), f'{longest["us"]:.1f}', speed(longest)], problem


@functools.cache
def recorded(path: Path) -> tuple[Record, ...]:
    """The last record of every case in a file; none if there is no such file."""
    if not path.exists():
        return ()
    found = [r for r in read_records(path) if r.get('timer') == GPU_TIMER]
    keys = ('op', 'case', 'peer', 'layer', 'num_tokens')
    return tuple({tuple(r.get(key) for key in keys): r for r in found}.values())


def speed(record: Record) -> str | None:
    """The speed of an op: operations a second if products bound it, else relative to a copy of the same bytes."""
    share, rate = record.get('pct_of_copy'), record.get('tflops')
    if rate is not None and (share is None or share < 50):
        return f'{rate:.0f} TFLOP/s'
    return None if share is None else f'{share:.0f} % of copy'


def comparisons(results: Path) -> list[str]:
    """What was faster on an H200 than what, from the records of a checkout."""
    layers = recorded(results / 'layer' / 'h200.jsonl')
    lines: list[str] = []
    for num_tokens in sorted({r['num_tokens'] for r in layers}, reverse=True):
        rows = sorted((r for r in layers if r['num_tokens'] == num_tokens), key=lambda r: r['us'])
        shape = rows[0]
        title = f'MoE layer, {num_tokens} tokens, {shape["num_experts"]} experts, top {shape["topk"]}'
        lines += ['', f'{title}, measured on an H200 ({shape["date"][:10]}), us:', *bars(rows, 'layer')]
    ours = {r['case']: r for r in recorded(results / 'h200.jsonl') if r['op'] == 'gemm.gemm'}
    for peer in recorded(results / 'peers' / 'h200.jsonl'):
        if peer['case'] in ours and (peer.get('us') or 0) > 1000:
            rows = sorted((peer, ours[peer['case']] | {'peer': 'tile_kernels'}), key=lambda r: r['us'])
            lines += ['', f'Dense GEMM, {peer["case"]}, us:', *bars(rows, 'peer')]
    return [*lines, ''] if lines else []


def bars(rows: Sequence[Record], name: str) -> list[str]:
    """Times as lines of text, each with its multiple of the shortest time and a bar."""
    times = [r['us'] for r in rows]
    return [
        f'  {r[name]:34} {us:8.0f} {us / min(times):5.1f} x  {"█" * max(round(24 * us / max(times)), 1)}'
        for r, us in zip(rows, times, strict=True)
    ]


def shape_words(case: Case) -> str:
    """A case as readable text: `16384×7168 bf16 e4m3_1x128_f32`."""
    extents: list[str] = []
    words: list[str] = []
    case = {name: f'{len(v)} of {v[0]}' if _repeats(v) else v for name, v in case.items()}
    for name, value in case.items():
        if isinstance(value, bool):
            words += [name] if value else []
        elif isinstance(value, torch.dtype):
            words.append(_DTYPE_WORDS.get(value, str(value).removeprefix('torch.')))
        elif isinstance(value, (int, tuple, list)):
            extents += map(str, [value] if isinstance(value, int) else value)
        elif value is not None:
            words.append(str(value))
    return ' '.join(['×'.join(extents), *words])


def _repeats(value: Any) -> bool:
    """Whether a value is a long list of one number, such as the lengths of equal sequences."""
    return isinstance(value, (tuple, list)) and len(value) > 3 and len(set(value)) == 1


_DTYPE_WORDS = {torch.bfloat16: 'bf16', torch.float16: 'f16', torch.float32: 'f32', torch.float8_e4m3fn: 'e4m3'}


def comparison(op: Op, case: Case, device: str) -> tuple[Text | None, str | None]:
    """Largest error against the twin, and the violated bound of the op, if any."""
    if not kernels_run(device):
        op.call(**cases_of(op).arguments(op.name, case, device))
        return None, None
    try:
        actual, expected = check_kernel(op, case, device)
    except (AssertionError, RuntimeError) as disagreement:
        return Text('wrong', style='red'), f'{op.name}[{case_id(case)}]: {disagreement}'.partition('\n')[0]
    error = max((max_error(actual[name], expected[name]) for name in expected), default=0.0)
    return Text('0' if error == 0 else f'{error:.0e}', style='green'), None


def kernels_run(device: str) -> bool:
    """Whether kernels can run: on a GPU always, on a CPU if TileLang is installed."""
    return device == 'cuda' or importlib.util.find_spec('tilelang') is not None


def closing(count: int, wrong: int, on_gpu: bool, seconds: float) -> str:
    """The last sentence."""
    ops = '1 op' if count == 1 else f'{count} ops'
    if wrong:
        return f'{wrong} of {ops} did not agree with plain PyTorch.'
    if on_gpu:
        return f'{ops} ran on {torch.cuda.get_device_name()} and agree with plain PyTorch ({seconds:.1f} s).'
    if not kernels_run('cpu'):
        return f'No GPU and no TileLang: {ops} were computed by their plain PyTorch twins ({seconds:.1f} s).'
    return f'No GPU: the kernels of {ops} ran in the interpreter and agree with plain PyTorch ({seconds:.1f} s).'
