"""Plots of benchmark records, for the site and for `tile-kernels report`. Drawing needs matplotlib, nothing else does.

Each function takes records and returns a `Plot`, or None if the records have nothing to show. The same records give the
same bytes of SVG. Every plot carries the table of its numbers, and a note that says where the numbers come from.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tile_kernels.core.errors import UnsupportedError
from tile_kernels.core.gpus import GPUS, Gpu
from tile_kernels.testing.records import Record

#: Color of text and axes. In a page it becomes the text color of the page, so that one picture suits light and dark.
INK = '#123456'

#: Eight colors that color-blind readers can tell apart (Okabe and Ito), each with a mark of its own.
COLORS = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#D55E00', '#56B4E9', '#B8A800', '#888888')
MARKS = ('o', 's', '^', 'D', 'v', 'P', 'X', '*')

#: How a round of `tools/peers.py` calls this package.
OURS = 'tile_kernels'

#: Smaller problems are bound by latency, so their % of copy says little.
LARGE_BYTES = 32 << 20

_STYLE = {
    'svg.hashsalt': 'tile_kernels',
    'svg.fonttype': 'none',
    'font.family': 'DejaVu Sans',
    'font.size': 9,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.axisbelow': True,
    'axes.grid': True,
    'axes.facecolor': 'none',
    'grid.color': '#888888',
    'grid.alpha': 0.3,
    'grid.linewidth': 0.6,
    'legend.frameon': False,
    **dict.fromkeys(('text.color', 'axes.edgecolor', 'axes.labelcolor', 'xtick.color', 'ytick.color'), INK),
}


@dataclass(frozen=True)
class Plot:
    """One picture with its numbers.

    Attributes:
        name: identifies the picture; letters, digits, dots and hyphens.
        title: what the picture shows.
        note: device, timer, commits, number of cases, and what is missing.
        heading: column names of the table.
        rows: the numbers of every mark, in the order of drawing.
        size: inches.
        draw: draws into a matplotlib figure.
    """

    name: str
    title: str
    note: str
    heading: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    size: tuple[float, float]
    draw: Callable[[Any], None]

    def figure(self) -> Any:
        """The matplotlib figure."""
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError:
            how = 'install it with: pip install "open-tile-kernels[plots]"'
            raise UnsupportedError(f'plots: a picture needs matplotlib; {how}') from None
        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=self.size, layout='constrained')
            self.draw(figure)
            return figure

    def svg(self, background: str | None = None) -> str:
        """The picture as SVG text; without a background it takes the text color of the page around it."""
        import matplotlib

        data = io.StringIO()
        figure = self.figure()
        with matplotlib.rc_context(_STYLE | {'svg.hashsalt': self.name}):
            figure.savefig(data, format='svg', facecolor=background or 'none', metadata={'Date': None})
        text = data.getvalue()
        ink = '#222222' if background else 'currentColor'
        text = text[text.index('<svg') :].replace(INK, ink)
        label = html.escape(self.title, quote=True)
        width = f'{self.size[0] * 72:g}'
        sizes = re.compile(r'width="[\d.]+pt" height="[\d.]+pt"')
        sized = sizes.sub(lambda _: f'width="{width}" role="img" aria-label="{label}"', text, count=1)
        return re.sub(r'(?<=\d\.\d\d)\d+', '', sized).replace('\n', ' ').strip() + '\n'

    def html(self) -> str:
        """The picture, its note, and its numbers in a table that opens on a click."""
        return (
            f'<figure class="plot" id="{self.name}">\n<div class="picture">{self.svg().strip()}</div>\n'
            f'<figcaption><strong>{html.escape(self.title)}.</strong> {html.escape(self.note)}</figcaption>\n'
            f'<details><summary>{len(self.rows)} rows of numbers</summary>\n{table(self.heading, self.rows)}\n'
            '</details>\n</figure>\n'
        )


def table(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table; numbers stand on the right."""
    head = ''.join(f'<th>{html.escape(cell)}</th>' for cell in heading)
    body = '\n'.join('<tr>' + ''.join(map(_cell, row)) + '</tr>' for row in rows)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'<td class="number">{number(value)}</td>'
    return f'<td>{html.escape("" if value is None else str(value))}</td>'


