"""Explain a call: its launches, their configs and the origin of each config, bytes moved and least time."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from rich.text import Text

from tile_kernels.cli import console
from tile_kernels.core.cases import Case, case_id
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.explain import bound, config_words, decided_by, explain_case
from tile_kernels.core.gpus import GPUS
from tile_kernels.core.op import Op
from tile_kernels.core.registry import case_by_id, find_op, typical_case, words_to_case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `explain`."""
    add_case_arguments(parser, optional=True)
    parser.add_argument('--error', metavar='FILE', help='explain the error text in a file instead; - reads the input')
    parser.add_argument('--device', default='h200', choices=GPUS, help='GPU to explain the call for (default h200)')


def add_case_arguments(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """An op and one of its cases; also used by `show`."""
    parser.add_argument(
        'op', metavar='OP', nargs='?' if optional else None, help='name of an op, as tile-kernels list prints it'
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
    """Print one row per launch, or the explanation of an error text."""
    if (args.op is None) == (args.error is None):
        raise ArgumentError('explain: give either an op or --error FILE')
    if args.error is not None:
        return _explain_error(args.error)
    op, case = selected_case(args)
    found = explain_case(op, case, args.device)
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
    device = found.device
    out = console.output()
    words = case_id(case)
    words = words if len(op.name) + len(words) < out.width else _short(words)
    out.print(Text.assemble((op.name, 'bold'), '  ', words))
    if rows:
        columns = ('kernel', '~config', 'decided by', '>moves', '>floor us', 'bound by', '>copy us')
        out.print(console.wide_or_tall(out, columns, rows))
        out.print(
            f'{device.name}: floor at the published speed of memory or of products, the longer time of the two, '
            f'copy at the {device.copy_bandwidth / 1e12:.2f} TB/s a large copy reaches.'
        )
    else:
        out.print('launches nothing: the problem is empty')
    return 0


def _short(words: str) -> str:
    """The id of a case with `4096x4096x4096x4096x4096` as `5 x 4096`."""
    return re.sub(r'\b(\d+)(?:x\1){3,}\b', lambda run: f'{run[0].count("x") + 1} x {run[1]}', words)


def _explain_error(name: str) -> int:
    """Print cause, action and line of an error text, or the text itself if it is unknown."""
    from tile_kernels.sight.errors import explain_error

    try:
        text = sys.stdin.read() if name == '-' else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f'explain: cannot read {name}: {error}') from None
    sys.stdout.write(f'{explain_error(text)}\n')
    return 0
