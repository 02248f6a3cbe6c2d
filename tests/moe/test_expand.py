"""Expanding rows to expert order: bits, padding, scale factor layouts, quantising on the way, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import tile_kernels.reference.moe as twins
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import forced_config
from tile_kernels.moe._samples import random_places
from tile_kernels.moe.expand_and_per_token_cast import FORMATS, expand_and_per_token_cast
from tile_kernels.moe.expand_to_fused import expand_to_fused
from tile_kernels.moe.expand_to_fused_kernels import expand_to_fused_kernel
from tile_kernels.moe.expand_to_fused_with_sf import expand_to_fused_with_sf
from tile_kernels.moe.fused_expand_reduce import fused_expand_reduce
from tile_kernels.moe.reduce_fused import reduce_fused
from tile_kernels.moe.token_to_expert_map import token_to_expert_map
from tile_kernels.reference.quant import per_token_cast
from tile_kernels.testing.numeric import assert_equal, assert_within_twice
from tile_kernels.testing.poison import poisoned


@pytest.fixture(autouse=True)
def interpreter():
    torch.manual_seed(0)
    with knobs(interpret=True), poisoned():
        yield


def places(num_tokens=13, num_topk=3, **options):
    return random_places(num_tokens, num_topk, **options)


def by_hand(x, token_topk_to_pos, num_expanded):
    """The definition, one row at a time."""
    y = torch.zeros(num_expanded, x.shape[1], dtype=x.dtype)
    for t, row in enumerate(token_topk_to_pos.tolist()):
        for pos in row:
            if pos >= 0:
                y[pos] = x[t]
    return y


# Rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.float64, torch.bool])
@pytest.mark.parametrize('hidden', [1, 7, 64, 576])
def test_rows_of_any_type_and_length(dtype, hidden):
    maps = places()
    x = torch.randint(0, 2 if dtype is torch.bool else 100, (13, hidden)).to(dtype)
    assert_equal(expand_to_fused(x, *maps), by_hand(x, maps[0], maps[1].shape[0]))


def test_bits_are_not_touched():
    bits = torch.randint(-(2**31), 2**31 - 1, (13, 32), dtype=torch.int32)  # NaN of every kind among them
    maps = places()
    expected = by_hand(bits, maps[0], maps[1].shape[0])
    assert_equal(expand_to_fused(bits.view(torch.float32), *maps).view(torch.int32), expected)
    assert_equal(twins.expand_to_fused(bits.view(torch.float32), *maps).view(torch.int32), expected)


@pytest.mark.parametrize('view', ['misaligned', 'apart', 'one row'])
def test_views(view):
    whole = torch.randn(13, 70, dtype=torch.bfloat16)
    x = {'misaligned': whole[:, 3:67], 'apart': whole[:, :64], 'one row': whole[:1, 1:65]}[view]
    maps = places(x.shape[0])
    assert_equal(expand_to_fused(x, *maps), by_hand(x, maps[0], maps[1].shape[0]))


@pytest.mark.parametrize('padding', [0, 1, 100])
@pytest.mark.parametrize('num_tokens', [0, 1, 40])
def test_padding_is_zero_even_without_tokens(num_tokens, padding):
    maps = places(num_tokens, padding=padding, unrouted=0.5)
    x = torch.randn(num_tokens, 48)
    assert_equal(expand_to_fused(x, *maps), by_hand(x, maps[0], maps[1].shape[0]))


def test_only_the_sign_of_the_expert_counts():
    token_topk_to_pos, pos_to_expert = places()
    x = torch.randn(13, 16)
    pos_to_token = torch.where(pos_to_expert < 0, -5, 2**30).int()
    assert_equal(
        expand_to_fused(x, token_topk_to_pos, pos_to_token), expand_to_fused(x, token_topk_to_pos, pos_to_expert)
    )


def test_places_beyond_the_last_are_skipped():
    x = torch.randn(2, 8)
    y = expand_to_fused(x, torch.tensor([[0, 9], [2**31 - 1, 1]], dtype=torch.int32), torch.tensor([0, 0, -1]).int())
    assert_equal(y, torch.stack([x[0], x[1], torch.zeros(8)]))


@pytest.mark.parametrize('row_threads', [32, 64, 128, 256])
@pytest.mark.parametrize('vectors', [1, 4])
@pytest.mark.parametrize('num_threads', [128, 512])
def test_configs_agree(row_threads, vectors, num_threads):
    maps = places(9)
    x = torch.randn(9, 640)
    with forced_config(row_threads=row_threads, vectors=vectors, num_threads=num_threads):
        assert_equal(expand_to_fused(x, *maps), by_hand(x, maps[0], maps[1].shape[0]))


def test_offsets_have_64_bits():
    source = expand_to_fused_kernel.source((7168, 2, 8, 8))
    assert '((int64_t)pos_local[((int64_t)k_1)]) * (int64_t)7168' in source


# Scale factors ------------------------------------------------------------------------------


@pytest.mark.parametrize('col', [False, True])
@pytest.mark.parametrize('sf_dtype', [torch.float32, torch.int32])
@pytest.mark.parametrize('num_tokens', [0, 1, 30])
def test_scale_factors_in_both_layouts(num_tokens, sf_dtype, col):
    maps = places(num_tokens)
    num_expanded, num_groups = maps[1].shape[0], 2 if sf_dtype is torch.int32 else 6
    x = torch.randint(0, 100, (num_tokens, 192), dtype=torch.uint8).view(torch.float8_e4m3fn)
    x_sf = torch.randint(1, 1000, (num_tokens, num_groups)).to(sf_dtype)
    y, y_sf = expand_to_fused_with_sf((x, x_sf), 32, *maps, use_tma_aligned_col_major_sf=col)
    assert_equal(y.view(torch.uint8), by_hand(x.view(torch.uint8), maps[0], num_expanded))
    assert_equal(y_sf, by_hand(x_sf, maps[0], num_expanded), check_stride=False)
    assert y_sf.stride() == ((1, -(-num_expanded // 4) * 4) if col else (num_groups, 1))
    for actual, expected in zip((y, y_sf), twins.expand_to_fused_with_sf((x, x_sf), 32, *maps, col), strict=True):
        assert_equal(actual, expected)


@pytest.mark.parametrize('fmt', [*FORMATS, 'e4m3_1x16_f32', 'e5m2_1x32_e4m3_col'])
@pytest.mark.parametrize('num_tokens', [0, 19])
def test_expand_and_cast_is_cast_and_expand(num_tokens, fmt):
    fmt = QuantFormat.parse(fmt)
    maps = places(num_tokens)
    x = torch.randn(num_tokens, 208, dtype=torch.bfloat16) * torch.rand(num_tokens, 1).exp2()
    y = expand_and_per_token_cast(x, *maps, fmt)
    assert y.fmt is fmt
    q = per_token_cast(x, QuantFormat.parse(fmt.name.removesuffix('_col')))
    num_expanded = maps[1].shape[0]
    assert_equal(y.data.view(torch.uint8), by_hand(q.data.view(torch.uint8), maps[0], num_expanded))
    width = {4: torch.int32, 1: torch.uint8}[q.sf.element_size()]
    assert_equal(y.sf.view(width), by_hand(q.sf.view(width), maps[0], num_expanded), check_stride=False)
    assert y.sf.stride() == fmt.empty_sf(num_expanded, 208, x.device).stride()


@pytest.mark.parametrize('gather', [False, True])
def test_columns_do_not_depend_on_the_way_they_are_written(gather):
    maps = places(70, padding=20)  # several tiles
    x = torch.randn(70, 272, dtype=torch.bfloat16)
    fmt = QuantFormat.parse('e4m3_1x16_f32_col')
    expected = twins.expand_and_per_token_cast(x, *maps, fmt)
    q = per_token_cast(x, QuantFormat.parse('e4m3_1x16_f32'))
    with forced_config(row_threads=32, vectors=2, num_threads=128, gather=gather):
        for actual in (
            expand_and_per_token_cast(x, *maps, fmt),
            expand_to_fused_with_sf((q.data, q.sf), 16, *maps, True),
        ):
            assert_equal(actual[0], expected.data)
            assert_equal(actual[1], expected.sf)


# Gradients and the whole way ----------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_map_of_any_size_moves_what_it_places_and_nothing_else(data):
    num_tokens, num_topk = data.draw(st.integers(0, 20)), data.draw(st.sampled_from([1, 3, 8]))
    num_experts, alignment = data.draw(st.sampled_from([1, 6])), data.draw(st.sampled_from([1, 4]))
    num_expanded = data.draw(st.one_of(st.none(), st.integers(0, 40)))  # None is enough for any choice
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    topk_indices = torch.randint(data.draw(st.sampled_from([-1, 0])), num_experts, (num_tokens, num_topk))
    routing_map = token_to_expert_map(topk_indices, num_experts, alignment, num_expanded=num_expanded)
    needed = sum(-(-int((topk_indices == e).sum()) // alignment) * alignment for e in range(num_experts))
    assert int(routing_map.overflow) == max(needed - routing_map.pos_to_token.shape[0], 0)

    x = torch.randint(-50, 50, (num_tokens, 24)).float()  # sums of these are exact
    y = expand_to_fused(x, routing_map.token_topk_to_pos, routing_map.pos_to_expert)
    assert_equal(y, by_hand(x, routing_map.token_topk_to_pos, y.shape[0]))
    placed = (routing_map.token_topk_to_pos >= 0).sum(1, keepdim=True)
    assert_equal(reduce_fused(y, None, routing_map.token_topk_to_pos), x * placed + 0.0)  # not -0
    if num_expanded is None:
        assert int(placed.sum()) == int((topk_indices >= 0).sum())


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_gradient_of_the_expansion(dtype):
    token_topk_to_pos, pos_to_expert = places(11, 4)
    x = torch.randn(11, 40, dtype=dtype, requires_grad=True)
    dy = torch.randn(pos_to_expert.shape[0], 40, dtype=dtype)
    expand_to_fused(x, token_topk_to_pos, pos_to_expert).backward(dy)

    def sums(rows):
        total = torch.zeros(11, 40, dtype=rows.dtype)
        for t, row in enumerate(token_topk_to_pos.tolist()):
            for pos in row:
                if pos >= 0:
                    total[t] += rows[pos]
        return total

    assert_within_twice(x.grad, sums(dy), sums(dy.double()))


@pytest.mark.parametrize('weighted', [True, False])
def test_expand_experts_reduce(weighted):
    num_tokens, num_topk, num_experts, hidden = 15, 3, 5, 24
    topk_indices = torch.rand(num_tokens, num_experts).argsort(1)[:, :num_topk]
    topk_indices[3] = -1
    routing_map = token_to_expert_map(topk_indices, num_experts, alignment=4)
    experts = torch.randn(num_experts, hidden, 16)
    hidden_states = torch.randn(num_tokens, hidden, requires_grad=True)
    topk_weights = torch.rand(num_tokens, num_topk, requires_grad=True) if weighted else None

    def expert_fn(expanded, routing_map):
        return torch.einsum('ph,pho->po', expanded, experts[routing_map.pos_to_expert.clamp(min=0).long()])

    result = fused_expand_reduce(hidden_states, routing_map, expert_fn, topk_weights)
    inputs = [hidden_states] + ([topk_weights] if weighted else [])
    grads = torch.autograd.grad(result.square().sum(), inputs)

    x = hidden_states.detach().double().requires_grad_()
    w = topk_weights.detach().double().requires_grad_() if weighted else torch.ones(num_tokens, num_topk).double()
    chosen = experts.double()[topk_indices.clamp(min=0)]
    per_slot = torch.einsum('th,tkho->tko', x, chosen) * w.unsqueeze(2) * (topk_indices >= 0).unsqueeze(2)
    truth = per_slot.sum(1)
    truth_grads = torch.autograd.grad(truth.square().sum(), [x, w] if weighted else [x])
    torch.testing.assert_close(result.double(), truth, rtol=1e-5, atol=1e-5)
    assert_equal(result, twins.fused_expand_reduce(hidden_states, routing_map, expert_fn, topk_weights))
    for grad, expected in zip(grads, truth_grads, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-3)


def test_the_whole_way_is_one_graph():
    counter = CompileCounter()

    def route(x, topk_indices, topk_weights):
        routing_map = token_to_expert_map(topk_indices, num_experts=4, alignment=8)
        return fused_expand_reduce(x, routing_map, lambda rows, _: rows * 2, topk_weights)

    compiled = torch.compile(route, backend=counter, fullgraph=True, dynamic=True)
    for num_tokens in (8, 21):
        args = torch.randn(num_tokens, 16), torch.randint(-1, 4, (num_tokens, 2)), torch.rand(num_tokens, 2)
        torch.testing.assert_close(compiled(*args), route(*args))
    assert counter.frame_count == 1


def test_experts_give_a_row_for_a_row():
    routing_map = token_to_expert_map(torch.zeros(2, 1, dtype=torch.int64), 1)
    with pytest.raises(ArgumentError, match=r'the result of expert_fn must be .* with num_expanded = 2'):
        fused_expand_reduce(torch.zeros(2, 8), routing_map, lambda rows, _: rows[:1])
    with pytest.raises(ArgumentError, match='routing_map must be a RoutingMap, got tuple'):
        fused_expand_reduce(torch.zeros(2, 8), (), lambda rows, _: rows)


@pytest.mark.parametrize(
    ('call', 'sentence'),
    [
        (lambda x, m, p: expand_to_fused(x[:3], m, p), 'token_topk_to_pos must be .* with num_tokens = 3'),
        (lambda x, m, p: expand_to_fused(x, m.long(), p), 'token_topk_to_pos must be int32'),
        (lambda x, m, p: expand_to_fused(x.t()[:13], m, p), 'x must have stride 1'),
        (lambda x, m, p: expand_to_fused(x.to(torch.complex128), m, p), 'x must have elements of 1, 2, 4 or 8 bytes'),
        (lambda x, m, p: expand_to_fused_with_sf((x, x), 4, m, p), r'x\[1\] must be .* with num_groups = 4'),
        (
            lambda x, m, p: expand_and_per_token_cast(x, m, p, QuantFormat.parse('e4m3_1xall_f32')),
            'scale block of fmt must be one of',
        ),
    ],
)
def test_refusals_are_sentences(call, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        call(torch.randn(13, 16), *places())
