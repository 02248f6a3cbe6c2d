"""The fast lanes of this suite: `--op` and `--quick`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import GENERIC, TESTS, files_of, kernels_of, named, smallest_cases
from tile_kernels.core.registry import load_ops

ROOT = Path(__file__).parents[2]


def collected(*words: str) -> list[str]:
    command = [sys.executable, '-m', 'pytest', '-n0', '--collect-only', '-q', '-o', 'addopts=', *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if '::' in line]


def test_an_op_is_named_with_or_without_its_family_and_a_family_is_all_of_its_ops():
    ops = load_ops()
    assert named(('moe.topk_gate',)) == named(('topk_gate',)) == (ops['moe.topk_gate'],)
    assert set(named(('rand', 'transpose'))) == {op for op in ops.values() if op.family in ('rand', 'transpose')}
    assert named(()) == ()


def test_an_unknown_op_is_a_usage_error_with_a_suggestion():
    with pytest.raises(pytest.UsageError, match=r"--op: .*got 'moe.topk_gat'; did you mean moe.topk_gate\?"):
        named(('moe.topk_gat',))


def test_files_of_an_op_name_it_or_a_function_that_calls_it():
    assert TESTS / 'transpose' / 'test_transpose.py' in files_of(('batched_transpose',))
    assert {path.parent.name for path in files_of(('moe.group_count',))} == {'moe'}


def test_only_tests_of_the_op_are_collected():
    found = collected('--op', 'transpose.batched_transpose')
    generic = [test for test in found if not test.startswith('tests/transpose/')]
    assert {test.partition('::')[0] for test in generic} == {str(path.relative_to(ROOT)) for path in GENERIC}
    words = ('transpose.batched_transpose', *kernels_of(('transpose.batched_transpose',)))
    assert all(any(word in test for word in words) for test in generic)
    assert len(found) > len(generic)


def test_the_quick_lane_has_the_core_and_one_case_of_every_op():
    found = collected('--quick')
    cases = [test for test in found if not test.startswith('tests/core/')]
    assert len(found) > len(cases) == len(smallest_cases()) == len(load_ops())
    for op in load_ops().values():
        assert sum(f'test_kernel_equals_twin[{op.name}[' in test for test in cases) == 1
