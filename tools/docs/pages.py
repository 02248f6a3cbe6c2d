"""The generated pages: `docs/settings.md`, tables in README and `docs/status.md`, and the reference of the site.

    python -m tools.docs            write those that are in the repository
    python -m tools.docs --check    fail if one of these is out of date

Everything comes from the declarations of ops and settings and from `benchmarks/results/*.jsonl`. The pages of ops and
of public functions (`docs/ops`, `docs/api`) are not in the repository: `tools.docs.site` builds them.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import tile_kernels
from tile_kernels import plots
from tile_kernels.cli import console
from tile_kernels.cli.bench import GPU_TIMER, read_records
from tile_kernels.cli.catalog import headline
from tile_kernels.core.cases import Case, case_id
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.explain import config_words, explain_case
from tile_kernels.core.gpus import DEFAULT_GPU, GPUS
from tile_kernels.core.knobs import KNOBS
from tile_kernels.core.op import Op
from tile_kernels.core.registry import all_cases, cases_of, load_ops
from tile_kernels.plots import LARGE_BYTES, is_gradient
from tile_kernels.testing.records import Record
from tools.docs.api import (
    GENERATED,
    LAYERS,
    TOOLS,
    api_index,
    api_page,
    callers,
    docstring,
    layers_with,
    link,
    markdown,
    public_names,
    signature,
    source_link,
)

ROOT = Path(__file__).parents[2]
BEGIN, END = '<!-- ops:begin -->', '<!-- ops:end -->'

#: Number of values of one entry of the cases that a page lists.
MAX_LISTED = 12

#: The device in README's tables.
README_DEVICE = 'H200'

#: The ops whose cases `docs/status.md` lists next to each other.
README_OPS = ('engram.gate', 'engram.gate_bwd_partial')

#: Faster records did not move all counted bytes: only the shape of an input mattered, or L2 held the data.
BANDWIDTH = GPUS[README_DEVICE.lower()].bandwidth


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Every generated page with its text."""
    ops = sorted(load_ops().values(), key=lambda op: op.name)
    records = current(measured(root / 'benchmarks' / 'results'), ops)
    made = {root / 'docs' / 'ops' / f'{op.name}.md': op_page(op, records) for op in ops}
    made[root / 'docs' / 'ops' / 'README.md'] = index_page(ops, records)
    made |= {root / 'docs' / 'api' / f'{part}.md': api_page(part) for part in (*tile_kernels.FAMILIES, *LAYERS, *TOOLS)}
    made[root / 'docs' / 'api' / 'README.md'] = api_index()
    return made | committed(root, ops, records)


def committed(root: Path = ROOT, ops: Sequence[Op] = (), records: Sequence[Record] = ()) -> dict[Path, str]:
    """The generated files that are in the repository, with their text."""
    ops = ops or sorted(load_ops().values(), key=lambda op: op.name)
    records = records or current(measured(root / 'benchmarks' / 'results'), ops)
    made = {root / 'docs' / 'settings.md': settings_page()}
    made[root / 'README.md'] = readme(root / 'README.md', ops, records)
    if (page := root / 'docs' / 'status.md').exists():
        made[page] = status(page, ops, records)
    if (page := root / 'docs' / 'real-models.md').exists():
        made[page] = _between_marks(page, layer_tables(layer_records(root)))
    if (plot := plots.families(records)) is not None:
        made[root / 'docs' / 'images' / 'speed.svg'] = plot.svg('white')
    return made


def stale(root: Path = ROOT) -> list[Path]:
    """Generated files of the repository that are missing or out of date."""
    return [path for path, text in committed(root).items() if not path.exists() or path.read_text() != text]


