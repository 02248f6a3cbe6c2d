"""The contract of every op on every case, on the GPU if there is one and in the interpreter otherwise."""

import pytest
import torch
from torch import Tensor

import tile_kernels
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.op import ops
from tile_kernels.testing import contract

for family in tile_kernels.FAMILIES:
    getattr(tile_kernels, family)

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
ALL_CASES = contract.contract_cases('full' if DEVICE == 'cuda' else 'smoke', variants=True)
CASES = [case for case in ALL_CASES if case.gpu is None]  # with the kernels of one GPU


def first_and_last(op):
    """Two cases of an op, the emptiest and the last: opcheck traces and compiles, and they see all of a schema."""
    own = [case for case in CASES if case.op is op]
    return own[:1] + own[1:][-1:]


def quantised(x):
    return torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)


OPCHECK = [case for op in ops.values() for case in first_and_last(op)]
WRITING = [first_and_last(op)[-1] for op in ops.values() if any(param.mutated for param in op.params)]


@pytest.mark.parametrize('case', ALL_CASES, ids=str)
def test_kernel_equals_twin(case):
    with case.choosing():
        contract.check_kernel(case.op, case.case, DEVICE)


@pytest.mark.parametrize('case', [c for c in ALL_CASES if c.op.backward is not None], ids=str)
def test_gradient_equals_autograd_of_the_twin(case):
    with case.choosing():
        contract.check_gradient(case.op, case.case, DEVICE)


@pytest.mark.parametrize('case', CASES, ids=str)
def test_operator_and_fake_tell_the_same(case):
    direct = contract.check_operator(case.op, case.case, DEVICE)
    contract.check_fake(case.op, case.case, DEVICE, direct)


@pytest.mark.parametrize('op', [op for op in ops.values() if op.case_set is not None], ids=lambda op: op.name)
@pytest.mark.parametrize('make', [Tensor.to_sparse, quantised], ids=['sparse', 'quantised'])
def test_a_tensor_that_is_no_plain_memory_is_refused(op, make):
    given = op.case_set.arguments(op.name, op.case_set.smoke[-1])
    for name, value in given.items():
        if isinstance(value, Tensor) and value.numel() > 0:
            with pytest.raises(ArgumentError, match='must be a plain dense tensor, got'):
                op.call(**given | {name: make(torch.zeros(value.shape))})


@pytest.mark.parametrize('case', OPCHECK, ids=str)
def test_opcheck(case):
    contract.check_opcheck(case.op, case.case, DEVICE)


@pytest.mark.parametrize('case', WRITING, ids=str)
def test_autograd_is_told_what_is_written(case):
    op, arguments = case.op, case.op.case_set.arguments(case.op.name, case.case, DEVICE)
    written = op.written_of({name: arguments.get(name) for name in op.names})
    for _ in range(3):  # the third call on a GPU is a replay
        before = [x._version for x in written]
        with contract._running_kernels(DEVICE):
            op.call(**arguments)
        assert all(x._version > version for x, version in zip(written, before, strict=True))


@pytest.mark.parametrize('case', WRITING, ids=str)
def test_what_is_written_must_not_need_a_gradient(case):
    op = case.op
    for param in op.params:
        arguments = op.case_set.arguments(op.name, case.case, DEVICE)
        x = arguments.get(param.name)
        x = x[-1] if param.many and x else x
        if param.mutated and isinstance(x, Tensor) and x.is_floating_point():
            before = x.float().clone()
            x.requires_grad_()
            with pytest.raises(ArgumentError, match=f'{op.name}: .* must not require a gradient'):
                op.call(**arguments)
            assert torch.equal(x.detach().float().nan_to_num(), before.nan_to_num())
