"""No two threads meet at an element without a barrier, and every element of a result is written."""

import pytest

from tile_kernels import knobs
from tile_kernels.core.op import ops
from tile_kernels.testing import contract

CASES = {case.op.name: case for case in contract.contract_cases('smoke') if case.op.name.startswith('mhc.')}


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_kernels_are_free_of_races(case):
    with knobs(checks='all'):
        contract.check_kernel(case.op, case.case)


def test_all_ops_are_checked():
    assert set(CASES) == {name for name in ops if name.startswith('mhc.')}
