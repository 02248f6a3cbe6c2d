"""Gating: choice, weights and gradients for every scoring."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import forced_config
from tile_kernels.moe import ScoringFunc, topk_gate, topk_gating, topk_gating_bwd
from tile_kernels.moe._macros import LOG1P_OVER_T, LOG2_E, estimate_error
from tile_kernels.moe.scoring import SCORINGS
from tile_kernels.moe.topk_gating_kernels import topk_gating_bwd_kernel, topk_gating_kernel
from tile_kernels.reference import moe as twins
from tile_kernels.reference.moe._common import score

NAN, INF = float('nan'), float('inf')
CLOSE = dict(rtol=2e-6, atol=1e-7)


@pytest.fixture(params=['twin', 'one row per warp', 'two rows per warp'])
def path(request, monkeypatch):
    """All ways the op runs on a CPU: its twin, and its kernel as it takes few and many tokens."""
    rows = 2 if request.param == 'two rows per warp' else 1
    monkeypatch.setattr(topk_gating_kernel, 'choose', lambda *_: dict(num_warps=2, rows=rows))
    with knobs(interpret=request.param != 'twin'):
        yield request.param


def spread_logits(num_tokens, num_experts, seed=0):
    """Logits of every token in random order on a grid, so that no rounding of a score can change the choice."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)
    return order * (8 / num_experts) - 4


def score64(logits, scoring):
    """Scores in float64, from the formulas."""
    x = logits.double()
    return {
        'softmax': lambda: x.exp() / x.exp().sum(-1, keepdim=True),
        'sigmoid': lambda: 1 / (1 + (-x).exp()),
        'sqrtsoftplus': lambda: (1 + x.exp()).log().sqrt(),
        'identity': lambda: x,
    }[scoring]()


# Choice and weights -------------------------------------------------------------------------


@pytest.mark.parametrize('renormalize', [True, False])
@pytest.mark.parametrize('scoring', SCORINGS)
@pytest.mark.parametrize(('num_experts', 'top_k'), [(256, 8), (72, 6), (40, 20), (80, 40), (8, 8)])
def test_choice_and_weights(num_experts, top_k, scoring, renormalize, path):
    logits = spread_logits(3, num_experts)
    weights, indices = topk_gating(logits, top_k, scoring=scoring, renormalize=renormalize, routed_scaling_factor=2.5)
    scores = score64(logits, scoring).gather(1, indices)
    if renormalize:
        scores = scores / scores.sum(1, keepdim=True)
    assert torch.equal(indices, logits.sort(dim=1, descending=True).indices[:, :top_k])
    rtol = 1e-3 if scoring == 'identity' and renormalize else 1e-5  # scores of both signs cancel in the sum
    torch.testing.assert_close(weights.double(), scores * 2.5, rtol=rtol, atol=1e-7)


def test_softmax_is_the_default_and_weights_sum_to_one(path):
    logits = torch.randn(5, 64)
    weights, indices = topk_gating(logits)
    assert weights.dtype == torch.float32
    assert indices.dtype == torch.int64
    chosen = logits.gather(1, indices).softmax(-1)
    torch.testing.assert_close(weights, chosen, **CLOSE)
    torch.testing.assert_close(weights.sum(1), torch.ones(5))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('scoring', SCORINGS)
def test_short_logits_are_scored_in_float32(scoring, dtype, path):
    logits = torch.randn(4, 128).to(dtype)
    weights, indices = topk_gating(logits, 8, scoring=scoring)
    expected, chosen = twins.topk_gating(logits.float(), 8, scoring=scoring)
    assert torch.equal(indices, chosen)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('scoring', SCORINGS)
