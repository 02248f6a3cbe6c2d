"""Sinkhorn: sums, invariance to shifts, gradients against float64."""

import pytest
import torch

import tile_kernels.reference as reference
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.knobs import knobs
from tile_kernels.mhc import expand, mhc_mix_split, sinkhorn_normalize
from tile_kernels.mhc.sinkhorn import sinkhorn_bwd
from tile_kernels.reference.mhc import sinkhorn as twin
from tile_kernels.testing.poison import poisoned

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


@pytest.fixture(autouse=True)
def kernels():
    torch.manual_seed(0)
    with knobs(interpret=True), poisoned():
        yield


@pytest.mark.parametrize('shape', [(2, 2), (5, 4, 4), (3, 2, 8, 8), (8, 64), (64, 8), (3, 5, 37)])
def test_rows_sum_to_one_and_columns_to_their_share(shape):
    y = sinkhorn_normalize(torch.randn(*shape, device=DEVICE), num_iters=60)
    torch.testing.assert_close(y.sum(-1), torch.ones_like(y[..., 0]), rtol=1e-3, atol=1e-3)
    share = shape[-2] / shape[-1]
    torch.testing.assert_close(y.sum(-2), torch.full_like(y[..., 0, :], share), rtol=1e-4, atol=1e-4)
    assert (y > 0).all()


def test_large_scores_do_not_overflow():
    x = torch.tensor([[1e4, -1e4], [0.0, 88.0]], device=DEVICE)
    y = sinkhorn_normalize(x)
    assert torch.isfinite(y).all() and y[0, 0] > 0.4


def test_shifting_a_row_changes_nothing():
    x = torch.randn(7, 4, 4, device=DEVICE)
    torch.testing.assert_close(sinkhorn_normalize(x), sinkhorn_normalize(x + torch.randn(7, 4, 1, device=DEVICE)))


@pytest.mark.parametrize('shape', [(9, 4, 4), (3, 8, 8), (8, 64), (2, 3, 5)])
@pytest.mark.parametrize('repeat', [1, 20])
def test_gradient_agrees_with_float64(shape, repeat):
    x = torch.randn(*shape, device=DEVICE, requires_grad=True)
    dy = torch.randn(*shape, device=DEVICE)
    sinkhorn_normalize(x, repeat).backward(dy)
    exact = x.detach().double().requires_grad_()
    twin(exact, repeat).backward(dy.double())
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


def test_reference_agrees():
    x = torch.randn(5, 4, 4, device=DEVICE)
    torch.testing.assert_close(sinkhorn_normalize(x, 10), reference.sinkhorn_normalize_ref(x, 10))
    torch.testing.assert_close(sinkhorn_normalize(x), reference.sinkhorn_normalize(x))


def test_what_it_refuses():
    with pytest.raises(ArgumentError, match=r'mhc\.sinkhorn_normalize: num_iters must be at least 1, got 0'):
        sinkhorn_normalize(torch.randn(2, 2), num_iters=0)
    with pytest.raises(ArgumentError, match='conn_weights must have matrices of at most 64 x 32 elements'):
        sinkhorn_normalize(torch.randn(128, 128))
    with pytest.raises(ArgumentError, match='conn_weights must be float32'):
        sinkhorn_normalize(torch.randn(4, 4, dtype=torch.float64))
    with pytest.raises(ArgumentError, match='the number of streams must be one of 2, 4, 8, got 3'):
        mhc_mix_split(torch.randn(5, 15), torch.ones(3), torch.ones(15), 3)
    with pytest.raises(ArgumentError, match='repeat must be at most 200 for gradients of 4 x 4 matrices, got 201'):
        sinkhorn_bwd(torch.randn(3, 4, 4), torch.randn(3, 4, 4), 201)
    with pytest.raises(ArgumentError, match='hidden must be at least 64, got 0'):
        expand(torch.empty(3, 0, dtype=torch.bfloat16), 4)


@pytest.mark.parametrize(('shape', 'repeat'), [((64, 8), 30), ((8, 8), 170), ((16, 100), 90)])
def test_gradients_of_many_steps(shape, repeat):
    """All lanes of a matrix then store the divisors of rows once."""
    x, dy = (torch.randn(3, *shape, device=DEVICE) for _ in range(2))
    with knobs(interpret=True, checks='all'):
        dx = sinkhorn_bwd(dy, x, repeat)
    exact = x.double().requires_grad_()
    twin(exact, repeat).backward(dy.double())
    torch.testing.assert_close(dx.double(), exact.grad, rtol=1e-3, atol=1e-5)
