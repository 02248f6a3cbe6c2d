"""What the contract does not see of linear attention with a decay: tolerances, stress inputs, fronts, torch.compile."""

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from tile_kernels import ArgumentError, knobs
from tile_kernels.linear_attention import (
    chunk_gla,
    chunk_linear_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_simple_gla,
    mamba_chunk_scan_combined,
    selective_state_update,
)
from tile_kernels.linear_attention.chunk_retention import retention_gates
from tile_kernels.linear_attention.chunk_simple_gla import segment_size

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16
LENGTH = 4097 if knobs.full_test else 200


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def rms(own: Tensor, exact: Tensor) -> float:
    """Relative error, root mean square."""
    return ((own.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)).item()


def operands(tokens: int, heads: int = 1, dim: int = 32, value_dim: int = 32, dtype=BF16, value_heads=None):
    torch.manual_seed(tokens + dim)
    shapes = ((heads, dim), (heads, dim), (value_heads or heads, value_dim))
    return [torch.randn(1, tokens, *shape, device=DEVICE).to(dtype) for shape in shapes]


def quadratic(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same sums as one matrix of decayed scores, in float64: fast for long sequences. g is clamped at -800."""
    q, k, v, g, state = (x.double() for x in (q, k, v, g, state))
    sums = g.clamp(min=-800.0).cumsum(1).transpose(1, 2)
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
    decay = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(~seen, -math.inf).exp()
    scores = torch.einsum('bihd,bjhd->bhij', q, k) * decay * scale
    o = torch.einsum('bhij,bjhe->bihe', scores, v)
    since = sums.exp().transpose(1, 2).unsqueeze(-1)
    o = o + scale * torch.einsum('bihd,bhde->bihe', q * since, state)
    until = (sums[..., -1:] - sums).exp().transpose(1, 2).unsqueeze(-1)
    final = torch.einsum('bjhd,bjhe->bhde', k * until, v) + state * sums[..., -1].exp()[..., None, None]
    return o, final


GATES = {
    'none': lambda g: g * 0.0,
    'slow': lambda g: g * 0.01,
    'random': lambda g: g * 0.3,
    'fast': lambda g: g * 4.0,
    'steep': lambda g: torch.where(g < -0.95, -1e4, g * 0.05),
}


@pytest.mark.parametrize('gate', GATES)
@pytest.mark.parametrize('segment', [0, 64])
def test_errors_keep_the_bounds(gate, segment):
    q, k, v = operands(LENGTH)
    g = GATES[gate](-torch.rand(1, LENGTH, 1, device=DEVICE))
    state = torch.randn(1, 1, 32, 32, device=DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v, g, state)]
    o, final = chunk_simple_gla.call(q, k, v, g, None, state, None, 0.2, True, False, segment)
    exact, exact_final = quadratic(*leaves, 0.2)
    upstream = [torch.randn_like(o), torch.randn_like(final)]
    own = torch.autograd.grad([o, final], leaves, upstream)
    wide = torch.autograd.grad([exact, exact_final], leaves, [x.double() for x in upstream])
    slack = 1.5 if gate in ('none', 'slow') and LENGTH > 1000 else 1.0
    assert rms(o, exact) <= 0.005 * slack and rms(final, exact_final) <= 0.005 * slack
    bounds = dict(q=0.008, k=0.008, v=0.008, g=0.015, state=0.015)
    for bound, a, b in zip(bounds.values(), own, wide, strict=True):
        assert a.isfinite().all() and rms(a, b) <= bound * slack


def channels(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The recurrence with a decay of every channel, in float64."""
    q, k, v, g, state = (x.double() for x in (q, k, v, g, state))
    rows = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        rows.append(scale * (q[:, t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(rows, 1), state


@pytest.mark.parametrize('gate', [*GATES, 'everywhere'])
def test_errors_of_gated_linear_attention_keep_the_bounds(gate):
    length = 1025 if knobs.full_test else 130
    q, k, v = operands(length)
    g = -torch.rand(1, length, 1, 32, device=DEVICE)
    g = torch.full_like(g, -1e4) if gate == 'everywhere' else GATES[gate](g)
    state = torch.randn(1, 1, 32, 32, device=DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v, g, state)]
    o, final = chunk_gla.call(q, k, v, g, state, None, 0.2, True, False, 64)
    exact, exact_final = channels(*leaves, 0.2)
    upstream = [torch.randn_like(o), torch.randn_like(final)]
    own = torch.autograd.grad([o, final], leaves, upstream)
    wide = torch.autograd.grad([exact, exact_final], leaves, [x.double() for x in upstream])
    assert rms(o, exact) <= 0.005 and rms(final, exact_final) <= 0.005
    for name, a, b in zip(('q', 'k', 'v', 'g', 'state'), own, wide, strict=True):
        assert a.isfinite().all()
        if gate == 'everywhere' and name in ('g', 'state'):
            assert a.abs().max() < 1e-4
        else:
            assert rms(a, b) <= (0.015 if name in ('g', 'state') else 0.008), name


def test_gated_linear_attention_equals_its_recurrent_form():
    q, k, v = operands(70, heads=2)
    g = -torch.rand(1, 70, 2, 32, device=DEVICE).to(BF16)
    o, final = chunk_gla(q, k, v, g, output_final_state=True, chunk_size=16)
    step, state = fused_recurrent_gla(q, k, v, g, output_final_state=True)
    torch.testing.assert_close(step.float(), o.float(), rtol=2e-2, atol=2e-2)
    assert rms(final, state) < 0.005
    with pytest.raises(ArgumentError, match=r'linear_attention.chunk_gla: g must be \(batch, tokens, heads, dim\)'):
        chunk_gla(q, k, v, g[..., 0])
    with pytest.raises(ArgumentError, match='g must be a tensor, got None'):
        chunk_gla(q, k, v, None)
    with pytest.raises(ArgumentError, match='heads of v must be 1, got 2'):
        chunk_gla(q[:, :, :1], k[:, :, :1], v, g[:, :, :1])


def test_float16_is_closer():
    q, k, v = operands(130, dtype=torch.float16)
    g = -torch.rand(1, 130, 1, device=DEVICE) * 0.1
    exact, _ = quadratic(q, k, v, g, torch.zeros(1, 1, 32, 32, device=DEVICE), 32**-0.5)
    assert rms(chunk_simple_gla(q, k, v, g)[0], exact) <= 0.0025


def test_chunks_equal_the_recurrent_form_and_calls_may_be_cut():
    q, k, v = operands(70, heads=2)
    g = -torch.rand(1, 70, 2, device=DEVICE)
    whole, final = chunk_simple_gla(q, k, v, g, output_final_state=True)
    state, rows = None, []
    for part in (slice(0, 33), slice(33, 66)):
        o, state = chunk_simple_gla(q[:, part], k[:, part], v[:, part], g[:, part], None, None, state, True)
        rows.append(o)
    for t in range(66, 70):
        part = slice(t, t + 1)
        o, state = fused_recurrent_simple_gla(
            q[:, part], k[:, part], v[:, part], g[:, part], initial_state=state, output_final_state=True
        )
        rows.append(o)
    torch.testing.assert_close(torch.cat(rows, 1).float(), whole.float(), rtol=2e-2, atol=2e-2)
    assert rms(state, final) < 0.005


def test_a_sequence_does_not_depend_on_its_neighbors():
    q, k, v = operands(100, heads=2)
    g = -torch.rand(1, 100, 2, device=DEVICE)
    cuts = torch.tensor([0, 0, 30, 100], device=DEVICE)
    o, final = chunk_simple_gla(q, k, v, g, output_final_state=True, cu_seqlens=cuts)
    alone, last = chunk_simple_gla(q[:, 30:], k[:, 30:], v[:, 30:], g[:, 30:], output_final_state=True)
    assert torch.equal(o[:, 30:], alone) and torch.equal(final[2:], last) and not final[0].any()


def test_retention_and_fixed_gates():
    q, k, v = operands(40, heads=2)
    gamma = retention_gates(2, DEVICE)
    assert math.isclose(gamma[1].exp().item(), 1 - 2**-6, rel_tol=1e-6)
    o, final = chunk_retention(q, k, v, output_final_state=True, chunk_size=32)
    same, _ = chunk_simple_gla(q, k, v, gamma.expand(1, 40, 2))
    assert torch.equal(o, same)
    step, state = fused_recurrent_simple_gla(q, k, v, g_gamma=gamma, output_final_state=True)
    torch.testing.assert_close(step.float(), o.float(), rtol=2e-2, atol=2e-2)
    assert rms(final, state) < 0.005
    gamma.requires_grad_()
    (own,) = torch.autograd.grad(chunk_simple_gla(q, k, v, g_gamma=gamma)[0].float().sum(), gamma)
    exact, _ = quadratic(q, k, v, gamma.expand(1, 40, 2), torch.zeros(1, 2, 32, 32, device=DEVICE), 32**-0.5)
    (wide,) = torch.autograd.grad(exact.sum(), gamma)
    assert rms(own, wide) < 0.015


def test_normalized_linear_attention():
    q, k, v = operands(70, heads=2)
    q, k = q.abs().requires_grad_(), k.abs().requires_grad_()
    o, final = chunk_linear_attn(q, k, v)
    weights = torch.einsum('bihd,bjhd->bhij', q.float(), k.float()).tril()
    expected = torch.einsum('bhij,bjhe->bihe', weights / weights.sum(-1, keepdim=True), v.float())
    assert rms(o, expected) < 0.005 and final is None
    upstream = torch.randn_like(expected)
    own = torch.autograd.grad(o, (q, k), upstream.to(BF16))
    wide = torch.autograd.grad(expected, (q, k), upstream.to(BF16).float())
    errors = [rms(a, b) for a, b in zip(own, wide, strict=True)]
    assert max(errors) < 0.008, errors
    plain, _ = chunk_linear_attn(q, k, v, normalize=False)
    assert torch.equal(plain, chunk_simple_gla(q, k, v)[0])


@pytest.mark.parametrize('value_dim', [32, 256])
@pytest.mark.parametrize('v_first', [False, True])
def test_normalized_linear_attention_with_states(value_dim, v_first):
    """The sum of keys leaves out those of the initial state. With 256 values it has a product of its own."""
    q, k, v = (x.abs() for x in operands(5, value_dim=value_dim))
    state = torch.randn(1, 1, *((value_dim, 32) if v_first else (32, value_dim)), device=DEVICE)
    options = dict(initial_state=state, output_final_state=True, state_v_first=v_first)
    with knobs(interpret=False):
        o, final = chunk_linear_attn(q, k, v, **options)
        plain, last = chunk_simple_gla(q, k, v, **options)
    total = torch.einsum('bihd,bihd->bih', q.float(), k.float().cumsum(1)) * 32**-0.5
    assert rms(o, plain.float() / total.unsqueeze(-1)) < 0.005
    assert torch.equal(final, last) and final.is_contiguous()
    with pytest.raises(ArgumentError, match='initial_state must be'):
        chunk_linear_attn(q, k, v, initial_state=state[..., :16])


def test_a_pool_of_states_changes_in_place():
    q, k, v = (x.transpose(0, 1).contiguous() for x in operands(3, heads=2))
    g = -torch.rand(3, 1, 2, 32, device=DEVICE)
    pool = torch.randn(5, 2, 32, 32, device=DEVICE)
    before = pool.clone()
    indices = torch.tensor([4, -1, 0], device=DEVICE)
    o, final = fused_recurrent_gla(q, k, v, g, initial_state=pool, state_indices=indices)
    assert final is None and not o[1].any() and o[0].any()
    assert torch.equal(pool[1:4], before[1:4]) and not torch.equal(pool[4], before[4])
    alone, state = fused_recurrent_gla(q[:1], k[:1], v[:1], g[:1], None, None, before[4:5], True)
    assert torch.equal(o[:1], alone) and torch.equal(pool[4:], state)


# Mamba-2 ------------------------------------------------------------------------------------


def scan(x, dt, A, B, C, D, z, bias, state, resets):
    """Mamba-2 token by token, float32."""
    dt, rows, group = F.softplus(dt + bias).clamp(0.01, 2.0), [], x.shape[2] // B.shape[2]
    for t in range(x.shape[1]):
        decay = (dt[:, t] * A).exp() * (0.0 if t in resets else 1.0)
        b, c = (y[:, t].repeat_interleave(group, 1) for y in (B, C))
        state = state * decay[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, :, None]
        rows.append((state * c[:, :, None]).sum(-1) + D * x[:, t])
    return torch.stack(rows, 1) * F.silu(z), state


def mamba_operands(tokens: int):
    torch.manual_seed(tokens)
    x, z = (torch.randn(2, tokens, 4, 32, device=DEVICE).to(BF16) for _ in range(2))
    B, C = (torch.randn(2, tokens, 2, 16, device=DEVICE).to(BF16) for _ in range(2))
    dt, A = torch.randn(2, tokens, 4, device=DEVICE), -torch.rand(4, device=DEVICE) * 2
    D, bias, state = (torch.randn(shape, device=DEVICE) for shape in ((4, 32), (4,), (2, 4, 32, 16)))
    return [x, dt, A, B, C, D, z, bias, state]


def test_mamba_equals_the_recurrence():
    given = mamba_operands(70)
    leaves, wide = ([x.detach().to(t or x.dtype).requires_grad_() for x in given] for t in (None, torch.float32))
    x, dt, A, B, C, D, z, bias, state = leaves
    index = (torch.arange(70, device=DEVICE) >= 30).int().expand(2, 70)
    y, final = mamba_chunk_scan_combined(
        x, dt, A, B, C, 256, D, z, bias, state, index, None, True, (0.01, 2.0), return_final_states=True
    )
    expected, last = scan(*wide, resets=(30,))
    upstream = [torch.randn_like(expected), torch.randn_like(last)]
    own = torch.autograd.grad([y, final], leaves, [upstream[0].to(BF16), upstream[1]])
    other = torch.autograd.grad([expected, last], wide, upstream)
    assert rms(y, expected) <= 0.005 and rms(final, last) <= 0.005
    names = ('x', 'dt', 'A', 'B', 'C', 'D', 'z', 'bias', 'state')
    errors = {name: rms(a, b) for name, a, b in zip(names, own, other, strict=True)}
    assert all(error <= 0.008 for error in errors.values()), errors


def test_mamba_decodes_what_it_scans_and_takes_packed_sequences():
    x, dt, A, B, C, D, z, bias, _ = (t[:1] if t.dim() > 2 else t for t in mamba_operands(7))
    options = dict(dt_bias=bias, dt_softplus=True)
    cuts = torch.tensor([0, 3, 7], device=DEVICE)
    y, final = mamba_chunk_scan_combined(
        x, dt, A, B, C, D=D, z=z, cu_seqlens=cuts, return_varlen_states=True, **options
    )
    pool = torch.zeros(3, 4, 32, 16, device=DEVICE)
    index = torch.tensor([2], device=DEVICE)
    for t in range(3, 7):
        step = selective_state_update(
            pool,
            x[:, t],
            dt[:, t, :, None].expand(1, 4, 32),
            A[:, None, None].expand(4, 32, 16),
            B[:, t],
            C[:, t],
            D,
            z[:, t],
            bias[:, None].expand(4, 32),
            True,
            index,
        )
        torch.testing.assert_close(step.float(), y[:, t].float(), rtol=2e-2, atol=3e-2)
    assert rms(pool[2:], final[1:]) < 0.005 and not pool[:2].any()


# Errors, compile ----------------------------------------------------------------------------


def call(function=chunk_simple_gla, **given):
    q, k, v = operands(3)
    return function(**dict(dict(q=q, k=k, v=v), **given))


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        (dict(g=torch.zeros(1, 3, 2)), r'g must be \(batch, tokens, heads\) with heads = 1'),
        (dict(g=torch.zeros(1, 3, 1), g_gamma=torch.zeros(1)), 'g_gamma must not come with g'),
        (dict(g_gamma=torch.zeros(2)), r'g_gamma must be \(heads\) with heads = 1'),
        (dict(chunk_size=48), 'chunk_size must be'),
        (dict(head_first=True), 'head_first must be False, since it has no meaning here'),
        (dict(nonsense=1), 'nonsense must be an argument of the function'),
        (dict(initial_state=torch.zeros(1, 1, 32, 16)), 'initial_state must be'),
        (dict(k=torch.zeros(1, 3, 1, 24, dtype=BF16)), 'k must be'),
        (dict(cu_seqlens=torch.zeros(2)), 'cu_seqlens must be int32 or int64'),
    ],
)
def test_bad_arguments_are_told(given, sentence):
    given = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in given.items()}
    with pytest.raises(ArgumentError, match=f'linear_attention.chunk_simple_gla: {sentence}'):
        call(**given)