def number(value: float) -> str:
    """Three significant digits, but never fewer digits than the integer part has."""
    return f'{value:.0f}' if abs(value) >= 100 else f'{value:.3g}'


# Facts about records ------------------------------------------------------------------------


def moved(record: Record) -> float:
    """Bytes that a case must move; 0 if the record does not say."""
    return (record.get('gbps') or 0) * record['us'] * 1e3


def family(record: Record) -> str:
    """The family of the op of a record."""
    return record['op'].partition('.')[0]


def is_gradient(name: str) -> bool:
    """Whether an op computes gradients, according to its name."""
    return 'bwd' in name or 'backward' in name


def is_round(case: str) -> bool:
    """Whether all sizes of a case are multiples of 8."""
    return all(int(found) % 8 == 0 or int(found) < 8 for found in re.findall(r'(?<![\w.])\d+', case.replace('=', ' ')))


def gpu_of(records: Sequence[Record]) -> Gpu | None:
    """The GPU that all records name, None if there is no record of it or they name several."""
    names = {record['device'] for record in records}
    found = [gpu for gpu in GPUS.values() if len(names) == 1 and gpu.name in next(iter(names))]
    return found[0] if found else None


def provenance(records: Sequence[Record], missing: str = '', of_what: str = 'case') -> str:
    """Where records come from, in one or two sentences."""
    dates = sorted(record['date'][:10] for record in records)
    when = dates[0] if dates[0] == dates[-1] else f'{dates[0]} to {dates[-1]}'
    commits = list(dict.fromkeys(r['commit'][:7] for r in sorted(records, key=lambda r: r['date'])))
    of = f'commit {commits[0]}' if len(commits) == 1 else f'{len(commits)} commits, {commits[0]} to {commits[-1]}'
    tools = ('torch', 'tilelang')
    versions = ', '.join(sorted({f'{tool} {record[tool]}' for tool in tools for record in records if record.get(tool)}))
    devices = ', '.join(sorted({record['device'] for record in records}))
    timer = ', '.join(sorted({record['timer'] for record in records}))
    told = f'{devices}; {timer}; {versions}; {when}, {of}; {len(records)} {of_what}{"s" * (len(records) != 1)}.'
    return f'{told} {missing}'.strip()


def largest(records: Iterable[Record]) -> list[Record]:
    """For every op the record that moves the most bytes."""
    found: dict[str, Record] = {}
    for record in records:
        if record['op'] not in found or moved(record) > moved(found[record['op']]):
            found[record['op']] = record
    return list(found.values())


# Plots --------------------------------------------------------------------------------------


def families(records: Iterable[Record], name: str = 'families') -> Plot | None:
    """% of copy of every op at its largest case, one line per family: the picture of the home page."""
    large = [r for r in records if r.get('pct_of_copy') is not None and moved(r) >= LARGE_BYTES]
    memory = (r for r in large if r.get('tflops') is None and family(r) != 'gemm')
    own = sorted(largest(memory), key=lambda r: (family(r), r['op']))
    if not own:
        return None
    names = sorted({family(record) for record in own})

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for gradient, color, mark, label in ((False, COLORS[0], 'o', 'forward'), (True, COLORS[4], '^', 'gradient')):
            points = [r for r in own if is_gradient(r['op']) == gradient]
            spread = [names.index(family(r)) + 0.18 * ((i % 3) - 1) for i, r in enumerate(points)]
            axes.scatter([r['pct_of_copy'] for r in points], spread, s=22, c=color, marker=mark, label=label, alpha=0.8)
        axes.axvline(100, color=INK, linewidth=1)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(0, max(125, *(r['pct_of_copy'] * 1.05 for r in own)))
        axes.set_xlabel('% of copy (100: as fast as a copy of the same bytes)')
        figure.legend(loc='outside upper right', ncols=2)

    missing = 'Each mark is the largest case of one op. Matrix products and cases below 32 MB are left out.'
    rows = [(r['op'], r['case'], r['pct_of_copy'], r['us'], r['commit'][:7]) for r in own]
    title = 'Speed of every op that moves memory, relative to a copy'
    size = (7.5, 0.42 * len(names) + 1.2)
    return Plot(name, title, provenance(own, missing), ('op', 'case', '% of copy', 'us', 'commit'), rows, size, draw)


