"""Gates with everything that goes with them: against a definition in Python, and gradients against float64 autograd."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tile_kernels.reference as reference
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.knobs import knobs
from tile_kernels.moe import (
    ScoringFunc,
    mask_indices_by_tp,
    moe_topk_gate,
    moe_topk_gate_backward,
    moe_topk_gate_forward,
    route_topk_,
    top2_sum_gate,
    topk_gating,
    topk_sum_and_topk_group_idx,
)
from tile_kernels.moe.route_topk_kernels import route_topk_kernel
from tile_kernels.moe.scoring import SCORINGS
from tile_kernels.reference.moe._common import best_groups, score, stable_topk_of

NAN, INF = float('nan'), float('inf')


@pytest.fixture(params=['twin', 'one row per warp', 'two rows per warp'])
def path(request, monkeypatch):
    """All ways the op runs on a CPU: its twin, and its kernel as it takes few and many tokens."""
    rows = 2 if request.param == 'two rows per warp' else 1
    monkeypatch.setattr(route_topk_kernel, 'choose', lambda *_: dict(num_warps=2, rows=rows))
    with knobs(interpret=request.param != 'twin'):
        yield request.param


def spread(num_tokens, num_experts, seed=0):
    """Logits of every token in random order on a grid, so that no rounding of a score can change the choice."""
    order = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)).argsort(dim=1)
    return order * (8 / num_experts) - 4


def forward(logits, num_topk, num_shared=0, factor=1.0, ep_rank=0, **options):
    return moe_topk_gate(logits, num_topk, num_shared > 0, num_shared, factor, ep_rank, **options)


def top2(logits, bias, num_topk, groups=(0, 0), num_shared=0, ranks=(0, 1, 0, 1), scoring='sigmoid', **options):
    num_topk_groups, num_groups = groups
    shared = (num_shared > 0, num_shared)
    return top2_sum_gate(logits, bias, num_topk, num_topk_groups, num_groups, *shared, 2.5, *ranks, scoring, **options)


def choice(ranked, num_topk, groups):
    """The definition for one token in Python."""
    num_topk_groups, num_groups = groups
    experts = range(len(ranked))
    if num_groups:
        size = len(ranked) // num_groups
        sums = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
        kept = sorted(range(num_groups), key=lambda g: (-sums[g], g))[:num_topk_groups]
        experts = [e for e in experts if e // size in kept]
    return sorted(experts, key=lambda e: (-ranked[e], e))[:num_topk]


# Choice -------------------------------------------------------------------------------------


@pytest.mark.parametrize('groups', [(0, 0), (8, 8), (4, 8), (1, 2), (3, 12)])
@pytest.mark.parametrize('scoring', SCORINGS)
def test_groups_of_largest_top2_sum(scoring, groups, path):
    logits, bias = spread(3, 96), torch.linspace(-0.1, 0.1, 96)
    idx, weights = top2(logits, bias, 6, groups, scoring=scoring)
    scores = score(logits, scoring)
    ranked = (logits if scoring == 'softmax' else scores) + bias
    assert idx.tolist() == [choice(row, 6, groups) for row in ranked.tolist()]
    chosen = scores.gather(1, idx).double()
    torch.testing.assert_close(weights.double(), chosen / chosen.sum(1, keepdim=True) * 2.5, rtol=1e-5, atol=1e-6)


def test_equal_scores_take_the_smaller_expert_and_group(path):
    idx, _ = top2(torch.zeros(2, 64), torch.zeros(64), 6, (4, 8))
    assert idx.tolist() == [list(range(6))] * 2


@pytest.mark.parametrize('scoring', ['sigmoid', 'sqrtsoftplus'])
@pytest.mark.parametrize('bias_size', [1e-3, 1.0, 1e4])
def test_bias_of_any_size_ranks_exact_scores(scoring, bias_size, path):
    torch.manual_seed(1)
    logits, bias = torch.randn(4, 256) * 3, torch.randn(256) * bias_size
    logits[0, 5], logits[0, 7], logits[1, :200], logits[2, ::3] = INF, -INF, NAN, 90.0
    idx, _ = forward(logits, 8, bias=bias, scoring_func=scoring)
    assert idx.tolist() == reference.stable_topk(score(logits, scoring) + bias, 8).tolist()


def test_estimates_close_to_the_cut_do_not_decide(path):
    """Scores that differ in the last bits only: the exact ones rank."""
    steps = torch.randperm(256, generator=torch.Generator().manual_seed(0)).int()
    logits = (torch.tensor([[1.0], [-9.0]]).view(torch.int32) + steps).view(torch.float32)
    for scoring in ('sigmoid', 'sqrtsoftplus'):
        scores = torch.empty(2, 256)
        idx, _ = forward(logits, 8, bias=torch.zeros(256), scoring_func=scoring, scores=scores)
        assert idx.tolist() == reference.stable_topk(scores, 8).tolist()


@pytest.mark.parametrize('scoring', ['sigmoid', 'sqrtsoftplus'])
def test_groups_whose_sums_are_close(scoring, path):
    """Sums that differ in the last bits, or not at all: the exact ones decide."""
    steps = torch.randperm(64, generator=torch.Generator().manual_seed(0)).int()
    logits = (torch.tensor([[1.0], [-9.0], [0.5], [0.5]]).view(torch.int32) + steps).view(torch.float32)
    logits[2] = 0.5
    logits[3, 9] = NAN
    idx, weights, scores = torch.empty(4, 6, dtype=torch.int64), torch.empty(4, 6), torch.empty(4, 64)
    route_topk_(idx, weights, logits, scoring, bias=torch.zeros(64), num_groups=8, num_topk_groups=3, scores=scores)
    expected = stable_topk_of(scores, best_groups(scores, 8, 3), 6)
    assert torch.equal(idx, expected)


def test_infinite_and_missing_biases(path):
    logits, bias = spread(2, 64), torch.zeros(64)
    bias[3], bias[4], bias[5] = INF, -INF, NAN
    idx, _ = forward(logits, 8, bias=bias)
    assert idx[:, 0].tolist() == [3, 3]
    assert idx.tolist() == reference.stable_topk(score(logits, 'sqrtsoftplus') + bias, 8).tolist()


def test_image_tokens_have_their_own_bias(path):
    logits, image = spread(4, 64), torch.tensor([True, False, True, False])
    bias, image_bias = torch.zeros(64), torch.zeros(64)
    bias[7], image_bias[9] = 50.0, 50.0
    for options, plain_first in ((dict(bias=bias), 7), ({}, None)):
        idx, _ = forward(logits, 4, image_bias=image_bias, image_token_mask=image, **options)
        assert idx[image, 0].tolist() == [9, 9]
        expected = logits[~image].argmax(1) if plain_first is None else torch.tensor([7, 7])
        assert idx[~image, 0].tolist() == expected.tolist()


# Rows that are not chosen -------------------------------------------------------------------


def test_masked_tokens_get_nothing(path):
    logits = spread(5, 64)
    logits[1] = NAN
    mask = torch.tensor([True, False, True, False, True])
    unmapped, scores = torch.full((5, 4), 77), torch.full((5, 64), 7.0)
    idx, weights = forward(logits, 4, mask=mask, unmapped_topk_idx=unmapped, scores=scores)
    assert (idx[~mask] == -1).all() and (weights[~mask] == 0).all()
    assert (unmapped[~mask] == -1).all() and (scores[~mask] == 0).all()
    assert torch.equal(unmapped[mask], idx[mask])
    torch.testing.assert_close(scores[mask], score(logits, 'sqrtsoftplus')[mask], rtol=2e-6, atol=0)


@pytest.mark.parametrize('scoring', SCORINGS)
def test_fixed_routing_takes_the_experts_given(scoring, path):
    logits = spread(4, 64)
    unmapped = torch.tensor([[5, 9, 60], [1, 1, 2], [3, -1, 99], [-1, -5, 64]])
    expected = unmapped.clone().masked_fill((unmapped < 0) | (unmapped >= 64), -1)
    scores = torch.empty(4, 64)
    options = dict(fix_routing_mask=torch.ones(4, dtype=torch.bool), unmapped_topk_idx=unmapped, scores=scores)
    idx, weights = forward(logits, 3, factor=2.0, scoring_func=scoring, **options)
    assert torch.equal(idx, expected) and torch.equal(unmapped, expected)
    chosen = torch.where(expected >= 0, score(logits, scoring).gather(1, expected.clamp(min=0)), 0.0)
    assert (weights[expected < 0] == 0).all()
    torch.testing.assert_close(weights, chosen / (chosen.sum(1, keepdim=True) + 1e-20) * 2, rtol=1e-5, atol=1e-6)


def test_unmapped_rows_may_be_strided(path):
    wide = torch.full((3, 9), 77)
    idx, _ = forward(spread(3, 64), 4, unmapped_topk_idx=wide[:, 2:6])
    assert torch.equal(wide[:, 2:6], idx)
    assert (wide[:, :2] == 77).all() and (wide[:, 6:] == 77).all()


def test_random_experts_are_distinct_and_spread(path):
    num_tokens = 9 if path != 'twin' else 4000
    logits, force = torch.randn(num_tokens, 24), torch.ones(num_tokens, dtype=torch.bool)
    force[1] = False
    unmapped, scores = torch.empty(num_tokens, 6, dtype=torch.int64), torch.empty(num_tokens, 24)
    idx, weights = forward(logits, 6, ep_rank=2, force_random=force, unmapped_topk_idx=unmapped, scores=scores)
    again, _ = forward(logits, 6, ep_rank=2, force_random=force)
    other, _ = forward(logits, 6, ep_rank=3, force_random=force)
    assert torch.equal(idx, again) and not torch.equal(idx[force], other[force])
    assert all(len(set(row)) == 6 for row in idx.tolist())
    assert idx.min() >= 0 and idx.max() < 24
    assert (unmapped[force] == -1).all() and (scores[force] == 0).all()
    assert (weights[force] >= 0).all() and (weights[force] < 1).all()
    assert torch.equal(idx[~force], unmapped[~force])
    if path == 'twin':
        counts = torch.bincount(idx[force].flatten(), minlength=24).double()
        expected = 3999 * 6 / 24
        assert ((counts - expected).abs() < 5 * expected**0.5).all()
        assert abs(weights[force].mean().item() - 0.5) < 0.01


def test_mask_goes_before_random_before_fixed(path):
    logits, yes = spread(4, 32), torch.tensor([True, True, False, False])
    given = torch.arange(8).view(4, 2)
    options = dict(unmapped_topk_idx=given.clone(), fix_routing_mask=torch.ones(4, dtype=torch.bool))
    idx, _ = forward(logits, 2, mask=torch.tensor([True, False, True, False]), force_random=yes, **options)
    alone, _ = forward(logits, 2, force_random=yes)
    assert idx.tolist() == [alone[0].tolist(), [-1, -1], given[2].tolist(), [-1, -1]]


# Places -------------------------------------------------------------------------------------


def test_replicas_are_taken_in_turns(path):
    logits, counts = spread(6, 32), torch.arange(1, 35, dtype=torch.int32) % 5 + 1
    table = torch.arange(34 * 5, dtype=torch.int32).view(34, 5)
    unmapped = torch.empty(6, 4, dtype=torch.int64)
    idx, weights = forward(
        logits, 4, num_shared=2, ep_rank=7, to_physical_map=table, logical_count=counts, unmapped_topk_idx=unmapped
    )
    for t in range(6):
        logical = [*unmapped[t].tolist(), 32, 33]
        assert idx[t].tolist() == [int(table[e, (7 + t * 23333) % int(counts[e])]) for e in logical]
    assert (weights[:, 4:] == 1).all()


def test_turns_do_not_overflow():
    """Token 92,038 is the first whose number of turns does not fit into 32 bits."""
    num_tokens = 92_045
    logits, counts = torch.zeros(num_tokens, 2), torch.tensor([7, 7], dtype=torch.int32)
    table = torch.arange(14, dtype=torch.int32).view(2, 7)
    idx, _ = forward(logits, 1, to_physical_map=table, logical_count=counts)
    with knobs(interpret=True):
        kernel, _ = forward(logits, 1, to_physical_map=table, logical_count=counts)
    assert idx[-3:, 0].tolist() == [t * 23333 % 7 for t in range(num_tokens - 3, num_tokens)]
    assert torch.equal(kernel, idx)


@pytest.mark.parametrize('tp_rank', [0, 1])
def test_ranks_see_their_experts_alone(tp_rank, path):
    logits, bias = spread(5, 64), torch.zeros(64)
    table = torch.arange(66, dtype=torch.int32).view(66, 1).repeat(1, 3)
    options = dict(to_physical_map=table, logical_count=torch.ones(66, dtype=torch.int32))
    alone, weights = top2(logits, bias, 6, num_shared=2, **options)
    idx, same = top2(logits, bias, 6, num_shared=2, ranks=(0, 4, tp_rank, 2), **options)
    assert torch.equal(idx, mask_indices_by_tp(alone, 66, 4, tp_rank, 2))
    assert torch.equal(weights, same)


# Memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_short_strided_and_misaligned_logits(dtype, path):
    bias = torch.randn(201)
    wide = spread(4, 200).to(dtype)
    for logits, added in ((wide[:, :128], bias[:128]), (wide[:, 3:131], bias[:128]), (wide[:, :128], bias[1:129])):
        scores = torch.empty(4 * 128 + 1)[1:].view(4, 128)
        idx, weights = forward(logits, 8, bias=added, scores=scores)
        expected, chosen = topk_gating(logits.float().contiguous(), 8, scoring='sqrtsoftplus', bias=added.clone())
        assert torch.equal(idx, chosen)
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(scores, score(logits.float(), 'sqrtsoftplus'), rtol=2e-6, atol=0)


def test_results_go_where_they_are_wanted(path):
    out = torch.full((3, 5), 7), torch.full((3, 5), 7.0)
    idx, weights = forward(spread(3, 64), 4, num_shared=1, out=out)
    assert idx is out[0] and weights is out[1]
    assert (idx[:, 4] == 64).all() and (weights[:, 4] == 1).all()


def test_no_tokens(path):
    idx, weights = forward(torch.empty(0, 64), 4)
    assert idx.shape == weights.shape == (0, 4)


def test_the_alias_and_the_members_of_the_enum():
    logits = spread(2, 64)
    assert moe_topk_gate is moe_topk_gate_forward
    by_member = forward(logits, 4, scoring_func=ScoringFunc.SIGMOID)
    assert all(torch.equal(a, b) for a, b in zip(by_member, forward(logits, 4, scoring_func='sigmoid'), strict=True))


def test_references_take_the_same_arguments():
    logits, bias = spread(3, 64), torch.zeros(64)
    expected = reference.moe_topk_gate(logits, 4, False, 0, 1.5, 0, 'sigmoid', bias=bias)
    actual = moe_topk_gate(logits, 4, False, 0, 1.5, 0, 'sigmoid', bias=bias)
    assert torch.equal(actual[0], expected[0])
    args = (logits, bias, 4, 2, 4, False, 0, 1.5, 0, 1, 0, 1, 'softmax')
    assert torch.equal(top2_sum_gate(*args)[0], reference.top2_sum_gate(*args)[0])


def test_one_graph():
    def step(logits, bias, mask):
        idx, weights = moe_topk_gate(logits, 4, True, 1, 2.0, 0, bias=bias, mask=mask)
        grouped = top2_sum_gate(logits, bias, 4, 2, 4, False, 0, 1.0, 0, 1, 0, 1, 'sigmoid')
        return idx, weights, *grouped

    counter = CompileCounter()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for num_tokens in (3, 8, 17):
        args = (spread(num_tokens, 64), torch.zeros(64), torch.rand(num_tokens) < 0.5)
        assert all(torch.equal(a, b) for a, b in zip(compiled(*args), step(*args), strict=True))
    assert counter.frame_count == 1


# Gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize('scoring', SCORINGS)
@pytest.mark.parametrize('num_seqs', [0, 2])
def test_gradient_is_that_of_float64_autograd(scoring, num_seqs, path):
    num_tokens, num_experts, factor = 6, 40, 2.5
    logits = spread(num_tokens, num_experts) + (5.0 if scoring == 'identity' else 0.0)
    mask = torch.tensor([True, True, False, True, True, True])
    unmapped, scores = torch.empty(num_tokens, 4, dtype=torch.int64), torch.empty(num_tokens, num_experts)
    options = dict(scoring_func=scoring, mask=mask, unmapped_topk_idx=unmapped, scores=scores)
    _, weights = forward(logits, 4, factor=factor, **options)
    upstream = torch.randn(num_tokens, 4)
    dsums = torch.randn(num_seqs, num_experts) if num_seqs else None
    gradient = moe_topk_gate_backward(scores, unmapped, weights, upstream, factor, scoring, mask, dsums)

    exact = logits.double().requires_grad_()
    u = score(exact, scoring)[mask]
    chosen = u.gather(1, unmapped[mask])
    loss = (chosen / chosen.sum(1, keepdim=True) * factor * upstream[mask]).sum()
    if dsums is not None:
        per_token = dsums.double().repeat_interleave(num_tokens // num_seqs, 0)[mask]
        loss = loss + (u / u.sum(1, keepdim=True) * per_token).sum()
    (expected,) = torch.autograd.grad(loss, exact)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('interpret', [False, True])
def test_gradient_of_an_expert_that_comes_twice(interpret):
    scores = torch.rand(2, 8) + 0.1
    idx = torch.tensor([[3, 3, 5], [1, -1, 1]])
    chosen = torch.where(idx >= 0, scores.gather(1, idx.clamp(min=0)), 0.0)
    weights = chosen / chosen.sum(1, keepdim=True)
    upstream, out = torch.randn(2, 3), torch.full((2, 8), NAN)
    with knobs(interpret=interpret):
        assert moe_topk_gate_backward(scores, idx, weights, upstream, 1.0, 'identity', out=out) is out
    exact = scores.double().requires_grad_()
    values = torch.where(idx >= 0, exact.gather(1, idx.clamp(min=0)), 0.0)
    (expected,) = torch.autograd.grad(values / values.sum(1, keepdim=True), exact, upstream.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('interpret', [False, True])
def test_slope_of_tiny_and_large_scores(interpret):
    x = torch.tensor([[-80.0, -30.0, -10.0, -1.3, -1.2, 0.0, 10.0, 25.0]])
    scores = score(x, 'sqrtsoftplus')
    idx, ones = torch.arange(8).view(1, 8), torch.zeros(1, 8)
    dsums, mask = torch.zeros(1, 8), torch.ones(1, dtype=torch.bool)
    upstream = torch.rand(1, 8) + 0.5
    with knobs(interpret=interpret):
        gradient = moe_topk_gate_backward(scores, idx, ones, upstream, 1.0, 'sqrtsoftplus', mask, dsums)
    exact = x.double().requires_grad_()
    u = exact.exp().log1p().sqrt()
    (expected,) = torch.autograd.grad((u * upstream / u.sum().detach()).sum(), exact)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-30)


# Groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize('interpret', [False, True])
@pytest.mark.parametrize('shape', [(3, 4, 18), (3, 8, 32), (2, 1, 5), (2, 33, 2), (2, 64, 1), (2, 5, 7)])
def test_groups_by_the_sum_of_their_best(shape, interpret):
    scores = torch.randn(shape).mul(4).round()
    scores[0, 0, 0] = NAN
    num_groups = min(shape[1], 3)
    for num_topk_sum in (1, 2)[: shape[2]]:
        with knobs(interpret=interpret):
            found = topk_sum_and_topk_group_idx(scores, num_topk_sum, num_groups)
        assert found.dtype == torch.int64
        for row, groups in zip(scores.tolist(), found.tolist(), strict=True):
            best = [sorted(group, key=lambda x: (x != x, -x if x == x else 0))[:num_topk_sum] for group in row]
            sums = [sum(b) for b in best]
            order = sorted(
                range(len(sums)), key=lambda g: (sums[g] != sums[g], -sums[g] if sums[g] == sums[g] else 0, g)
            )
            assert groups == order[:num_groups]


# Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('options', 'sentence'),
    [
        (dict(num_topk=65), 'num_topk must be at most 64, got 65'),
        (dict(num_topk=0), 'num_topk must be at least 1, got 0'),
        (dict(scoring_func='tanh'), "scoring_func must be one of sigmoid, sqrtsoftplus, softmax, identity, got 'tanh'"),
        (dict(bias=torch.zeros(71)), 'bias must be (num_experts) with num_experts = 72, got float32[71] on cpu'),
        (dict(image_bias=torch.zeros(72)), 'image_bias must come with image_token_mask, got no image_token_mask'),
        (dict(mask=torch.zeros(2)), 'mask must be bool, got float32[2] on cpu'),
        (dict(mask=torch.zeros(3).bool()), 'mask must be (num_tokens) with num_tokens = 2, got bool[3] on cpu'),
        (
            dict(fix_routing_mask=torch.zeros(2).bool()),
            'fix_routing_mask must come with unmapped_topk_idx, got no unmapped_topk_idx',
        ),
        (
            dict(to_physical_map=torch.zeros(72, 2).int()),
            'to_physical_map must come with logical_count, got no logical_count',
        ),
        (dict(num_shared_experts=17, use_shared_as_routed=True), 'num_shared_experts must be at most 16, got 17'),
        (dict(ep_rank=-1), 'ep_rank must be at least 0, got -1'),
        (
            dict(out=(torch.zeros(2, 5).long(), torch.zeros(2, 5))),
            'out[0] must be (num_tokens, num_slots) with num_slots = 6, got int64[2, 5] on cpu',
        ),
        (
            dict(out=(torch.zeros(2, 6).long(), torch.zeros(2, 6).half())),
            'out[1] must be float32, got float16[2, 6] on cpu',
        ),
    ],
)
def test_errors_are_one_sentence(options, sentence):
    arguments = dict(num_topk=6, use_shared_as_routed=False, num_shared_experts=0, routed_scaling_factor=1.0, ep_rank=0)
    with pytest.raises(ArgumentError) as raised:
        moe_topk_gate_forward(torch.randn(2, 72), **{**arguments, **options})
    assert str(raised.value) == f'moe.moe_topk_gate_forward: {sentence}'


def test_errors_of_the_others():
    logits = torch.randn(4, 64)
    with pytest.raises(ArgumentError, match=r'moe\.top2_sum_gate: num_groups must come with num_topk_groups'):
        top2(logits, None, 6, groups=(0, 8))
    with pytest.raises(ArgumentError, match='use_shared_as_routed must come with to_physical_map'):
        top2(logits, None, 6, num_shared=1)
    with pytest.raises(ArgumentError, match='tp_rank must be at most 1, got 2'):
        top2(logits, None, 6, ranks=(0, 2, 2, 2))
    with pytest.raises(ArgumentError, match=r'moe\.topk_sum_and_topk_group_idx: num_topk_sum must be one of 1, 2'):
        topk_sum_and_topk_group_idx(logits.view(4, 8, 8), 3, 2)
    idx, weights = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)
    with pytest.raises(ArgumentError, match=r'moe\.moe_topk_gate_backward: grad_scores_sum must come with mask'):
        moe_topk_gate_backward(logits, idx, weights, weights, 1.0, grad_scores_sum=torch.zeros(1, 64))
    with pytest.raises(ArgumentError, match='num_tokens must be a multiple of 3, got 4'):
        moe_topk_gate_backward(
            logits, idx, weights, weights, 1.0, mask=torch.ones(4).bool(), grad_scores_sum=torch.zeros(3, 64)
        )
