"""Every clause of the contract must fail for an op that breaks it, and pass for one that does not.

The ops here compute with torch in their bodies: what is tested is the checks, not a kernel.
"""

import itertools

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.testing._internal.optests.generate_tests import OpCheckError

from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.knobs import knobs
from tile_kernels.core.op import Mut, Out, op, ops
from tile_kernels.testing import contract
from tile_kernels.testing.contract import check_contract, contract_cases
from tile_kernels.testing.records import moved_bytes

_numbers = itertools.count()


def declare(body, twin, outputs='y', backward=None, match='bitwise', **cases):
    """An op that no other test sees; operators stay registered, so each gets a number of its own."""
    made = op(outputs=outputs, backward=backward, name=f'{body.__name__}_{next(_numbers)}', twin=twin)(body)
    made.cases(make=lambda rows: dict(x=torch.randn(rows, 4)), match=match, smoke=grid(rows=[3]), **cases)
    del ops[made.name]
    return made


def double_twin(x):
    return 2 * x


def double(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.copy_(2 * x)
    return y


@pytest.mark.parametrize('rows', [0, 1, 5])
def test_an_honest_op_passes(rows):
    check_contract(declare(double, double_twin), dict(rows=rows))


def test_an_unwritten_element_is_found():
    def double(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y.view(-1)[:-1] = 2 * x.view(-1)[:-1]
        return y

    with pytest.raises(
        AssertionError, match=r'kernel and twin: y: 1 of 12 elements differ, the first at \[2, 3\]: nan'
    ):
        check_contract(declare(double, double_twin), dict(rows=3))


def test_a_wrong_bit_is_found():
    def double(x: Tensor) -> Tensor:
        return torch.nextafter(2 * x, torch.tensor(torch.inf))

    with pytest.raises(AssertionError, match='kernel and twin: y: 12 of 12 elements differ'):
        check_contract(declare(double, double_twin), dict(rows=3))


def test_stated_bounds_are_kept():
    def double(x: Tensor) -> Tensor:
        return 2.001 * x

    check_contract(declare(double, double_twin, match=dict(rtol=1e-3, atol=0)), dict(rows=3))
    with pytest.raises(AssertionError, match=r'kernel and twin: y: .*not close'):
        check_contract(declare(double, double_twin, match=dict(rtol=1e-4, atol=0)), dict(rows=3))


def test_bounds_cover_eight_bit_floats_and_never_nan():
    def round(x: Tensor) -> Tensor:
        return (1.01 * x).to(torch.float8_e4m3fn)

    def unwritten(x: Tensor) -> Tensor:
        return torch.empty_like(x, dtype=torch.float8_e4m3fn)

    def twin(x):
        return x.to(torch.float8_e4m3fn)

    contract.check_kernel(declare(round, twin, match=dict(rtol=0.15, atol=1e-2)), dict(rows=3))
    with pytest.raises(AssertionError, match='kernel and twin: y'):
        contract.check_kernel(declare(unwritten, twin, match=dict(rtol=0.15, atol=1e-2)), dict(rows=3))


@pytest.mark.parametrize('match', ['bitwise', dict(rtol=1, atol=1)], ids=['bitwise', 'bounded'])
def test_strides_belong_to_the_result(match):
    with pytest.raises(AssertionError, match=r'kernel and twin: y: .*\(1, 3\)'):
        check_contract(declare(double, lambda x: (2 * x).T.contiguous().T, match=match), dict(rows=3))


def test_a_fake_that_lies_is_found():
    def double(x: Tensor) -> Tensor:
        return torch.empty_like(x, dtype=torch.float64) if isinstance(x, FakeTensor) else 2 * x

    with pytest.raises(AssertionError, match=r'fake and real: y: .*torch.float64'):
        contract.check_fake(declare(double, double_twin), dict(rows=3))


def test_an_operator_that_differs_from_the_direct_call_is_found():
    calls = itertools.count()
    with pytest.raises(AssertionError, match='direct call and operator: y'):
        contract.check_operator(declare(double, lambda x: 2 * x + next(calls)), dict(rows=3))


def test_an_undeclared_write_is_found():
    def twin(x):
        return x.mul_(2).clone()

    with pytest.raises(OpCheckError, match='mutated'):
        contract.check_opcheck(declare(double, twin), dict(rows=3))


def square_bwd_twin(dy, x):
    return 2 * dy * x


def square(x: Tensor) -> Tensor:
    return x * x


def test_right_and_wrong_gradients():
    def square_bwd(dy: Tensor, x: Tensor) -> Tensor:
        return 2 * dy * x

    def wrong_bwd(dy: Tensor, x: Tensor) -> Tensor:
        return 2.1 * dy * x

    right = declare(square_bwd, square_bwd_twin, outputs='dx', match=dict(rtol=1e-5, atol=1e-5))
    check_contract(declare(square, lambda x: x * x, backward=right), dict(rows=3))
    check_contract(declare(square, lambda x: x * x, backward=right), dict(rows=0))
    wrong = declare(wrong_bwd, square_bwd_twin, outputs='dx')
    with pytest.raises(AssertionError, match='gradient and autograd of the twin: dx'):
        check_contract(declare(square, lambda x: x * x, backward=wrong), dict(rows=3))


def test_integers_have_no_gradient_and_saved_outputs_get_none():
    def halve_bwd(dhalf: Tensor, half: Tensor, x: Tensor) -> Tensor:
        return dhalf / 2 + 0 * half

    def halve(x: Tensor) -> tuple[Tensor, Tensor]:
        return x / 2, x.to(torch.int32)

    backward = declare(halve_bwd, lambda dhalf, half, x: dhalf / 2, outputs='dx')
    made = declare(halve, halve, outputs='half whole', backward=backward)
    check_contract(made, dict(rows=3))
    made.cases(make=lambda rows: dict(x=torch.arange(rows)), smoke=grid(rows=[3]))
    contract.check_gradient(made, dict(rows=3))


def test_arguments_written_in_place_are_compared():
    def double_(x: Mut) -> None:
        x.mul_(2)

    def triple_(x: Mut) -> None:
        x.mul_(3)

    def twin(x):
        x.mul_(2)

    check_contract(declare(double_, twin, outputs=''), dict(rows=3))
    with pytest.raises(AssertionError, match='kernel and twin: x: 12 of 12 elements differ'):
        check_contract(declare(triple_, twin, outputs=''), dict(rows=3))


def test_what_was_in_an_overwritten_argument_may_not_matter():
    def copy_(x: Tensor, y: Out) -> None:
        y.copy_(x)

    def add_(x: Tensor, y: Out) -> None:
        y.add_(x)

    def twin(x, y):
        y.copy_(x)

    def made(fn):
        declared = declare(fn, twin, outputs='')
        declared.cases(make=lambda rows: dict(x=torch.randn(rows), y=torch.zeros(rows)), smoke=grid(rows=[3]))
        return declared

    check_contract(made(copy_), dict(rows=3))
    with pytest.raises(AssertionError, match='kernel and twin: y'):
        check_contract(made(add_), dict(rows=3))


def test_bytes_of_arguments_count_by_what_is_done_to_them():
    def copy_(x: Tensor, y: Out) -> None:
        y.copy_(x)

    def add_(x: Tensor, y: Mut) -> None:
        y.add_(x)

    arguments = dict(x=torch.randn(8), y=torch.randn(8))
    assert moved_bytes(declare(copy_, copy_, outputs=''), arguments) == 2 * 32
    assert moved_bytes(declare(add_, add_, outputs=''), arguments) == 3 * 32


def test_quantised_results_are_compared_part_by_part():
    fmt = QuantFormat.parse('e4m3_1xall_f32')

    def twin(x, fmt):
        return QuantTensor(x.to(torch.float8_e4m3fn), x.new_ones(x.shape[0], 1), fmt)

    def cast(x: Tensor, fmt: QuantFormat) -> QuantTensor:
        y = fmt.empty(*x.shape, x.device)
        y.data.copy_(x.to(torch.float8_e4m3fn))
        y.sf.fill_(1)
        return y

    def forgetful(x: Tensor, fmt: QuantFormat) -> QuantTensor:
        y = fmt.empty(*x.shape, x.device)
        y.data.copy_(x.to(torch.float8_e4m3fn))
        return y

    for body in (cast, forgetful):
        made = declare(body, twin, outputs='y y_sf')
        made.cases(make=lambda rows: dict(x=torch.randn(rows, 4), fmt=fmt), smoke=grid(rows=[3]))
        if body is cast:
            check_contract(made, dict(rows=3))
        else:
            with pytest.raises(AssertionError, match='kernel and twin: y_sf: 3 of 3 elements differ'):
                check_contract(made, dict(rows=3))


def test_cases_follow_the_level():
    made = declare(double, double_twin, full=grid(rows=[1000]))
    ops[made.name] = made
    try:
        smoke, full = ([str(c) for c in contract_cases(level) if c.op is made] for level in ('smoke', 'full'))
        assert smoke == [f'{made.name}[rows=3]']
        assert full == [f'{made.name}[rows=3]', f'{made.name}[rows=1000]']
        with knobs(full_test=True):
            assert [str(c) for c in contract_cases() if c.op is made] == full
    finally:
        del ops[made.name]


def test_bounds_may_count_in_root_mean_squares_and_differ_between_outputs():
    def off(x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x + 0.05 * x.square().mean().sqrt(), 2 * x

    def twin(x):
        return 2 * x, 2 * x

    loose, tight = dict(rtol=0.0, rms=0.03), dict(rtol=0.0, rms=0.02)
    contract.check_kernel(declare(off, twin, outputs='y z', match=tight | dict(y=loose)), dict(rows=3))
    with pytest.raises(AssertionError, match='kernel and twin: y: Tensor-likes are not close'):
        contract.check_kernel(declare(off, twin, outputs='y z', match=loose | dict(y=tight)), dict(rows=3))
