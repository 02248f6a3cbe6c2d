"""What the contract does not see of the merge of parts of attention."""

import math

import pytest
import torch

from tile_kernels import ArgumentError, knobs
from tile_kernels.attention import flash_attn_combine
from tile_kernels.reference.attention._common import attend_sequence

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def test_parts_of_the_keys_give_the_whole():
    torch.manual_seed(0)
    q, k, v, sink = torch.randn(4, 2, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 24), torch.randn(2)
    whole, lse = attend_sequence(q, k, v, sink, 0.25, -1, -1, 0.0)
    parts = [
        attend_sequence(q, k[cut], v[cut], None, 0.25, -1, -1, 0.0) for cut in (slice(5), slice(5, 9), slice(9, 9))
    ]
    outs = torch.stack([o for o, _ in parts]).float().to(DEVICE)
    lses = torch.stack([part.T for _, part in parts]).float().contiguous().to(DEVICE)
    merged, merged_lse = flash_attn_combine(outs, lses, sink=sink.to(DEVICE))
    torch.testing.assert_close(merged.cpu(), whole.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged_lse.cpu(), lse.T.float(), rtol=1e-5, atol=1e-6)


def test_empty_parts_count_for_nothing_and_infinite_sinks_are_legal():
    outs = torch.tensor([[[1.0] * 8] * 3, [[math.nan] * 8] * 3], device=DEVICE)
    lses = torch.tensor([[0.0, 0.0, -math.inf], [-math.inf] * 3], device=DEVICE)
    o, lse = flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    assert o.dtype is torch.bfloat16
    assert o[:, 0].tolist() == [1.0, 1.0, 0.0] and lse.tolist() == [0.0, 0.0, -math.inf]
    o, lse = flash_attn_combine(outs, lses, sink=torch.tensor([math.inf, -math.inf, 1.0], device=DEVICE))
    assert o[:, 0].tolist() == [0.0, 1.0, 0.0] and lse.tolist() == [0.0, 0.0, -math.inf]


def test_no_parts_are_parts_without_keys():
    o, lse = flash_attn_combine(torch.zeros(0, 2, 8, device=DEVICE), torch.zeros(0, 2, device=DEVICE))
    assert o.shape == (2, 8) and not o.any() and (lse == -math.inf).all()


def test_slices_are_parts():
    outs, lses = torch.randn(2, 3, 4, 16, device=DEVICE), torch.randn(2, 4, 3, device=DEVICE)
    o, lse = flash_attn_combine(outs[..., :8], lses.transpose(1, 2))
    expected = flash_attn_combine(outs[..., :8].contiguous(), lses.transpose(1, 2).contiguous())
    assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])


def test_nan_shows():
    outs, lses = torch.ones(2, 2, 8, device=DEVICE), torch.zeros(2, 2, device=DEVICE)
    lses[1, 0] = math.nan
    o, lse = flash_attn_combine(outs, lses)
    assert o[0].isnan().all() and lse[0].isnan() and (o[1] == 1).all()


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        (lambda o, lse: (o.double(), lse), 'out_partial must be float32 or bfloat16 or float16'),
        (lambda o, lse: (o, lse[:, :1]), 'lse_partial must have the shape of out_partial without its last'),
        (lambda o, lse: (o, lse.half()), 'lse_partial must be float32'),
        (lambda o, lse: (o.mT.contiguous().mT, lse), 'out_partial must have stride 1 in the last dimension'),
        (
            lambda o, lse: (o[..., :4].contiguous(), lse),
            'the last extent of out_partial must be a positive multiple of 8',
        ),
    ],
)
def test_bad_arguments_are_told(change, sentence):
    with pytest.raises(ArgumentError, match='attention.flash_attn_combine: ' + sentence):
        flash_attn_combine(*change(torch.zeros(2, 3, 8), torch.zeros(2, 3)))
    with pytest.raises(ArgumentError, match=r'sink must be \(heads\) with heads = 3'):
        flash_attn_combine(torch.zeros(2, 3, 8), torch.zeros(2, 3), sink=torch.zeros(2))