def write(root: Path = ROOT) -> None:
    """Update every generated file of the repository."""
    for path, text in committed(root).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def measured(folder: Path) -> list[Record]:
    """The last GPU record of every op, case and device."""
    last: dict[tuple, Record] = {}
    records = [record for path in sorted(folder.glob('*.jsonl')) for record in read_records(path)]
    for record in sorted(records, key=lambda record: record.get('date', '')):
        if record.get('timer') == GPU_TIMER and 'sweep' not in record:
            last[record['op'], record['case'], record['device']] = record
    return list(last.values())


def current(records: Iterable[Record], ops: Iterable[Op]) -> list[Record]:
    """The records of cases that ops still have; other cases cannot be measured again."""
    cases = {(op.name, case_id(case)) for op in ops for case in all_cases(op)}
    return [record for record in records if (record['op'], record['case']) in cases]


# One op -------------------------------------------------------------------------------------


def op_page(op: Op, records: Iterable[Record]) -> str:
    """The page of an op."""
    how = (inspect.getdoc(sys.modules[op.fn.__module__]) or '').strip()
    return (
        '\n\n'.join(
            part
            for part in (
                GENERATED,
                f'# {op.name}' if is_public(op) else f'# {op.name} (operator)',
                calling(op),
                f'```python\n{signature(op.fn)}\n```',
                docstring(op.fn),
                relations(op),
                f'## How it works\n\n{how}' if how else '',
                f'## Cases\n\n{case_table(op)}' if op.case_set is not None else '',
                f'## What model-sized calls cost\n\n{cost_table(op)}' if op.case_set is not None else '',
                measured_section(op, records),
            )
            if part
        )
        + '\n'
    )


def is_public(op: Op) -> bool:
    """Whether users call the op itself."""
    return public_names().get(op.name) is op


def calling(op: Op) -> str:
    """How a user calls the op: by its name, through public functions, or not at all."""
    if is_public(op):
        return f'Called as {link(op.name)}.'
    internal = 'Internal: a registered operator, not a function of the package.'
    if found := callers(op):
        return f'{internal} Call {", ".join(map(link, found))}, whose arguments may differ from those below.'
    forward = [other for other in load_ops().values() if other.backward is op]
    if forward:
        return f'{internal} Autograd calls it for {", ".join(f"[{other.name}]({other.name}.md)" for other in forward)}.'
    if layers := layers_with(op):
        return f'{internal} It is used in {", ".join(map(link, layers))}.'
    return f'{internal} Nothing public calls it; it is there to be tested and measured.'


def relations(op: Op) -> str:
    """Operator, twin, source and backward of an op, one paragraph each."""
    found = {
        'Operator': f'`torch.ops.tile_kernels.{op.schema}`',
        'Plain PyTorch': f'`{op.twin.__module__}.{op.twin.__name__}`',
        'Source': source_link(sys.modules[op.fn.__module__]),
    }
    if op.backward == 'identity':
        found['Backward'] = 'the gradient passes straight through'
    elif op.backward is not None:
        found['Backward'] = f'[{op.backward.name}]({op.backward.name}.md)'
    return '\n\n'.join(f'**{name}** {value}' for name, value in found.items())


def case_table(op: Op) -> str:
    """The test and benchmark cases of the op, one row per level."""
    levels = {level: getattr(op.case_set, level) for level in ('smoke', 'full', 'bench')}
    rows = [(level, len(cases), axes(cases)) for level, cases in levels.items() if cases]
    match = cases_of(op).match
    rule = 'bit for bit' if isinstance(match, str) else f'within {_bounds(match)}'
    return f'The kernel agrees with plain PyTorch {rule}.\n\n' + markdown(('level', 'cases', 'values'), rows)


def _bounds(match: dict[str, Any]) -> str:
    """`rtol=0.001, atol=rms * 0.002` (the root mean square of the output), then outputs with their own bounds."""
    own = {name: bounds for name, bounds in match.items() if isinstance(bounds, dict)}
    common = ', '.join(f'{name}={value:.2g}' for name, value in match.items() if name not in own)
    common = common.replace('rms=', 'atol=rms * ')
    return '; '.join([common, *(f'{name} within {_bounds(bounds)}' for name, bounds in own.items())])


