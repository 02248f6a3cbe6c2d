"""What the contract does not see of the delta rule: relative errors, stress inputs, options, foreign arguments."""

import math
import os

import pytest
import torch
from torch import Tensor

from tile_kernels import ArgumentError, knobs
from tile_kernels.core.launch import on_gpu
from tile_kernels.linear_attention import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_kda,
    delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)
from tile_kernels.linear_attention._samples import random_delta

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16, F32 = torch.bfloat16, torch.float32
FULL = os.environ.get('TK_FULL_TEST') == '1'
#: Bounds of the relative RMS error against the recurrence in float32.
LIMITS = dict(o=5e-3, final=5e-3, q=8e-3, k=8e-3, v=8e-3, g=15e-3, beta=15e-3, state=15e-3, A_log=22e-3, dt_bias=22e-3)


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, one token after the other, in float32; autograd gives its gradients."""
    heads = v.shape[2]
    q, k = (x.float().repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    state = torch.zeros(v.shape[0], heads, k.shape[3], v.shape[3]) if state is None else state.float()
    g = g.float() if g.dim() == 4 else g.float()[..., None]
    out = []
    for t in range(v.shape[1]):
        state = g[:, t].exp()[..., None] * state
        u = beta[:, t, :, None].float() * (v[:, t].float() - torch.einsum('bhkv,bhk->bhv', state, k[:, t]))
        state = state + torch.einsum('bhk,bhv->bhkv', k[:, t], u)
        out.append(torch.einsum('bhkv,bhk->bhv', state, q[:, t]))
    return torch.stack(out, 1) * (q.shape[3] ** -0.5 if scale is None else scale), state


def off(x: Tensor, exact: Tensor) -> float:
    """The relative RMS error."""
    return (
        ((x.double() - exact.double()).square().mean() / exact.double().square().mean().clamp(min=1e-12)).sqrt().item()
    )


def inputs(**case) -> dict:
    torch.manual_seed(7)
    made = random_delta(**case)
    names = dict(initial_state='state')
    return {names.get(n, n): made[n] for n in ('q', 'k', 'v', 'g', 'beta', 'initial_state') if n in made}


def compare(given: dict, run, exact, slack: float = 1.0, skip: tuple = ()) -> None:
    """Results and all gradients of two functions of the same leaves."""
    outcomes = []
    for function in (run, exact):
        leaves = {n: x.detach().clone().requires_grad_() for n, x in given.items()}
        o, final = function(**leaves)
        torch.manual_seed(1)
        upstream = [torch.randn(o.shape), torch.randn(final.shape)]
        sums = (o.float() * upstream[0].to(BF16).float()).sum() + (final * upstream[1]).sum()
        grads = torch.autograd.grad(sums, list(leaves.values()))
        outcomes.append(dict(o=o.detach(), final=final.detach()) | dict(zip(leaves, grads, strict=True)))
    for name, x in outcomes[0].items():
        assert x.isfinite().all(), name
        if name not in skip:
            assert off(x, outcomes[1][name]) <= slack * LIMITS[name], (name, off(x, outcomes[1][name]))


def run_gdn(chunk: int = 16):
    def run(q, k, v, g, beta, state=None):
        front = chunk_kda if g.dim() == 4 else chunk_gated_delta_rule
        return front(q, k, v, g, beta, initial_state=state, output_final_state=True, chunk_size=chunk)

    return run


SIZES = dict(tokens=34, heads=(1, 2), dims=(32, 32))
STRESS = [
    dict(SIZES),
    dict(SIZES, betas='zero', state=F32),
    dict(SIZES, betas='one'),
    dict(SIZES, keys='equal', betas='one', gate='none', state=F32),
    dict(SIZES, tokens=64, keys='long', gate='none'),
    dict(SIZES, gate='none'),
    dict(SIZES, gate='drop', state=F32),
    dict(SIZES, heads=(1, 3), state=BF16),
    dict(SIZES, tokens=17, channels=True, gate='drop', state=F32),
    dict(SIZES, tokens=34, channels=True, betas='one', gate='weak'),
]
#: Errors of sums that cancel grow with the chunk.
STRESS += [
    dict(tokens=130, dims=(64, 64), keys='equal', betas='one', gate='none', chunk=64, state=F32),
    dict(tokens=130, dims=(64, 64), keys='equal', betas='one', gate='none', chunk=64, gpu='a100'),
    dict(tokens=70, dims=(64, 64), keys='equal', betas='one', gate='none', chunk=64, channels=True, state=F32),
]
if FULL:
    STRESS += [
        dict(tokens=130, heads=(2, 6), dims=(64, 64), state=F32, chunk=64, channels=channels, gate=gate)
        for channels in (False, True)
        for gate in ('mixed', 'none', 'drop', 'weak')
    ]


@pytest.mark.parametrize('case', STRESS, ids=lambda case: '-'.join(f'{v}' for v in case.values()))
def test_errors_keep_the_bounds(case):
    """Without decay, or with equal keys, the bounds are wider. Gates that decide nothing have no relative error."""
    slack = 2.0 if case.get('keys') == 'equal' else 1.5 if case.get('gate') in ('none', 'weak') else 1.0
    skip = ('k', 'q', 'g') if case.get('betas') == 'zero' and 'state' not in case else ()
    case = dict(case)
    gpu = case.pop('gpu', 'h200')
    if case.get('keys') == 'equal' and 'state' not in case:
        skip = ('g',)
    given = inputs(**case)
    with on_gpu(gpu):
        compare(given, run_gdn(case.get('chunk', 16)), recurrence, slack, skip)


def gate_of(g: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float | None) -> Tensor:
    rate = A_log.exp()[:, None] if g.dim() == 4 else A_log.exp()
    x = g.float() + dt_bias.view(g.shape[2:])
    return -rate * torch.nn.functional.softplus(x) if bound is None else bound * torch.sigmoid(rate * x)


@pytest.mark.parametrize(
    ('channels', 'bound', 'tokens', 'chunk'),
    [(False, None, 34, 16), (True, None, 34, 16), (True, -4.0, 34, 16), (True, None, 66, 64)],
)
def test_options_have_gradients_to_their_inputs(channels, bound, tokens, chunk):
    """The gradient of A_log is a sum over all tokens and channels, in which pairs of tokens cancel."""
    given = inputs(tokens=tokens, heads=(2, 4), dims=(32, 32), channels=channels, form=1)
    given |= dict(q=given['q'] * 3, k=given['k'] * 2, g=torch.randn(given['g'].shape).to(BF16))
    given |= dict(A_log=torch.randn(4) * 0.3, dt_bias=torch.randn(given['g'].shape[2:].numel()))

    def run(q, k, v, g, beta, A_log, dt_bias):
        options = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
        options |= dict(use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, output_final_state=True)
        options['chunk_size'] = chunk
        if channels:
            return chunk_kda(q, k, v, g, beta, **options, safe_gate=bound is not None, lower_bound=bound)
        return chunk_gdn(q, k, v, g, beta, **options)

    def exact(q, k, v, g, beta, A_log, dt_bias):
        q, k = (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        return recurrence(q, k, v, gate_of(g, A_log, dt_bias, bound), 2 * torch.sigmoid(beta))

    compare(given, run, exact)


def test_no_decay_is_the_delta_rule():
    given = inputs(tokens=20, heads=(1, 2))
    q, k, v, beta = (given[n] for n in ('q', 'k', 'v', 'beta'))
    o, none = chunk_delta_rule(q, k, v, beta, chunk_size=16)
    exact, _ = recurrence(q, k, v, torch.zeros(beta.shape), beta)
    assert none is None and off(o, exact) <= 1.5 * LIMITS['o']
    other, _ = chunk_delta_rule(q, k, v, beta, chunk_size=32)
    assert off(other, o) <= LIMITS['o']


@pytest.mark.parametrize('channels', [False, True])
def test_packed_sequences_are_those_run_alone(channels):
    """Bits of a sequence do not depend on its neighbors, empty ones included; rows of nobody have no gradient."""
    lengths = (0, 1, 0, 33, 0)
    torch.manual_seed(3)
    made = random_delta(lengths, heads=(1, 2), dims=(32, 32), channels=channels, state=F32, behind=2)
    names = ('q', 'k', 'v', 'g', 'beta', 'initial_state')
    given = [made[n].requires_grad_() for n in names]
    front = chunk_kda if channels else chunk_gated_delta_rule
    options = dict(output_final_state=True, chunk_size=16)
    cuts = made['cu_seqlens'].long()
    o, final = front(*given[:5], initial_state=given[5], cu_seqlens=cuts, cu_seqlens_cpu=cuts, **options)
    upstream = torch.randn(o.shape).to(BF16)
    grads = torch.autograd.grad(o, given, upstream)
    assert not o[:, 34:].any() and not any(g[:, 34:].any() for g in grads[:5])
    first = 0
    for n, length in enumerate(lengths):
        own = slice(first, first + length)
        if length:
            alone = [x.detach()[:, own].clone().requires_grad_() for x in given[:5]]
            state = given[5].detach()[n : n + 1].clone().requires_grad_()
            o1, final1 = front(*alone, initial_state=state, **options)
            grads1 = torch.autograd.grad(o1, [*alone, state], upstream[:, own])
            assert torch.equal(o1, o[:, own]) and torch.equal(final1[0], final[n])
            assert all(torch.equal(a, b[:, own]) for a, b in zip(grads1[:5], grads[:5], strict=True))
            assert torch.equal(grads1[5][0], grads[5][n])
        else:
            assert torch.equal(final[n], given[5].detach()[n]) and not grads[5][n].any()
        first += length


@pytest.mark.parametrize('channels', [False, True])
def test_recurrent_equals_chunks_and_the_recurrence(channels):
    given = inputs(tokens=18, heads=(1, 2), dims=(32, 48), channels=channels, state=F32)
    q, k, v, g, beta, state = given.values()
    chunks, steps = (chunk_kda, fused_recurrent_kda) if channels else (chunk_gdn, fused_recurrent_gated_delta_rule)
    exact, last = recurrence(*given.values())
    o, final = steps(q, k, v, g, beta, initial_state=state, output_final_state=True)
    assert (o.float() - exact).abs().max() <= 2**-8 * exact.abs().max() and off(final, last) <= 1e-5
    o2, final2 = chunks(q, k, v, g, beta, initial_state=state, output_final_state=True, chunk_size=16)
    assert off(o2, o) <= LIMITS['o'] and off(final2, final) <= LIMITS['final']
    pool = torch.randn(4, 2, 48, 32)
    pool[2] = state[0].transpose(1, 2)
    before = pool.clone()
    for t in range(3):
        now = [x[:, t : t + 1] for x in (q, k, v, g, beta)]
        out, same = steps(*now, initial_state=pool, state_indices=torch.tensor([2]), state_v_first=True)
        assert same is None and torch.allclose(out[:, 0], o[:, t], atol=2e-2)
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]]) and not torch.equal(pool[2], before[2])
    skipped, _ = steps(*now, initial_state=pool, state_indices=torch.tensor([-1]), state_v_first=True)
    assert not skipped.any()


@pytest.mark.parametrize('gate', [0.0, -1e4, -math.inf])
def test_no_gate_overflows(gate):
    for channels in (False, True):
        given = inputs(tokens=20, dims=(16, 16), channels=channels, state=F32)
        given['g'] = given['g'].fill_(gate)
        leaves = [x.requires_grad_() for x in given.values()]
        o, final = run_gdn()(*leaves)
        assert o.isfinite().all() and final.isfinite().all()
        assert all(x.isfinite().all() for x in torch.autograd.grad(o.float().sum() + final.sum(), leaves))


@pytest.mark.parametrize('gpu', ['h200', 'a100'])
@pytest.mark.parametrize('channels', [False, True])
def test_nan_reaches_no_earlier_token(channels, gpu):
    """A token with NaN makes the same results NaN as in the recurrence, but for other values of the same token."""
    clean = inputs(tokens=70, heads=(1, 2), dims=(32, 32), channels=channels, state=F32)
    run = run_gdn(64)
    with on_gpu(gpu):
        for name in ('q', 'k', 'v', 'g', 'beta'):
            given = {n: x.clone() for n, x in clean.items()}
            given[name][0, 20, 0 if name in 'qk' else 1].view(-1)[0] = math.nan
            (o, final), (exact, last) = run(**given), recurrence(**given)
            assert torch.equal(o.isnan(), exact.isnan()), name
            assert torch.equal(final.isnan(), last.isnan()), name
            assert off(o.nan_to_num(), exact.nan_to_num()) <= 1.5 * LIMITS['o'], name


def test_repeated_runs_have_equal_bits():
    given = inputs(tokens=20, heads=(1, 3), state=F32)
    runs = []
    for _ in range(2):
        leaves = [x.detach().clone().requires_grad_() for x in given.values()]
        o, final = run_gdn()(*leaves)
        runs.append([o, final, *torch.autograd.grad(o.float().sum() + final.sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_autocast_and_bfloat16_gates():
    given = inputs(tokens=5)
    q, k, v, g, beta = given.values()
    expected, _ = chunk_gdn(q, k, v, g.to(BF16), beta.to(BF16), chunk_size=16)
    with torch.autocast(DEVICE, BF16):
        o, _ = chunk_gdn(q.float(), k.float(), v.float(), g.to(BF16), beta.to(BF16), chunk_size=16)
    assert o.dtype is BF16 and torch.equal(o, expected)


@pytest.mark.parametrize('channels', [False, True])
def test_traces_whole(channels):
    given = inputs(tokens=5, dims=(16, 16), channels=channels)
    leaves = [x.requires_grad_() for x in given.values()]
    front = chunk_kda if channels else chunk_gdn

    def loss(*leaves):
        o, final = front(*leaves, use_qk_l2norm_in_kernel=True, output_final_state=True, chunk_size=16)
        return o.float().square().sum() + final.sum()

    with knobs(interpret=False):
        compiled = torch.compile(loss, backend='aot_eager', fullgraph=True, dynamic=True)
        got = torch.autograd.grad(compiled(*leaves), leaves)
        expected = torch.autograd.grad(loss(*leaves), leaves)
    assert all(torch.allclose(a, b) for a, b in zip(got, expected, strict=True))


def call(front=chunk_gated_delta_rule, **changes):
    given = inputs(tokens=3, dims=(16, 16))
    given['initial_state'] = given.pop('state', None)
    front(**(given | changes))


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (dict(q=torch.zeros(1, 3, 1, 24, dtype=BF16)), 'k must be'),
        (dict(v=torch.zeros(1, 3, 1, 20, dtype=BF16)), 'the last extent of v must be a multiple of 16'),
        (dict(v=torch.zeros(1, 3, 0, 16, dtype=BF16), g=torch.zeros(1, 3, 1)), 'must'),
        (dict(q=torch.zeros(1, 3, 1, 16)), 'q must be bfloat16 or float16'),
        (dict(g=torch.zeros(1, 3)), r'g must be \(batch, tokens, heads\)'),
        (dict(beta=torch.zeros(1, 2, 1)), 'beta must be'),
        (dict(chunk_size=48), 'chunk_size must be one of 16, 32, 64'),
        (dict(initial_state=torch.zeros(2, 1, 16, 16)), 'initial_state must be'),
        (dict(cu_seqlens=torch.tensor([0.0, 3.0])), 'cu_seqlens must be int32 or int64'),
        (dict(A_log=torch.zeros(1)), 'A_log and dt_bias must come with use_gate_in_kernel'),
        (dict(use_gate_in_kernel=True), 'A_log must be a tensor'),
        (dict(cp_context=1), 'cp_context must be None, since it has no meaning here'),
        (dict(head_first=True), 'head_first must be False'),
        (dict(heads=1), 'heads must be an argument of the function'),
        (dict(front=chunk_kda), r'g must be \(batch, tokens, heads, dim\)'),
        (dict(front=chunk_kda, g=torch.zeros(1, 3, 1, 16), lower_bound=-2.0), 'lower_bound must come with'),
        (
            dict(
                front=chunk_kda,
                g=torch.zeros(1, 3, 1, 16),
                lower_bound=-9.0,
                use_gate_in_kernel=True,
                A_log=torch.zeros(1),
            ),
            'lower_bound must be at least -5.0 and below 0',
        ),
        (
            dict(front=fused_recurrent_gated_delta_rule, beta=torch.zeros(1, 3, 1, requires_grad=True)),
            'beta must not require a gradient, got one that does; call the chunk form',
        ),
        (
            dict(front=fused_recurrent_gated_delta_rule, state_indices=torch.tensor([0])),
            'initial_state must be a tensor',
        ),
    ],
)
def test_bad_input_is_one_sentence(changes, words):
    with pytest.raises(ArgumentError, match=words) as error:
        call(**changes)
    assert '\n' not in str(error.value)


def test_nothing_is_saved_per_chunk_but_the_inverse():
    given = inputs(tokens=40)
    leaves = [x.requires_grad_() for x in given.values()]
    o, _ = chunk_gdn(*leaves, chunk_size=16)
    saved = [x for x in o.grad_fn.saved_tensors if isinstance(x, Tensor)]
    extra = [x for x in saved if not any(x.data_ptr() == leaf.data_ptr() for leaf in leaves)]
    assert {tuple(x.shape) for x in extra} == {(1, 40, 1), (3, 1, 16, 16)}


def test_twin_is_the_recurrence():
    made = random_delta(9, heads=(1, 2), state=F32)
    o, final, _, _ = delta_rule.twin(**made, output_final_state=True)
    exact, last = recurrence(*(made[n] for n in ('q', 'k', 'v', 'g', 'beta', 'initial_state')))
    torch.testing.assert_close(o.float(), exact, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(final, last)
