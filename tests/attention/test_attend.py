"""What the contract does not see of attention: tolerances, masks, hidden NaN, foreign signatures, torch.compile."""

import math
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tile_kernels import ArgumentError, knobs
from tile_kernels.attention import attend, attend_bwd, flash_attn_func, flash_attn_varlen_func
from tile_kernels.attention._samples import random_attention
from tile_kernels.core.launch import on_gpu, tracing

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def operands(queries=5, keys=7, heads=(2, 1), dim=16, batch=1, dtype=BF16):
    torch.manual_seed(queries + 100 * keys)
    shapes = ((batch, queries, heads[0], dim), (batch, keys, heads[1], dim), (batch, keys, heads[1], dim))
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
    """Plain PyTorch in a dtype, with a softmax in float32 or better."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).to(torch.promote_types(dtype, torch.float32))
    if causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows).logical_not()
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1).to(dtype) @ v).transpose(1, 2)


def error(x: Tensor, exact: Tensor) -> float:
    return (x.double() - exact).abs().max().item()


def floor(x: Tensor, exact: Tensor) -> float:
    """The error of plain PyTorch, never taken below a rounding of the largest number."""
    return max(error(x, exact), 2**-9 * exact.abs().max().item())


@pytest.mark.parametrize('causal', [False, True])
def test_errors_are_those_of_plain_pytorch(causal):
    leaves = [x.requires_grad_() for x in operands(70, 70, heads=(2, 1), dim=64)]
    outs, grads = [], []
    for dtype in ('kernel', torch.float64, BF16):
        if dtype == 'kernel':
            o, lse = flash_attn_func(*leaves, causal=causal, return_lse=True)
        else:
            o = plain(*leaves, causal, dtype)
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(o, leaves, torch.randn(o.shape, device=DEVICE).to(o.dtype)))
        outs.append(o.detach())
    assert error(outs[0], outs[1]) <= 2 * floor(outs[2], outs[1]) + 1e-5
    exact = attend.twin(*(x.detach() for x in leaves), scale=0.125, right=0 if causal else -1)[1]
    assert (lse - exact).abs().max() <= 1e-4
    leaves64 = [x.detach().double().requires_grad_() for x in leaves]
    torch.manual_seed(0)
    upstream = torch.randn(outs[0].shape, device=DEVICE).to(BF16)
    grads64 = torch.autograd.grad(plain(*leaves64, causal, torch.float64), leaves64, upstream.double())
    for own, half, wide in zip(grads[0], grads[2], grads64, strict=True):
        assert error(own, wide) <= 3 * floor(half, wide) + 1e-5
        rms = [(x.double() - wide).square().mean().sqrt().item() for x in (own, half)]
        assert rms[0] <= 1.5 * max(rms[1], 2**-9 * wide.square().mean().sqrt().item())


@pytest.mark.parametrize('window', [(-1, 0), (2, 0), (0, 1), (1, 2)])
def test_what_a_row_does_not_see_has_no_effect(window):
    """A NaN or inf in a value that only some rows see must show in these rows alone."""
    q, k, v = operands(6, 9)
    for index, value in ((8, math.nan), (4, math.inf), (5, math.nan)):
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, index], bad_v[:, index] = math.nan, value
        position = torch.arange(6) + 3
        left, right = (side if side >= 0 else 100 for side in window)
        sees = (index >= position - left) & (index <= position + right)
        expected = flash_attn_func(q, k, v, window_size=window)
        o = flash_attn_func(q, k, bad_v, window_size=window)
        assert torch.equal(o[:, ~sees], expected[:, ~sees])
        assert not o[:, sees].isfinite().any()
        o = flash_attn_func(q, bad_k, v, window_size=window)
        assert torch.equal(o[:, ~sees], expected[:, ~sees]) and o[:, sees].isnan().all()


def test_infinite_values_are_those_of_the_twin():
    q, k, v = operands(6, 6)
    v[:, 2, :, 0], v[:, 4, :, 1] = math.inf, -math.inf
    o = flash_attn_func(q, k, v, causal=True)
    expected, _ = attend.twin(q, k, v, scale=0.25, right=0)
    torch.testing.assert_close(o, expected, rtol=1e-2, atol=1e-2)
    assert o.isinf().any() and not o.isnan().any()


def test_sinks_may_be_infinite():
    q, k, v = operands(5, 7)
    sink = torch.tensor([-math.inf, math.inf], device=DEVICE)
    o, lse = flash_attn_func(q, k, v, s_aux=sink, return_attn_probs=True)
    plain_o, plain_lse = flash_attn_func(q, k, v, return_lse=True)
    assert torch.equal(o[:, :, 0], plain_o[:, :, 0]) and not o[:, :, 1].any()
    assert torch.equal(lse, plain_lse)
    gradients = attend_bwd(torch.ones_like(o), q, k, v, o, lse, sink, scale=0.25)
    assert all(g.isfinite().all() for g in gradients) and not gradients[3].any() and not gradients[0][:, :, 1].any()


def test_rows_without_keys_and_rows_of_nobody_have_no_gradient():
    q, k, v = (x[0].clone() for x in operands(8, 6))
    q[7:], k[5:], v[5:] = math.nan, math.nan, math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cuts = [torch.tensor(c, device=DEVICE) for c in ([0, 3, 7], [0, 0, 5])]  # int64
    o, lse = flash_attn_varlen_func(*leaves, *cuts, 4, 5, causal=True, return_lse=True)
    assert not o[:3].any() and not o[7:].any() and o[3:7].isfinite().all()
    assert (lse[:, :3] == -math.inf).all() and lse.shape == (2, 8)
    dq, dk, dv = torch.autograd.grad(o.float().square().sum(), leaves)
    assert not dq[:3].any() and not dq[7:].any() and not dk[5:].any() and not dv[5:].any()
    assert all(g.isfinite().all() for g in (dq, dk, dv)) and dq[3:7].any() and dk[:5].any()


def test_a_sequence_does_not_depend_on_its_neighbours():
    q, k, v = (x[0] for x in operands(40, 40, heads=(3, 1)))
    both = flash_attn_varlen_func(q, k, v, *[torch.tensor([0, 11, 40], device=DEVICE, dtype=torch.int32)] * 2, 29, 29)
    cuts = [torch.tensor([0, 29], device=DEVICE, dtype=torch.int32)] * 2
    alone = flash_attn_varlen_func(q[11:], k[11:], v[11:], *cuts, 1, 999)  # wrong maxima change nothing
    dense = flash_attn_func(q[None, 11:], k[None, 11:], v[None, 11:])
    assert torch.equal(both[11:], alone) and torch.equal(dense[0], alone)


def test_negative_scale():
    q, k, v = operands(3, 70)
    expected = flash_attn_func(-q, k, v, softmax_scale=0.5)
    assert torch.equal(flash_attn_func(q, k, v, softmax_scale=-0.5), expected)


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        (dict(dropout_p=0.1), 'dropout_p must be 0.0, since it has no meaning here, got float 0.1'),
        (dict(alibi_slopes=torch.zeros(1)), 'alibi_slopes must be None, since it has no meaning here'),
        (dict(window_size=(1,)), r'window_size must be a pair \(left, right\)'),
        (dict(window_size=(-2, 0)), 'window_size must hold numbers of keys, or -1 for no bound'),
        (dict(softcap=-1.0), 'softcap must be at least 0'),
        (dict(nonsense=1), 'nonsense must be an argument of the function'),
        (dict(sink=torch.zeros(3)), r'sink must be \(heads\) with heads = 2'),
        (dict(sink=torch.zeros(2), s_aux=torch.zeros(2)), 's_aux must not come with another name'),
        (dict(softmax_scale='x'), 'softmax_scale must be a number'),
        (dict(num_splits=-1), 'num_splits must be at least 0'),
    ],
)
def test_bad_options_are_told(given, sentence):
    with pytest.raises(ArgumentError, match='attention.flash_attn_func: ' + sentence):
        flash_attn_func(*(x.cpu() for x in operands()), **given)


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        (lambda q, k, v: (q.float(), k, v), 'q must be bfloat16 or float16'),
        (lambda q, k, v: (q, k.half(), v), 'k must be bfloat16'),
        (lambda q, k, v: (q, k, v[:, 1:]), r'v must be \(batch, tokens, heads, dim\) with tokens = 7'),
        (
            lambda q, k, v: (q[..., :12], k[..., :12], v),
            'the last extent of q must be a multiple of 8 up to 256, got 12',
        ),
        (lambda q, k, v: (q[:, :, :1], k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)), 'heads of q must be a multiple'),
        (lambda q, k, v: (q.transpose(2, 3).contiguous().transpose(2, 3), k, v), 'q must have stride 1 .*contiguous'),
        (lambda q, k, v: (torch.cat((q, q[..., :4]), 3)[..., :16], k, v), 'q must have a base and strides .* 16 bytes'),
        (lambda q, k, v: (q[0], k, v), r'q must be \(batch, tokens, heads, dim\)'),
    ],
)
def test_bad_operands_are_told(change, sentence):
    with pytest.raises(ArgumentError, match='attention.flash_attn_func: ' + sentence):
        flash_attn_func(*change(*(x.cpu() for x in operands())))


def test_splits_need_no_gradient():
    q, k, v = operands()
    with pytest.raises(ArgumentError, match='num_splits must be 0 or 1 where a gradient is needed'):
        flash_attn_func(q.requires_grad_(), k, v, num_splits=2)


def test_neutral_foreign_arguments_are_accepted():
    q, k, v = operands()
    given = dict(dropout_p=0.0, alibi_slopes=None, qv=None, attention_chunk=0, pack_gqa=None, sm_margin=0)
    assert torch.equal(flash_attn_func(q, k, v, window_size=(None, None), **given), flash_attn_func(q, k, v))


def test_autocast_casts_the_operands():
    q, k, v = (x.float() for x in operands())
    with torch.autocast(DEVICE, dtype=BF16):
        o = flash_attn_func(q, k, v)
    assert o.dtype is BF16


def test_traces_into_one_graph_with_dynamic_shapes():
    counter = CompileCounter()

    def step(q, k, v, cuts, sink):
        dense = flash_attn_func(q, k, v, causal=True, sink=sink)
        packed = flash_attn_varlen_func(q[0], k[0], v[0], cuts, cuts, q.shape[1], q.shape[1], window_size=(3, 0))
        return dense, packed

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for number in (6, 9, 13):
        q, k, v = (x.requires_grad_() for x in operands(number, number))
        cuts = torch.tensor([0, 2, number], device=DEVICE, dtype=torch.int32)
        sink = torch.zeros(2, device=DEVICE)
        with knobs(interpret=False):
            for actual, expected in zip(compiled(q, k, v, cuts, sink), step(q, k, v, cuts, sink), strict=True):
                assert torch.equal(actual, expected)
    assert counter.frame_count == 1


# Hopper and others --------------------------------------------------------------------------


@contextmanager
def any_order():
    """Poisoned memory needs the deterministic mode of PyTorch; here it is off."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode('default')
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def names_of(launches) -> list[str]:
    return [made.kernel.name for made in launches]


