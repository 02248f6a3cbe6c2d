"""Layers of the delta rule: equal to plain PyTorch in results and gradients; steps equal chunks."""

import copy
import io

import pytest
import torch

from tile_kernels import ArgumentError, knobs
from tile_kernels.modeling import GatedDeltaNet, KimiDeltaAttention

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
LAYERS = [GatedDeltaNet, KimiDeltaAttention]


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def make(kind, **options):
    torch.manual_seed(0)
    return kind(32, 1, 2, 16, 16, device=DEVICE, **options)


def plain(layer, x: torch.Tensor) -> torch.Tensor:
    """The layer in plain PyTorch, float32, one token after the other."""
    taps, heads = layer.conv_size, layer.num_v_heads
    projected = layer.qkv_proj(x)
    window = torch.nn.functional.pad(projected, (0, 0, taps - 1, 0))
    mixed = sum(layer.conv_weight[:, j] * window[:, j : j + x.shape[1]] for j in range(taps))
    q, k, v = torch.nn.functional.silu(mixed).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    q, k, v = (y.unflatten(-1, (n, -1)) for y, n in ((q, layer.num_heads), (k, layer.num_heads), (v, heads)))
    q, k = (
        (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(heads // y.shape[2], 2)
        for y in (q, k)
    )
    if isinstance(layer, GatedDeltaNet):
        decay, gate = layer.a_proj(x)[..., None], torch.nn.functional.silu(layer.g_proj(x))
    else:
        decay = layer.f_b_proj(layer.f_a_proj(x)).unflatten(-1, (heads, -1))
        gate = torch.sigmoid(layer.g_b_proj(layer.g_a_proj(x)))
    g = -layer.A_log.exp()[:, None] * torch.nn.functional.softplus(decay + layer.dt_bias.view(heads, -1))
    beta = torch.sigmoid(layer.b_proj(x)) * (2 if layer.allow_neg_eigval else 1)
    state, out = torch.zeros(x.shape[0], heads, layer.head_k_dim, layer.head_v_dim), []
    for t in range(x.shape[1]):
        state = g[:, t].exp()[..., None] * state
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum('bhkv,bhk->bhv', state, k[:, t]))
        state = state + torch.einsum('bhk,bhv->bhkv', k[:, t], u)
        out.append(torch.einsum('bhkv,bhk->bhv', state, q[:, t]) * layer.head_k_dim**-0.5)
    o = torch.stack(out, 1)
    o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.norm_weight
    return layer.o_proj(o.flatten(-2) * gate)


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact.double()).square().mean() / exact.double().square().mean()).sqrt().item()


@pytest.mark.parametrize('options', [dict(), dict(conv_size=3, allow_neg_eigval=True)], ids=str)
@pytest.mark.parametrize('kind', LAYERS)
def test_equals_plain_pytorch(kind, options):
    layer = make(kind, **options)
    wide = copy.deepcopy(layer).float()
    x = torch.randn(2, 20, 32, device=DEVICE).bfloat16()
    upstream = torch.randn(2, 20, 32, device=DEVICE).bfloat16()
    outcomes = []
    for own, run in ((layer, layer), (wide, lambda x: plain(wide, x))):
        leaf = x.to(own.o_proj.weight.dtype).requires_grad_()
        y = run(leaf)
        grads = torch.autograd.grad(y, [leaf, *own.parameters()], upstream.to(y.dtype))
        outcomes.append([y.detach(), *grads])
    assert error(outcomes[0][0], outcomes[1][0]) < 0.02
    names = ['x', *(name for name, _ in layer.named_parameters())]
    for name, own, exact in zip(names, outcomes[0][1:], outcomes[1][1:], strict=True):
        assert error(own, exact) < 0.05, name


@pytest.mark.parametrize('kind', LAYERS)
def test_steps_and_parts_equal_the_whole(kind):
    layer = make(kind)
    x = torch.randn(2, 22, 32, device=DEVICE).bfloat16()
    with torch.no_grad():
        whole, last = layer(x, return_state=True)
        state = layer.new_state(2)
        first, same = layer(x[:, :18], state=state)
        assert same is state
        parts = [first]
        for t in range(18, 22):
            y, same = layer(x[:, t : t + 1], state=state)
            assert same is state
            parts.append(y)
    assert error(torch.cat(parts, 1), whole) < 0.02
    assert error(state.recurrent, last.recurrent) < 0.01 and torch.equal(state.conv, last.conv)
    state.reset(1)
    assert not state.recurrent[1].any() and state.recurrent[0].any()


@pytest.mark.parametrize('kind', LAYERS)
def test_packed_sequences_are_those_run_alone(kind):
    layer = make(kind)
    x = torch.randn(1, 20, 32, device=DEVICE).bfloat16()
    with torch.no_grad():
        y = layer(x, cu_seqlens=torch.tensor([0, 3, 3, 20], device=DEVICE))
        alone = torch.cat([layer(x[:, :3]), layer(x[:, 3:])], 1)
    assert torch.equal(y, alone)


def test_a_state_of_a_training_step_is_a_new_one():
    layer = make(GatedDeltaNet)
    x = torch.randn(1, 3, 32, device=DEVICE).bfloat16()
    state = layer.new_state(1)
    y, other = layer(x, state=state)
    assert other is not state and not state.recurrent.any() and other.recurrent.requires_grad
    y2, _ = layer(x, state=other)
    (y.sum() + y2.sum()).backward()
    assert layer.A_log.grad.isfinite().all()


@pytest.mark.parametrize('kind', LAYERS)
def test_state_dict_round_trip(kind):
    layer, other = make(kind), kind(32, 1, 2, 16, 16, device=DEVICE)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    x = torch.randn(1, 5, 32, device=DEVICE).bfloat16()
    with torch.no_grad():
        assert torch.equal(layer(x), other(x))


def test_wrong_arguments_are_named():
    with pytest.raises(ArgumentError, match='GatedDeltaNet: num_v_heads must be a multiple of 2'):
        GatedDeltaNet(32, 2, 3)
    with pytest.raises(ArgumentError, match='head_k_dim must be a multiple of 16'):
        KimiDeltaAttention(32, 1, head_k_dim=24)
    layer = make(GatedDeltaNet)
    with pytest.raises(ArgumentError, match='state must have 2 sequences, got 1'):
        layer(torch.zeros(2, 1, 32, device=DEVICE).bfloat16(), state=layer.new_state(1))


@pytest.mark.parametrize('kind', LAYERS)
def test_convolutions_start_as_those_of_pytorch(kind):
    layer = make(kind, conv_size=4)  # uniform up to 1 / sqrt(4)
    assert 0.9 < layer.conv_weight.abs().max() * 2 <= 1 and abs(layer.conv_weight.std() * 12**0.5 - 1) < 0.1
