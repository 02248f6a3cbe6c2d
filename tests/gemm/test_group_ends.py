"""Ends of groups that no routing would make: one rule on a CPU and in every kernel, and no access outside memory."""

import pytest
import torch

from tile_kernels import gemm, knobs
from tile_kernels.core.launch import on_gpu
from tile_kernels.gemm._samples import random_packed

ENDS = [
    ([4, 12, 99], [4, 10, 10]),  # behind the last row
    ([-3, 4, 8], [0, 4, 8]),
    ([4, 2, 8], [4, 4, 8]),  # group 2 begins at row 4, not 2
    ([7, -5, 3], [7, 7, 7]),
    ([-(2**31), 2**31 - 1, 0], [0, 10, 10]),
    ([99, 0, -1], [10, 10, 10]),
]
GPUS = ['h200', 'a100']  # kernels with wgmma, and those every GPU has


def ints(ends):
    return torch.tensor(ends, dtype=torch.int32)


def same(function, given, clean):
    """Whether the twin and the kernels of both GPUs give for `given` what the twin gives for the `clean` ends."""
    expected = function(ints(clean))
    results = [function(ints(given))]
    for gpu in GPUS:
        with knobs(interpret=True, checks='all'), on_gpu(gpu):
            results.append(function(ints(given)))
    for result in results:
        for x, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(x.float(), wanted.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize('few_rows', [False, True])
@pytest.mark.parametrize(('given', 'clean'), ENDS)
def test_products_follow_one_rule(given, clean, few_rows):
    a, b = torch.randn(10, 64, dtype=torch.bfloat16), torch.randn(3, 64, 64, dtype=torch.bfloat16) / 8
    with knobs(few_rows=few_rows):
        same(lambda ends: [gemm.grouped_gemm(a, b, ends)], given, clean)


@pytest.mark.parametrize(('given', 'clean'), ENDS)
def test_gradients_follow_the_same_rule(given, clean):
    a, b, dd = torch.randn(10, 64), torch.randn(3, 64, 64) / 8, torch.randn(10, 64)
    operands = [x.bfloat16() for x in (dd, a, b)]
    same(lambda ends: gemm.grouped_gemm_bwd(*operands, ends), given, clean)


@pytest.mark.parametrize(('given', 'clean'), ENDS[2:4])
def test_fused_and_fp8_products_follow_the_same_rule(given, clean):
    a, b = torch.randn(10, 128), torch.randn(3, 256, 128) / 8
    codes = a.to(torch.float8_e4m3fn), torch.ones(10, 1), b.to(torch.float8_e4m3fn), torch.ones(3, 2, 1)
    same(lambda ends: [gemm.grouped_gemm_swiglu(a.bfloat16(), b.bfloat16(), ends)], given, clean)
    same(lambda ends: [gemm.grouped_gemm_fp8(*codes, ends)], given, clean)


@pytest.mark.parametrize('num_rows', [10, 20])
@pytest.mark.parametrize(('given', 'clean'), ENDS[2:4])
def test_packed_products_follow_the_same_rule(given, clean, num_rows):
    a = torch.randn(num_rows, 64, dtype=torch.bfloat16)
    weight = random_packed(64, 64, 'u4_1x64', torch.bfloat16, True, (3,))
    parts = [weight[name] for name in ('codes', 'scale', 'zero', 'whole')]
    product = gemm.grouped_gemm_dequant.call
    same(lambda ends: [product(a, *parts, ends, 'u4_1x64', 64)], given, clean)


def test_falling_ends_over_more_groups_than_a_warp_has_lanes():
    ends = [3, 1] * 20 + [2] + [-1] * 30 + [9, 4]
    a, b = torch.randn(10, 64, dtype=torch.bfloat16), torch.randn(len(ends), 64, 64, dtype=torch.bfloat16) / 8
    same(lambda given: [gemm.grouped_gemm(a, b, given)], ends, [3] * 71 + [9, 9])
