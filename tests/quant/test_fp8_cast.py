"""The friendly fp8 casts, called exactly as users read about them."""

import pytest
import torch

import tile_kernels
from tile_kernels import ArgumentError, knobs
from tile_kernels.quant import per_token_cast_fp8
from tile_kernels.reference import per_token_cast_fp8 as per_token_cast_fp8_ref
from tile_kernels.testing.numeric import assert_equal, check_bias


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
def test_one_scale_per_row(dtype):
    x = torch.randn(7, 200).to(dtype)
    x_fp8, scale = per_token_cast_fp8(x)
    assert (x_fp8.shape, x_fp8.dtype) == ((7, 200), torch.float8_e4m3fn)
    assert (scale.shape, scale.dtype) == ((7, 1), torch.float32)
    assert torch.equal(scale[:, 0], x.float().abs().amax(1) / 448)
    torch.testing.assert_close(x_fp8.float() * scale, x.float(), rtol=2**-4, atol=1e-2)


@pytest.mark.parametrize('group_size', [16, 32, 64, 128])
@pytest.mark.parametrize('hidden', [128, 200, 77])
def test_groups_of_channels(group_size, hidden):
    x = torch.randn(5, hidden).bfloat16()
    x_fp8, scale = per_token_cast_fp8(x, group_size=group_size)
    assert scale.shape == (5, -(-hidden // group_size))
    spread = scale.repeat_interleave(group_size, 1)[:, :hidden]
    torch.testing.assert_close(x_fp8.float() * spread, x.float(), rtol=2**-4, atol=1e-2)


def test_e5m2():
    x = torch.randn(5, 128)
    x_fp8, scale = per_token_cast_fp8(x, dtype=torch.float8_e5m2)
    assert x_fp8.dtype is torch.float8_e5m2
    assert torch.equal(scale[:, 0], x.abs().amax(1) / 57344)


@pytest.mark.parametrize('interpret', [False, True])
@pytest.mark.parametrize('group_size', [None, 128])
@pytest.mark.parametrize('shape', [(0, 64), (1, 8), (3, 130), (2, 776)])
def test_equals_the_reference(shape, group_size, interpret):
    x = torch.randn(shape).bfloat16()
    with knobs(interpret=interpret):
        actual = per_token_cast_fp8(x, group_size)
    for y, expected in zip(actual, per_token_cast_fp8_ref(x, group_size), strict=True):
        assert_equal(y, expected)


def test_rounding_has_no_bias():
    x = torch.randn(512, 1024)
    x_fp8, scale = per_token_cast_fp8(x, 128)
    check_bias(x_fp8.float() * scale.repeat_interleave(128, 1), x)


def test_the_package_gives_access_by_name():
    assert tile_kernels.quant.per_token_cast_fp8 is per_token_cast_fp8


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        (dict(group_size=100), 'group_size must be one of None, 16, 32, 64, 128, got 100'),
        (dict(dtype=torch.int8), 'dtype must be one of torch.float8_e4m3fn, torch.float8_e5m2, got torch.int8'),
    ],
)
def test_errors_name_the_argument(arguments, sentence):
    with pytest.raises(ArgumentError, match=f'^quant.per_token_cast_fp8: {sentence}'):
        per_token_cast_fp8(torch.randn(2, 128), **arguments)


@pytest.mark.benchmark
def test_benchmark(benchmark_op):
    assert benchmark_op('quant.per_token_cast')
