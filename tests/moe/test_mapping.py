"""The map from tokens to experts: every slot once, in order, aligned, whatever the choice and the number of blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree

import tile_kernels.reference.moe as twins
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import forced_config
from tile_kernels.moe.fused_mapping import fused_mapping, get_fused_mapping, places_for
from tile_kernels.moe.token_to_expert_map import RoutingMap, token_to_expert_map

NAMES = fused_mapping.outputs


@pytest.fixture(autouse=True)
def interpreter():
    with knobs(interpret=True):
        yield


def run(topk_idx, num_experts, alignment, num_expanded=None):
    """Maps by name, checked against the twin and against the definition."""
    if num_expanded is None:
        num_expanded = places_for(*topk_idx.shape, num_experts, alignment)
    maps = dict(zip(NAMES, fused_mapping(topk_idx, num_experts, num_expanded, alignment), strict=True))
    expected = twins.fused_mapping(topk_idx, num_experts, num_expanded, alignment)
    for name, tensor in zip(NAMES, expected, strict=True):
        torch.testing.assert_close(maps[name], tensor, rtol=0, atol=0, msg=lambda m, name=name: f'{name}: {m}')
    check_properties(topk_idx, num_experts, alignment, num_expanded, maps)
    return maps


def check_properties(topk_idx, num_experts, alignment, num_expanded, maps):
    """What a map promises, in plain Python."""
    num_tokens, num_topk = topk_idx.shape
    lists = {name: tensor.tolist() for name, tensor in maps.items()}
    rows = {e: [] for e in range(num_experts)}
    for t, row in enumerate(topk_idx.tolist()):
        for k, e in enumerate(row):
            if 0 <= e < num_experts:
                rows[e].append(t * num_topk + k)

    place = 0
    used = {}
    for e in range(num_experts):
        size = -(-len(rows[e]) // alignment) * alignment
        assert lists['num_tokens_per_expert'][e] == size
        assert lists['expert_start'][e] == min(place, num_expanded)
        assert lists['expert_end'][e] == min(place + size, num_expanded)
        used |= {place + i: (e, slot) for i, slot in enumerate(rows[e]) if place + i < num_expanded}
        place += size
    assert lists['overflow'] == [max(place - num_expanded, 0)]

    for pos in range(num_expanded):
        e, slot = used.get(pos, (-1, -1))
        assert lists['pos_to_expert'][pos] == e
        assert lists['pos_to_token_topk'][pos] == slot
        assert lists['pos_to_token'][pos] == (slot // num_topk if slot >= 0 else -1)
    places = {slot: pos for pos, (_, slot) in used.items()}
    for t in range(num_tokens):
        assert lists['token_topk_to_pos'][t] == [places.get(t * num_topk + k, -1) for k in range(num_topk)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_choice(data):
    num_tokens, num_topk = data.draw(st.integers(0, 40)), data.draw(st.sampled_from([1, 2, 8]))
    num_experts, alignment = data.draw(st.sampled_from([1, 5, 40])), data.draw(st.sampled_from([1, 3, 64]))
    seed, low = data.draw(st.integers(0, 1000)), data.draw(st.sampled_from([-1, -3 * num_experts]))
    torch.manual_seed(seed)
    run(torch.randint(low, num_experts, (num_tokens, num_topk)), num_experts, alignment)


@pytest.mark.parametrize('alignment', [1, 128])
@pytest.mark.parametrize('num_tokens', [0, 1, 33])
@pytest.mark.parametrize('choice', ['none', 'one hot expert', 'the last expert', 'the same twice'])
def test_extreme_choices(choice, num_tokens, alignment):
    topk_idx = torch.full((num_tokens, 4), -1)
    if choice == 'one hot expert':
        topk_idx[:, 2] = 3
    elif choice == 'the last expert':
        topk_idx[:, 0] = 8
    elif choice == 'the same twice':
        topk_idx[:, 1:3] = 5
    run(topk_idx, 9, alignment)


def test_numbers_that_are_no_expert_are_not_routed():
    topk_idx = torch.tensor([[0, -7, 9], [2**40, 8, -(2**40)]])
    maps = run(topk_idx, 9, 1)
    assert maps['token_topk_to_pos'].tolist() == [[0, -1, -1], [-1, 1, -1]]


@pytest.mark.parametrize('num_threads', [256, 1024])
@pytest.mark.parametrize('rounds', [1, 2, 8])
@pytest.mark.parametrize('launches', [1, 2, 3])
def test_launches_chunks_and_warps_do_not_matter(launches, rounds, num_threads):
    torch.manual_seed(0)
    topk_idx = torch.randint(-1, 12, (210, 6))
    with forced_config(launches=launches, rounds=rounds, num_threads=num_threads):
        run(topk_idx, 12, 16)


@pytest.mark.parametrize('launches', [2, 3])
def test_more_chunks_than_warps_and_more_experts_than_threads(launches):
    torch.manual_seed(0)
    with forced_config(launches=launches, rounds=2, num_threads=256):
        run(torch.randint(-1, 70, (3500, 5)), 70, 4)
        run(torch.randint(-1, 300, (500, 5)), 300, 1)


def test_more_tokens_than_int32_products_allow():
    torch.manual_seed(0)
    topk_idx = torch.randint(-1, 3, (92_500, 1), dtype=torch.int32)
    run(topk_idx, 3, 128)


@pytest.mark.parametrize('num_expanded', [0, 1, 40, 95, 96])
def test_overflow_is_flagged_and_nothing_is_written_beyond(num_expanded):
    topk_idx = torch.arange(64).view(16, 4) % 6  # 96 places with alignment 16
    maps = run(topk_idx, 6, 16, num_expanded)
    assert bool(maps['overflow']) == (num_expanded < 96)
    assert int(maps['token_topk_to_pos'].max()) < num_expanded


@pytest.mark.parametrize('alignment', [1, 64])
def test_fused_mapping_as_a_tuple_with_the_host_list(alignment):
    torch.manual_seed(0)
    topk_idx = torch.randint(-1, 7, (29, 3))
    *maps, rows = get_fused_mapping(topk_idx, 7, 0, alignment)
    counts = [int((topk_idx == e).sum()) for e in range(7)]
    assert rows == [-(-c // alignment) * alignment for c in counts] == maps[6].tolist()
    assert [tuple(m.shape) for m in maps] == [(sum(rows),)] * 3 + [(29, 3)] + [(7,)] * 3
    assert all(m.dtype is torch.int32 for m in maps)
    expected = twins.get_fused_mapping(topk_idx, 7, 0, alignment)
    assert expected[-1] == rows
    for actual, tensor in zip(maps, expected, strict=False):
        torch.testing.assert_close(actual, tensor, rtol=0, atol=0)


@pytest.mark.parametrize(('num_expanded', 'force_no_sync'), [(64, False), (64, True), (0, True)])
def test_a_given_size_needs_no_host(num_expanded, force_no_sync):
    topk_idx = torch.arange(20).view(10, 2) % 5
    *maps, rows = get_fused_mapping(topk_idx, 5, num_expanded, 8, force_no_sync)
    assert rows == []
    assert all(m.shape == (num_expanded,) for m in maps[:3])
    assert int((maps[3] >= 0).sum()) == min(20, num_expanded)


def test_the_friendly_map():
    topk_indices = torch.tensor([[2, 0], [-1, 2], [0, 1]])
    routing_map = token_to_expert_map(topk_indices, num_experts=3, alignment=2)
    assert routing_map.token_topk_to_pos.tolist() == [[4, 0], [-1, 5], [1, 2]]
    assert routing_map.pos_to_token[:6].tolist() == [0, 2, 2, -1, 0, 1]
    assert routing_map.pos_to_expert[:6].tolist() == [0, 0, 1, -1, 2, 2]
    assert routing_map.expert_end.tolist() == [2, 4, 6]
    assert not routing_map.overflow
    assert token_to_expert_map(topk_indices, 3, num_expanded=4).overflow.item() == 1
    twin = twins.token_to_expert_map(topk_indices, num_experts=3, alignment=2)
    for actual, expected in zip(_pytree.tree_leaves(routing_map), _pytree.tree_leaves(twin), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_the_map_is_a_pytree():
    routing_map = token_to_expert_map(torch.tensor([[1], [0]]), num_experts=2)
    leaves, spec = _pytree.tree_flatten(routing_map)
    assert len(leaves) == 8
    again = _pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, RoutingMap)
    assert again.pos_to_token is routing_map.pos_to_token


def test_one_graph_for_any_number_of_tokens():
    counter = CompileCounter()
    compiled = torch.compile(
        lambda x: token_to_expert_map(x, num_experts=4, alignment=8).pos_to_token,
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    for num_tokens in (8, 13, 40):
        topk_idx = torch.randint(-1, 4, (num_tokens, 2))
        torch.testing.assert_close(compiled(topk_idx), token_to_expert_map(topk_idx, 4, 8).pos_to_token)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ('call', 'sentence'),
    [
        (lambda x: get_fused_mapping(x.float(), 4, 0, 1), 'topk_idx must be int64 or int32, got float32'),
        (lambda x: get_fused_mapping(x, 0, 64, 1), 'num_experts must be at least 1, got 0'),
        (lambda x: get_fused_mapping(x, 5000, 64, 1), 'num_experts must be at most 4096, got 5000'),
        (lambda x: get_fused_mapping(x, 4, -1, 1), 'num_expanded_tokens must be at least 0, got -1'),
        (lambda x: token_to_expert_map(x.float(), 4), 'topk_indices must be int64 or int32'),
        (lambda x: token_to_expert_map(x.new_empty(6, 0), 4), 'num_topk must be at least 1, got 0'),
        (lambda x: token_to_expert_map(x, 4, 0), 'alignment must be at least 1, got 0'),
        (lambda x: get_fused_mapping(x.t(), 4, 0, 1), 'topk_idx must be contiguous'),
        (lambda x: token_to_expert_map(x[0], 4), r'topk_indices must be \(num_tokens, num_topk\)'),
    ],
)
def test_refusals_are_sentences(call, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        call(torch.zeros(6, 2, dtype=torch.int64))
