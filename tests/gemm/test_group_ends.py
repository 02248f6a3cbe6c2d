"""Ends of groups that no routing would make: the same on a CPU and in the kernel, or one sentence."""

import pytest
import torch

from tile_kernels import ArgumentError, gemm, knobs


def test_ends_behind_the_last_row_count_as_the_last_row():
    a, b = torch.randn(10, 64, dtype=torch.bfloat16), torch.randn(3, 64, 64, dtype=torch.bfloat16)
    given, clamped = (torch.tensor(ends, dtype=torch.int32) for ends in ([4, 12, 99], [4, 10, 10]))
    expected = gemm.grouped_gemm(a, b, clamped)
    assert torch.equal(gemm.grouped_gemm(a, b, given), expected)
    with knobs(interpret=True, checks='memory'):
        assert torch.equal(gemm.grouped_gemm(a, b, given), expected)


@pytest.mark.parametrize('ends', [[4, 2, 8], [-3, 4, 8]])
def test_falling_and_negative_ends_get_one_sentence_on_a_cpu(ends):
    a, b = torch.randn(10, 64, dtype=torch.bfloat16), torch.randn(3, 64, 64, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match='group_end must not fall, and begin at 0 or later'):
        gemm.grouped_gemm(a, b, torch.tensor(ends, dtype=torch.int32))
