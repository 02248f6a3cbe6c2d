"""The way of a token to its experts, gate -> map -> expand and quantise: one traced graph, one CUDA graph, no gaps."""

import itertools
import statistics

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tile_kernels.reference.moe as twins
from tile_kernels.core.formats import QuantFormat
from tile_kernels.moe import expand_and_per_token_cast, token_to_expert_map, topk_gating
from tile_kernels.testing import assert_equal

if not torch.cuda.is_available():
    pytest.skip('needs a CUDA device', allow_module_level=True)

NUM_TOKENS, HIDDEN, NUM_EXPERTS, NUM_TOPK, ALIGNMENT = 4096, 7168, 256, 8, 128
FORMATS = ['e4m3_1x128_f32', 'e4m3_1x128_ue8m0x4_col']


def route(logits, hidden, fmt):
    """Weights, places and quantised rows in expert order."""
    weights, experts = topk_gating(logits, top_k=NUM_TOPK)
    routing_map = token_to_expert_map(experts, num_experts=NUM_EXPERTS, alignment=ALIGNMENT)
    rows = expand_and_per_token_cast(hidden, routing_map.token_topk_to_pos, routing_map.pos_to_expert, fmt)
    return weights, routing_map.token_topk_to_pos, routing_map.expert_end, rows.data, rows.sf


def route_twin(logits, hidden, fmt):
    _, experts = twins.topk_gating(logits, top_k=NUM_TOPK)
    routing_map = twins.token_to_expert_map(experts, num_experts=NUM_EXPERTS, alignment=ALIGNMENT)
    rows = twins.expand_and_per_token_cast(hidden, routing_map.token_topk_to_pos, routing_map.pos_to_expert, fmt)
    return routing_map.token_topk_to_pos, routing_map.expert_end, rows.data, rows.sf


def inputs():
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, device='cuda')
    return logits, torch.randn(NUM_TOKENS, HIDDEN, device='cuda', dtype=torch.bfloat16)


def captured(*args):
    """A CUDA graph of the route and its results."""
    for _ in range(3):
        route(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = route(*args)
    return graph, results


@pytest.mark.parametrize('fmt', FORMATS)
def test_the_route_is_one_traced_graph(fmt):
    logits, hidden = inputs()
    fmt = QuantFormat.parse(fmt)
    compiled = torch.compile(lambda logits, hidden: route(logits, hidden, fmt), fullgraph=True)
    results = compiled(logits, hidden)
    for actual, expected in zip(results, route(logits, hidden, fmt), strict=True):
        assert_equal(actual, expected)
    for actual, expected in zip(results[1:], route_twin(logits, hidden, fmt), strict=True):
        assert_equal(actual, expected)


@pytest.mark.parametrize('fmt', FORMATS)
def test_the_route_is_one_cuda_graph(fmt):
    logits, hidden = inputs()
    fmt = QuantFormat.parse(fmt)
    graph, results = captured(logits, hidden, fmt)
    for _ in range(3):
        fresh = inputs()
        logits.copy_(fresh[0])
        hidden.copy_(fresh[1])
        graph.replay()
        for actual, expected in zip(results, route(*fresh, fmt), strict=True):
            assert_equal(actual, expected)


def kernel_spans(graph, replays=20):
    """(start, end) of every kernel of each replay in microseconds, in order."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            graph.replay()
            torch.cuda.synchronize()
    events = [e for e in profiler.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.start_ns() / 1e3, (e.start_ns() + e.duration_ns()) / 1e3) for e in events if 'kernel' in e.name())
    per_replay, rest = divmod(len(spans), replays)
    assert per_replay > 0 and rest == 0
    return [spans[i * per_replay : (i + 1) * per_replay] for i in range(replays)]


@pytest.mark.parametrize('fmt', FORMATS)
def test_no_gap_between_kernels_is_longer_than_1_us(fmt):
    graph, _ = captured(*inputs(), QuantFormat.parse(fmt))
    gaps = []
    for spans in kernel_spans(graph):
        gaps.append([start - end for (_, end), (start, _) in itertools.pairwise(spans)])
    medians = [statistics.median(of) for of in zip(*gaps, strict=True)]
    assert max(medians) <= 1.0, f'gaps between kernels: {[round(m, 2) for m in medians]} us'