def test_bias_moves_the_choice_and_not_the_weight(scoring, path):
    logits = spread_logits(4, 96)
    bias = torch.zeros(96)
    bias[[5, 90]] = 100.0
    weights, indices = topk_gating(logits, 6, scoring=scoring, renormalize=False, bias=bias)
    assert indices[:, :2].sort(dim=1).values.tolist() == [[5, 90]] * 4
    scores = score64(logits, scoring).gather(1, indices)
    torch.testing.assert_close(weights.double(), scores, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('scoring', SCORINGS)
def test_ties_take_the_smaller_index(scoring, path):
    logits = torch.zeros(2, 128)
    logits[1, 64:] = 1.0
    _, indices = topk_gating(logits, 8, scoring=scoring)
    assert indices.tolist() == [list(range(8)), list(range(64, 72))]


@pytest.mark.parametrize('scoring', ['sigmoid', 'sqrtsoftplus'])
def test_logits_whose_scores_round_alike_are_ties(scoring, path):
    steps = torch.arange(64, dtype=torch.int32)
    neighbours = [(torch.tensor([x]).view(torch.int32) + steps).view(torch.float32) for x in (3.0, 7.0, 25.0)]
    saturated = torch.linspace(30, 40, 64) if scoring == 'sigmoid' else torch.linspace(-300, -200, 64)
    logits = torch.stack([*neighbours, saturated])
    scores, order = topk_gating(logits, 64, scoring=scoring, renormalize=False)
    falls, ties = scores[:, :-1] > scores[:, 1:], scores[:, :-1] == scores[:, 1:]
    assert ties.any(dim=1).all()
    assert (falls | (ties & (order[:, :-1] < order[:, 1:]))).all()
    for top_k in (1, 8, 16, 17):
        weights, indices = topk_gating(logits, top_k, scoring=scoring, renormalize=False)
        assert torch.equal(indices, order[:, :top_k])
        assert torch.equal(weights, scores[:, :top_k])


@pytest.mark.parametrize('scoring', SCORINGS)
def test_nan_is_chosen_last(scoring, path):
    logits = spread_logits(2, 64)
    logits[0, ::2] = NAN
    logits[1, 4:] = NAN
    _, indices = topk_gating(logits, 8, scoring=scoring)
    assert not logits[0, indices[0]].isnan().any()
    assert logits[1, indices[1]].isnan().tolist() == [False] * 4 + [True] * 4
    assert indices[1, 4:].tolist() == [4, 5, 6, 7]


def test_masked_experts_get_no_weight(path):
    logits = torch.full((1, 64), -INF)
    logits[0, [3, 40]] = torch.tensor([1.0, 2.0])
    weights, indices = topk_gating(logits, 4)
    assert indices.tolist() == [[40, 3, 0, 1]]
    torch.testing.assert_close(
        weights, torch.tensor([[1.0, 2.0, -INF, -INF]]).flip(1).softmax(1).sort(descending=True)[0]
    )


def test_rows_of_zero_scores_stay_finite(path):
    weights, _ = topk_gating(torch.full((1, 32), -300.0), 4, scoring='sqrtsoftplus')
    assert weights.tolist() == [[0.0] * 4]


def test_no_tokens(path):
    weights, indices = topk_gating(torch.empty(0, 64), 4, index_dtype=torch.int32)
    assert weights.shape == indices.shape == (0, 4)
    assert indices.dtype == torch.int32


@pytest.mark.parametrize('num_warps', topk_gating_kernel.space['num_warps'])
def test_every_config(num_warps):
    logits = spread_logits(19, 96)
    expected, chosen = topk_gating(logits, 6, renormalize=False)
    gradient = topk_gating_bwd(expected, logits, chosen, renormalize=False)
    with knobs(interpret=True):
        for rows in topk_gating_kernel.space['rows']:
            with forced_config(num_warps=num_warps, rows=rows):
                weights, indices = topk_gating(logits, 6, renormalize=False)
            assert torch.equal(indices, chosen)
            torch.testing.assert_close(weights, expected, **CLOSE)
        with forced_config(num_warps=num_warps):
            actual = topk_gating_bwd(expected, logits, chosen, renormalize=False)
        torch.testing.assert_close(actual, gradient, **CLOSE)


def test_strided_and_misaligned_logits(path):
    storage = spread_logits(4, 200)
    for logits in (storage[:, :128], storage[:, 3:131], storage[:1, 1:129]):
        weights, indices = topk_gating(logits, 8)
        expected, chosen = topk_gating(logits.clone(), 8)
        assert torch.equal(indices, chosen)
        assert torch.equal(weights, expected)


@pytest.mark.parametrize('rows', topk_gating_kernel.space['rows'])
def test_kernels_neither_race_nor_leave_outputs_unwritten(rows):
    logits = torch.randn(5, 72)
    logits[2] = 0
    with knobs(interpret=True, checks='all'):
        with forced_config(num_warps=2, rows=rows):
            topk_gating(logits, 6, scoring='sigmoid')
            topk_gating(logits, 6, bias=torch.randn(72), renormalize=False)
            weights, indices = topk_gating(logits, 6, num_groups=8, num_topk_groups=3)
        topk_gating_bwd(weights, logits, indices, renormalize=False)


# Groups -------------------------------------------------------------------------------------


def choose_by_hand(ranked, top_k, num_groups, num_topk_groups):
    """Groups by the sum of their two best, then the best experts of those groups."""
    size = len(ranked) // num_groups
    sums = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
    groups = sorted(range(num_groups), key=lambda g: (-sums[g], g))[:num_topk_groups]
    experts = [e for e in range(len(ranked)) if e // size in groups]
    return sorted(experts, key=lambda e: (-ranked[e], e))[:top_k]


@pytest.mark.parametrize('scoring', SCORINGS)
@pytest.mark.parametrize(
    ('num_experts', 'num_groups', 'num_topk_groups', 'top_k'),
    [(64, 8, 4, 8), (72, 4, 2, 6), (32, 32, 5, 5), (256, 8, 4, 8), (80, 40, 7, 9), (64, 1, 1, 4), (64, 8, 8, 3)],
)
def test_only_the_best_groups_take_part(num_experts, num_groups, num_topk_groups, top_k, scoring, path):
    logits = spread_logits(3, num_experts)
    bias = torch.randn(num_experts).mul(8).round().div(64)
    _, indices = topk_gating(
        logits, top_k, scoring=scoring, bias=bias, num_groups=num_groups, num_topk_groups=num_topk_groups
    )
    ranked = (logits if scoring == 'softmax' else score(logits, scoring)) + bias
    expected = [choose_by_hand(row, top_k, num_groups, num_topk_groups) for row in ranked.tolist()]
    assert indices.tolist() == expected


def test_equal_groups_take_the_first(path):
    _, indices = topk_gating(torch.zeros(1, 64), 8, num_groups=8, num_topk_groups=2)
    assert indices.tolist() == [list(range(8))]
    logits = torch.zeros(1, 64)
    logits[0, 40:42] = 1.0
    _, indices = topk_gating(logits, 10, num_groups=8, num_topk_groups=2)
    assert indices.tolist() == [[40, 41, 0, 1, 2, 3, 4, 5, 6, 7]]


def test_a_group_of_nan_comes_last(path):
    logits = spread_logits(1, 32)
    logits[0, :8] = NAN
    logits[0, 8:16] = -INF
    _, indices = topk_gating(logits, 20, num_groups=4, num_topk_groups=3)
    assert indices.min() >= 8


# Gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize('renormalize', [True, False])
@pytest.mark.parametrize('scoring', SCORINGS)
@pytest.mark.parametrize(('num_experts', 'top_k'), [(64, 8), (36, 6), (80, 40)])
def test_gradient_is_that_of_float64_autograd(num_experts, top_k, scoring, renormalize, path):
    logits = (spread_logits(3, num_experts) + (6.0 if scoring == 'identity' else 0.0)).requires_grad_()
    bias = torch.randn(num_experts)
    options = dict(scoring=scoring, renormalize=renormalize, bias=bias, routed_scaling_factor=2.5)
    weights, indices = topk_gating(logits, top_k, **options)
    upstream = torch.randn_like(weights)
    (gradient,) = torch.autograd.grad(weights, logits, upstream)

    exact_logits = logits.detach().double().requires_grad_()
    scores = score64(exact_logits, scoring).gather(1, indices)
    exact = scores / scores.sum(1, keepdim=True) if renormalize else scores
    (expected,) = torch.autograd.grad(exact * 2.5, exact_logits, upstream.double())
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('scoring', SCORINGS)
def test_gradient_of_extreme_logits_is_finite(scoring, path):
    logits = torch.tensor([[-200.0, -90.0, -30.0, 0.0, 19.0, 21.0, 60.0, 200.0]], requires_grad=True)
    weights, _ = topk_gating(logits, 8, scoring=scoring, renormalize=scoring == 'softmax')
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    assert gradient.isfinite().all()


def test_gradient_of_short_logits_and_int32_indices(path):
    logits = torch.randn(3, 128, dtype=torch.bfloat16, requires_grad=True)
    weights, indices = topk_gating(logits, 8, scoring='sigmoid', index_dtype=torch.int32)
    (gradient,) = torch.autograd.grad(weights.square().sum(), logits)
    assert gradient.dtype == torch.bfloat16
    expected = twins.topk_gating_bwd(2 * weights.detach(), logits.detach(), indices, 'sigmoid')
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-6)


def test_twin_of_the_backward_is_autograd_through_the_twin():
    for scoring in SCORINGS:
        for renormalize in (True, False):
            logits = spread_logits(3, 40).requires_grad_()
            options = dict(scoring=scoring, renormalize=renormalize, routed_scaling_factor=1.5)
            weights, indices = twins.topk_gating(logits, 6, **options)
            dweights = torch.randn_like(weights)
            (expected,) = torch.autograd.grad(weights, logits, dweights)
            actual = twins.topk_gating_bwd(dweights, logits.detach(), indices, **options)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


# Compilation --------------------------------------------------------------------------------


def test_one_graph_with_gradients():
    counter = CompileCounter()
    compiled = torch.compile(
        lambda logits: topk_gating(logits, 6, scoring='sigmoid'), backend=counter, fullgraph=True, dynamic=True
    )
    for num_tokens in (3, 8, 17):
        logits = torch.randn(num_tokens, 64, requires_grad=True)
        weights, indices = compiled(logits)
        expected, chosen = topk_gating(logits, 6, scoring='sigmoid')
        assert torch.equal(indices, chosen)
        gradients = [torch.autograd.grad(w.square().sum(), logits)[0] for w in (weights, expected)]
        assert torch.equal(*gradients)
    assert counter.frame_count == 1


def test_runtime_values_are_no_compile_keys():
    def static(num_tokens, factor):
        return topk_gating.trace(torch.randn(num_tokens, 64), 6, routed_scaling_factor=factor)[0].static

    assert static(3, 1.0) == static(4000, 2.5)


# Kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize('scoring', [ScoringFunc.SOFTMAX, ScoringFunc.SQRTSOFTPLUS])
def test_kernels_use_wide_loads_and_do_not_spill(scoring):
    static = (256, 8, torch.float32, torch.int64, scoring, True, False, 1, 1, 16, True)
    assert 'float4' in topk_gating_kernel.source(static)
    resources = topk_gating_kernel.resources(static)
    assert resources['spill_stores'] == 0
    assert resources['registers'] <= 64
    backward = (256, 8, torch.float32, torch.int64, scoring, False, 16, True)
    assert topk_gating_bwd_kernel.resources(backward)['spill_stores'] == 0


def test_long_rows_do_not_spill():
    static = (2048, 8, torch.float32, torch.int64, ScoringFunc.SOFTMAX, True, False, 1, 1, 16, True)
    assert topk_gating_kernel.resources(static)['spill_stores'] == 0


# Scoring functions --------------------------------------------------------------------------


def test_scoring_functions_by_name():
    assert [int(member) for member in ScoringFunc] == [0, 1, 2, 3]
    for member in ScoringFunc:
        assert ScoringFunc.from_str(str(member).upper()) is member
    assert str(ScoringFunc.SQRTSOFTPLUS) == 'sqrtsoftplus'
    with pytest.raises(ValueError, match='must be one of sigmoid, sqrtsoftplus, softmax, identity'):
        ScoringFunc.from_str('tanh')


def test_identity_gating_chooses_what_the_gate_chooses(path):
    scores = torch.randn(3, 72).mul(4).round()
    assert torch.equal(topk_gating(scores, 6, scoring='identity')[1], topk_gate(scores, 6))


# Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('options', 'sentence'),
    [
        (dict(top_k=65), 'top_k must be at most 64, got 65'),
        (dict(top_k=0), 'top_k must be at least 1, got 0'),
        (dict(scoring='tanh'), "scoring must be one of sigmoid, sqrtsoftplus, softmax, identity, got 'tanh'"),
        (dict(index_dtype=torch.int16), 'index_dtype must be one of torch.int64, torch.int32, got torch.int16'),
        (dict(bias=torch.zeros(71)), 'bias must be (num_experts) with num_experts = 72, got float32[71] on cpu'),
        (dict(bias=torch.zeros(72).half()), 'bias must be float32, got float16[72] on cpu'),
        (dict(num_groups=8), 'num_groups must come with num_topk_groups, got 8 and None'),
        (dict(num_groups=7, num_topk_groups=2), 'num_experts % num_groups must be 0, got 2'),
        (dict(num_groups=8, num_topk_groups=9), 'num_topk_groups must be at most 8, got 9'),
        (dict(num_groups=18, num_topk_groups=1), 'top_k must be at most 4, got 6'),
    ],
)
def test_errors_are_one_sentence(options, sentence):
    with pytest.raises(ArgumentError) as raised:
        topk_gating(torch.randn(2, 72), **{'top_k': 6, **options})
    assert str(raised.value) == f'moe.topk_gating: {sentence}'


def test_the_backward_checks_its_arguments():
    with pytest.raises(ArgumentError, match=r'moe\.topk_gating_bwd: dweights must be float32'):
        topk_gating_bwd(torch.zeros(2, 4).half(), torch.zeros(2, 8), torch.zeros(2, 4, dtype=torch.int64))


def test_estimated_roots_are_as_good_as_promised():
    x = torch.cat([torch.linspace(-100, 100, 100001), torch.linspace(-4, 4, 100001)])
    tail = torch.exp2(x.abs() * -LOG2_E)
    ratio = torch.full_like(x, LOG1P_OVER_T[-1])
    for c in LOG1P_OVER_T[-2::-1]:
        ratio = ratio * tail + c
    estimate = (tail * ratio + x.clamp(min=0)).sqrt()
    exact = torch.nn.functional.softplus(x.double()).sqrt()
    assert (estimate - exact).abs().max() < estimate_error(ScoringFunc.SQRTSOFTPLUS, False) / 2
