"""Find the fastest configs of kernels and store them in a table; without a GPU, rank them by prediction."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tile_kernels.cli import console, files
from tile_kernels.cli.bench import check_writable, circumstances, write_records
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.gpus import GPUS
from tile_kernels.core.registry import find_ops, words_to_case

#: `choose` is good if it is within this factor of the best config.
TOLERANCE = 1.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tune`."""
    add = parser.add_argument
    add('words', nargs='*', metavar='OP|FILE.py:NAME [KEY=VALUE ...]', help='ops, families or a kernel, and one case')
    add('--space', metavar='FILE.json', type=Path, help="values of each config entry of a user's kernel")
    add('--reference', metavar='NAME', help='function of FILE.py that computes the same in plain PyTorch')
    add('--budget', type=float, default=120.0, metavar='S', help='seconds for each kernel and case (default 120)')
    add('--trials', type=int, metavar='N', help='time at most N configs')
    add('--top', type=int, default=8, metavar='N', help='configs to print (default 8)')
    add('--rank', choices=('us', 'graph_us'), default='us', help='what counts (default us)')
    add('--jobs', type=int, metavar='N', help='processes that compile (default: one per CPU core)')
    add('--store', choices=('user', 'shipped', 'none'), default='user', help='table for the results (default user)')
    add('--device', choices=GPUS, help='GPU to rank for; nothing is timed')
    add('--dry-run', action='store_true', help='only rank by prediction')
    add('--all', action='store_true', help='time every config that fits; without OP, tune every op')
    add('--allow-numeric', action='store_true', help='accept configs that change result bits')
    add('--json', metavar='FILE', type=Path, help='append every trial to FILE, one JSON object per line')
    add('--commit', help='commit that tables and records carry, where the package is not in a git checkout')


def run(args: argparse.Namespace) -> int:
    """Tune and print; returns 1 if a kernel has no result."""
    import torch

    names = [word for word in args.words if '=' not in word]
    values = words_to_case(word for word in args.words if '=' in word)
    if not names and not args.all:
        raise ArgumentError('tune: name an op, a family or FILE.py:NAME, or give --all for every op')
    if args.json is not None:
        check_writable(args.json)
    about = circumstances('cuda' if torch.cuda.is_available() else 'cpu', args.commit)
    options: dict[str, Any] = dict(
        budget=args.budget,
        trials=args.trials,
        rank=args.rank,
        jobs=args.jobs,
        store=args.store,
        device=args.device,
        dry_run=args.dry_run,
        every=args.all,
        allow_numeric=args.allow_numeric,
        commit=about['commit'],
    )
    report = Report(args, about)
    if names and files.is_file(names[0]):
        report.add(tune_file(names, values, args, options))
    else:
        tune_ops(names, values, args, options, report)
    return report.end()


def tune_file(names: list[str], values: dict[str, str], args: argparse.Namespace, options: dict[str, Any]) -> Any:
    """Tune the kernel at `FILE.py:NAME`."""
    from tile_kernels.tuning import tune

    if len(names) > 1:
        raise ArgumentError(f'tune: give one kernel of a file at a time, got {", ".join(names)}')
    name, defined = files.definitions(names[0], [args.reference] if args.reference else [])
    if args.space is None:
        raise ArgumentError(f'tune: {name} needs --space FILE.json with the values of its config entries')
    try:
        space = json.loads(args.space.read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError(f'tune: --space must be a JSON file that can be read, got {args.space} ({error})') from None
    reference = defined[args.reference] if args.reference else None
    return tune(defined[name], space=space, reference=reference, **options, **files.values(values))


def tune_ops(
    names: list[str], values: dict[str, str], args: argparse.Namespace, options: dict[str, Any], report: Report
) -> None:
    """Tune ops, case by case, so that an interrupted run has stored what it finished."""
    from tile_kernels.tuning import tune

    if args.space is not None or args.reference is not None:
        raise ArgumentError('tune: --space and --reference are for a kernel of a file; ops declare both')
    for op in find_ops(names):
        if op.case_set is None:
            continue
        for case in [values] if values else op.case_set.bench:
            report.add(tune(op, cases=[case], **options))
            if report.interrupted:
                return


class Report:
    """Prints results as they come, and where `choose` is behind at the end."""

    def __init__(self, args: argparse.Namespace, about: dict[str, Any]) -> None:
        self.args, self.about, self.out = args, about, console.output()
        self.num_timed = 0
        self.behind: list[str] = []
        self.failures: dict[str, str] = {}
        self.interrupted = False

    def add(self, found: Any) -> None:
        """Print one `Best`, or those of an op."""
        self.failures |= getattr(found, 'failures', {})
        for best in found if isinstance(found, list) else [found]:
            self.out.print(best.table(self.args.top) + '\n', markup=False, soft_wrap=True)
            self.interrupted = self.interrupted or best.interrupted
            if self.args.json is not None:
                write_records(self.args.json, [record | self.about for record in best.records()])
            self.num_timed += best.us is not None
            if best.gain is not None and best.gain > TOLERANCE:
                self.behind.append(f'{best.name}: {best.gain:.2f}x')

    def end(self) -> int:
        """Print the summary; returns the exit status."""
        if self.num_timed:
            share = f'{self.num_timed - len(self.behind)} of {self.num_timed}'
            self.out.print(f'The config in force is within {TOLERANCE - 1:.0%} of the best in {share} runs.')
        for line in self.behind:
            self.out.print(f'slower: {line}', style='yellow', markup=False, soft_wrap=True)
        for name, reason in self.failures.items():
            self.out.print(f'no result: {name}: {reason}', style='red', markup=False, soft_wrap=True)
        return 130 if self.interrupted else int(bool(self.failures))
