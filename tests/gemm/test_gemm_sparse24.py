"""2:4 sparse weights: compression is exact, pruning keeps the largest, bad patterns are told."""

import itertools

import pytest
import torch

from tile_kernels import ArgumentError
from tile_kernels.gemm import Sparse24, compress24, gemm, gemm_sparse24

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def patterns():
    """Every choice of at most two of four channels, in both groups of a byte."""
    rows = [
        [float(i in kept) * (i + 1) for i in range(4)]
        for size in range(3)
        for kept in itertools.combinations(range(4), size)
    ]
    return torch.tensor([a + b for a, b in itertools.product(rows, rows)])


@pytest.mark.parametrize('dtype', [BF16, torch.float16, FP8])
def test_every_pattern_is_exact(dtype):
    b = patterns().to(dtype)
    packed = compress24(b)
    assert packed.shape == b.shape and packed.index.shape == (b.shape[0], 1)
    assert torch.equal(packed.dense().float(), b.float())
    assert torch.equal(compress24(b, prune=True).dense().float(), b.float())
    first = packed.index[:, 0].int()
    assert ((first & 3) < (first >> 2 & 3)).all() and ((first >> 4 & 3) < (first >> 6)).all()


def test_pruning_keeps_the_two_largest():
    b = torch.randn(24, 64).to(BF16)
    kept = compress24(b, prune=True).dense()
    fours, left = b.float().abs().view(24, 16, 4), kept.view(24, 16, 4) != 0
    assert (left.sum(-1) == 2).all() and (fours[left] >= fours.sort(-1).values[..., 2:3].expand_as(fours)[left]).all()
    assert torch.equal(kept[kept != 0], b[kept != 0])
    ties = torch.ones(8, 8, dtype=BF16)
    assert torch.equal(
        compress24(ties, prune=True).dense().view(-1, 4), torch.tensor([1.0, 1, 0, 0]).to(BF16).expand(16, 4)
    )


def test_equals_the_dense_product_with_its_gradient():
    a = torch.randn(5, 64, dtype=BF16, requires_grad=True)
    b = compress24(torch.randn(24, 64).to(BF16), prune=True)
    d = gemm_sparse24(a, b)
    torch.testing.assert_close(d, gemm(a, b.dense()), rtol=1e-2, atol=1e-2)
    d.sum().backward()
    torch.testing.assert_close(a.grad.float(), b.dense().float().sum(0).expand(5, 64), rtol=1e-2, atol=2e-2)
    leaves, spec = torch.utils._pytree.tree_flatten(b)
    assert isinstance(torch.utils._pytree.tree_unflatten(leaves, spec), Sparse24)


def test_slices_and_autocast():
    a = torch.randn(5, 72, dtype=BF16)[:, 8:].requires_grad_()
    b = compress24(torch.randn(24, 64).to(BF16), prune=True)
    d = gemm_sparse24(a, b)
    assert torch.equal(d, gemm_sparse24(a.contiguous(), b))
    assert torch.autograd.grad(d.sum(), a)[0].shape == a.shape
    codes, kept = a.to(FP8), compress24(b.dense().to(FP8))
    with torch.autocast('cpu', BF16):
        assert torch.equal(gemm_sparse24(a.float(), b), d)
        assert gemm_sparse24(codes.contiguous(), kept).dtype is BF16


@pytest.mark.parametrize(
    ('call', 'sentence'),
    [
        (lambda: compress24(torch.ones(8, 8, dtype=BF16)), 'compress24: b must have at most two of four'),
        (lambda: compress24(torch.ones(8, 12, dtype=BF16)), 'compress24: b must be .n, k. with k a multiple of 8'),
        (lambda: compress24(torch.ones(8, 8)), 'compress24: b must be a matrix of bfloat16'),
        (lambda: gemm_sparse24(torch.ones(2, 8, dtype=BF16), torch.ones(8, 8)), 'b must be a Sparse24'),
        (
            lambda: gemm_sparse24(torch.ones(2, 16, dtype=BF16), compress24(torch.zeros(8, 8, dtype=BF16))),
            r'a must be \(m, 8\)',
        ),
    ],
)
def test_bad_input_is_told(call, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        call()
