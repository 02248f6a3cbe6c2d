"""The twins of the public functions of products in `tile_kernels.torch`."""

import tile_kernels.torch as twins
import torch

from tile_kernels import gemm

HALF = torch.bfloat16


def close(ours, theirs):
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2 * theirs.abs().max().item())


def test_packed_weights():
    a, bias = torch.randn(5, 128).to(HALF), torch.randn(16).to(HALF)
    weight = gemm.quantize_weight(torch.randn(16, 128), 'u4_1x64')
    close(gemm.gemm_dequant(a, weight, bias), twins.gemm_dequant(a, weight, bias))
    stacked = gemm.quantize_weight(torch.randn(3, 16, 128), 'u4_1x64')
    ends = torch.tensor([2, 2, 4], dtype=torch.int32)
    close(gemm.grouped_gemm_dequant(a, stacked, ends), twins.grouped_gemm_dequant(a, stacked, ends))


def test_sparse_weights():
    a, b = torch.randn(5, 128).to(HALF), gemm.compress24(torch.randn(16, 128).to(HALF), prune=True)
    close(gemm.gemm_sparse24(a, b), twins.gemm_sparse24(a, b))


def test_convolution():
    x, weight, bias = torch.randn(2, 6, 5, 8).to(HALF), torch.randn(16, 3, 3, 8).to(HALF), torch.randn(16).to(HALF)
    options = dict(stride=2, padding=(1, 0), dilation=1)
    close(gemm.conv2d(x, weight, bias, **options), twins.conv2d(x, weight, bias, **options))