def axes(cases: Sequence[Case]) -> str:
    """`num_tokens: 0, 1, 37; hidden: 256`: all values of each entry."""
    values: dict[str, dict[str, None]] = {}
    for case in cases:
        for name, value in case.items():
            values.setdefault(name, {})[str(value).removeprefix('torch.')] = None
    return '; '.join(f'{name}: {_listed(list(taken))}' for name, taken in values.items())


def _listed(values: list[str]) -> str:
    """The values, or the first ones and their number."""
    if len(values) <= MAX_LISTED:
        return ', '.join(values)
    return f'{", ".join(values[:MAX_LISTED])}, … ({len(values)} in all)'


def cost_table(op: Op) -> str:
    """Launches, bytes and floor of the benchmark cases."""
    rows, products = [], False
    for case in cases_of(op).bench:
        found = explain_case(op, case)
        kernels = ', '.join(f'{launch.kernel.name} {config_words(launch.config)}' for launch in found.launches)
        products = products or any(launch.cost.flops for launch in found.launches)
        rows.append(
            (case_id(case), kernels, console.size(found.bytes), f'{found.floor_us:.1f}', f'{found.copy_us:.1f}')
        )
    table = markdown(('case', 'launches', 'moves', 'floor on H200, us', 'copy on H200, us'), rows)
    half, fp8 = (DEFAULT_GPU.peaks[dtype] / 1e12 for dtype in (torch.bfloat16, torch.float8_e4m3fn))
    rule = (
        'Floor: the bytes at the published bandwidth, or the products at the published dense peak of '
        f'{half:.0f} TFLOP/s (fp8: {fp8:.0f}), whichever takes longer.\n\n'
    )
    return rule + table if products else table


def measured_section(op: Op, records: Iterable[Record]) -> str:
    """The measured times of an op with a heading; empty if there are none."""
    heading = {
        'us': 'us',
        'graph_us': 'us in a graph',
        'gbps': 'GB/s',
        'pct_of_copy': '% of copy',
        'host_us': 'host us',
    }
    if op.case_set is not None and op.case_set.flops is not None:
        heading['tflops'] = 'TFLOP/s'
    rows = [
        (
            record['device'],
            record['case'],
            *(console.number(record.get(column)) or '' for column in heading),
            record['date'][:10],
            record['commit'],
        )
        for record in records
        if record['op'] == op.name
    ]
    if not rows:
        return ''
    columns = ('GPU', 'case', *heading.values(), 'date', 'commit')
    return f'## Measured\n\nTimer: {GPU_TIMER}.\n\n' + markdown(columns, rows)


# Other pages --------------------------------------------------------------------------------


def settings_page() -> str:
    """The page of settings."""
    rows = [(f'`{knob.env}`', f'`{name}`', f'`{knob.default}`', knob.doc) for name, knob in KNOBS.items()]
    return (
        f'{GENERATED}\n\n# Settings\n\n'
        'Each setting is an environment variable, read when the package is imported, and a name in '
        '`with tile_kernels.knobs(name=value):`, which holds for its thread and the backward passes called in it.\n\n'
        + markdown(('variable', 'name', 'default', 'meaning'), rows)
        + '\n'
    )


def index_page(ops: Sequence[Op], records: Sequence[Record]) -> str:
    """All ops, with the worst and the best measurement."""
    heading = ('op', 'what it does', 'call', 'backward', f'% of copy, {README_DEVICE}', 'least, µs')
    rows = [
        (
            f'[{op.name}]({op.name}.md)',
            headline(op),
            'itself' if is_public(op) else ', '.join(map(link, callers(op))) or 'internal',
            'yes' if op.backward is not None else '',
            *shares([op], records),
        )
        for op in ops
    ]
    about = (
        'Every registered operator, `torch.ops.tile_kernels.<family>_<op>`. The column `call` says by which public '
        'function it is called: `itself`, others with arguments of their own, or none (`internal`: gradients that '
        'autograd calls, and ops for tests). [Public functions](../api/README.md) has the functions themselves.'
    )
    return f'{GENERATED}\n\n# Ops\n\n{about}\n\n{markdown(heading, rows)}\n\n{occasion(ops, records)}\n'


