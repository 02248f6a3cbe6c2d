"""The front with torch's arguments does what torch does."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as theirs

from tile_kernels import ArgumentError, knobs
from tile_kernels.attention import scaled_dot_product_attention

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


@pytest.mark.parametrize('shape', [(5, 5), (7, 3), (3, 7)])
@pytest.mark.parametrize('causal', [False, True])
def test_equals_torch(shape, causal):
    torch.manual_seed(0)
    q = torch.randn(2, 4, shape[0], 16, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 2, shape[1], 16, device=DEVICE, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k.clone(), v.clone())]
    o = scaled_dot_product_attention(*leaves, is_causal=causal, scale=0.3, enable_gqa=True)
    wide = [x.detach().float().requires_grad_() for x in leaves]
    expected = theirs(*wide, is_causal=causal, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(o.float(), expected, rtol=2e-2, atol=2e-2)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(o, leaves, upstream.to(o.dtype))
    for own, other in zip(gradients, torch.autograd.grad(expected, wide, upstream), strict=True):
        torch.testing.assert_close(own.float(), other, rtol=3e-2, atol=3e-2)


def test_float16_views_and_an_own_width_of_values():
    torch.manual_seed(0)
    shapes = ((1, 6, 3, 24), (1, 6, 3, 24), (1, 6, 3, 16))
    views = [torch.randn(shape, device=DEVICE).half().transpose(1, 2) for shape in shapes]
    o = scaled_dot_product_attention(*views, is_causal=True)
    expected = theirs(*(x.float() for x in views), is_causal=True)
    assert o.dtype is torch.float16 and o.shape == (1, 3, 6, 16)
    torch.testing.assert_close(o.float(), expected, rtol=2e-3, atol=2e-3)
    fewer = [views[0][:, :, :2], *views[1:]]
    torch.testing.assert_close(
        scaled_dot_product_attention(*fewer, is_causal=True).float(),
        theirs(*(x.float() for x in fewer), is_causal=True),
        rtol=2e-3,
        atol=2e-3,
    )


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        (dict(attn_mask=torch.zeros(1)), 'attn_mask must be None, since only is_causal is offered'),
        (dict(dropout_p=0.5), 'dropout_p must be 0.0'),
        (dict(), 'key must have 2 heads unless enable_gqa is set'),
        (dict(scale='1', enable_gqa=True), 'scale must be'),
    ],
)
def test_what_is_not_offered_is_told(given, sentence):
    q, k = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 3, 8, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match='attention.scaled_dot_product_attention: ' + sentence):
        scaled_dot_product_attention(q, k, k, **given)
