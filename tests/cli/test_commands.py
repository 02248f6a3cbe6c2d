"""`list`, `explain`, `show`, `demo`, `bench` on an op of our own."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tile_kernels
from tile_kernels.cli import bench, catalog, console, demo
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.explain import config_words, explain
from tile_kernels.core.knobs import knobs

NAME = 'tests.double'


def test_list_says_what_an_op_does(toy, cli):
    status, out, _ = cli('list')
    assert status == 0
    assert NAME in out and 'Twice the input.' in out and 'bfloat16, float32' in out


def test_an_error_is_one_sentence_and_exit_status_1(toy, cli):
    status, out, err = cli('explain', 'tests.triple')
    assert (status, out) == (1, '')
    assert err.startswith("tile-kernels explain: op must be the name of an op or a family, got 'tests.triple'; ")
    assert err.endswith('did you mean tests.double?\n') and err.count('\n') == 1


def test_explain_states_bytes_and_floor(toy):
    found = explain(NAME, num_tokens=1000, dtype='float32')
    assert found.bytes == 2 * 1000 * 128 * 4
    assert found.floor_us == pytest.approx(found.bytes / 4.8e12 * 1e6)
    assert found.copy_us > found.floor_us
    assert 'double_kernel block_m=4 num_threads=64 (by choose) | 1.0 MB | floor 0.2 us on H200 (4.8 TB/s)' in str(found)


@pytest.fixture
def narrow(cli, monkeypatch):
    """A terminal of 80 columns without color."""
    monkeypatch.setattr(type(sys.stdout), 'isatty', lambda self: True)
    for name, value in dict(COLUMNS='80', LINES='25', NO_COLOR='1', TERM='xterm').items():
        monkeypatch.setenv(name, value)


def readable(out: str) -> list[str]:
    """The lines of an output of at most 80 columns, without escape sequences."""
    lines = [line.rstrip() for line in re.sub(r'\x1b\[[0-9;]*m', '', out).splitlines()]
    assert max(map(len, lines)) <= 80
    return lines


def test_explain_fits_80_columns(toy, cli, narrow):
    lines = readable(cli('explain', NAME, 'num_tokens=1000')[1])
    assert lines[1:4] == ['double_kernel', '    config      block_m=4 num_threads=64', '    decided by  choose']
    assert lines[4].split() == ['moves', '512.0', 'kB'] and lines[6].split() == ['bound', 'by', '4.8', 'TB/s']


@pytest.mark.parametrize('name', ['mhc.pre', 'attention.mla_decode', 'linear_attention.chunk_gla', 'moe.fused_mapping'])
def test_explain_of_real_ops_breaks_no_word_at_80_columns(cli, narrow, name):
    more = [] if name == 'moe.fused_mapping' else ['--no-predict']  # lowering the others takes seconds
    lines = readable(cli('explain', name, *more)[1])
    found = explain(name)
    for launch in found.launches:
        where = lines.index(launch.kernel.name)
        shown = ' '.join(' '.join(lines[where + 1 : where + 8]).split())
        assert f'config {config_words(launch.config)} decided by' in shown and 'copy us' in shown
    assert len(lines) < 10 * (len(found.launches) + 2)


def test_list_and_show_fit_80_columns(toy, cli, narrow):
    assert '    Twice the input.' in readable(cli('list')[1])
    source = ''.join(readable(cli('show', NAME, 'num_tokens=64', '--what', 'cuda')[1]))
    assert '__restrict__ y, int num_tokens)' in source and 'double_kernel(128, bfloat16)' in source


def test_explain_on_the_command_line(toy, cli):
    _, out, _ = cli('explain', NAME, 'num_tokens=1000', '--device', 'h100')
    assert 'double_kernel' in out and 'choose' in out and '512.0 kB' in out and '3.35 TB/s' in out
    assert 'launches nothing' in cli('explain', NAME, 'num_tokens=0')[1]


def test_explain_says_what_a_floor_stands_on():
    assert 'floor 121.5 us on H200 (1979 TFLOP/s)' in str(explain('gemm.gemm_fp8', m=8192, n=2048, k=7168))
    assert 'us on H200 (4.8 TB/s)' in str(explain('gemm.gemm_fp8', m=16, n=2048, k=7168))


def test_explain_knows_its_devices(toy):
    with pytest.raises(ArgumentError, match=r"device must be one of h200, h100, .*, got 'k80'"):
        explain(NAME, device='k80')
    with pytest.raises(ArgumentError, match=r"got 'h20'; did you mean h200\?$"):
        explain(NAME, device='h20')
    with pytest.raises(ArgumentError, match=r'got num_token; did you mean num_tokens\?$'):
        explain(NAME, num_token=3)


def test_show_compiles_without_a_gpu(toy, cli):
    status, out, _ = cli('show', NAME, '--case', 'num_tokens=64-hidden=128-bfloat16')
    assert status == 0
    assert '=== tilelang: double_kernel(128, bfloat16)  block_m=1 num_threads=64  sm_90a' in out
    assert '@T.prim_func' in out
    assert '__global__' in out
    assert '.target sm_90a' in out
    assert 'registers' in out and 'spill stores' in out
    assert 'dynamic shared      256' in out  # one row of 128 bfloat16


def test_show_prints_only_what_is_asked_for(toy, cli):
    _, out, _ = cli('show', NAME, 'num_tokens=64', '--what', 'cuda', '--arch', 'sm_80')
    assert '__global__' in out and 'prim_func' not in out and 'registers' not in out


def test_show_refuses_two_ways_to_say_the_case(toy, cli):
    assert 'either --case or key=value' in cli('show', NAME, 'num_tokens=64', '--case', 'x')[2]


def test_demo_runs_the_kernels_and_closes_with_a_sentence(toy, cli):
    status, out, _ = cli('demo')
    assert status == 0
    heading, row, _, *comparisons, closing = out.splitlines()
    assert heading.split() == ['op', 'max', 'error']  # no record, no column
    assert row.split() == ['tests.double', '0']
    assert [line for line in comparisons if line] == [line for line in demo.comparisons(demo.RESULTS) if line]
    assert closing.startswith('No GPU: the kernels of 1 op ran in the interpreter and agree with plain PyTorch')


def test_demo_compares_by_the_records(tmp_path):
    lines = demo.comparisons(demo.RESULTS)
    layer = next(i for i, line in enumerate(lines) if line.startswith('MoE layer, 4096 tokens'))
    names = [line[2:36].strip() for line in lines[layer + 1 : layer + 7]]
    assert names[:2] == ['tile_kernels fp8', 'tile_kernels bf16'] and names[-1] == 'loop, torch.compile'
    times = [int(line[36:45]) for line in lines[layer + 1 : layer + 7]]
    records = [json.loads(line) for line in (demo.RESULTS / 'layer' / 'h200.jsonl').read_text().splitlines()]
    last = {r['layer']: r['us'] for r in records if r['num_tokens'] == 4096}
    assert times == sorted(round(us) for us in last.values()) and max(map(len, lines)) <= 80
    assert any(line.startswith('  cuBLAS by torch.mm') for line in lines)  # also where others are faster
    assert demo.comparisons(tmp_path) == []  # an installed package has no records


def test_demo_shows_what_was_measured(monkeypatch):
    monkeypatch.setattr(demo, 'comparison', lambda *args: (None, None))
    row, _ = demo.cpu_row(demo.load_ops()['transpose.batched_transpose'])
    assert row[2].startswith('64×4096×4096') and float(row[3]) > 500 and row[4].endswith('% of copy')
    row, _ = demo.cpu_row(demo.load_ops()['attention.attend'])
    assert row[4].endswith(' TFLOP/s')


def test_demo_fails_when_a_kernel_is_wrong(toy, cli, monkeypatch):
    monkeypatch.setattr(toy, 'twin', lambda x: x * 3)
    status, out, _ = cli('demo')
    assert status == 1
    assert (
        'tests.double[num_tokens=5-hidden=64-float32]: kernel and twin: y' in out and '1 of 1 op did not agree' in out
    )


def test_demo_shows_every_family():
    assert sorted(op.family for op in demo.representatives()) == sorted(tile_kernels.FAMILIES)


def test_the_demo_takes_the_largest_case_within_the_limit(toy):
    cases = toy.case_set.bench
    assert demo.largest_case(toy, cases, 1 << 30)['num_tokens'] == 4096
    assert demo.largest_case(toy, cases, 100_000)['num_tokens'] == 64
    assert demo.largest_case(toy, cases, 1)['num_tokens'] == 64


def test_shapes_read_at_a_glance():
    case = {
        'shape': (3, 37),
        'k': 8,
        'dtype': torch.float16,
        'bias': None,
        'sorted': True,
        'odd': False,
        'scoring': 'softmax',
    }
    assert demo.shape_words(case) == '3×37×8 f16 sorted softmax'
    assert demo.shape_words({'tokens': (2048,) * 16, 'heads': (32, 32)}) == '32×32 16 of 2048'


# bench ---------------------------------------------------------------------------------------


def test_bench_without_a_gpu_writes_nothing_that_looks_like_a_gpu_result(toy, cli, tmp_path):
    path = tmp_path / 'results' / 'bench.jsonl'
    status, out, _ = cli('bench', '--json', str(path), '--commit', 'abc')
    assert status == 0 and 'No GPU' in out
    records = bench.read_records(path)
    assert [record['case'] for record in records] == [
        'num_tokens=0-hidden=64-float32',
        'num_tokens=5-hidden=64-float32',
    ]
    for record in records:
        assert record['device'] == 'cpu' and record['timer'] == 'wall clock' and record['ran'] == 'twin'
        assert record['commit'] == 'abc' and record['wall_us'] > 0
        assert not record.keys() & {'us', 'graph_us', 'gbps', 'pct_of_copy', 'host_us'}


@pytest.mark.parametrize('name', ['', 'file/bench.jsonl'])
def test_bench_refuses_a_file_it_cannot_write_before_it_runs(toy, cli, tmp_path, name, monkeypatch):
    monkeypatch.setattr(bench, 'measure_all', None)
    (tmp_path / 'file').touch()
    status, _, said = cli('bench', '--json', str(tmp_path / name))
    assert status == 1 and said.startswith('tile-kernels bench: --json must be a file that can be written, got ')


def test_bench_without_records_leaves_no_file(toy, cli, tmp_path):
    assert cli('bench', '--json', str(tmp_path / 'bench.jsonl'), '--level', 'full')[0] == 1
    assert list(tmp_path.iterdir()) == []


def test_bench_refuses_an_op_that_disagrees_with_its_twin(toy, cli, monkeypatch):
    monkeypatch.setattr(toy, 'twin', lambda x: x * 3)
    with knobs(interpret=True):
        status, out, _ = cli('bench')
    assert status == 1
    assert (
        'refused: tests.double[num_tokens=5-hidden=64-float32]: kernel and twin: y: 320 of 320 elements differ' in out
    )
    assert 'refused: tests.double[num_tokens=0' not in out  # nothing to disagree about


def test_bench_says_when_there_is_no_case(toy, cli):
    assert cli('bench', '--level', 'full')[2] == 'tile-kernels bench: ops have no full cases\n'


def git(root: Path, *words: str) -> str:
    return subprocess.run(['git', *words], cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path):
    """A checkout with a package that answers `bench --json F` with the time its file holds."""
    root = tmp_path / 'checkout'
    package = root / 'tile_kernels' / 'cli'
    package.mkdir(parents=True)
    (package.parent / '__init__.py').touch()
    (package / '__init__.py').touch()
    (root / 'time').write_text('8')
    (package / 'main.py').write_text(
        'import json, sys\n'
        "record = dict(op='tests.double', case=' '.join(sys.argv[1:5]), us=float(open('time').read()))\n"
        "open(sys.argv[-1], 'w').write(json.dumps(record))\n"
    )
    git(root, 'init', '--quiet')
    git(root, 'add', '.')
    git(root, '-c', 'user.name=n', '-c', 'user.email=e', 'commit', '--quiet', '--message', 'first')
    (root / 'time').write_text('2')
    return root


def test_base_measures_the_other_revision_and_leaves_no_worktree(repository):
    (record,) = bench.base_records('HEAD', ['tests.double'], 'bench', root=repository)
    assert record == {'op': 'tests.double', 'case': 'bench tests.double --level bench', 'us': 8.0}
    assert len(git(repository, 'worktree', 'list').splitlines()) == 1


def test_base_must_be_a_revision_of_a_checkout(repository, tmp_path):
    with pytest.raises(ArgumentError, match="must name a git revision, got 'nowhere'"):
        bench.base_records('nowhere', [], 'bench', root=repository)
    outside = tmp_path / 'outside'
    outside.mkdir()
    with pytest.raises(ArgumentError, match='needs the package in a git checkout'):
        bench.base_records('HEAD', [], 'bench', root=outside)


def test_base_says_why_the_other_revision_failed(repository):
    (repository / 'tile_kernels' / 'cli' / 'main.py').write_text("raise SystemExit('no such command')")
    git(repository, '-c', 'user.name=n', '-c', 'user.email=e', 'commit', '--quiet', '--all', '--message', 'broken')
    with pytest.raises(ArgumentError, match='--base HEAD could not be measured: no such command'):
        bench.base_records('HEAD', [], 'bench', root=repository)


def test_the_report_compares_case_by_case(capsys):
    record = {'op': 'o', 'us': 2.0, 'graph_us': 1.5, 'gbps': 100.0, 'pct_of_copy': 97.5, 'host_us': 9.0}
    records = [record | {'case': 'a'}, record | {'case': 'b'}]
    bench.report(records, {}, 'cuda', 'main', [record | {'case': 'a', 'us': 3.0}])
    heading, first, second = capsys.readouterr().out.splitlines()
    assert ' '.join(heading.split()) == 'op case us graph us GB/s % of copy TFLOP/s host us main us faster'
    assert ' '.join(first.split()) == 'o a 2.00 1.50 100 97.5 – 9.00 3.00 1.50x'
    assert second.split()[-2:] == ['–', '–']


def test_records_survive_a_round_trip(tmp_path):
    path = tmp_path / 'r.jsonl'
    bench.write_records(path, [{'a': 1}])
    bench.write_records(path, [{'a': torch.float32}])
    assert bench.read_records(path) == [{'a': 1}, {'a': 'torch.float32'}]
    assert json.loads(path.read_text().splitlines()[0]) == {'a': 1}


@pytest.mark.parametrize(
    ('value', 'text'),
    [
        (0, '0.000'),
        (0.1234, '0.123'),
        (2.345, '2.35'),
        (23.45, '23.4'),
        (234.5, '234'),
        (1e-6, '1.00e-06'),
        (None, None),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert console.number(value) == text


@pytest.mark.parametrize(('value', 'text'), [(999, '999 B'), (89_000_000, '89.0 MB'), (5e12, '5000.0 GB')])
def test_sizes_have_units(value, text):
    assert console.size(value) == text


def test_list_searches_public_functions(cli):
    _, out, _ = cli('list', 'flash_attn')
    assert 'attention.flash_attn_func' in out and 'attention.flash_attn_with_kvcache' in out and 'quant.' not in out
    _, out, _ = cli('list', 'sinkhorn')
    assert 'mhc.sinkhorn' in out and 'engram.sinkhorn_step' in out
    status, _, err = cli('list', 'nonsense')
    assert status == 1 and "got 'nonsense'" in err


def test_every_public_function_is_listed():
    listed = catalog.catalog()
    values = {id(value) for value in listed.values()}
    for part in tile_kernels.FAMILIES:
        package = importlib.import_module(f'tile_kernels.{part}')
        public = {name: getattr(package, name) for name in package.__all__}
        assert not [name for name, value in public.items() if callable(value) and id(value) not in values]
