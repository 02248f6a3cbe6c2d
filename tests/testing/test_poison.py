"""Poisoned memory: what a kernel leaves unwritten must show."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tile_kernels.testing.numeric import assert_equal
from tile_kernels.testing.poison import poisoned

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def _allocations(dtype):
    x = torch.zeros(3, 4, dtype=dtype)
    yield torch.empty(3, 4, dtype=dtype)
    yield torch.empty_like(x)
    yield torch.empty_strided((3, 4), (1, 8), dtype=dtype)
    yield torch.empty_permuted((3, 4), (1, 0), dtype=dtype)
    yield x.new_empty(3, 4)
    yield x.new_empty_strided((3, 4), (1, 8))
    yield torch.empty(4, 16, dtype=dtype)[:, :3].T


@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_floats_start_as_nan(dtype):
    for x in _allocations(dtype):
        assert x.float().isnan().all(), x


@pytest.mark.parametrize('dtype', INTEGERS, ids=str)
def test_integers_start_as_a_value_no_index_or_count_has(dtype):
    for x in _allocations(dtype):
        assert (x == torch.iinfo(dtype).max).all(), x


def test_the_mode_ends_with_the_block():
    assert torch.get_deterministic_debug_mode() == 1, 'the fixture poisons every test'
    torch.set_deterministic_debug_mode('default')
    torch.utils.deterministic.fill_uninitialized_memory = False
    with poisoned():
        assert torch.empty(3).isnan().all()
    assert torch.get_deterministic_debug_mode() == 0
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_an_unwritten_element_fails_a_comparison():
    def double(x, count):
        y = torch.empty_like(x)
        y[:count] = 2 * x[:count]
        return y

    x = torch.randn(8)
    assert_equal(double(x, 8), 2 * x)
    with pytest.raises(AssertionError, match=r'1 of 8 elements differ, the first at \[7\]: nan'):
        assert_equal(double(x, 7), 2 * x)


def test_fake_and_meta_tensors_pass_untouched():
    with FakeTensorMode():
        assert torch.empty(3).shape == (3,)
    assert torch.empty(3, device='meta').shape == (3,)
    assert torch.empty(0).numel() == 0


def test_compiled_functions_may_allocate():
    @torch.compile(fullgraph=True, backend='eager')
    def ones(x):
        return torch.empty_like(x).fill_(1) + x.new_empty(x.shape).fill_(1), torch.empty_like(x)

    written, unwritten = ones(torch.zeros(3))
    assert_equal(written, torch.full((3,), 2.0))
    assert unwritten.isnan().all()


def test_gradients_flow_through_poisoned_allocations():
    weight = torch.empty(3, requires_grad=True)
    with torch.no_grad():
        weight.fill_(2)
    weight.square().sum().backward()
    assert_equal(weight.grad, torch.full((3,), 4.0))
