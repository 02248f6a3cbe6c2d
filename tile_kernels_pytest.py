"""pytest plugin: benchmarks on request, seeded and poisoned tests, workers spread over GPUs.

    --run-benchmark         run the tests marked `benchmark` (skipped otherwise) and print their table
    --benchmark-output F    write the table to F as well, one JSON object per line
    --seed N                seed of the session; every test draws its own from it and its id
    TK_FULL_TEST=1          the larger cases, where a test asks for them

pytest loads this in every project of an environment, so it acts only where the configuration says `tile_kernels = true`
(under `[tool.pytest.ini_options]` in pyproject.toml); elsewhere it offers its options and fixtures, and does nothing.
It stands outside of the package because importing the package imports torch, which other projects need not wait for.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

#: What PyTorch says about its own ops in the mode that poisons memory.
IRRELEVANT_WARNINGS = ('.*does not have a deterministic implementation', 'Deterministic behavior was enabled')

BENCHMARK_PROPERTY = 'tile_kernels_benchmark'


# Options -------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the switch of a project."""
    parser.addini('tile_kernels', 'seed and poison tests, skip benchmarks, spread workers over GPUs', 'bool', False)


def _active(config: pytest.Config) -> bool:
    return config.getini('tile_kernels')


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser) -> Iterator[None]:
    """Add our options, except those the conftest files of a project define: suites for TileKernels bring their own."""
    result = yield
    taken = vars(parser.parse_known_args([]))
    group = parser.getgroup('tile_kernels')
    if 'run_benchmark' not in taken:
        group.addoption(
            '--run-benchmark', action='store_true', help='run tests marked benchmark, and print their table'
        )
    if 'benchmark_output' not in taken:
        group.addoption('--benchmark-output', metavar='FILE', help='write benchmark records as JSON lines')
    if 'seed' not in taken:
        group.addoption('--seed', type=int, default=0, help='seed of the session; each test adds its id (default 0)')
    return result


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and silence what PyTorch says about its own ops when memory is poisoned."""
    config.addinivalue_line('markers', 'benchmark: a measurement, run with --run-benchmark only')
    for message in IRRELEVANT_WARNINGS:
        config.addinivalue_line('filterwarnings', f'ignore:{message}')


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip benchmarks unless asked for."""
    if _active(config):
        skip_benchmarks(config, items)


def skip_benchmarks(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `benchmark` unless `--run-benchmark` was given."""
    if config.getoption('run_benchmark', False):
        return
    skip = pytest.mark.skip(reason='benchmarks run with --run-benchmark')
    for item in items:
        if item.get_closest_marker('benchmark'):
            item.add_marker(skip)


# Fixtures ------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Give every xdist worker its GPU."""
    worker = getattr(session.config, 'workerinput', None)
    if worker is None or not _active(session.config):
        return
    import torch

    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(int(worker['workerid'].removeprefix('gw')) % torch.cuda.device_count())


@pytest.fixture(autouse=True)
def tile_kernels_seed(request: pytest.FixtureRequest) -> int | None:
    """Seed torch and random from `--seed` and the id of the test, so that a failure reproduces alone."""
    return seed_test(request) if _active(request.config) else None


def seed_test(request: pytest.FixtureRequest) -> int:
    """Seed torch and random; returns the seed."""
    import torch

    digest = hashlib.sha256(request.node.nodeid.encode()).digest()
    value = (int(request.config.getoption('seed', 0) or 0) + int.from_bytes(digest[:4], 'little')) % 2**31
    torch.manual_seed(value)
    random.seed(value)
    return value


@pytest.fixture(autouse=True)
def poison(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let no test meet memory that happens to hold the right answer; benchmarks time the plain allocations."""
    if not _active(request.config) or request.node.get_closest_marker('benchmark'):
        yield
        return
    from tile_kernels.testing.poison import poisoned

    with poisoned():
        yield


@pytest.fixture
def benchmark_op(request: pytest.FixtureRequest) -> Callable[[str], list[dict[str, Any]]]:
    """`benchmark_op('transpose.batched_transpose')` measures an op on its cases and adds them to the table."""
    from tile_kernels.testing.records import measure_op

    def measure(name: str) -> list[dict[str, Any]]:
        measured = list(measure_op(name))
        request.node.user_properties.extend((BENCHMARK_PROPERTY, record) for record in measured)
        return measured

    return measure


# Report --------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what passing benchmarks measured, in whichever worker, and write the results file."""
    properties = [entry for report in terminalreporter.stats.get('passed', []) for entry in report.user_properties]
    records = [record for name, record in properties if name == BENCHMARK_PROPERTY]
    if not records:
        return
    from tile_kernels.testing.records import table

    terminalreporter.section(f'benchmarks on {records[0]["device"]}')
    for line in table(records):
        terminalreporter.write_line(line)
    output = config.getoption('benchmark_output')
    if output:
        Path(output).write_text(''.join(json.dumps(record) + '\n' for record in records))
        terminalreporter.write_line(f'written to {output}')