def test_bad_arguments_of_the_other_functions_are_told():
    q, k, v = operands(1)
    with pytest.raises(ArgumentError, match='q must not require a gradient, got one that does; call the chunk form'):
        fused_recurrent_gla(q.requires_grad_(), k, v)
    q = q.detach()
    with pytest.raises(ArgumentError, match='initial_state must be a pool of states with state_indices'):
        fused_recurrent_simple_gla(q, k, v, state_indices=torch.zeros(1, device=DEVICE, dtype=torch.int32))
    with pytest.raises(ArgumentError, match='reverse must be False'):
        fused_recurrent_gla(q, k, v, reverse=True)
    x, dt, A, B, C, *_ = mamba_operands(2)
    with pytest.raises(ArgumentError, match='A must be one number for each head, expanded'):
        full = torch.zeros(4, 32, 16, device=DEVICE)
        state = torch.zeros(2, 4, 32, 16, device=DEVICE)
        selective_state_update(state, x[:, 0], dt[:, 0], full, B[:, 0], C[:, 0])
    with pytest.raises(ArgumentError, match='dt must be'):
        mamba_chunk_scan_combined(x, dt[:, :1], A, B, C)


def test_segments_are_a_function_of_shapes():
    assert segment_size(1, 8192, 192) == 8192
    assert segment_size(1, 65536, 4) == 1024  # 64 segments of 4 blocks
    assert segment_size(1, 100, 1) == 128 and segment_size(1, 0, 1) == 64
    assert segment_size(8, 4096, 64, 2048) == 2048


def test_compiles_with_dynamic_shapes():
    counter = CompileCounter()

    def step(q, k, v, g):
        return chunk_simple_gla(q, k, v, g, output_final_state=True)[0] + chunk_retention(q, k, v)[0]

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    with knobs(interpret=False):
        for tokens in (5, 8, 11):
            given = [*operands(tokens), -torch.rand(1, tokens, 1, device=DEVICE)]
            assert torch.equal(compiled(*given), step(*given))
    assert counter.frame_count == 1
