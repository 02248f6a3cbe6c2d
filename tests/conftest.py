"""Options of this suite.

    pytest --op NAME    the tests of one op, of several (repeat it) or of a family: `moe.topk_gate`, `topk_gate`, `moe`
    pytest --quick      the tests of the core, and the contract of every op on its smallest case

The tests of an op are its cases in `test_contract.py`, `test_lowering.py` and `test_house.py`, and the files in the
folder of its family that name the op or a public function that calls it.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent

#: Files whose tests are made from the declarations of ops.
GENERIC = tuple(TESTS / name for name in ('test_contract.py', 'test_lowering.py', 'test_house.py'))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup('tile_kernels')
    group.addoption('--op', action='append', default=[], metavar='NAME', help='only tests of this op or family')
    group.addoption('--quick', action='store_true', help='only core tests and the smallest case of every op')


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption('op', ()) and config.getoption('quick', False):
        raise pytest.UsageError('give either --op or --quick, got both')
    named(tuple(config.getoption('op', ())))  # an unknown name fails before anything is collected


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out that no chosen test is in; None leaves the decision to others."""
    names = tuple(config.getoption('op', ()))
    if not collection_path.is_file() or not (names or config.getoption('quick', False)):
        return None
    if config.getoption('quick', False):
        chosen = collection_path == GENERIC[0] or TESTS / 'core' in collection_path.parents
    else:
        chosen = collection_path in GENERIC or collection_path in files_of(names)
    return None if chosen else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of generic files that are not about a chosen op."""
    names = tuple(config.getoption('op', ()))
    if names:
        chosen = [item for item in items if item.path not in GENERIC or is_about(item, names)]
    elif config.getoption('quick', False):
        chosen = [item for item in items if item.path not in GENERIC or is_smallest(item)]
    else:
        return
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


@pytest.fixture(autouse=True, scope='session')
def save_time(request: pytest.FixtureRequest) -> None:
    """Leave the cores to the workers of xdist, and rewrite the source of a kernel once, unless `TK_FULL_TEST=1`."""
    import torch

    from tile_kernels import knobs

    if hasattr(request.config, 'workerinput'):  # else the threads of PyTorch wait for one another
        os.environ['OMP_NUM_THREADS'] = '1'  # for processes that tests start
        torch.set_num_threads(1)
    if not knobs.full_test:
        from tests import fast_tir

        fast_tir.install()


# Ops by name ---------------------------------------------------------------------------------


@functools.cache
def named(names: tuple[str, ...]) -> tuple[Any, ...]:
    """The ops of these names; a name may leave the family out, and a family stands for all of its ops."""
    from tile_kernels.core.errors import ArgumentError
    from tile_kernels.core.registry import find_ops, load_ops

    if not names:
        return ()
    found: dict[str, Any] = {}
    for name in names:
        own = {op.name: op for op in load_ops().values() if op.name.partition('.')[2] == name}
        try:
            found |= own or {op.name: op for op in find_ops([name])}
        except ArgumentError as error:
            raise pytest.UsageError(f'--op: {error}') from error
    return tuple(found.values())


@functools.cache
def files_of(names: tuple[str, ...]) -> frozenset[Path]:
    """Test files in the folders of the ops' families that name an op or a public function that calls it."""
    from tools.docs.api import callers

    found = set()
    for op in named(names):
        words = {name.partition('.')[2] for name in (op.name, *callers(op))}
        pattern = re.compile(rf'\b({"|".join(map(re.escape, sorted(words)))})\b')
        found |= {path for path in (TESTS / op.family).glob('test_*.py') if pattern.search(path.read_text())}
    return frozenset(found)


@functools.cache
def kernels_of(names: tuple[str, ...]) -> frozenset[str]:
    """Kernels that the cases of the ops launch, on Hopper and on GPUs before it."""
    from tile_kernels.core.launch import on_gpu
    from tile_kernels.core.registry import all_cases

    found = set()
    for arch in ('sm_90a', 'sm_80'):
        with on_gpu(arch):
            for op in named(names):
                found |= {launch.kernel.name for case in all_cases(op) for launch in op.trace_case(case)}
    return frozenset(found)


def is_about(item: pytest.Item, names: tuple[str, ...]) -> bool:
    """Whether a test of a generic file has a chosen op, a case of it or a launch of its kernels as parameter."""
    given = item.callspec.params if hasattr(item, 'callspec') else {}
    op = given.get('op') or getattr(given.get('case'), 'op', None)
    if op is not None:
        return op in named(names)
    kernel = getattr(given.get('launch'), 'kernel', None)
    return kernel is not None and kernel.name in kernels_of(names)


@functools.cache
def smallest_cases() -> frozenset[str]:
    """The smoke case of every op that moves the fewest bytes among those that launch a kernel."""
    from tile_kernels.core.registry import load_ops
    from tile_kernels.testing.contract import ContractCase

    found = set()
    for op in load_ops().values():
        sizes = {}
        for case in op.case_set.smoke if op.case_set is not None else ():
            traced = op.trace_case(case)
            if traced:
                sizes[str(ContractCase(op, case))] = sum(launch.cost.bytes for launch in traced)
        if sizes:
            found.add(min(sizes, key=sizes.__getitem__))
    return frozenset(found)


def is_smallest(item: pytest.Item) -> bool:
    """Whether a test compares a kernel with its twin on the smallest case of an op."""
    if not item.name.startswith('test_kernel_equals_twin['):
        return False
    return str(item.callspec.params['case']) in smallest_cases()
