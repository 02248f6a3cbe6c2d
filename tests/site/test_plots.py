"""Plots: every selected record is a mark, axes hold all marks, the same records give the same bytes."""

import json
import re
from pathlib import Path

import pytest

from tile_kernels import plots
from tile_kernels.cli import main as cli
from tile_kernels.cli import report
from tile_kernels.core.errors import ArgumentError

pytest.importorskip('matplotlib')
from matplotlib.collections import PathCollection

RESULTS = Path(__file__).parents[2] / 'benchmarks' / 'results'
BASE = {
    'device': 'NVIDIA H200',
    'timer': report.GPU_TIMER,
    'commit': 'abc1234567',
    'date': '2026-01-02T03:04:05Z',
    'torch': '2.11.0',
}


def record(op='quant.cast', case='4096x7168', us=50.0, share=95.0, **more):
    gbps = more.pop('gbps', 4000.0)
    spread = {'p20_us': us * 0.99, 'p80_us': us * 1.01, 'graph_us': us - 2, 'host_us': 9.0}
    return {**BASE, 'op': op, 'case': case, 'us': us, 'gbps': gbps, 'pct_of_copy': share, **spread, **more}


RECORDS = [
    record(),
    record(case='8001x2560', us=20.0, share=90.0),
    record(case='64x7168', us=4.0, share=110.0, gbps=200.0),
    record('quant.cast_bwd', share=80.0),
    record('gemm.gemm', 'm=4096-n=4096-k=7168', us=300.0, share=10.0, gbps=500.0, tflops=780.0),
    record('gemm.gemm', 'm=1-n=4096-k=7168', us=20.0, share=90.0, gbps=3000.0, tflops=3.0),
]


def marks(figure):
    """All points of scatter plots and all bars of a figure."""
    (axes,) = figure.axes
    scattered = [found for found in axes.collections if isinstance(found, PathCollection)]
    points = [tuple(point) for found in scattered for point in found.get_offsets()]
    bars = [(bar.get_width(), bar.get_y()) for bar in axes.patches if bar.get_height() and bar.get_width()]
    return axes, points + bars


@pytest.mark.parametrize(
    ('plot', 'expected'),
    [
        (plots.families(RECORDS), {'quant.cast', 'quant.cast_bwd'}),
        (plots.shares(RECORDS, False, 'forward'), {'quant.cast', 'gemm.gemm'}),
        (plots.shares(RECORDS, True, 'gradients'), {'quant.cast_bwd'}),
        (plots.latency(RECORDS), {'quant.cast'}),
        (plots.host(RECORDS), {'quant.cast', 'quant.cast_bwd', 'gemm.gemm'}),
    ],
    ids=lambda value: getattr(value, 'name', ''),
)
def test_a_plot_of_ops_has_one_row_for_every_selected_op(plot, expected):
    assert [row[0] for row in plot.rows] == list(dict.fromkeys(row[0] for row in plot.rows))
    assert {row[0] for row in plot.rows} == expected
    axes, found = marks(plot.figure())
    assert len(found) == len(plot.rows) * (2 if plot.name == 'latency' else 1)
    (left, right), width = axes.get_xlim(), [x for x, _ in found]
    assert left <= min(width) and max(width) <= right


def test_a_note_names_the_range_of_commits_and_the_host_plot_the_smallest_case():
    later = record(
        'quant.cast', '1x7168', us=2.0, gbps=1.0, commit='def4567890', date='2026-01-03T00:00:00Z', host_us=99.0
    )
    plot = plots.host([*RECORDS, later])
    assert '2 commits, abc1234 to def4567' in plot.note and 'torch 2.11.0' in plot.note
    assert dict((row[0], row[2]) for row in plot.rows)['quant.cast'] == 99.0


def test_the_model_has_two_marks_for_every_counted_case():
    plot = plots.model([(r, r['us'] * 1.1, r['us'] * 2) for r in RECORDS], 'Nothing is missing.')
    assert [row[3] / row[2] for row in plot.rows] == pytest.approx([1.1] * len(RECORDS))
    assert len(marks(plot.figure())[1]) == 2 * len(RECORDS) and plot.note.endswith('Nothing is missing.')
    assert plots.model([]) is None


def test_bars_start_at_zero():
    for plot in (plots.shares(RECORDS, False, 'forward'), plots.host(RECORDS)):
        assert plot.figure().axes[0].get_xlim()[0] == 0


def test_the_roofline_places_products_by_their_counts_and_rings_what_is_too_fast():
    fast = record('gemm.gemm', 'm=2-n=4096-k=7168', us=20.0, share=130.0, gbps=5500.0, tflops=30.0)
    plot = plots.roofline([*RECORDS, fast])
    assert [row[:2] for row in plot.rows] == [(r['op'], r['case']) for r in (*RECORDS[4:], fast)]
    assert plot.rows[0][2] == pytest.approx(780e12 / 500e9) and '1 ringed cases' in plot.note
    assert len(marks(plot.figure())[1]) == 3 + 1


