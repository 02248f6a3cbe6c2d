"""The pytest plugin, run on small projects of its own."""

import json
from pathlib import Path

import pytest

pytest_plugins = ['pytester']

ROOT = Path(__file__).parents[2]

OP = """
import pytest
import torch
from torch import Tensor
from tile_kernels.core.cases import grid
from tile_kernels.core.op import op

@op(outputs='y', twin=lambda x: 2 * x)
def double(x: Tensor) -> Tensor:
    return torch.empty_like(x)

double.cases(
    make=lambda rows: dict(x=torch.randn(rows, 4)),
    smoke=grid(rows=[1, 300]),
    bench=grid(rows=[1, 300]),
)

@pytest.mark.benchmark
def test_double_is_measured(benchmark_op):
    assert torch.get_deterministic_debug_mode() == 0, 'a benchmark times plain allocations'
    assert [record['case'] for record in benchmark_op('test_project.double')] == ['rows=1', 'rows=300']

@pytest.mark.benchmark
def test_red_tests_report_no_numbers(benchmark_op, request):
    benchmark_op('test_project.double')
    assert 'red' not in request.config.getoption('benchmark_output')
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest on a test file with this plugin and no other; `own_process` where a run leaves traces."""

    def run(text, *args, ini='tile_kernels = true', own_process=False):
        monkeypatch.setenv('PYTEST_DISABLE_PLUGIN_AUTOLOAD', '1')
        monkeypatch.setenv('PYTHONPATH', str(ROOT))
        pytester.makepyfile(test_project=text)
        pytester.makeini(f'[pytest]\n{ini}\n')
        execute = pytester.runpytest_subprocess if own_process else pytester.runpytest_inprocess
        return execute('-p', 'tile_kernels.testing.plugin', '-p', 'no:cacheprovider', *args)

    return run


def test_other_projects_are_left_alone(run):
    result = run(
        """
        import random, pytest, torch

        random.seed(5)
        STATE, SEED = random.getstate(), torch.initial_seed()

        @pytest.mark.benchmark
        def test_their_benchmarks_run_and_their_memory_and_seeds_are_their_own():
            assert random.getstate() == STATE
            assert torch.initial_seed() == SEED
            assert torch.get_deterministic_debug_mode() == 0
        """,
        ini='',
        own_process=True,
    )
    result.assert_outcomes(passed=1)


def test_other_projects_do_not_wait_for_torch(pytester, monkeypatch):
    monkeypatch.setenv('PYTEST_DISABLE_PLUGIN_AUTOLOAD', '1')
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    pytester.makepyfile(
        """
        import sys

        def test_neither_torch_nor_the_package_is_loaded(pytestconfig):
            assert pytestconfig.pluginmanager.has_plugin('tile_kernels_pytest')
            assert not {'torch', 'tile_kernels'} & sys.modules.keys()
        """
    )
    result = pytester.runpytest_subprocess('-p', 'tile_kernels_pytest', '-p', 'no:cacheprovider')
    result.assert_outcomes(passed=1)


def test_options_are_in_the_help(run):
    result = run('', '--help')
    result.stdout.fnmatch_lines(['*--run-benchmark*', '*--benchmark-output=FILE*', '*--seed=SEED*'])


def test_options_of_an_older_suite_are_respected(run, pytester):
    pytester.makepyfile(
        own_options="""
        def pytest_addoption(parser):
            parser.addoption('--run-benchmark', action='store_true', default=False)
            parser.addoption('--benchmark-output', default=None)
            parser.addoption('--seed', type=int, default=7)
        """
    )
    pytester.makeconftest("pytest_plugins = ['own_options']")
    test = """
        import pytest

        def test_default_is_theirs(pytestconfig):
            assert pytestconfig.getoption('seed') == 7

        @pytest.mark.benchmark
        def test_slow():
            pass
        """
    run(test).assert_outcomes(passed=1, skipped=1)
    run(test, '--run-benchmark').assert_outcomes(passed=2)


def test_benchmarks_are_skipped_unless_asked_for(run):
    run(OP, own_process=True).assert_outcomes(skipped=2)


@pytest.mark.parametrize('processes', [(), ('-p', 'xdist', '-n', '2')], ids=['one process', 'xdist'])
def test_benchmarks_give_a_table_and_a_file(run, pytester, processes):
    result = run(OP, '--run-benchmark', '--benchmark-output', 'red.jsonl', *processes, own_process=True)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            '*= benchmarks on *',
            'op * case * us * GB/s * % of copy * graph us * host us',
            'test_project.double * rows=1 *',
            'test_project.double * rows=300 *',
            'written to red.jsonl',
        ]
    )
    records = [json.loads(line) for line in (pytester.path / 'red.jsonl').read_text().splitlines()]
    assert [record['case'] for record in records] == ['rows=1', 'rows=300']
    for record in records:
        assert record['op'] == 'test_project.double'
        assert 0 < record['p20_us'] <= record['us'] <= record['p80_us']
        assert record['gbps'] > 0
        assert record['pct_of_copy'] > 0


SEEDS = """
import pytest, torch

@pytest.mark.parametrize('name', ['a', 'b'])
def test_draw(name, record_property):
    record_property('draw', int(torch.randint(10**9, ())))
"""


def _draws(run, pytester, *args):
    run(SEEDS, '--junit-xml', 'report.xml', *args).assert_outcomes(passed=2)
    lines = (pytester.path / 'report.xml').read_text().split('name="draw" value="')[1:]
    return [int(line.partition('"')[0]) for line in lines]


def test_every_test_draws_its_own_numbers_and_draws_them_again(run, pytester):
    first, second = _draws(run, pytester), _draws(run, pytester)
    assert first == second
    assert first[0] != first[1]
    assert not set(first) & set(_draws(run, pytester, '--seed', '1'))


def test_memory_is_poisoned_in_tests(run):
    result = run(
        """
        import torch
        from hypothesis import given, strategies as st

        def test_unwritten_memory_shows():
            assert torch.empty(3).isnan().all()

        @given(st.integers(0, 3))
        def test_property_tests_too(size):
            assert torch.empty(size).isnan().all()
        """
    )
    result.assert_outcomes(passed=2)


def test_repetition_comes_from_pytest_repeat(run):
    pytest.importorskip('pytest_repeat')
    run('def test_once(): pass', '-p', 'pytest_repeat', '--count', '3').assert_outcomes(passed=3)


def test_the_parts_can_be_loaded_by_name(run, pytester):
    """As the conftest files of TileKernels' suites do, in a project that has not switched the plugin on."""
    names = ('benchmark', 'gpu_mem', 'precompile', 'random', 'tilelang_warning', 'xdist_failfast')
    pytester.makeconftest(f'pytest_plugins = {[f"tile_kernels.testing.pytest.{name}" for name in names]}')
    result = run(
        """
        import pytest
        import torch

        before = torch.initial_seed()

        def test_seeded():
            assert torch.initial_seed() != before

        @pytest.mark.benchmark
        def test_measures():
            raise AssertionError('not asked for')
        """,
        ini='',
        own_process=True,
    )
    result.assert_outcomes(passed=1, skipped=1)