def shares(records: Iterable[Record], gradients: bool, name: str) -> Plot | None:
    """% of copy of the largest case of every op, sorted, with the spread between the 20th and 80th percentile."""
    large = [r for r in records if r.get('pct_of_copy') is not None and moved(r) >= LARGE_BYTES]
    own = [r for r in largest(large) if is_gradient(r['op']) == gradients]
    if not own:
        return None
    own.sort(key=lambda record: -record['pct_of_copy'])
    low = [r['pct_of_copy'] - r['pct_of_copy'] * r['us'] / r.get('p80_us', r['us']) for r in own]
    high = [r['pct_of_copy'] * r['us'] / r.get('p20_us', r['us']) - r['pct_of_copy'] for r in own]
    spread = [[max(0.0, value) for value in side] for side in (low, high)]
    kinds = ('without matrix products', 'with matrix products')

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        places = range(len(own))
        colors = [COLORS[1] if r.get('tflops') is not None else COLORS[0] for r in own]
        bars = {'ecolor': INK, 'error_kw': {'linewidth': 0.8}}
        axes.barh(places, [r['pct_of_copy'] for r in own], xerr=spread, color=colors, height=0.7, **bars)
        axes.axvline(100, color=INK, linewidth=1)
        axes.set_yticks(places, [r['op'] for r in own], fontsize=7)
        axes.set_ylim(len(own) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel('% of copy')
        handles = [axes.barh(0, 0, color=color, label=label) for color, label in zip(COLORS, kinds, strict=False)]
        figure.legend(handles=handles, loc='outside upper right', ncols=2)

    title = f'Largest case of every {"gradient" if gradients else "op"}, relative to a copy'
    rows = [(r['op'], r['case'], r['pct_of_copy'], r['us'], r.get('tflops'), r['commit'][:7]) for r in own]
    heading = ('op', 'case', '% of copy', 'us', 'TFLOP/s', 'commit')
    missing = 'Whiskers: 20th to 80th percentile. Ops without a measured case of 32 MB are not shown.'
    return Plot(name, title, provenance(own, missing), heading, rows, (7.5, 0.17 * len(own) + 0.9), draw)


def latency(records: Iterable[Record], name: str = 'latency') -> Plot | None:
    """Time of the smallest case of every op, cold and in a CUDA graph."""
    found: dict[str, Record] = {}
    for record in records:
        if record.get('graph_us') and 0 < moved(record) < LARGE_BYTES:
            best = found.get(record['op'])
            found[record['op']] = record if best is None or moved(record) < moved(best) else best
    own = sorted(found.values(), key=lambda record: record['graph_us'])
    if not own:
        return None

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for column, color, mark, label in (
            ('us', COLORS[1], 's', 'cold L2'),
            ('graph_us', COLORS[0], 'o', 'in a graph'),
        ):
            axes.scatter([r[column] for r in own], range(len(own)), s=14, c=color, marker=mark, label=label)
        axes.set_yticks(range(len(own)), [r['op'] for r in own], fontsize=7)
        axes.set_ylim(len(own) - 0.4, -0.6)
        axes.set_xscale('log')
        axes.set_xlabel('us (log scale)')
        figure.legend(loc='outside upper right', ncols=2)

    rows = [(r['op'], r['case'], r['us'], r['graph_us'], r['commit'][:7]) for r in own]
    heading = ('op', 'case', 'us', 'us in a graph', 'commit')
    title = 'Smallest case of every op'
    missing = 'Ops without a case below 32 MB that was timed in a CUDA graph are not shown.'
    return Plot(name, title, provenance(own, missing), heading, rows, (7.5, 0.17 * len(own) + 0.9), draw)


def host(records: Iterable[Record], name: str = 'host') -> Plot | None:
    """Host time of one call of every op, at the case that moves the fewest bytes."""
    found: dict[str, Record] = {}
    for record in records:
        if record.get('host_us') and moved(record) < moved(found.get(record['op'], {'us': 1e30, 'gbps': 1e30})):
            found[record['op']] = record
    own = sorted(found.values(), key=lambda record: record['host_us'])
    if not own:
        return None

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.barh(range(len(own)), [r['host_us'] for r in own], color=COLORS[0], height=0.7)
        axes.set_yticks(range(len(own)), [r['op'] for r in own], fontsize=7)
        axes.set_ylim(len(own) - 0.4, -0.6)
        axes.set_xlabel('us on the host')

    rows = [(r['op'], r['case'], r['host_us'], r['commit'][:7]) for r in own]
    missing = 'Smallest case of each op. The CPU, and host times of other libraries in this run, are not recorded.'
    title = 'Host time of one call from Python'
    size = (7.5, 0.17 * len(own) + 0.9)
    return Plot(name, title, provenance(own, missing), ('op', 'case', 'host us', 'commit'), rows, size, draw)


def roofline(records: Iterable[Record], peers: Iterable[Record] = (), name: str = 'roofline') -> Plot | None:
    """Arithmetic intensity against rate, for the cases of ops that multiply matrices."""
    own = [r for r in records if r.get('tflops') and moved(r)]
    gpu = gpu_of(own)
    if not own or gpu is None:
        return None
    import torch

    points = [(r['tflops'] * 1e12 * r['us'] * 1e-6 / moved(r), r) for r in own]
    names = sorted({family(record) for record in own})
    half, fp8 = (gpu.peaks[dtype] / 1e12 for dtype in (torch.bfloat16, torch.float8_e4m3fn))
    best = max((p['tflops'] for p in peers if p.get('tflops') and gpu.name in p['device']), default=None)
    above = [r for x, r in points if r['tflops'] > gpu.copy_bandwidth * x / 1e12]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        ends = min(x for x, _ in points) / 2, max(x for x, _ in points) * 2
        for peak, style, label in ((half, '--', 'datasheet, half precision'), (fp8, ':', 'datasheet, fp8')):
            xs = [ends[0], peak * 1e12 / gpu.bandwidth, max(ends[1], peak * 2e12 / gpu.bandwidth)]
            axes.plot(xs, [min(x * gpu.bandwidth / 1e12, peak) for x in xs], style, color=INK, linewidth=1, label=label)
        if best is not None:
            xs = [ends[0], best * 1e12 / gpu.copy_bandwidth, ends[1]]
            ys = [min(x * gpu.copy_bandwidth / 1e12, best) for x in xs]
            axes.plot(xs, ys, '-', color=INK, linewidth=1.4, label='measured: copy and cuBLAS')
        for i, group in enumerate(names):
            inside = [(x, r['tflops']) for x, r in points if family(r) == group]
            look = {'s': 20, 'color': COLORS[i % 8], 'marker': MARKS[i % 8], 'alpha': 0.8}
            axes.scatter(*zip(*inside, strict=True), label=group, **look)
        ringed = [(x, r['tflops']) for x, r in points if r in above]
        if ringed:
            axes.scatter(*zip(*ringed, strict=True), s=70, facecolors='none', edgecolors=INK, linewidths=0.8)
        axes.set_xscale('log')
        axes.set_yscale('log')
        axes.set_xlabel('FLOP per byte (log scale)')
        axes.set_ylabel('TFLOP/s (log scale)')
        axes.legend(loc='lower right', fontsize=8)

    missing = 'Ops without matrix products have no FLOP count; the bars show them.'
    if above:
        missing += f' {len(above)} ringed cases moved fewer bytes than counted: L2 held some, or padding was skipped.'
    rows = [(r['op'], r['case'], x, r['tflops'], r['us'], r['commit'][:7]) for x, r in points]
    heading = ('op', 'case', 'FLOP per byte', 'TFLOP/s', 'us', 'commit')
    return Plot(name, f'Roofline of {gpu.name}', provenance(own, missing), heading, rows, (7.5, 4.6), draw)


def sizes(records: Sequence[Record], name: str) -> Plot | None:
    """The cases of one op: time against the bytes that it must move, beside a copy of these bytes and the floor."""
    own = sorted((r for r in records if r.get('gbps')), key=moved)
    gpu = gpu_of(own)
    if len(own) < 2 or gpu is None:
        return None
    megabytes = [moved(record) / 1e6 for record in own]
    copied = [(mb, r['us'] * r['pct_of_copy'] / 100) for mb, r in zip(megabytes, own, strict=True) if r['pct_of_copy']]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for solid, label in ((True, 'cold L2'), (False, 'cold L2, odd sizes')):
            points = [(mb, r['us']) for mb, r in zip(megabytes, own, strict=True) if is_round(r['case']) == solid]
            fill = COLORS[0] if solid else 'none'
            if points:
                axes.scatter(*zip(*points, strict=True), s=26, facecolors=fill, edgecolors=COLORS[0], label=label)
        graphs = [(mb, r['graph_us']) for mb, r in zip(megabytes, own, strict=True) if r.get('graph_us')]
        if graphs:
            axes.scatter(*zip(*graphs, strict=True), s=8, color=COLORS[1], marker='s', label='in a graph')
        if copied:
            axes.plot(*zip(*copied, strict=True), color=INK, linewidth=1, label='copy of the same bytes, same run')
        floor = [mb * 1e12 / gpu.bandwidth for mb in (megabytes[0], megabytes[-1])]
        axes.plot(
            [megabytes[0], megabytes[-1]], floor, '--', color=INK, linewidth=0.8, label='bytes at the datasheet rate'
        )
        axes.set_xscale('log')
        axes.set_yscale('log')
        axes.set_xlabel('MB that the case must move (log scale)')
        axes.set_ylabel('us (log scale)')
        axes.legend(loc='upper left', fontsize=8)

    rows = [
        (r['case'], mb, r['us'], r.get('graph_us'), r['pct_of_copy'], r['commit'][:7])
        for mb, r in zip(megabytes, own, strict=True)
    ]
    heading = ('case', 'MB', 'us', 'us in a graph', '% of copy', 'commit')
    note = provenance(own, 'Cases that were never measured, or changed since, are not shown.')
    return Plot(name, f'{own[0]["op"]}: time against size', note, heading, rows, (7.0, 3.6), draw)


def history(records: Iterable[Record], name: str, most: int = 6) -> Plot | None:
    """How the time of the cases of one op changed from commit to commit; the cases that were measured most often."""
    rounds: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: r['date']):
        rounds.setdefault(record['case'], []).append(record)
    often = [case for case in rounds if len({r['commit'] for r in rounds[case]}) >= 3]
    cases = sorted(often, key=lambda case: -len(rounds[case]))[:most]
    if not cases:
        return None
    own = [record for case in cases for record in rounds[case]]
    dates = sorted({record['date'] for record in own})

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for i, case in enumerate(cases):
            xs = [dates.index(r['date']) for r in rounds[case]]
            low = [r.get('p20_us', r['us']) for r in rounds[case]]
            high = [r.get('p80_us', r['us']) for r in rounds[case]]
            axes.plot(xs, [r['us'] for r in rounds[case]], color=COLORS[i], marker=MARKS[i], markersize=4, label=case)
            axes.fill_between(xs, low, high, color=COLORS[i], alpha=0.25, linewidth=0)
        labels = [next(r['commit'][:7] for r in own if r['date'] == date) for date in dates]
        axes.set_xticks(range(len(dates)), labels, rotation=60, fontsize=7)
        axes.set_yscale('log')
        axes.set_ylabel('us (log scale)')
        figure.legend(loc='outside lower center', fontsize=7)

    rows = [(r['case'], r['date'][:10], r['commit'][:7], r['us'], r.get('p20_us'), r.get('p80_us')) for r in own]
    heading = ('case', 'date', 'commit', 'us', 'p20', 'p80')
    title = f'{own[0]["op"]}: time from round to round'
    return Plot(
        name,
        title,
        provenance(
            own, f'Bands: 20th to 80th percentile. At most {most} cases, those with the most rounds.', 'measurement'
        ),
        heading,
        rows,
        (7.0, 3.2 + 0.16 * len(cases)),
        draw,
    )


