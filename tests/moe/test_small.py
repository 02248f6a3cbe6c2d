"""The small ops around routing: counts, load fractions, unique indices, masks, normalised weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tile_kernels.reference.moe as twins
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import forced_config
from tile_kernels.moe.aux_fi import aux_fi
from tile_kernels.moe.group_count import group_count
from tile_kernels.moe.inplace_unique_group_indices import inplace_unique_group_indices
from tile_kernels.moe.mask_indices_by_tp import mask_indices_by_tp
from tile_kernels.moe.normalize_weight import normalize_weight, weight_normalize
from tile_kernels.testing.numeric import assert_equal, assert_within_twice, calc_diff
from tile_kernels.testing.poison import poisoned


@pytest.fixture(autouse=True)
def interpreter():
    torch.manual_seed(0)
    with knobs(interpret=True), poisoned():
        yield


# Counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [torch.int64, torch.int32])
@pytest.mark.parametrize(('num_tokens', 'num_groups'), [(0, 3), (1, 1), (50, 8), (50, 72), (700, 5), (40, 3000)])
def test_counts(num_tokens, num_groups, dtype):
    group_idx = torch.randint(-2, num_groups, (num_tokens, 7), dtype=dtype)
    counts = group_count(group_idx, num_groups)
    assert counts.tolist() == [int((group_idx == g).sum()) for g in range(num_groups)]
    assert_equal(counts, twins.group_count(group_idx, num_groups))


def test_numbers_that_are_no_group_count_nowhere():
    assert group_count(torch.tensor([[0, 3, 2**40, -(2**40), 4]]), 4).tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize('num_blocks', [1, 16, 64, 128])
def test_blocks_do_not_matter(num_blocks):
    group_idx = torch.randint(-1, 9, (333, 3))
    with forced_config(num_blocks=num_blocks, num_threads=256):
        assert_equal(group_count(group_idx, 9), twins.group_count(group_idx, 9))


@pytest.mark.parametrize('num_tokens', [0, 1, 999])
@pytest.mark.parametrize('num_aux_topk', [1, 6])
def test_load_fractions(num_tokens, num_aux_topk):
    topk_idx = torch.randint(-1, 12, (num_tokens, 6))
    fractions = aux_fi(topk_idx, 12, num_aux_topk)
    truth = torch.tensor([int((topk_idx == e).sum()) * 12 / max(num_tokens * num_aux_topk, 1) for e in range(12)])
    assert calc_diff(fractions, truth) < 1e-14
    assert_equal(fractions, twins.aux_fi(topk_idx, 12, num_aux_topk))


def test_an_even_load_is_one():
    assert aux_fi(torch.arange(24).view(8, 3) % 6, 6, 3).tolist() == [1.0] * 6


# Unique indices -----------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(-3, 6), min_size=5, max_size=5), min_size=1, max_size=30),
    dtype=st.sampled_from([torch.int64, torch.int32]),
)
def test_the_first_of_equal_indices_stays(rows, dtype):
    indices, twin = torch.tensor(rows, dtype=dtype), torch.tensor(rows, dtype=dtype)
    inplace_unique_group_indices(indices, 7)
    twins.inplace_unique_group_indices(twin, 7)
    expected = [[-1 if v >= 0 and v in row[:k] else v for k, v in enumerate(row)] for row in rows]
    assert indices.tolist() == twin.tolist() == expected


def test_any_number_of_groups_and_choices():
    indices = torch.randint(0, 5000, (3, 700))
    twin = indices.clone()
    inplace_unique_group_indices(indices, 5000)
    twins.inplace_unique_group_indices(twin, 5000)
    assert_equal(indices, twin)
    assert all(len(set(kept)) == len(kept) for kept in ([v for v in row if v >= 0] for row in indices.tolist()))


# Masks --------------------------------------------------------------------------------------


@pytest.mark.parametrize('shape', [(0, 3), (1,), (31, 7), (4, 5, 6)])
@pytest.mark.parametrize(('n', 'num_ep_ranks', 'num_tp_ranks'), [(72, 8, 2), (256, 32, 4), (24, 24, 8), (100, 3, 1)])
def test_local_experts(shape, n, num_ep_ranks, num_tp_ranks):
    for dtype in (torch.int64, torch.int32):
        indices = torch.randint(-2, n, shape, dtype=dtype)
        for tp_rank in range(num_tp_ranks):
            masked = mask_indices_by_tp(indices, n, num_ep_ranks, tp_rank, num_tp_ranks)
            assert_equal(masked, twins.mask_indices_by_tp(indices, n, num_ep_ranks, tp_rank, num_tp_ranks))


def test_every_expert_belongs_to_one_rank():
    indices = torch.arange(48)
    masked = torch.stack([mask_indices_by_tp(indices, 48, 8, rank, 4) for rank in range(4)])
    assert ((masked >= 0).sum(0) == 1).all()
    for row in masked:
        assert sorted(v for v in row.tolist() if v >= 0) == list(range(12))


# Weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize(('num_tokens', 'num_topk'), [(0, 8), (1, 1), (130, 6), (17, 9), (5, 300)])
def test_sums_are_added_up_in_order(num_tokens, num_topk):
    weights = torch.rand(num_tokens, num_topk) * torch.randint(-20, 20, (num_tokens, num_topk)).float().exp2()
    denominator, normalized = normalize_weight(weights)
    for actual, expected in zip((denominator, normalized), twins.normalize_weight(weights), strict=True):
        assert_equal(actual, expected)
    torch.testing.assert_close(normalized.sum(1), torch.ones(num_tokens), rtol=1e-5, atol=0)


def test_a_zero_row_stays_zero():
    weights = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    assert weight_normalize(weights).tolist() == [[0.0, 0.0], [0.25, 0.75]]


def test_gradient_of_normalised_weights():
    weights = torch.rand(40, 7, requires_grad=True)
    dn, dd = torch.randn(40, 7), torch.randn(40)

    def gradient(weights, normalise):
        denominator, normalized = normalise(weights)
        outcome = (normalized * dn.to(weights.dtype)).sum() + (denominator * dd.to(weights.dtype)).sum()
        return torch.autograd.grad(outcome, weights)[0]

    def plain(weights):
        return weights.sum(1), weights / weights.sum(1, keepdim=True)

    truth = gradient(weights.detach().double().requires_grad_(), plain)
    assert_within_twice(gradient(weights, normalize_weight), gradient(weights, plain), truth)


@pytest.mark.parametrize(
    ('call', 'sentence'),
    [
        (lambda x: group_count(x.float(), 4), 'group_idx must be int64 or int32'),
        (lambda x: group_count(x, 0), 'num_groups must be at least 1'),
        (lambda x: aux_fi(x, 0, 1), 'num_experts must be at least 1'),
        (lambda x: aux_fi(x[:, :0].contiguous(), 4, 1), 'num_topk must be at least 1, got 0'),
        (lambda x: aux_fi(x, 4, 0), 'num_aux_topk must be at least 1'),
        (lambda x: inplace_unique_group_indices(x.new_empty(6, 0), 4), 'num_topk must be at least 1, got 0'),
        (lambda x: inplace_unique_group_indices(x.t(), 4), 'group_indices must be contiguous'),
        (lambda x: mask_indices_by_tp(x, 4, 8, 0, 1), 'n must be at least 8, got 4'),
        (lambda x: mask_indices_by_tp(x, 8, 8, 2, 2), 'tp_rank must be at most 1, got 2'),
        (lambda x: normalize_weight(torch.empty(6, 0)), 'num_topk must be at least 1, got 0'),
        (lambda x: normalize_weight(x), 'topk_weights must be float32'),
    ],
)
def test_refusals_are_sentences(call, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        call(torch.zeros(6, 2, dtype=torch.int64))
