"""Reducing expanded rows to tokens: the arithmetic to the last bit, what is skipped, fp8, gradients."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tile_kernels.reference.moe as twins
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import forced_config
from tile_kernels.moe._samples import random_places
from tile_kernels.moe.reduce_fused import reduce_fused
from tile_kernels.moe.reduce_rows_kernels import reduce_rows_kernel
from tile_kernels.reference.moe._common import FusedMultiplyAdd
from tile_kernels.testing.numeric import assert_equal, assert_within_twice
from tile_kernels.testing.poison import poisoned

NAN, INF = float('nan'), float('inf')


@pytest.fixture(autouse=True)
def interpreter():
    torch.manual_seed(0)
    with knobs(interpret=True), poisoned():
        yield


def check(x, topk_weights, token_topk_to_pos, **options):
    actual = reduce_fused(x, topk_weights, token_topk_to_pos, **options)
    assert_equal(actual, twins.reduce_fused(x, topk_weights, token_topk_to_pos, **options))
    return actual


def places(*rows):
    return torch.tensor(rows, dtype=torch.int32)


# Arithmetic ---------------------------------------------------------------------------------


def rounded(value: Fraction) -> float:
    """The float32 nearest to a fraction, ties to even; by counting units in the last place."""
    if value == 0:
        return 0.0
    exponent = max(abs(value).numerator.bit_length() - abs(value).denominator.bit_length() - 24, -149)
    while abs(value) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    while exponent > -149 and abs(value) < Fraction(2) ** (exponent + 23):
        exponent -= 1
    return float(round(value / Fraction(2) ** exponent) * Fraction(2) ** exponent)


finite = st.floats(-(2.0**60), 2.0**60, width=32)


@settings(max_examples=300, deadline=None)
@given(a=finite, b=finite, c=finite)
def test_the_reference_rounds_once(a, b, c):
    fma = FusedMultiplyAdd.apply(*(torch.tensor([v]) for v in (a, b, c))).item()
    assert fma == rounded(Fraction(a) * Fraction(b) + Fraction(c))


def test_the_sum_is_a_chain_of_fused_multiply_adds_in_order_of_k():
    big = 2.0**24
    x = torch.tensor([[big + 2, 1.0], [1.0, 2.0**-30], [-big, 3.0]])
    weights = torch.tensor([[1.0 + 2.0**-23, 1.0, 1.0]])
    y = check(x, weights, places([0, 1, 2]))
    first = rounded(Fraction(big + 2) * Fraction(1.0 + 2.0**-23))
    second = rounded(Fraction(1.0) + Fraction(first))
    assert y[0, 0].item() == rounded(Fraction(-big) + Fraction(second))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('weighted', [True, False])
@pytest.mark.parametrize('scaled', [True, False])
@pytest.mark.parametrize('fp8_format', ['', 'e4m3'])
def test_every_combination_of_factors(dtype, weighted, scaled, fp8_format):
    token_topk_to_pos, pos_to_expert = random_places(17, 5)
    num_expanded = pos_to_expert.shape[0]
    x = torch.randn(num_expanded, 72, dtype=dtype)
    weights = torch.rand(17, 5) if weighted else None
    y = check(
        (x, torch.rand(num_expanded)) if scaled else x,
        weights,
        token_topk_to_pos,
        fp8_format=fp8_format,
        sf=torch.tensor([3.0]) if fp8_format else None,
    )
    assert y.dtype is (torch.float8_e4m3fn if fp8_format else dtype)


@pytest.mark.parametrize('num_topk', [1, 2, 9, 10, 19, 64])
@pytest.mark.parametrize('hidden', [1, 5, 256, 1032])
def test_any_number_of_choices_and_row_length(num_topk, hidden):
    token_topk_to_pos, pos_to_expert = random_places(6, num_topk, num_experts=max(8, num_topk))
    check(torch.randn(pos_to_expert.shape[0], hidden), torch.rand(6, num_topk), token_topk_to_pos)


@pytest.mark.parametrize('row_threads', [32, 64, 128, 256])
@pytest.mark.parametrize('vectors', [1, 4])
@pytest.mark.parametrize('num_threads', [128, 512])
def test_configs_agree(row_threads, vectors, num_threads):
    token_topk_to_pos, pos_to_expert = random_places(9, 3)
    with forced_config(row_threads=row_threads, vectors=vectors, num_threads=num_threads):
        check(torch.randn(pos_to_expert.shape[0], 640), torch.rand(9, 3), token_topk_to_pos)


def test_offsets_have_64_bits():
    source = reduce_rows_kernel.source((7168, torch.bfloat16, torch.bfloat16, 8, 8, True, False, False))
    assert '((int64_t)pos_local[((int64_t)i_2)]) * (int64_t)7168' in source


# What is skipped ----------------------------------------------------------------------------


def test_slots_without_a_place_count_nothing_whatever_their_weight():
    x = torch.tensor([[1.0, -2.0]])
    weights = torch.tensor([[NAN, 0.5, INF], [NAN, NAN, NAN]])
    y = check((x, torch.tensor([2.0])), weights, places([-1, 0, -7], [-1, -1, 5]))
    assert y.tolist() == [[1.0, -2.0], [0.0, 0.0]]


def test_a_skipped_slot_keeps_the_sign_of_zero():
    tiny = torch.tensor([[-(2.0**-100)]])
    y = check(tiny, torch.full((1, 3), 2.0**-100), places([0, -1, -1]))  # the product underflows to -0
    assert y.view(torch.int32).item() == -(2**31)


def test_what_is_not_finite_stays_so():
    x = torch.tensor([[INF, NAN, 1e38], [-INF, 1.0, 1e38]])
    y = check(x, torch.full((1, 2), 4.0), places([0, 1]))
    assert y.isnan().tolist() == [[True, True, False]]
    assert y[0, 2].item() == INF


def test_fp8_saturates():
    x = torch.tensor([[1000.0, -1000.0, INF, 0.0]])
    y = check(x, None, places([0]), fp8_format='e4m3', sf=torch.tensor([1.0]))
    assert y.float().tolist() == [[448.0, -448.0, 448.0, 0.0]]


@pytest.mark.parametrize('num_expanded', [0, 4])
def test_no_tokens_or_no_rows(num_expanded):
    x = torch.randn(num_expanded, 16)
    assert check(x, torch.rand(0, 2), torch.empty(0, 2, dtype=torch.int32)).shape == (0, 16)
    assert not check(x, torch.rand(3, 2), torch.full((3, 2), -1, dtype=torch.int32)).any()


def test_out_is_written_and_returned():
    token_topk_to_pos, pos_to_expert = random_places(7, 2)
    x, weights = torch.randn(pos_to_expert.shape[0], 40), torch.rand(7, 2)
    out = torch.full((7, 40), NAN)
    assert reduce_fused(x, weights, token_topk_to_pos, out=out) is out
    assert_equal(out, twins.reduce_fused(x, weights, token_topk_to_pos))


# Gradients ----------------------------------------------------------------------------------


def loss(y, dy):
    return (y.to(dy.dtype) * dy).sum()


def plain(x, weights, token_topk_to_pos, x_sf):
    """The definition with ordinary arithmetic in the precision of the arguments."""
    rows = x[token_topk_to_pos.clamp(min=0).long()] * (token_topk_to_pos >= 0).unsqueeze(2)
    factors = torch.ones_like(token_topk_to_pos, dtype=x.dtype) if weights is None else weights.to(x.dtype)
    if x_sf is not None:
        factors = factors * x_sf.to(x.dtype)[token_topk_to_pos.clamp(min=0).long()]
    return (rows * factors.unsqueeze(2)).sum(1)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('weighted', [True, False])
@pytest.mark.parametrize('scaled', [True, False])
def test_gradients_against_float64(dtype, weighted, scaled):
    token_topk_to_pos, pos_to_expert = random_places(12, 4)
    num_expanded, hidden = pos_to_expert.shape[0], 96
    x = torch.randn(num_expanded, hidden, dtype=dtype)
    weights = torch.rand(12, 4) if weighted else None
    x_sf = torch.rand(num_expanded) + 0.5 if scaled else None
    dy = torch.randn(12, hidden, dtype=dtype)

    def gradients(reduce, dtype):
        leaf = x.to(dtype).requires_grad_()
        weight = weights.to(dtype if dtype is torch.float64 else torch.float32).requires_grad_() if weighted else None
        y = reduce(leaf, weight)
        return torch.autograd.grad(loss(y, dy.to(dtype)), [leaf, weight] if weighted else [leaf])

    actual = gradients(
        lambda leaf, weight: reduce_fused((leaf, x_sf) if scaled else leaf, weight, token_topk_to_pos), dtype
    )
    lowp = gradients(lambda leaf, weight: plain(leaf, weight, token_topk_to_pos, x_sf), dtype)
    truth = gradients(lambda leaf, weight: plain(leaf, weight, token_topk_to_pos, x_sf), torch.float64)
    for ours, reference, true in zip(actual, lowp, truth, strict=True):
        assert_within_twice(ours, reference, true)


def test_rows_no_token_has_get_no_gradient():
    x = torch.randn(5, 8, requires_grad=True)
    reduce_fused(x, None, places([3], [-1], [0])).sum().backward()
    assert x.grad.tolist() == [[1.0] * 8, [0.0] * 8, [0.0] * 8, [1.0] * 8, [0.0] * 8]


@pytest.mark.parametrize(
    ('call', 'sentence'),
    [
        (lambda x, w, m: reduce_fused(x, w, m, fp8_format='e5m2'), "fp8_format must be one of '', e4m3, got 'e5m2'"),
        (lambda x, w, m: reduce_fused(x, w, m, sf=torch.ones(1)), "sf must be None unless fp8_format is 'e4m3'"),
        (lambda x, w, m: reduce_fused(x.int(), w, m), 'x must be bfloat16 or float16 or float32'),
        (lambda x, w, m: reduce_fused(x.new_empty(4, 0), w, m), 'hidden must be at least 1, got 0'),
        (lambda x, w, m: reduce_fused(x, w[:2], m), 'topk_weights must be .* with num_tokens = 3'),
        (lambda x, w, m: reduce_fused((x, w[0]), w, m), r'x\[1\] must be .* with num_expanded = 4'),
        (lambda x, w, m: reduce_fused(x, w, m, out=x), r'out must be \(3, 8\) float32'),
        (lambda x, w, m: reduce_fused(x, w, m, out=x[:3].half()), r'out must be \(3, 8\) float32'),
        (lambda x, w, m: reduce_fused(x, w, m.long()), 'token_topk_to_pos must be int32'),
    ],
)
def test_refusals_are_sentences(call, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        call(torch.randn(4, 8), torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.int32))
