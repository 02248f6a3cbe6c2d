"""Write one HTML file with the tables and plots of benchmark records, and what changed against other records."""

from __future__ import annotations

import argparse
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

import tile_kernels
from tile_kernels import plots
from tile_kernels.cli import console
from tile_kernels.cli.bench import GPU_TIMER, read_records
from tile_kernels.core.errors import ArgumentError
from tile_kernels.testing.records import Record

#: Two times differ only if their ratio differs from 1 by more than this, and by more than the spread of both.
NOISE = 0.02

#: The same rules serve the plots of the site.
STYLE = """
.plot { margin: 1.5rem 0; }
.plot .picture { overflow-x: auto; }
.plot .picture svg { width: 100%; min-width: 30rem; max-width: 60rem; height: auto; }
.plot figcaption { font-size: 0.85rem; text-align: left; }
.plot details { font-size: 0.8rem; }
.plot td.number { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
article table.docutils :is(code, a) { white-space: normal; overflow-wrap: anywhere; }
article table.docutils td:first-child { min-width: 7rem; }
@media (max-width: 40rem) { article h1 { font-size: 1.6rem; overflow-wrap: anywhere; } }
.scroll th, .scroll td { padding: 0.1rem 0.6rem; text-align: left; white-space: nowrap; }
"""

_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { font-family: system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 0 1rem 3rem; line-height: 1.45; }
table { border-collapse: collapse; font-size: 0.85rem; }
tbody tr { border-top: 1px solid #8884; }
summary { cursor: pointer; }
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `report`."""
    parser.add_argument('results', type=Path, metavar='RESULTS.jsonl', help='records that `bench --json` wrote')
    parser.add_argument(
        '--against', type=Path, metavar='OTHER.jsonl', help='records to compare with, e.g. of last week'
    )
    parser.add_argument('--out', type=Path, required=True, metavar='report.html', help='the file to write')


def run(args: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    records = checked(args.results)
    other = None if args.against is None else checked(args.against)
    if not args.out.parent.is_dir():
        raise ArgumentError(f'report: the folder of --out must exist, got {args.out}')
    args.out.write_text(page(records, other, args.results.name, args.against and args.against.name))
    console.output().print(f'{args.out}: {len(records)} cases')
    return 0


def checked(path: Path) -> list[Record]:
    """The last record of every op, case and device of a file; only records of a GPU."""
    if not path.is_file():
        raise ArgumentError(f'report: no file {path}; write one with: tile-kernels bench --json {path}')
    try:
        records = read_records(path)
        last = {(r['op'], r['case'], r['device']): r for r in records if r.get('timer') == GPU_TIMER}
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f'report: {path} must hold records of `bench --json`, one JSON object a line') from error
    if not last:
        raise ArgumentError(f'report: {path} has no record of a GPU among {len(records)}; run `bench --json` on one')
    return list(last.values())


def page(records: list[Record], other: list[Record] | None, name: str, against: str | None) -> str:
    """The whole HTML file; it asks for nothing outside itself."""
    drawn = [
        plots.families(records),
        plots.shares(records, False, 'forward'),
        plots.shares(records, True, 'gradients'),
        plots.latency(records),
        plots.roofline(records),
        plots.host(records),
    ]
    parts = [
        f'<h1>{html.escape(name)}</h1>',
        f'<p>tile_kernels {tile_kernels.__version__}. {html.escape(plots.provenance(records))}</p>',
        *([] if other is None else [difference(records, other, str(against))]),
        *(plot.html() for plot in drawn if plot is not None),
        '<h2>All cases</h2>',
        every_case(records),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(name)}</title><style>{_PAGE_STYLE}{STYLE}</style>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + '\n'.join(parts) + '\n</body></html>\n'


def every_case(records: Iterable[Record]) -> str:
    """The table of `bench`."""
    columns = {
        'op': 'op', 'case': 'case', 'us': 'us', 'graph_us': 'us in a graph', 'gbps': 'GB/s',
        'pct_of_copy': '% of copy', 'tflops': 'TFLOP/s', 'host_us': 'host us', 'commit': 'commit',
    }  # fmt: skip
    rows = [[r.get(key) for key in columns] for r in sorted(records, key=lambda r: (r['op'], r['case']))]
    return plots.table(list(columns.values()), rows)


def difference(records: Iterable[Record], other: Iterable[Record], name: str) -> str:
    """What changed against other records: the largest changes first."""
    before = {(r['op'], r['case'], r['device']): r for r in other}
    pairs = [(r, before[key]) for r in records if (key := (r['op'], r['case'], r['device'])) in before]
    if not pairs:
        return f'<h2>Against {html.escape(name)}</h2>\n<p>No case is in both files.</p>'
    pairs.sort(key=lambda pair: -abs(pair[0]['us'] / pair[1]['us'] - 1))
    rows = [(r['op'], r['case'], b['us'], r['us'], r['us'] / b['us'], f'{spread(r, b):.1%}', verdict(r, b))
            for r, b in pairs]  # fmt: skip
    counts = {word: sum(row[-1] == word for row in rows) for word in ('faster', 'slower', 'within noise')}
    told = ', '.join(f'{count} {word}' for word, count in counts.items())
    heading: Sequence[str] = ('op', 'case', 'before, us', 'now, us', 'now / before', 'spread', 'verdict')
    return f'<h2>Against {html.escape(name)}</h2>\n<p>{told}.</p>\n{plots.table(heading, rows)}'


def spread(record: Record, base: Record) -> float:
    """The larger distance between the 20th and the 80th percentile, relative to the median."""
    return max((r.get('p80_us') or r['us']) / r['us'] - (r.get('p20_us') or r['us']) / r['us'] for r in (record, base))


def verdict(record: Record, base: Record) -> str:
    """Whether a case is faster, slower, or the same within noise."""
    change = record['us'] / base['us'] - 1
    if abs(change) <= max(NOISE, spread(record, base)):
        return 'within noise'
    return 'faster' if change < 0 else 'slower'