@pytest.mark.parametrize(
    ('gpu', 'dims'), [('h200', (64, 64)), ('h200', (192, 128)), ('h200', (256, 256)), ('a100', (64, 64))]
)
def test_many_blocks_of_rows_and_keys(gpu, dims):
    """Several steps of every loop: turns of the warpgroups, rings, blocks with and without a mask, tiles to spare."""
    rows = 140 if dims == (64, 64) else 70  # wide heads take the interpreter longer
    given = random_attention(rows, 2 * rows, (2, 1), dims, band=(rows + 60, 0), sink=torch.float32)
    given = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in given.items()}
    o, lse = attend.twin(**given)
    with on_gpu(gpu), knobs(checks='all'), any_order():
        actual = attend(**given)
        do = torch.randn(o.shape, device=DEVICE).to(o.dtype)
        gradients = attend_bwd(do, o=o, lse=lse, **given)
    torch.testing.assert_close(actual[0], o, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(actual[1], lse, rtol=1e-6, atol=1e-4)
    for own, expected in zip(gradients, attend_bwd.twin(do, o=o, lse=lse, **given), strict=True):
        torch.testing.assert_close(own, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(('gpu', 'dim'), [('h200', 64), ('h200', 192), ('a100', 64)])
@pytest.mark.parametrize('bad', ['q', 'k', 'do'])
def test_what_a_row_does_not_see_has_no_effect_on_gradients(gpu, dim, bad):
    q, k, v = operands(6, 9, dim=dim)
    do = torch.randn_like(q)
    position = torch.arange(6) + 3
    sees = (torch.arange(9) >= position[:, None] - 2) & (torch.arange(9) <= position[:, None])
    given, results = dict(q=q, k=k, v=v, do=do), []
    for value in (None, math.nan, math.inf):
        changed = {name: x.clone() for name, x in given.items()}
        if value is not None:
            changed[bad][:, 4, :, 3] = value
        o, lse = attend.twin(changed['q'], changed['k'], v, scale=0.25, left=2, right=0)
        with on_gpu(gpu), any_order():
            results.append(attend_bwd(o=o, lse=lse, scale=0.25, left=2, right=0, **changed)[:3])
    rows = sees[:, 4] if bad == 'k' else torch.arange(6) == 4  # rows with a result or gradient that is not finite
    keys = sees[rows].any(0)
    for dq, dk, dv in results[1:]:
        for own, expected, hit in ((dq, results[0][0], rows), (dk, results[0][1], keys), (dv, results[0][2], keys)):
            assert torch.equal(own[:, ~hit], expected[:, ~hit])
    assert results[1][0][:, rows].isnan().all()
    assert all(x[:, keys].isnan().all() for x in results[1][1:])


def test_the_order_of_sums_is_fixed_where_asked():
    """The sequences have rows and keys that do not count, with NaN behind them."""
    given = random_attention((3, 70), (9, 40), (2, 1), (72, 64), band=(20, 0), behind=2, used=(4, 33), used_q=(3, 66))
    given = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in given.items()}
    o, lse = attend.twin(**given)
    given |= dict(do=torch.randn(o.shape, device=DEVICE).to(o.dtype), o=o, lse=lse)
    with on_gpu('h200'), any_order():
        with tracing() as free:
            attend_bwd(**given)
        with tracing() as fixed:
            attend_bwd(**given, deterministic=True)
        torch.use_deterministic_algorithms(True)
        with tracing() as asked:
            attend_bwd(**given)
        torch.use_deterministic_algorithms(False)
        default, ordered = attend_bwd(**given), attend_bwd(**given, deterministic=True)
    assert names_of(free)[1:] == ['attend_bwd_sm90_kernel', 'attend_dq_cast_kernel']
    assert names_of(fixed)[1:] == names_of(asked)[1:] == ['attend_bwd_sm90_kernel', 'attend_dq_kernel']
    for expected, *both in zip(attend_bwd.twin(**given), default, ordered, strict=True):
        for own in both:
            torch.testing.assert_close(own, expected, rtol=2e-2, atol=2e-2)


def test_gradients_flow_through_lse():
    leaves = [x.requires_grad_() for x in operands(5, 7)]
    sink = torch.tensor([0.5, 1.0], device=DEVICE, requires_grad=True)
    for given in ((), (sink,)):
        own_sink = given[0] if given else None
        o, lse = flash_attn_func(*leaves, causal=True, sink=own_sink, return_lse=True)
        inputs = (*leaves, *given)
        actual = torch.autograd.grad(o.float().sum() + (lse * lse).sum(), inputs)
        o, lse = attend.twin(*leaves, own_sink, scale=0.25, right=0)
        expected = torch.autograd.grad(o.float().sum() + (lse * lse).sum(), inputs)
        for own, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-2)


def test_sm_margin_changes_no_result():
    q, k, v = operands(5, 7)
    assert torch.equal(flash_attn_func(q, k, v, sm_margin=2), flash_attn_func(q, k, v))
    with pytest.raises(ArgumentError, match='sm_margin must be at least 0'):
        flash_attn_func(q, k, v, sm_margin=-1)
    split = dict(num_splits=2)
    assert torch.equal(flash_attn_func(q, k, v, sm_margin=1, **split), flash_attn_func(q, k, v, **split))


def test_a_scale_of_zero_gives_the_mean():
    q, k, v = operands(3, 4)
    o = flash_attn_func(q, k, v, softmax_scale=0.0, window_size=(1, 0))
    expected = torch.stack([v[:, :2].float().mean(1), v[:, 1:3].float().mean(1), v[:, 2:].float().mean(1)], 1)
    torch.testing.assert_close(o.float(), expected.expand_as(o), rtol=1e-2, atol=1e-2)
