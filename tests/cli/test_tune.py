"""`tune`: ops, kernels of files, everything; results in tables, on the screen and in a file."""

import functools
import json
from dataclasses import replace

import pytest
import torch

from tests.tuning.kernels import times
from tile_kernels import tuning
from tile_kernels.cli import bench
from tile_kernels.core import tuned
from tile_kernels.core.cases import case_id, grid
from tile_kernels.core.knobs import knobs
from tile_kernels.core.workers import Here
from tile_kernels.tuning.search import Lab

KERNEL = """
import tilelang.language as T


def doubled(n, threads=32):
    @T.prim_func
    def doubling(x: T.Tensor((n,), 'float32'), y: T.Tensor((n,), 'float32')):
        with T.Kernel(n // 32, threads=threads) as block:
            for i in T.Parallel(32):
                y[block * 32 + i] = x[block * 32 + i] * 2.0

    return doubling


def reference(x):
    return 3 * x
"""


@pytest.fixture(autouse=True)
def own_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, 'SHIPPED', tmp_path / 'shipped')
    before = dict(knobs.of_process)
    knobs.cache_dir = tmp_path / 'cache'
    yield
    knobs.of_process.update(before)
    knobs.touch()


@pytest.fixture
def small(toy, monkeypatch):
    """The toy with small benchmark cases, since the interpreter runs them."""
    cases = replace(toy.case_set, bench=grid(num_tokens=[4, 100], hidden=[64], dtype=[torch.float32]))
    monkeypatch.setattr(toy, '_cases', cases)
    return toy


@pytest.fixture
def measured(monkeypatch):
    """`tune` with the interpreter in the place of the GPU, and more threads are faster."""
    clock = lambda run, effort: times(640.0 / next(v for k, v in run.config.items() if 'threads' in k))
    monkeypatch.setattr(tuning, 'tune', functools.partial(tuning.tune, lab=Lab(clock, Here)))


@pytest.fixture
def file(tmp_path):
    (tmp_path / 'kernel.py').write_text(KERNEL)
    (tmp_path / 'space.json').write_text('{"threads": [32, 64]}')
    return f'{tmp_path / "kernel.py"}:doubled', str(tmp_path / 'space.json')


def test_without_a_gpu_an_op_is_ranked(toy, cli, tmp_path):
    path = tmp_path / 'tune.jsonl'
    status, out, _ = cli('tune', 'tests.double', 'num_tokens=64', '--json', str(path), '--commit', 'abc')
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == 'tests.double[num_tokens=64-hidden=128-bfloat16] double_kernel on h200'
    assert lines[1] == '4 configs, 4 fit, 4 differ'
    assert lines[2].split() == ['predicted', 'block_m', 'num_threads'] and max(map(len, lines)) <= 80
    assert 'ranked by prediction, nothing was timed' in out and 'best' in lines[3] and 'in force' in out
    records = bench.read_records(path)
    assert len(records) == 4 and {r['commit'] for r in records} == {'abc'} and {r['us'] for r in records} == {None}
    assert records[0]['sweep'] == 'double_kernel' and records[0]['case'] == 'num_tokens=64-hidden=128-bfloat16'
    assert not (tmp_path / 'cache' / 'tuned').exists()


def test_an_op_is_tuned_on_all_its_benchmark_cases(small, cli, measured, tmp_path):
    status, out, _ = cli('tune', 'tests.double', '--top', '1', '--store', 'shipped', '--commit', 'abc')
    assert status == 0 and out.count('2.00x as fast as the config in force') == 2
    assert 'The config in force is within 10% of the best in 0 of 2 runs.' in out
    assert 'slower: tests.double[num_tokens=4-hidden=64-float32] double_kernel: 2.00x' in out
    entries = tuned.read(tmp_path / 'shipped' / 'h200' / 'double_kernel.json')
    assert [(e['size'], e['config']['num_threads'], e['commit']) for e in entries] == [
        (4, 128, 'abc'),
        (128, 128, 'abc'),
    ]
    assert cli('explain', 'tests.double')[1].count('shipped table') == 1
    assert 'slower' not in cli('tune', 'tests.double', '--store', 'none')[1]


def test_all_means_every_op_and_every_config(small, cli, measured):
    status, out, _ = cli('tune', '--all', '--store', 'none')
    assert status == 0 and out.count('double_kernel on h200') == 2 and '4 timed' in out


def test_an_op_whose_kernel_is_wrong_is_named_and_the_others_go_on(small, cli, measured, monkeypatch):
    monkeypatch.setattr(small, 'twin', lambda x: x * 3)
    status, out, _ = cli('tune', 'tests.double')
    assert status == 1 and out.count('no result: tests.double[') == 2