def readme(path: Path, ops: Sequence[Op], records: Sequence[Record], *, links: bool = False) -> str:
    """README with its table replaced: all families, with links on the site."""
    rows = [
        (_family(name, 'docs/api') if links else f'`{name}`', _purpose(own[0]), len(own), shares(own, records)[0])
        for name, own in _families(ops).items()
    ]
    heading = ('family', 'what it does', 'ops', f'% of copy, {README_DEVICE}')
    return _between_marks(path, f'{markdown(heading, rows)}\n')


def status(path: Path, ops: Sequence[Op], records: Sequence[Record]) -> str:
    """`docs/status.md` with its tables replaced: families with separate gradients, and the cases of a few ops."""
    rows = [
        (
            _family(name, 'api'),
            shares([op for op in own if not is_gradient(op.name)], records)[0],
            shares([op for op in own if is_gradient(op.name)], records)[0],
            shares(own, records)[1],
        )
        for name, own in _families(ops).items()
    ]
    heading = ('family', '% of copy', '% of copy, gradients', 'least, µs')
    return _between_marks(path, f'{markdown(heading, rows)}\n\n{occasion(ops, records)}\n{side_by_side(records)}')


def layer_records(root: Path) -> list[Record]:
    """The records of decoder layers on a GPU; empty before the first run."""
    path = root / 'benchmarks' / 'results' / 'models' / f'{README_DEVICE.lower()}.jsonl'
    found = read_records(path) if path.exists() else []
    return plots.last_layers(record for record in found if record.get('timer') == GPU_TIMER)


def layer_tables(records: Sequence[Record]) -> str:
    """The times of decoder layers, one table for each shape, then what failed."""
    if not records:
        return 'Not measured yet.\n'
    hows = list(dict.fromkeys(r['how'] for r in records))
    parts = [f'{plots.provenance(records)} Each cell: µs on the device / µs of the host.']
    for shape in dict.fromkeys(r['shape'] for r in records):
        own = {(r['model'], r['how']): r for r in records if r['shape'] == shape}
        first = next(iter(own.values()))
        what = f'{shape}: {first["batch"]} × {first["tokens"]} tokens, {first["past"]} in the cache'
        names = dict.fromkeys(name for name, _ in own)
        rows = [(name, *(_layer_cell(own.get((name, how))) for how in hows)) for name in names]
        parts.append(markdown((what, *hows), rows))
    parts += [f'- {r["model"]}, {r["shape"]}, {r["how"]}: {r["failed"]}' for r in records if 'failed' in r]
    return '\n\n'.join(parts) + '\n'


def _layer_cell(record: Record | None) -> str:
    if record is None or 'failed' in record:
        return '' if record is None else 'failed'
    return f'{plots.number(record["us"])} / {plots.number(record["host_us"])}'


def _families(ops: Iterable[Op]) -> dict[str, list[Op]]:
    """The ops of every family."""
    found: dict[str, list[Op]] = {}
    for op in ops:
        found.setdefault(op.family, []).append(op)
    return found


def _family(name: str, folder: str) -> str:
    """The name of a family, with a link to its page if it has one."""
    return f'[`{name}`]({folder}/{name}.md)' if name in tile_kernels.FAMILIES else f'`{name}`'


def _between_marks(path: Path, tables: str) -> str:
    """The text of a page with the part between its two marks replaced."""
    text = path.read_text() if path.exists() else ''
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ArgumentError(
            f'{path} must hold one {BEGIN} and one {END}, got {text.count(BEGIN)} and {text.count(END)}'
        )
    head, rest = text.split(BEGIN)
    return f'{head}{BEGIN}\n{tables}{END}{rest.split(END)[1]}'