def test_odd_sizes_are_hollow_and_every_case_is_a_mark():
    assert plots.is_round('4096x7168-float32') and plots.is_round('num_tokens=64-hidden=4096-num_streams=4')
    assert not plots.is_round('8001x2560') and not plots.is_round('num_tokens=33-hidden=4096')
    plot = plots.sizes([r for r in RECORDS if r['op'] == 'quant.cast'], 'sizes')
    assert [row[0] for row in plot.rows] == ['64x7168', '8001x2560', '4096x7168']
    assert len(marks(plot.figure())[1]) == 2 * len(plot.rows)  # cold and in a graph
    assert plots.sizes(RECORDS[:1], 'one') is None


def test_history_needs_three_commits_of_a_case():
    rounds = [record(us=float(i), commit=f'{i}' * 10, date=f'2026-01-0{i}T00:00:00Z') for i in (1, 2, 3)]
    assert plots.history(rounds[:2], 'h') is None
    assert [row[3] for row in plots.history(rounds, 'h').rows] == [1.0, 2.0, 3.0]


def test_others_count_only_at_the_same_commit_and_with_the_same_timer():
    product = RECORDS[4]
    peer = {**BASE, 'peer': 'cuBLAS', 'case': product['case'], 'us': 150.0}
    assert not plots.beside(RECORDS, [peer | {'commit': 'fff'}, peer | {'timer': 'wall clock'}])
    assert plots.peers([]) is None
    plot = plots.peers(plots.beside(RECORDS, [peer]))
    assert plot.rows[0][:6] == ('gemm.gemm', product['case'], 'cuBLAS', 300.0, 150.0, 0.5)
    refused = plots.peers(plots.beside(RECORDS, [peer | {'us': None}]))
    assert refused.rows[0][5] == 'refused' and 'refused' in refused.svg()


def test_a_round_is_compared_with_itself_and_shows_refusals_but_no_failures():
    def round_of(date, **times):
        told = {'fast': 'ok', 'shy': 'refused', 'gone': 'absent', 'wrong': 'differs', plots.OURS: 'ok'}
        one = {**BASE, 'date': date, 'op': 'norm.norm', 'work': 'norm.norm:add', 'case': 'tokens=64'}
        got = [{**one, 'peer': peer, 'status': told[peer]} for peer in told]
        return [r | ({'us': times[r['peer']], 'host_us': 3.0} if r['peer'] in times else {}) for r in got]

    old = round_of('2026-01-01T00:00:00Z', tile_kernels=9.0, fast=1.0)
    new = round_of('2026-01-02T00:00:00Z', tile_kernels=4.0, fast=2.0)
    pairs = plots.beside(RECORDS, new + old)
    plot = plots.peers(pairs)
    assert [row[1:6] for row in plot.rows] == [
        ('tokens=64', 'fast', 4.0, 2.0, 0.5),
        ('tokens=64', 'shy', 4.0, None, 'refused'),
    ]
    axes, aside = plot.figure().axes
    points = [tuple(point) for found in axes.collections for point in found.get_offsets()]
    assert points == [(0.5, 0.0)] and axes.get_xlim()[0] < 0.5 and [bar.get_hatch() for bar in aside.patches] == ['///']
    assert [row[5] for row in plots.peers(pairs, column='host_us').rows] == [1.0, 'refused']
    assert plots.peers(pairs, column='graph_us') is None


def test_the_same_records_give_the_same_bytes_and_the_text_color_of_the_page():
    plot = plots.families(RECORDS)
    assert plot.svg() == plots.families(RECORDS).svg() and plots.INK not in plot.svg()
    assert 'currentColor' in plot.svg() and 'currentColor' not in plot.svg('white')
    assert not re.findall(r'(?:href|src)="http', plot.html())


def test_real_records_give_every_plot():
    records = report.checked(RESULTS / 'h200.jsonl')
    others = report.read_records(RESULTS / 'peers' / 'h200.jsonl')
    assert plots.peers(plots.beside(report.read_records(RESULTS / 'h200.jsonl'), others)).rows
    assert len(plots.roofline(records, others).rows) > 50
    assert len(plots.layers(report.read_records(RESULTS / 'layer' / 'h200.jsonl')).rows) == 12


# Report -------------------------------------------------------------------------------------


def test_a_report_says_what_changed_beyond_noise(tmp_path, capsys):
    now, before = tmp_path / 'now.jsonl', tmp_path / 'before.jsonl'
    old = [r | {'us': r['us'] * factor} for r, factor in zip(RECORDS, (2.0, 1.005, 0.5, 1, 1, 1), strict=True)]
    for path, records in ((now, RECORDS), (before, old)):
        path.write_text('\n'.join(map(json.dumps, records)))
    out = tmp_path / 'report.html'
    assert cli.main(['report', str(now), '--against', str(before), '--out', str(out)]) == 0
    text = out.read_text()
    assert '1 faster, 1 slower, 4 within noise.' in text and '6 cases' in capsys.readouterr().out
    assert text.count('<figure') == 6 and not re.findall(r'(?:src|href)="', text.replace('xlink:href="#', ''))


@pytest.mark.parametrize(
    ('text', 'said'),
    [(None, 'no file'), ('', 'no record of a GPU'), ('{"a": 1}', 'no record'), ('nonsense', 'must hold')],
)
def test_a_report_of_nothing_is_refused_in_one_sentence(tmp_path, text, said):
    path = tmp_path / 'r.jsonl'
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArgumentError, match=said):
        report.checked(path)