def test_a_kernel_of_a_file(cli, file, measured):
    status, out, _ = cli('tune', file[0], 'n=64', '--space', file[1])
    assert status == 0 and 'doubled(n=64) on h200' in out and 'best 10 us, 2.00x as fast' in out
    status, _, err = cli('tune', file[0], 'n=96', '--space', file[1], '--reference', 'reference')
    assert status == 1 and 'no config that runs and agrees with its reference' in err
    assert 'found in your table' in cli('tune', file[0], 'n=64', '--space', file[1])[1]


def test_ctrl_c_prints_what_was_measured(small, cli, monkeypatch):
    seen = []

    def clock(run, effort):
        seen.append(run)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return times(640.0 / run.config['num_threads'])

    monkeypatch.setattr(tuning, 'tune', functools.partial(tuning.tune, lab=Lab(clock, Here)))
    status, out, _ = cli('tune', 'tests.double')
    assert status == 130 and 'interrupted: decided by what was measured' in out and out.count('on h200') == 1


@pytest.mark.parametrize(
    ('words', 'sentence'),
    [
        (['tune'], 'name an op, a family or FILE.py:NAME, or give --all for every op'),
        (['tune', 'tests.dubble'], "op must be the name of an op or a family, got 'tests.dubble'; did you mean"),
        (['tune', 'tests.double', '--space', 'x.json'], '--space and --reference are for a kernel of a file'),
        (['tune', 'tests.double', 'tokens=3'], 'a case is given by num_tokens, hidden, dtype, got tokens'),
        (['tune', 'tests.double', '--budget', '0'], 'budget must be positive seconds, got 0.0'),
        (['tune', 'none.py:f'], 'none.py does not exist'),
        (['bench', '--sweep'], '--sweep is a command of its own now: tile-kernels tune OP --all'),
    ],
)
def test_bad_input_is_one_sentence(toy, cli, words, sentence):
    status, _, err = cli(*words)
    assert status == 1 and sentence in err and err.startswith(f'tile-kernels {words[0]}: ') and err.count('\n') == 1


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        ({'space': None}, 'doubled needs --space FILE.json'),
        ({'space': 'absent.json'}, '--space must be a JSON file that can be read, got'),
        ({'name': 'tripled'}, 'kernel.py must define tripled'),
        ({'reference': 'twin'}, 'kernel.py must define twin'),
        ({'more': 'other.py:f'}, 'give one kernel of a file at a time'),
    ],
)
def test_bad_input_of_a_file_is_one_sentence(cli, file, tmp_path, change, sentence):
    address, space = file[0].replace('doubled', change.get('name', 'doubled')), change.get('space', file[1])
    words = ['tune', address, *([change['more']] if 'more' in change else []), 'n=64']
    words += ['--space', str(tmp_path / space)] if space else []
    status, _, err = cli(*words, *(['--reference', change['reference']] if 'reference' in change else []))
    assert status == 1 and sentence in err


def test_help_names_every_option(capsys):
    from tile_kernels.cli.main import main

    with pytest.raises(SystemExit):
        main(['tune', '--help'])
    text = capsys.readouterr().out
    for option in ['space', 'budget', 'trials', 'top', 'rank', 'jobs', 'store', 'dry-run', 'json', 'all', 'device']:
        assert f'--{option}' in text


# bench on what looks like a GPU ------------------------------------------------------------------


def test_gpu_records_carry_what_reproduces_them(toy, cli, monkeypatch, tmp_path):
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr('torch.cuda.current_device', lambda: 0)
    monkeypatch.setattr('torch.cuda.get_device_name', lambda index=None: 'NVIDIA H200')
    monkeypatch.setattr(bench, 'arch_of', lambda index: 'sm_90a')
    numbers = {'us': 2.0, 'graph_us': 1.5, 'gbps': 16.4, 'pct_of_copy': 97.5, 'host_us': 9.0}
    checked = []
    monkeypatch.setattr(bench, 'check_kernel', lambda op, case, device: checked.append(device))
    monkeypatch.setattr(bench, 'measure', lambda op, case, device: {'op': op.name, 'case': case_id(case)} | numbers)
    path = tmp_path / 'bench.jsonl'
    status, out, _ = cli('bench', '--json', str(path))
    assert status == 0 and 'No GPU' not in out and '97.5' in out
    first, second = map(json.loads, path.read_text().splitlines())
    assert checked == ['cuda', 'cuda']
    assert first['case'] == 'num_tokens=64-hidden=128-bfloat16' and first['pct_of_copy'] == 97.5
    assert first['launches'] == [{'kernel': 'double_kernel', 'config': {'block_m': 1, 'num_threads': 64}}]
    assert second['launches'] == [{'kernel': 'double_kernel', 'config': {'block_m': 4, 'num_threads': 64}}]
    assert first['device'] == 'NVIDIA H200' and first['timer'] == bench.GPU_TIMER
    assert first['commit'] and first['date'] and first['torch'] and first['tilelang']
