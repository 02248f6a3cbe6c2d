"""Explain a call: its launches, their configs and who chose them, bytes, least, predicted and measured time."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tile_kernels.cli import console, files
from tile_kernels.core.cases import Case, case_id
from tile_kernels.core.errors import ArgumentError, TileKernelsError
from tile_kernels.core.explain import Explanation, bound, config_words, decided_by, explain_case
from tile_kernels.core.gpus import GPUS
from tile_kernels.core.op import Op
from tile_kernels.core.registry import case_by_id, find_op, typical_case, words_to_case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `explain`."""
    add_case_arguments(parser, optional=True)
    parser.add_argument('--error', metavar='FILE', help='explain the error text in a file instead; - reads the input')
    parser.add_argument('--device', default='h200', choices=GPUS, help='GPU to explain the call for (default h200)')
    parser.add_argument('--compile', action='store_true', help='run nvcc, so that occupancy counts registers')
    parser.add_argument('--no-predict', action='store_true', help='do not lower the kernels: no predicted time')
    parser.add_argument('--json', action='store_true', help='print JSON')


def add_case_arguments(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """An op and one of its cases; also used by `show`."""
    parser.add_argument(
        'op',
        metavar='OP',
        nargs='?' if optional else None,
        help='name of an op, as tile-kernels list prints it, or FILE.py:NAME',
    )
    changes = "changes to the op's first benchmark case"
    parser.add_argument('values', nargs='*', default=[], metavar='KEY=VALUE', help=changes)
    parser.add_argument('--case', metavar='ID', help='one of the cases of the op, by its id')


def selected_case(args: argparse.Namespace) -> tuple[Op, Case]:
    """The op and case given by the arguments of `add_case_arguments`."""
    op, given = find_op(args.op), words_to_case(args.values)
    if args.case and given:
        raise ArgumentError('give either --case or key=value, got both')
    return op, case_by_id(op, args.case) if args.case else typical_case(op, given)


def run(args: argparse.Namespace) -> int:
    """Print one row per launch and the prediction, or the explanation of an error text."""
    if (args.op is None) == (args.error is None):
        raise ArgumentError('explain: give either an op or --error FILE')
    if args.error is not None:
        return _explain_error(args.error, args.json)
    if files.is_file(args.op):
        return _explain_file(args)
    op, case = selected_case(args)
    found = explain_case(op, case, args.device)
    record = recorded(op, case, args.device)
    prediction, problem = (None, '') if args.no_predict or not found.launches else _predicted(args, op, **case)
    if args.json:
        launches = [
            {'kernel': n.kernel.name, 'config': n.config, 'decided_by': decided_by(n), 'bytes': n.cost.bytes}
            | {'floor_us': n.cost.floor_us(found.device), 'copy_us': n.cost.copy_us(found.device)}
            for n in found.launches
        ]
        about = {'op': op.name, 'case': case_id(case), 'device': args.device, 'launches': launches, 'record': record}
        console.json_out(about | {'prediction': prediction and prediction.to_dict(), 'problem': problem})
        return 0
    out = console.output()
    words = case_id(case)
    words = words if len(op.name) + len(words) < out.width else _short(words)
    out.print(Text.assemble((op.name, 'bold'), '  ', words))
    _print_launches(found, out)
    if prediction is not None or problem:
        out.print(f'predicted: {prediction or problem}', markup=False, highlight=False)
    if record is not None:
        graph = f', {record["graph_us"]:.4g} us in a CUDA graph' if record.get('graph_us') else ''
        day, commit = record['date'][:10], record['commit']
        told = f'{record["us"]:.4g} us{graph} ({record["device"]}, {day}, commit {commit})'
        out.print(f'measured: {told}', markup=False, highlight=False)
    return 0


def _print_launches(found: Explanation, out: Console) -> None:
    rows = [
        (
            launch.kernel.name,
            config_words(launch.config),
            decided_by(launch),
            console.size(launch.cost.bytes),
            console.number(launch.cost.floor_us(found.device)),
            bound(launch.cost, found.device),
            console.number(launch.cost.copy_us(found.device)),
        )
        for launch in found.launches
    ]
    if len(rows) > 1:
        total = console.size(found.bytes), console.number(found.floor_us), '', console.number(found.copy_us)
        rows.append(('all launches', '', '', *total))
    if not rows:
        out.print('launches nothing: the problem is empty')
        return
    device = found.device
    columns = ('kernel', '~config', 'decided by', '>moves', '>floor us', 'bound by', '>copy us')
    out.print(console.wide_or_tall(out, columns, rows))
    out.print(
        f'{device.name}: floor at the published speed of memory or of products, the longer time of the two, '
        f'copy at the {device.copy_bandwidth / 1e12:.2f} TB/s a large copy reaches.'
    )


def _predicted(args: argparse.Namespace, kernel: Any, **named: Any) -> tuple[Any, str]:
    """The prediction, or the sentence why there is none."""
    from tile_kernels.sight import predict

    try:
        with console.waiting('lowering'):
            return predict(kernel, device=args.device, compile=args.compile, **named), ''
    except TileKernelsError as error:
        return None, str(error)


def _explain_file(args: argparse.Namespace) -> int:
    """Print the prediction for a kernel of a file."""
    name, defined = files.definitions(args.op)
    prediction, problem = _predicted(args, defined[name], **files.values(words_to_case(args.values)))
    if prediction is None:
        raise ArgumentError(problem)
    if args.json:
        console.json_out(prediction.to_dict())
    else:
        console.output().print(str(prediction), markup=False, highlight=False)
    return 0


def _short(words: str) -> str:
    """The id of a case with `4096x4096x4096x4096x4096` as `5 x 4096`."""
    return re.sub(r'\b(\d+)(?:x\1){3,}\b', lambda run: f'{run[0].count("x") + 1} x {run[1]}', words)


def recorded(op: Op, case: Case, device: str) -> dict[str, Any] | None:
    """The latest record of a case, in a checkout; the package itself has none."""
    path = Path(__file__).parents[2] / 'benchmarks' / 'results' / f'{device}.jsonl'
    if not path.exists():
        return None
    key = f'"op": "{op.name}", "case": "{case_id(case)}"'
    lines = [line for line in path.read_text().splitlines() if key in line]
    return json.loads(lines[-1]) if lines else None


def _explain_error(name: str, as_json: bool) -> int:
    """Print cause, action and line of an error text, or the text itself if it is unknown."""
    from tile_kernels.sight.errors import explain_error

    try:
        text = sys.stdin.read() if name == '-' else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f'explain: cannot read {name}: {error}') from None
    found = explain_error(text)
    if as_json:
        console.json_out(asdict(found))
    else:
        sys.stdout.write(f'{found}\n')
    return 0
