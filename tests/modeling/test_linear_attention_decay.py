"""Mamba-2 and retention layers: equal to plain PyTorch in results and gradients; decoding equals the chunk form."""

import copy
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from tile_kernels import ArgumentError, knobs
from tile_kernels.modeling import Mamba2, Retention

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16
EXAMPLE = Path(__file__).parents[2] / 'examples' / 'training' / 'linear_attention.py'


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def plain_mamba(layer: Mamba2, x: Tensor) -> Tensor:
    """The layer in plain PyTorch, token by token."""
    heads, groups, state_dim, inner = layer.heads, layer.ngroups, layer.d_state, layer.inner
    z, xbc, dt = layer.in_proj(x).split([inner, layer.conv1d.in_channels, heads], -1)
    taps = layer.conv1d.kernel_size[0]
    xbc = F.silu(layer.conv1d(F.pad(xbc.transpose(1, 2), (taps - 1, 0))).transpose(1, 2))
    values, B, C = xbc.split([inner, groups * state_dim, groups * state_dim], -1)
    values = values.unflatten(-1, (heads, -1))
    B, C = (y.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 2) for y in (B, C))
    dt, A = F.softplus(dt + layer.dt_bias), -layer.A_log.exp()
    state, rows = values.new_zeros(x.shape[0], heads, layer.headdim, state_dim), []
    for t in range(x.shape[1]):
        state = state * (dt[:, t] * A).exp()[..., None, None]
        state = state + (dt[:, t, :, None] * values[:, t])[..., None] * B[:, t, :, None]
        rows.append((state * C[:, t, :, None]).sum(-1) + layer.D[:, None] * values[:, t])
    y = torch.stack(rows, 1).flatten(-2) * F.silu(z)
    return layer.out_proj(F.rms_norm(y, (inner,), layer.norm.weight, layer.eps))


def plain_retention(layer: Retention, x: Tensor) -> Tensor:
    """The layer in plain PyTorch, token by token."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj)
    q, k, v, gate = (proj(x).unflatten(-1, (layer.num_heads, -1)) for proj in projections)
    angle = torch.arange(x.shape[1])[:, None] * layer.rope_theta ** (
        -torch.arange(0, layer.head_dim, 2) / layer.head_dim
    )
    cos, sin = (y[:, None].to(x.device) for y in (angle.cos(), angle.sin()))

    def rotate(y):
        a, b = y.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    q, k = rotate(q) * layer.head_dim**-0.5, rotate(k)
    decay = 1 - 2.0 ** (-5 - torch.arange(layer.num_heads, device=x.device))
    state, rows = 0.0, []
    for t in range(x.shape[1]):
        state = state * decay[:, None, None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append((state * q[:, t, :, :, None]).sum(2))
    o = F.rms_norm(torch.stack(rows, 1), (layer.value_dim,), layer.g_norm.weight, layer.eps)
    return layer.o_proj((o * F.silu(gate)).flatten(-2))


def make(name: str):
    torch.manual_seed(0)
    if name == 'mamba':
        return Mamba2(32, d_state=16, headdim=16, ngroups=2, device=DEVICE), plain_mamba
    return Retention(32, 2, expand_v=2, device=DEVICE), plain_retention


@pytest.mark.parametrize('name', ['mamba', 'retention'])
def test_equals_plain_pytorch(name):
    layer, plain = make(name)
    x = torch.randn(2, 9, 32, device=DEVICE).to(BF16).requires_grad_()
    wide, wide_x = copy.deepcopy(layer).float(), x.detach().float().requires_grad_()
    expected, y = plain(wide, wide_x), layer(x)
    assert (y.float() - expected).norm() <= 0.02 * expected.norm()
    upstream = torch.randn_like(expected)
    own = torch.autograd.grad(y, [x, *layer.parameters()], upstream.to(BF16))
    other = torch.autograd.grad(expected, [wide_x, *wide.parameters()], upstream)
    for a, b in zip(own, other, strict=True):
        assert (a.float() - b).norm() <= 0.04 * b.norm()


@pytest.mark.parametrize('name', ['mamba', 'retention'])
def test_decoding_equals_the_chunk_form(name):
    layer, _ = make(name)
    x = torch.randn(2, 12, 32, device=DEVICE).to(BF16)
    with torch.no_grad():
        whole, last = layer(x, return_state=True)
        y, state = layer(x[:, :5], return_state=True)
        rows = [y]
        for part in x[:, 5:].split([1, 1, 4, 1], dim=1):
            y, state = layer(part, state=state)
            rows.append(y)
    torch.testing.assert_close(torch.cat(rows, 1).float(), whole.float(), rtol=3e-2, atol=2e-2)
    for own, other in zip(vars(state).values(), vars(last).values(), strict=True):
        torch.testing.assert_close(own.float(), other.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize('name', ['mamba', 'retention'])
def test_packed_sequences_equal_dense_ones(name):
    layer, _ = make(name)
    x = torch.randn(1, 11, 32, device=DEVICE).to(BF16)
    y, state = layer(x, cu_seqlens=torch.tensor([0, 4, 4, 11], device=DEVICE), return_state=True)
    first, second = layer(x[:, :4]), layer(x[:, 4:], return_state=True)
    assert torch.equal(y[:, :4], first) and torch.equal(y[:, 4:], second[0])
    for own, other in zip(vars(state).values(), vars(second[1]).values(), strict=True):
        assert torch.equal(own[2:], other)


@pytest.mark.parametrize('name', ['mamba', 'retention'])
def test_nothing_in_is_nothing_out(name):
    layer, _ = make(name)
    for shape in ((0, 3, 32), (2, 0, 32)):
        x = torch.zeros(shape, device=DEVICE, dtype=BF16)
        y, state = layer(x, return_state=True)
        assert y.shape == shape and layer(x, state=state)[0].shape == shape


def test_bad_arguments_are_told():
    with pytest.raises(ArgumentError, match='Mamba2: d_state must be a multiple of 16, got 24'):
        Mamba2(32, d_state=24)
    with pytest.raises(ArgumentError, match='Retention: hidden_size must be a multiple of 3, got 32'):
        Retention(32, 3)
    for name in ('mamba', 'retention'):
        layer, _ = make(name)
        with pytest.raises(ArgumentError, match=f'{type(layer).__name__}: x must be'):
            layer(torch.zeros(3, 32, device=DEVICE, dtype=BF16))


@pytest.mark.parametrize('name', ['mamba', 'retention'])
def test_state_dict_and_compile(name):
    layer, other = make(name)[0], make(name)[0]
    other.load_state_dict(layer.state_dict())
    counter = CompileCounter()
    compiled = torch.compile(other, fullgraph=True, dynamic=True, backend=counter)
    with knobs(interpret=False):
        for tokens in (5, 8, 11):
            x = torch.randn(2, tokens, 32, device=DEVICE).to(BF16)
            assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


def test_the_example_trains_to_the_loss_of_plain_pytorch(capsys):
    with knobs(interpret=False):
        runpy.run_path(str(EXAMPLE), run_name='__main__')
    assert 'loss after' in capsys.readouterr().out
