"""The contract of every op on every case, on the GPU if there is one and in the interpreter otherwise."""

import pytest
import torch

import tile_kernels
from tile_kernels.core.op import ops
from tile_kernels.testing import contract

for family in tile_kernels.FAMILIES:
    getattr(tile_kernels, family)

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
CASES = contract.contract_cases('full' if DEVICE == 'cuda' else 'smoke')


def first_and_last(op):
    """Two cases of an op, the emptiest and the last: opcheck traces and compiles, and they see all of a schema."""
    own = [case for case in CASES if case.op is op]
    return own[:1] + own[1:][-1:]


OPCHECK = [case for op in ops.values() for case in first_and_last(op)]


@pytest.mark.parametrize('case', CASES, ids=str)
def test_kernel_equals_twin(case):
    contract.check_kernel(case.op, case.case, DEVICE)


@pytest.mark.parametrize('case', [c for c in CASES if c.op.backward is not None], ids=str)
def test_gradient_equals_autograd_of_the_twin(case):
    contract.check_gradient(case.op, case.case, DEVICE)


@pytest.mark.parametrize('case', CASES, ids=str)
def test_operator_and_fake_tell_the_same(case):
    contract.check_operator(case.op, case.case, DEVICE)
    contract.check_fake(case.op, case.case, DEVICE)


@pytest.mark.parametrize('case', OPCHECK, ids=str)
def test_opcheck(case):
    contract.check_opcheck(case.op, case.case, DEVICE)
