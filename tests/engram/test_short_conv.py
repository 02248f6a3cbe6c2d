"""The short convolution: equal to PyTorch's in float64, deterministic, no more than the past."""

import pytest
import torch
from torch.nn import functional

from tile_kernels import ArgumentError, knobs
from tile_kernels.engram import short_conv
from tile_kernels.engram.short_conv import MAX_TAPS, short_conv_bwd_kernel, short_conv_kernel
from tile_kernels.testing import assert_equal, calc_diff


def conv_in_fp64(x, weight, dilation):
    channels, taps = weight.shape
    padded = functional.pad(x.mT, ((taps - 1) * dilation, 0))
    return functional.silu(functional.conv1d(padded, weight.unsqueeze(1), groups=channels, dilation=dilation)).mT


@pytest.mark.parametrize('interpret', [False, True], ids=['twin', 'kernel'])
@pytest.mark.parametrize(('taps', 'dilation'), [(4, 3), (1, 1), (2, 5), (8, 1)])
def test_convolution_and_gradients_equal_pytorch(taps, dilation, interpret):
    torch.manual_seed(0)
    x = torch.randn(2, 43, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(16, taps) * taps**-0.5).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    with knobs(interpret=interpret):
        y = short_conv(x, weight, dilation)
        dy = torch.randn_like(y)
        dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    expected = conv_in_fp64(*exact, dilation)
    grads = torch.autograd.grad(expected, exact, dy.double())
    assert calc_diff(y.detach(), expected.detach().bfloat16()) < 1e-8
    assert calc_diff(dx, grads[0].bfloat16()) < 1e-8
    assert calc_diff(dweight, grads[1]) < 1e-10


def test_bad_input_is_named():
    x, weight = torch.ones(1, 3, 16, dtype=torch.bfloat16), torch.ones(16, 4)
    with pytest.raises(ArgumentError, match=r'engram\.short_conv: channels must be a multiple of 8, got 12'):
        short_conv(x[..., :12].contiguous(), weight[:12])
    with pytest.raises(ArgumentError, match=r'\(taps - 1\) \* dilation must be at most 32, got 33'):
        short_conv(x, weight, 11)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_fifty_runs_give_the_same_bits():
    torch.manual_seed(0)
    x = torch.randn(2, 1001, 2560, dtype=torch.bfloat16, device='cuda', requires_grad=True)
    weight = torch.randn(2560, 4, device='cuda', requires_grad=True)
    dy = torch.randn_like(x)

    def once():
        y = short_conv(x, weight, 3)
        return y.detach(), *torch.autograd.grad(y, (x, weight), dy)

    first = once()
    for _ in range(49):
        for actual, expected in zip(once(), first, strict=True):
            assert_equal(actual, expected)


@pytest.mark.parametrize('kernel', [short_conv_kernel, short_conv_bwd_kernel], ids=lambda kernel: kernel.name)
def test_the_most_taps_fit_in_registers(kernel):
    used = kernel.resources((4096, MAX_TAPS, 1))
    assert used['spill_stores'] == used['spill_loads'] == 0, used
