"""The assertions must fail where they should, and say why."""

import math

import pytest
import torch

from tile_kernels.core.formats import QuantTensor
from tile_kernels.testing.numeric import (
    assert_equal,
    assert_within_twice,
    calc_diff,
    check_bias,
    count_bytes,
    max_error,
    rms_error,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int8]


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_equal_tensors_pass_in_any_layout(dtype):
    x = torch.randn(5, 8).mul(4).to(dtype)
    assert_equal(x, x.clone())
    assert_equal(x.T, x.clone().T)
    assert_equal(x[::2, 1::3], x.clone()[::2, 1::3])


def test_the_first_difference_is_named():
    x = torch.arange(12.0).view(3, 4)
    y = x.clone()
    y[1, 2], y[2, 3] = 0.5, 0.25
    with pytest.raises(
        AssertionError, match=r'2 of 12 elements differ, the first at \[1, 2\]: 6.0 \(0x40c00000\) != 0.5'
    ):
        assert_equal(x, y)


def test_the_first_difference_of_a_transposed_tensor_is_named_by_its_own_index():
    x = torch.arange(12, dtype=torch.int32).view(3, 4).T
    y = x.clone(memory_format=torch.preserve_format)
    y[3, 1] = -1
    with pytest.raises(
        AssertionError, match=r'1 of 12 elements differ, the first at \[3, 1\]: 7 .* != -1 \(0xffffffff\)'
    ):
        assert_equal(x, y)


def test_zeros_of_different_sign_and_nan_patterns_differ():
    with pytest.raises(AssertionError, match=r'\[0\]: 0.0 \(0x00000000\) != -0.0 \(0x80000000\)'):
        assert_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert_equal(quiet, quiet.clone())
    with pytest.raises(AssertionError, match='nan'):
        assert_equal(quiet, other)


@pytest.mark.parametrize(
    ('x', 'y', 'what'),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), 'dtypes differ: torch.float32 != torch.int32'),
        (torch.zeros(2, 3), torch.zeros(3, 2), r'shapes differ: \(2, 3\) != \(3, 2\)'),
        (torch.zeros(2, 3), torch.zeros(3, 2).T, r'strides differ: \(3, 1\) != \(1, 2\)'),
        (torch.zeros(2), torch.zeros(2, device='meta'), 'devices differ: cpu != meta'),
    ],
)
def test_what_surrounds_the_values_is_compared(x, y, what):
    with pytest.raises(AssertionError, match=what):
        assert_equal(x, y)


def test_checks_can_be_switched_off():
    assert_equal(torch.zeros(2, 3), torch.zeros(3, 2).T, check_stride=False)
    assert_equal(torch.zeros(6), torch.zeros(2, 3), check_shape=False, check_stride=False)
    assert_equal(torch.zeros(2), torch.zeros(2, dtype=torch.int32), check_dtype=False)
    with pytest.raises(AssertionError, match='sizes differ: 8 bytes != 16 bytes'):
        assert_equal(torch.zeros(2), torch.zeros(2, dtype=torch.int64), check_dtype=False)


def test_strides_of_empty_tensors_mean_nothing():
    assert_equal(torch.empty_strided((0, 3), (1, 1)), torch.empty(0, 3))


def test_one_element_may_have_any_stride():
    x = torch.empty_strided((1, 1), (1, 4)).fill_(2)
    assert_equal(x, x.clone(memory_format=torch.preserve_format).as_strided((1, 1), (1, 4)))
    assert_equal(torch.tensor(3.0), torch.tensor(3.0))


def test_calc_diff_is_the_relative_squared_distance():
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])
    assert calc_diff(x, y) == pytest.approx(1 / (25 + 34))
    assert calc_diff(x, x) == 0
    assert calc_diff(torch.zeros(3), torch.zeros(3)) == 0
    assert math.isnan(calc_diff(x, torch.tensor([math.nan, 1.0])))
    with pytest.raises(AssertionError, match='shapes differ'):
        calc_diff(x, torch.zeros(2, 1))


def test_unbiased_rounding_passes_and_truncation_does_not():
    x = torch.randn(100_000)
    check_bias(x.bfloat16(), x)
    check_bias(x, x)
    check_bias(torch.empty(0), torch.empty(0))
    floored = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    check_bias(floored, x)  # toward zero: below for positive, above for negative values
    with pytest.raises(AssertionError, match=r'rounding is biased: 1.0000 of \d+ elements lie below'):
        check_bias(floored[x > 0], x[x > 0])
    with pytest.raises(AssertionError, match='biased'):
        check_bias(torch.full_like(x, math.nan), x)


def test_bytes_are_counted_through_containers():
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    pair = QuantTensor(torch.zeros(2, 128, dtype=torch.float8_e4m3fn), torch.zeros(2, 1), 'e4m3_1x128_f32')
    assert count_bytes(x) == 24
    assert count_bytes(x, None, [x, (x,)], {'a': x, 'fmt': 'e4m3', 'n': 3}) == 4 * 24
    assert count_bytes(pair) == 256 + 8
    assert count_bytes() == 0


def test_errors_of_values_that_are_not_numbers():
    inf, nan = math.inf, math.nan
    x = torch.tensor([1.0, inf, nan])
    assert max_error(x, x) == rms_error(x, x) == 0
    assert max_error(torch.tensor([1.0, 3.0]), torch.tensor([1.5, 1.0])) == 2
    assert max_error(torch.tensor([1 + 1j]), torch.tensor([1 + 3j])) == 2
    assert rms_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == pytest.approx(math.sqrt(12.5))
    assert max_error(torch.tensor([nan]), torch.tensor([1.0])) == inf
    assert max_error(torch.tensor([inf]), torch.tensor([1.0])) == inf
    assert max_error(torch.tensor([inf]), torch.tensor([-inf])) == inf
    assert max_error(torch.empty(0), torch.empty(0)) == 0


def _sums(length=4096):
    x = torch.randn(64, length)
    truth = x.double().sum(1)
    reference = x.bfloat16().sum(1)
    return truth, reference


def test_twice_the_error_of_the_reference_is_the_limit():
    truth, reference = _sums()
    assert_within_twice(reference, reference, truth)
    assert_within_twice(truth.bfloat16(), reference, truth)
    wrong = truth.clone()
    wrong[7] += 10 * max_error(reference, truth)
    with pytest.raises(AssertionError, match='largest error'):
        assert_within_twice(wrong.bfloat16(), reference, truth)


def test_a_small_error_everywhere_exceeds_the_typical_one():
    truth, reference = _sums()
    outlier = reference.clone()
    outlier[0] += 5
    with pytest.raises(AssertionError, match='root mean square error'):
        assert_within_twice((truth + 5).bfloat16(), outlier, truth)


def test_an_exact_reference_allows_one_rounding():
    truth = torch.randn(1000).double()
    assert_within_twice(truth.bfloat16(), truth, truth)
    with pytest.raises(AssertionError, match='exceeds'):
        assert_within_twice((truth * 1.02).bfloat16(), truth, truth)


def test_nan_never_passes_and_a_broken_reference_bounds_nothing():
    truth = torch.randn(10).double()
    broken = truth.float()
    broken[3] = math.nan
    with pytest.raises(AssertionError, match='largest error inf exceeds'):
        assert_within_twice(broken, truth.float(), truth)
    with pytest.raises(AssertionError, match='bounds nothing'):
        assert_within_twice(truth.float(), broken, truth)
