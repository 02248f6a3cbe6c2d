"""The convolution against PyTorch in NCHW, its options, and its errors."""

import pytest
import torch

from tile_kernels import ArgumentError
from tile_kernels.gemm import conv2d

BF16 = torch.bfloat16


def test_equals_pytorch_with_gradients():
    x = torch.randn(2, 6, 5, 16, dtype=BF16, requires_grad=True)
    weight = (torch.randn(8, 3, 3, 16) / 12).to(BF16).requires_grad_()
    bias = torch.randn(8, dtype=BF16, requires_grad=True)
    y = conv2d(x, weight, bias, stride=2, padding=(1, 0), dilation=1)
    planes, kernel = (t.detach().float().permute(0, 3, 1, 2).requires_grad_() for t in (x, weight))
    expected = torch.nn.functional.conv2d(planes, kernel, bias.detach().float(), 2, (1, 0))
    torch.testing.assert_close(y.float(), expected.permute(0, 2, 3, 1), rtol=2e-2, atol=2e-2)
    y.sum().backward()
    expected.sum().backward()
    for own, other in ((x, planes), (weight, kernel)):
        torch.testing.assert_close(own.grad.float(), other.grad.permute(0, 2, 3, 1), rtol=2e-2, atol=5e-2)
    assert torch.equal(bias.grad.float(), torch.full((8,), float(y.shape[0] * y.shape[1] * y.shape[2])))


def test_slices_and_autocast():
    wide = torch.randn(1, 4, 4, 24, dtype=BF16)
    weight = torch.randn(8, 3, 3, 16, dtype=BF16)
    x = wide[..., 8:].requires_grad_()
    y = conv2d(x, weight)
    assert torch.equal(y, conv2d(x.contiguous(), weight))
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
    with torch.autocast('cpu', BF16):
        assert torch.equal(conv2d(x.float(), weight.float()), y)
    with pytest.raises(ArgumentError, match='x must have a base and strides that are multiples of 16 bytes'):
        conv2d(wide[..., 4:20], weight)


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        (
            dict(x=torch.zeros(1, 4, 4, 12, dtype=BF16), weight=torch.zeros(8, 1, 1, 12, dtype=BF16)),
            'channels must be a',
        ),
        (dict(weight=torch.zeros(9, 3, 3, 8, dtype=BF16)), 'n must be a multiple of 8, got 9'),
        (dict(weight=torch.zeros(8, 5, 5, 8, dtype=BF16)), 'the height of the result must be at least 1'),
        (dict(stride=0), 'stride must be two integers of at least 1'),
        (dict(padding='same'), 'padding must be an integer or two'),
        (
            dict(x=torch.zeros(1, 8, 4, 4, dtype=BF16).permute(0, 2, 3, 1)),
            'x must have stride 1 in the last dimension, .*; pass x.contiguous',
        ),
        (dict(bias=torch.zeros(7, dtype=BF16)), 'bias must be .n. with n = 8'),
    ],
)
def test_bad_input_is_told(change, sentence):
    given = dict(x=torch.zeros(1, 4, 4, 8, dtype=BF16), weight=torch.zeros(8, 3, 3, 8, dtype=BF16)) | change
    with pytest.raises(ArgumentError, match=sentence):
        conv2d(given.pop('x'), given.pop('weight'), given.pop('bias', None), **given)