def beside(records: Iterable[Record], others: Iterable[Record]) -> list[tuple[Record, Record]]:
    """Pairs of ours and another's: of the same round, or on the same machine at the same commit with the same timer.

    A round of `tools/peers.py` holds ours, too. Of several rounds the last one counts. A library that is absent, fails
    or disagrees is left out; one that refuses a case stays.
    """
    others = sorted(others, key=lambda record: record['date'])
    ours = {(r['case'], r['commit'][:7], r['device'], r['timer']): r for r in records}
    rounds = {(r['work'], r['case'], r['date']): r for r in others if r['peer'] == OURS and 'us' in r}
    found: dict[tuple, tuple[Record, Record]] = {}
    for p in others:
        if 'work' in p:
            own = rounds.get((p['work'], p['case'], p['date'])) if p['status'] in ('ok', 'refused') else None
        else:
            own = ours.get((p['case'], p['commit'][:7], p['device'], p['timer']))
        if own is not None and p['peer'] != OURS:
            found[p.get('work', own['op']), p['case'], p['peer']] = own, p
    return list(found.values())


def ratio_ticks(axes: Any) -> None:
    """Plain numbers below a logarithmic axis of ratios: 0.5, 1, 2, 5, and no labels between them."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter('{x:g}')
    axes.xaxis.set_minor_formatter(NullFormatter())


def peers(pairs: Sequence[tuple[Record, Record]], name: str = 'peers', column: str = 'us') -> Plot | None:
    """Times of others as multiples of ours, a line for each case; who refuses a case has a hatched bar there."""
    own = [
        (ours, other) for ours, other in pairs if ours.get(column) and (other.get(column) or other.get('us') is None)
    ]
    if not own:
        return None
    lines = list(dict.fromkeys((ours.get('work', ours['op']), ours['case'], ours[column]) for ours, _ in own))
    names = sorted({other['peer'] for _, other in own})
    looks = {peer: (COLORS[(i + i // 8) % 8], MARKS[i % 8]) for i, peer in enumerate(names)}

    def draw(figure: Any) -> None:
        axes, aside = figure.subplots(1, 2, sharey=True, width_ratios=(5, 1))
        refused: dict[int, list[str]] = {}
        drawn: dict[str, tuple[list[float], list[int]]] = {}
        for ours, other in own:
            line = lines.index((ours.get('work', ours['op']), ours['case'], ours[column]))
            if other.get(column) is None:
                refused.setdefault(line, []).append(other['peer'])
            else:
                xs, ys = drawn.setdefault(other['peer'], ([], []))
                xs.append(other[column] / ours[column])
                ys.append(line)
        for peer in names:
            color, mark = looks[peer]
            axes.scatter(*drawn.get(peer, ([], [])), s=22, c=color, marker=mark, label=peer, alpha=0.85)
        for line, who in refused.items():
            aside.barh(line, 1, 0.7, color='none', edgecolor=INK, hatch='///', linewidth=0.6)
            aside.text(1.05, line, ', '.join(who), va='center', fontsize=6)
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_xscale('log')
        ratio_ticks(axes)
        axes.set_yticks(range(len(lines)), [f'{op} {case}: {us:.3g} us' for op, case, us in lines], fontsize=6)
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.set_xlabel('time of the other / ours (log scale); right of 1 ours is faster')
        aside.set_xlim(0, 3)
        aside.set_xticks([])
        aside.set_xlabel('refused')
        aside.grid(False)
        figure.legend(loc='outside upper center', ncols=4, fontsize=7)

    rows = [
        (
            ours.get('work', ours['op']),
            ours['case'],
            other['peer'],
            ours[column],
            other.get(column),
            other[column] / ours[column] if other.get(column) else 'refused',
            *(record.get(key) for key in ('graph_us', 'host_us') for record in (ours, other)),
        )
        for ours, other in own
    ]
    words = {'us': 'Time', 'graph_us': 'Time in a graph', 'host_us': 'Host time'}[column]
    where = ('graph: ours', 'graph: other', 'host: ours', 'host: other')
    heading = ('op', 'case', 'other', 'ours, us', 'other, us', 'other / ours', *where)
    note = provenance([other for _, other in own], 'Times of another run, commit or machine are not shown.')
    title = f'{words} beside others, same machine and same run'
    return Plot(name, title, note, heading, rows, (7.5, 0.16 * len(lines) + 1.6), draw)


def layers(records: Iterable[Record], name: str = 'layers') -> Plot | None:
    """The MoE layer and its baselines: the last record of each, eager and in a CUDA graph."""
    last: dict[tuple[int, str], Record] = {}
    for record in sorted(records, key=lambda r: r['date']):
        last[record['num_tokens'], record['layer']] = record
    own = [last[key] for key in sorted(last, key=lambda key: (key[0], last[key]['us']))]
    if not own:
        return None

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        places = range(len(own))
        axes.barh([i - 0.2 for i in places], [r['us'] for r in own], 0.38, color=COLORS[0], label='eager')
        graphs = [(i + 0.2, r['graph_us']) for i, r in enumerate(own) if r.get('graph_us')]
        if graphs:
            axes.barh(*zip(*graphs, strict=True), 0.38, color=COLORS[1], label='in a graph')
        axes.set_yticks(places, [f'{r["layer"]}, {r["num_tokens"]} tokens' for r in own], fontsize=8)
        axes.set_ylim(len(own) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel('us')
        figure.legend(loc='outside upper right', ncols=2)

    rows = [(r['layer'], r['num_tokens'], r['us'], r.get('graph_us'), r.get('host_us'), r['commit'][:7]) for r in own]
    heading = ('layer', 'tokens', 'us', 'us in a graph', 'host us', 'commit')
    first = own[0]
    title = f'MoE layer forward, {first["num_experts"]} experts, top {first["topk"]}'
    missing = 'The share of each kernel is not recorded.'
    return Plot(name, title, provenance(own, missing), heading, rows, (7.5, 0.4 * len(own) + 1), draw)


def decoder_layers(records: Iterable[Record], name: str = 'decoder-layers') -> Plot | None:
    """One decoder layer of each model, before and after `patch`: the last time of each shape on the device."""
    own = [record for record in last_layers(records) if record.get('us')]
    if not own:
        return None
    shapes, models, hows = (list(dict.fromkeys(r[key] for r in own)) for key in ('shape', 'model', 'how'))

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
        for axes, shape in zip(panels, shapes, strict=True):
            for i, how in enumerate(hows):
                found = [r for r in own if r['shape'] == shape and r['how'] == how]
                places = [models.index(r['model']) for r in found]
                look = {'s': 22, 'c': COLORS[i], 'marker': MARKS[i], 'alpha': 0.8}
                axes.scatter([r['us'] for r in found], places, label=how if axes is panels[0] else None, **look)
            axes.set_xscale('log')
            axes.set_xlabel('us (log scale)')
            axes.set_title(shape, fontsize=9)
        panels[0].set_yticks(range(len(models)), models, fontsize=8)
        panels[0].set_ylim(len(models) - 0.5, -0.5)
        figure.legend(loc='outside upper center', ncols=len(hows))

    columns = ('model', 'shape', 'how', 'us', 'graph_us', 'host_us', 'error')
    rows = [(*(r.get(column) for column in columns), r['commit'][:7]) for r in own]
    heading = ('model', 'tokens', 'how', 'us', 'us in a graph', 'host us', 'relative error', 'commit')
    size = (2.2 * len(shapes) + 1.5, 0.4 * len(models) + 1.3)
    return Plot(name, 'One decoder layer at its true size', provenance(own), heading, rows, size, draw)


def last_layers(records: Iterable[Record]) -> list[Record]:
    """The last record of every model, shape and way to run, in the order of the first run."""
    found: dict[tuple[str, str, str], Record] = {}
    for record in sorted(records, key=lambda r: r['date']):
        found[record['model'], record['shape'], record['how']] = record
    return list(found.values())


def model(pairs: Sequence[tuple[Record, float, float]], missing: str = '', name: str = 'model') -> Plot | None:
    """Predicted against measured times: (record, predicted us, us of the baseline)."""
    own = sorted(pairs, key=lambda pair: pair[0]['us'])
    if not own:
        return None

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        measured = [record['us'] for record, _, _ in own]
        axes.fill_between(
            measured, [x * 0.75 for x in measured], [x * 1.25 for x in measured], color='#888888', alpha=0.2
        )
        axes.plot(measured, measured, color=INK, linewidth=1)
        baseline = [us for _, _, us in own]
        axes.scatter(measured, baseline, s=10, facecolors='none', edgecolors=COLORS[1], marker='s', label='baseline')
        axes.scatter(measured, [us for _, us, _ in own], s=8, color=COLORS[0], label='model')
        axes.set_xscale('log')
        axes.set_yscale('log')
        axes.set_xlabel('measured, us (log scale)')
        axes.set_ylabel('predicted, us (log scale); band: 25 %')
        axes.legend(loc='upper left')

    rows = [(r['op'], r['case'], r['us'], us, base) for r, us, base in own]
    heading = ('op', 'case', 'measured us', 'model us', 'baseline us')
    note = provenance([record for record, _, _ in own], missing)
    return Plot(name, 'Predicted and measured times', note, heading, rows, (6.5, 5.0), draw)