def _purpose(op: Op) -> str:
    """The first line of the docstring of an op's family."""
    family = sys.modules[op.fn.__module__.rpartition('.')[0]]
    return (inspect.getdoc(family) or '').partition('\n')[0]


def shares(ops: Sequence[Op], records: Iterable[Record]) -> tuple[str, str]:
    """Worst and best % of copy over the cases that move enough bytes, and the least time in a CUDA graph.

    For ops made of matrix products, also the worst and best rate of operations.
    """
    names = {op.name for op in ops}
    own = [r for r in records if r['op'] in names and README_DEVICE in r['device'] and r['pct_of_copy'] is not None]
    large = [r for r in own if r['gbps'] * r['us'] * 1e3 >= LARGE_BYTES and r['gbps'] * 1e9 <= BANDWIDTH]
    span = _span(r['pct_of_copy'] for r in large)
    if rates := _span(r['tflops'] for r in large if r.get('tflops') is not None):
        span += f' ({rates} TFLOP/s)'
    return span, f'{min(r["graph_us"] for r in own):.1f}' if own else ''


def _span(values: Iterable[float]) -> str:
    """`90–98`, the minimum and maximum; one number if they are equal, empty if there are none."""
    found = [f'{value:.0f}' for value in values]
    return '–'.join(dict.fromkeys((min(found, key=float), max(found, key=float)))) if found else ''


def side_by_side(records: Iterable[Record]) -> str:
    """The cases that were measured for all of `README_OPS`, and the command that measures them."""
    found = {(r['op'], r['case']): r for r in records if README_DEVICE in r['device']}
    cases = [case for op, case in found if op == README_OPS[0] and all((name, case) in found for name in README_OPS)]
    if not cases:
        return ''
    heading = ('case', *(column for name in README_OPS for column in (f'`{name}`, µs', 'GB/s', '% of copy')))
    formats = {'us': '.1f', 'gbps': '.0f', 'pct_of_copy': '.0f'}
    rows = [
        (f'`{case}`', *(format(found[name, case][key], spec) for name in README_OPS for key, spec in formats.items()))
        for case in cases
    ]
    return f'\n{markdown(heading, rows)}\n\n`tile-kernels bench {" ".join(README_OPS)}` measures these on your GPU.\n'


def occasion(ops: Sequence[Op], records: Iterable[Record]) -> str:
    """Date and commits of the numbers, and how many of the cases have one."""
    own = sorted((r for r in records if README_DEVICE in r['device']), key=lambda r: r['date'], reverse=True)
    if not own:
        return 'Not measured yet.'
    cases = {(op.name, case_id(case)) for op in ops if op.case_set is not None for case in op.case_set.bench}
    done = cases & {(r['op'], r['case']) for r in own}
    commits = list(dict.fromkeys(r['commit'][:7] for r in own))
    return (
        f'Each range spans the slowest and the fastest case that moves at least {LARGE_BYTES >> 20} MB. '
        f'Cases above the {BANDWIDTH / 1e12:.1f} TB/s peak are left out: they did not read every byte we counted. '
        '`least` is the shortest time of any case in a CUDA graph. '
        f'{own[0]["device"]}, {own[0]["date"][:10]}, commit{"s" * (len(commits) > 1)} {", ".join(commits)}. '
        f'{len(done)} of {len(cases)} benchmark cases are measured, each on the page of its op.'
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser('python -m tools.docs', description=__doc__.splitlines()[0])
    parser.add_argument('--check', action='store_true', help='fail if a page is out of date, and change nothing')
    args = parser.parse_args(argv)
    if not args.check:
        write()
        return 0
    wrong = stale()
    for path in wrong:
        sys.stderr.write(f'{path.relative_to(ROOT)} is out of date; run: python -m tools.docs\n')
    return 1 if wrong else 0
