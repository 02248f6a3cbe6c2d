"""The Engram gate: both calling forms, masks, in place, without residual, determinism, bad input."""

import importlib

import pytest
import torch

import tile_kernels.reference.engram as twins
from tile_kernels import ArgumentError, knobs
from tile_kernels.core.launch import forced_config
from tile_kernels.engram import engram_gate_bwd, engram_gate_fwd, fused_weight, grad_w_reduce
from tile_kernels.engram.gate_bwd_kernels import gate_bwd_kernel
from tile_kernels.reference.engram import engram_gate_ref
from tile_kernels.testing import assert_equal, calc_diff

EPS, CLAMP = 1e-20, 1e-6


@pytest.fixture(autouse=True, params=[False, True], ids=['twin', 'kernel'])
def interpreting(request):
    with knobs(interpret=request.param):
        yield


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    x, k = (torch.randn(7, 4, 256, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(7, 256, dtype=torch.bfloat16)
    weights = [torch.randn(4, 256, dtype=torch.bfloat16) for _ in range(2)]
    return x, k, v, *weights


def test_forward_equals_the_reference(inputs):
    x, k, v, wh, we = inputs
    found = engram_gate_fwd(x, k, v, fused_weight(wh, we), EPS, CLAMP)
    expected = engram_gate_ref(x, k, v, wh, we, CLAMP, EPS, save_for_backward=True)
    for actual, reference in zip(found, expected, strict=True):
        assert calc_diff(actual, reference) < 2e-10


@pytest.mark.parametrize('num_tokens', [4, 7])
def test_the_reference_knows_both_forms(inputs, num_tokens):
    x, k, v, wh, we = inputs
    x, k, v = x[:num_tokens], k[:num_tokens], v[:num_tokens]  # as many tokens as streams, or more
    apart = engram_gate_ref(x, k, v, wh, we, CLAMP, EPS)
    assert_equal(engram_gate_ref(x, torch.cat([k, v[:, None]], dim=1), wh, we, CLAMP, EPS), apart)


def test_packed_form_gives_the_same_bits(inputs):
    x, k, v, wh, we = inputs
    weight, kv = fused_weight(wh, we), torch.cat([k, v[:, None]], dim=1)
    apart = engram_gate_fwd(x, k, v, weight, EPS, CLAMP)
    packed = engram_gate_fwd(x, kv, weight, EPS, CLAMP)
    named = engram_gate_fwd(x, kv=kv, weight_fused=weight, eps=EPS, clamp_value=CLAMP)
    for a, b, c in zip(apart, packed, named, strict=True):
        assert_equal(a, b)
        assert_equal(a, c)
    dy = torch.randn_like(x)
    dx, dk, dv, partial = engram_gate_bwd(dy, x, k, v, weight, *apart[1:], CLAMP)
    dx_packed, dkv, partial_packed = engram_gate_bwd(dy, x, kv, weight, *apart[1:], CLAMP)
    assert_equal(dx_packed, dx)
    assert_equal(dkv, torch.cat([dk, dv[:, None]], dim=1))
    assert_equal(partial_packed, partial)


def test_saving_and_writing_in_place_change_no_bit(inputs):
    x, k, v, wh, we = inputs
    weight = fused_weight(wh, we)
    y = engram_gate_fwd(x, k, v, weight, EPS, CLAMP)[0]
    bare = engram_gate_fwd(x, k, v, weight, EPS, CLAMP, save_for_backward=False)
    assert_equal(bare[0], y)
    assert bare[1:] == (None,) * 4
    z = x.clone()
    assert engram_gate_fwd(z, k, v, weight, EPS, CLAMP, save_for_backward=False, inplace=True)[0] is z
    assert_equal(z, y)
    with pytest.raises(ArgumentError, match='inplace must come with save_for_backward=False'):
        engram_gate_fwd(z, k, v, weight, EPS, CLAMP, inplace=True)


def test_image_tokens_take_in_nothing_whatever_their_embedding_holds(inputs):
    x, k, v, wh, we = inputs
    weight, mask = fused_weight(wh, we), torch.tensor([1, 0, 0, 1, 0, 1, 0], dtype=torch.bool)
    x[0, 0, 0] = -0.0
    clean = engram_gate_fwd(x, k, v, weight, EPS, CLAMP)
    k[mask], v[mask] = float('nan'), float('inf')
    y, *saved = engram_gate_fwd(x, k, v, weight, EPS, CLAMP, image_token_mask=mask)
    assert_equal(y[mask], x[mask])
    assert_equal(y[~mask], clean[0][~mask])
    assert all((s[mask] == 0).all() for s in saved)
    dy = torch.randn_like(x)
    dx, dk, dv, partial = engram_gate_bwd(dy, x, k, v, weight, *saved, CLAMP, image_token_mask=mask)
    assert_equal(dx[mask], dy[mask])
    assert (dk[mask] == 0).all() and (dv[mask] == 0).all() and partial.isfinite().all()


@pytest.mark.parametrize('residual', [True, False])
def test_gradients_equal_autograd_of_the_reference(inputs, residual):
    x, k, v, wh, we = inputs
    leaves = [t.double().requires_grad_() for t in (x, k, v, wh, we)]
    y = gate_in_fp64(*leaves, residual)
    dy = torch.randn_like(x)
    y.backward(dy.double())
    weight = fused_weight(wh, we)
    found, *saved = engram_gate_fwd(x, k, v, weight, EPS, CLAMP, residual=residual)
    assert calc_diff(found, y.detach().bfloat16()) < 2e-10
    dx, dk, dv, partial = engram_gate_bwd(dy, x, k, v, weight, *saved, CLAMP, residual=residual)
    dwh, dwe = torch.zeros(4, 256), torch.zeros(4, 256)
    grad_w_reduce(partial, wh, we, dwh, dwe)
    for actual, leaf in zip((dx, dk, dv), leaves[:3], strict=True):
        assert calc_diff(actual, leaf.grad.bfloat16()) < 1e-8
    for actual, leaf in zip((dwh, dwe), leaves[3:], strict=True):
        assert calc_diff(actual, leaf.grad) < 1e-10


@pytest.mark.parametrize('num_streams', range(1, 9))
def test_any_number_of_streams(num_streams):
    torch.manual_seed(num_streams)
    x, k, dy = (torch.randn(3, num_streams, 192, dtype=torch.bfloat16) for _ in range(3))
    v, weight = torch.randn(3, 192, dtype=torch.bfloat16), torch.randn(num_streams, 192)
    y, *saved = engram_gate_fwd(x, k, v, weight, EPS, CLAMP)
    assert calc_diff(y, twins.gate(x, k, v, weight, EPS, CLAMP)[0]) < 2e-10
    *grads, partial = engram_gate_bwd(dy, x, k, v, weight, *saved, CLAMP)
    *wanted, wanted_partial = twins.gate_bwd_partial(dy, x, k, v, weight, *saved, CLAMP)
    for actual, gradient in zip((*grads, partial.sum(0)), (*wanted, wanted_partial.sum(0)), strict=True):
        assert calc_diff(actual, gradient) < 1e-8


def gate_in_fp64(x, k, v, wh, we, residual):
    """Both rows normalised, multiplied, rooted: as the paper has it, without any fusing."""
    hidden = x.shape[-1]
    query = torch.nn.functional.rms_norm(x, (hidden,), eps=EPS) * wh
    key = torch.nn.functional.rms_norm(k, (hidden,), eps=EPS) * we
    z = (query * key).sum(-1) / hidden**0.5
    score = torch.sigmoid(z.abs().clamp_min(CLAMP).sqrt() * z.sign())
    taken = score.unsqueeze(-1) * v.unsqueeze(1)
    return x + taken if residual else taken


def test_a_nan_key_shows(inputs):
    x, k, v, wh, we = inputs
    k[2, 1, 17] = float('nan')
    y = engram_gate_fwd(x, k, v, fused_weight(wh, we), EPS, CLAMP)[0]
    assert y[2, 1].isnan().all() and y[2, 0].isfinite().all()


def test_the_number_of_partial_sums_depends_on_the_shape_alone(inputs):
    x, k, v, wh, we = inputs
    weight = fused_weight(wh, we)
    saved = engram_gate_fwd(x, k, v, weight, EPS, CLAMP)[1:]
    dy = torch.randn_like(x)
    first = engram_gate_bwd(dy, x, k, v, weight, *saved, CLAMP)
    with knobs(num_sms=3):
        second = engram_gate_bwd(dy, x, k, v, weight, *saved, CLAMP)
    for a, b in zip(first, second, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize('ahead', [False, True])
@pytest.mark.parametrize('num_partials', [1, 3])
@pytest.mark.parametrize('images', [False, True])
def test_a_block_goes_through_many_tokens(inputs, monkeypatch, num_partials, ahead, images):
    x, k, v, wh, we = inputs
    weight, dy = fused_weight(wh, we), torch.randn_like(x)
    mask = torch.tensor([0, 1, 0, 0, 1, 1, 0], dtype=torch.bool) if images else None
    saved = engram_gate_fwd(x, k, v, weight, EPS, CLAMP, image_token_mask=mask)[1:]
    given = (dy, x, k, v, weight, *saved, CLAMP, mask)
    expected = twins.gate_bwd_partial(*given)
    for module in ('tile_kernels.engram.gate_bwd', 'tile_kernels.reference.engram.gate_bwd_partial'):
        monkeypatch.setattr(importlib.import_module(module), 'num_partials_for', lambda *shape: num_partials)
    with forced_config(gate_bwd_kernel, vectors=2, resident_threads=512, ahead=ahead):
        *grads, partial = engram_gate_bwd(*given)
    assert partial.shape == (num_partials, 4, 256)
    for actual, wanted in zip((*grads, partial.sum(0)), (*expected[:3], expected[3].sum(0)), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=2e-2 if actual.dtype == torch.bfloat16 else 1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (lambda a: a | dict(hidden_states=a['hidden_states'].float()), 'hidden_states must be bfloat16'),
        (lambda a: a | dict(v=a['v'][:3]), r'v must be \(num_tokens, hidden\) with num_tokens = 7'),
        (
            lambda a: {n: t[..., :100] if n != 'v' else t[:, :100] for n, t in a.items()},
            'hidden must be a multiple of 64',
        ),
        (lambda a: a | dict(k=a['k'].mT.contiguous().mT), 'k must have stride 1 in the last dimension'),
        (lambda a: a | dict(weight_fused=a['weight_fused'].double()), 'weight_fused must be float32'),
    ],
)
def test_bad_input_is_named(inputs, change, words):
    x, k, v, wh, we = inputs
    given = change(dict(hidden_states=x, k=k, v=v, weight_fused=fused_weight(wh, we)))
    with pytest.raises(ArgumentError, match='engram.engram_gate_fwd: ' + words):
        engram_gate_fwd(**given, eps=EPS, clamp_value=CLAMP)


@pytest.mark.parametrize('packed', [False, True])
def test_missing_arguments_are_those_of_the_function_called(inputs, packed):
    x, k, v, wh, we = inputs
    sources = (torch.cat([k, v.unsqueeze(1)], 1),) if packed else (k, v)
    with pytest.raises(TypeError, match=r"^engram_gate_fwd\(\) missing .* 'eps' and 'clamp_value'"):
        engram_gate_fwd(x, *sources, fused_weight(wh, we))


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_fifty_runs_give_the_same_bits():
    torch.manual_seed(0)
    x, k, dy = (torch.randn(1001, 4, 2560, dtype=torch.bfloat16, device='cuda') for _ in range(3))
    v, weight = torch.randn(1001, 2560, dtype=torch.bfloat16, device='cuda'), torch.randn(4, 2560, device='cuda')

    def once():
        y, *saved = engram_gate_fwd(x, k, v, weight, EPS, CLAMP)
        *grads, partial = engram_gate_bwd(dy, x, k, v, weight, *saved, CLAMP)
        total = [torch.zeros(4, 2560, device='cuda') for _ in range(2)]
        grad_w_reduce(partial, weight, weight, *total)
        return y, *saved, *grads, partial, *total

    first = once()
    for _ in range(49):
        for actual, expected in zip(once(), first, strict=True):
            assert_equal(actual, expected)


@pytest.mark.parametrize('which', ['x', 'k'])
def test_rows_of_zeros_are_divided_by_eps_alone(inputs, which):
    x, k, v, wh, we = inputs
    given = {'x': x, 'k': k}[which]
    given[2], given[3] = 0, 1e-8
    found = engram_gate_fwd(x, k, v, fused_weight(wh, we), 1e-6, CLAMP)
    expected = engram_gate_ref(x, k, v, wh, we, CLAMP, 1e-6, save_for_backward=True)
    for actual, reference in zip(found, expected, strict=True):
        assert actual.isfinite().all() and calc_diff(actual, reference) < 2e-10
    rstd = found[3 if which == 'x' else 4]
    torch.testing.assert_close(rstd[2:4], torch.full_like(rstd[2:4], 1e3))
