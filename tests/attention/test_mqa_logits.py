"""Scores of the indexer: what the contract does not see."""

import math

import pytest
import torch

from tile_kernels import ArgumentError, knobs
from tile_kernels.attention import fp8_mqa_logits, fp8_paged_mqa_logits, topk_indices
from tile_kernels.attention.fp8_paged_mqa_logits import pack_page
from tile_kernels.core.launch import on_gpu

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def operands(tokens=5, keys=130, heads=16, dim=64):
    torch.manual_seed(tokens)
    q, kv = torch.randn(tokens, heads, dim, device=DEVICE).to(FP8), torch.randn(keys, dim, device=DEVICE).to(FP8)
    return q, (kv, torch.rand(keys, device=DEVICE) + 0.5), torch.randn(tokens, heads, device=DEVICE)


def plain(q, kv, weights):
    scores = torch.einsum('ihd,jd->ihj', q.float(), kv[0].float()).relu()
    return torch.einsum('ihj,ih->ij', scores, weights) * kv[1]


def bounds(*numbers):
    return torch.tensor(numbers, device=DEVICE, dtype=torch.int32)


@pytest.mark.parametrize('gpu', ['h200', 'a100'])
def test_relative_error(gpu):
    q, kv, weights = operands()
    with on_gpu(gpu):
        logits = fp8_mqa_logits(q, kv, weights, bounds(0, 0, 0, 0, 0), bounds(*[130] * 5).long())
    exact = plain(q, kv, weights)
    assert ((logits - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item() <= 2e-3
    wrong = plain(q, (kv[0], kv[1].roll(1)), weights)  # a planted error: factors of the neighbors
    assert ((logits - wrong).square().mean().sqrt() / exact.square().mean().sqrt()).item() > 0.1


@pytest.mark.parametrize('gpu', ['h200', 'a100'])
def test_only_visible_logits_are_written_and_nan_shows_where_it_is_seen(gpu):
    q, (kv, sf), weights = operands()
    kv.view(torch.uint8)[3], sf[100] = 0x7F, math.nan
    start, end = bounds(0, 4, 99, 101, 50), bounds(2, 100, 101, 500, 50)
    with on_gpu(gpu):
        clean = fp8_mqa_logits(q, (kv, sf), weights, start, end)
        rough = fp8_mqa_logits(q, (kv, sf), weights, start, end, clean_logits=False)
        all_keys = fp8_mqa_logits(q, (kv, sf), weights, start * 0, end * 0 + 130)
    column = torch.arange(130, device=DEVICE)
    inside = (column >= start[:, None]) & (column < end[:, None])
    assert (clean[~inside] == -math.inf).all()
    seen = clean[inside]
    assert seen.isnan().sum() == 1 and clean[2, 100].isnan()  # row 2 sees the factor
    torch.testing.assert_close(rough[inside], seen, rtol=0, atol=0, equal_nan=True)
    assert all_keys[:, 3].isnan().all() and all_keys[:, 100].isnan().all() and all_keys.isnan().sum() == 10
    assert clean.stride(0) == 132 and clean.shape == (5, 130)


@pytest.mark.parametrize('gpu', ['h200', 'a100'])
def test_pages_are_those_of_the_table(gpu):
    heads, dim, tokens = 8, 64, 2
    torch.manual_seed(1)
    codes, sf = torch.randn(5, 64, dim, device=DEVICE).to(FP8), torch.rand(5, 64, device=DEVICE) + 0.5
    q = torch.randn(2, tokens, heads, dim, device=DEVICE).to(FP8)
    weights = torch.randn(2 * tokens, heads, device=DEVICE)
    table = torch.tensor([[4, 1, -1], [0, -1, 3]], device=DEVICE)
    sf[1, 30:] = math.nan  # behind the length of the first sequence
    lengths = torch.tensor([64 + 30, 140], device=DEVICE)
    with on_gpu(gpu):
        logits = fp8_paged_mqa_logits(q, pack_page(codes, sf), weights, lengths, table, None, 190, clean_logits=True)
    for b, pages in enumerate(([4, 1], [0, 2, 3])):
        kv = (codes[pages].flatten(0, 1), sf[pages].flatten())
        exact = plain(q[b], kv, weights[b * tokens : (b + 1) * tokens])
        for t in range(tokens):
            own, number = logits[b * tokens + t], int(lengths[b]) - tokens + t + 1
            assert (own[number:] == -math.inf).all()
            holes = slice(64, 128) if b else slice(0, 0)
            assert (own[holes] == -math.inf).all()
            kept = torch.ones(number, dtype=torch.bool, device=DEVICE)
            kept[holes] = False
            torch.testing.assert_close(own[:number][kept], exact[t, :number][kept], rtol=2e-3, atol=2e-2)
    best = topk_indices(logits, 16)
    assert (best >= 0).all() and (logits.gather(1, best.long()) > -math.inf).all()


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        (lambda a: a | dict(q=a['q'][:, :12]), 'the heads of q must be a multiple of 8 up to 64, got 12'),
        (lambda a: a | dict(q=a['q'][:, :, :48].contiguous()), 'the last extent of q must be one of 32, 64, 128'),
        (lambda a: a | dict(kv=a['kv'][0]), r'kv must be a pair \(codes, factors\)'),
        (lambda a: a | dict(weights=a['weights'].double()), 'weights must be float32'),
        (lambda a: a | dict(cu_seq_len_k_end=bounds(1)), r'cu_seq_len_k_end must be \(tokens\) with tokens = 5'),
    ],
)
def test_bad_input_gets_one_sentence(change, sentence):
    q, kv, weights = operands()
    given = dict(q=q, kv=kv, weights=weights, cu_seq_len_k_start=bounds(*[0] * 5), cu_seq_len_k_end=bounds(*[9] * 5))
    with pytest.raises(ArgumentError, match=sentence):
        fp8_mqa_logits(**change(given))


def test_bad_cache_gets_one_sentence():
    q, weights = torch.zeros(1, 5, 8, 32).to(FP8), torch.zeros(5, 8)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), bounds(3)
    with pytest.raises(ArgumentError, match='the tokens of q must be 1 to 4, got 5'):
        fp8_paged_mqa_logits(q, torch.zeros(1, 64, 1, 36, dtype=torch.uint8), weights, lengths, table, None, 8)
    with pytest.raises(ArgumentError, match=r'kv_cache must be \(pages, 64, 1, dim\+4\) with dim\+4 = 36'):
        fp8_paged_mqa_logits(
            q[:, :1], torch.zeros(1, 64, 1, 32, dtype=torch.uint8), weights[:1], lengths, table, None, 8
        )
