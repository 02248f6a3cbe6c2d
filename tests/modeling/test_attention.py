"""The attention layer: equal to plain PyTorch in results and gradients; decode equals prefill."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from tile_kernels import ArgumentError, knobs
from tile_kernels.attention import KVCache
from tile_kernels.modeling import Attention

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def plain(layer: Attention, x: torch.Tensor, window: int | None = None, first: int = 0) -> torch.Tensor:
    """The layer in plain PyTorch, float32."""
    heads = [(layer.q_proj, layer.num_heads), (layer.k_proj, layer.num_kv_heads), (layer.v_proj, layer.num_kv_heads)]
    q, k, v = (proj(x).unflatten(-1, (n, -1)).transpose(1, 2) for proj, n in heads)
    tokens, dim = x.shape[1], layer.head_dim
    angle = torch.arange(first, first + tokens)[:, None] * layer.rope_theta ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angle.cos().to(x.device), angle.sin().to(x.device)

    def rotate(y):
        a, b = y.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    group = layer.num_heads // layer.num_kv_heads
    q, k, v = rotate(q), rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * dim**-0.5
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    distance = torch.arange(tokens) - torch.arange(tokens)[:, None]
    hidden = (distance > 0) | (distance <= -(window or tokens))
    scores = scores.masked_fill(hidden.to(x.device), float('-inf'))
    if layer.sinks is not None:
        sinks = layer.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(-2))


def make(**options) -> Attention:
    torch.manual_seed(0)
    layer = Attention(32, 4, 2, 16, device=DEVICE, **options)
    if layer.sinks is not None:
        nn.init.normal_(layer.sinks)
    return layer


@pytest.mark.parametrize('options', [dict(), dict(window=3, sink=True, bias=True), dict(softcap=0.5, rope_theta=100.0)])
def test_equals_plain_pytorch(options):
    layer = make(**options)
    x = torch.randn(2, 9, 32, device=DEVICE).to(BF16).requires_grad_()
    wide, wide_x = copy.deepcopy(layer).float(), x.detach().float().requires_grad_()
    expected, y = plain(wide, wide_x, options.get('window')), layer(x)
    torch.testing.assert_close(y.float(), expected, rtol=3e-2, atol=3e-2)
    upstream = torch.randn_like(expected)
    own = torch.autograd.grad(y, [x, *layer.parameters()], upstream.to(BF16))
    other = torch.autograd.grad(expected, [wide_x, *wide.parameters()], upstream)
    for a, b in zip(own, other, strict=True):
        assert (a.float() - b).abs().max() <= 0.05 * b.abs().max() + 1e-2


def test_packed_sequences_equal_dense_ones():
    layer = make()
    x = torch.randn(11, 32, device=DEVICE).to(BF16).requires_grad_()
    y = layer(x, cu_seqlens=torch.tensor([0, 4, 11], device=DEVICE))
    dense = torch.cat((layer(x[None, :4])[0], layer(x[None, 4:])[0]))
    assert torch.equal(y, dense)
    upstream = torch.randn_like(y)
    for own, other in zip(torch.autograd.grad(y, x, upstream), torch.autograd.grad(dense, x, upstream), strict=True):
        torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-2)


def test_positions_turn_queries_and_keys():
    layer = make()
    x = torch.randn(1, 5, 32, device=DEVICE).to(BF16)
    positions = torch.arange(40, 45, device=DEVICE)[None]
    expected = plain(copy.deepcopy(layer).float(), x.float(), first=40)
    torch.testing.assert_close(layer(x, positions=positions).float(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize('dtype', [BF16, 'e4m3'])
def test_decode_equals_prefill(dtype):
    layer = make(window=6, sink=True)
    x = torch.randn(2, 9, 32, device=DEVICE).to(BF16)
    cache = KVCache(2, 2, 20, 2, 16, page=16, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        whole = layer(x)
        steps = [layer(part, cache=cache.layer(1)) for part in x.split([5, 1, 1, 2], dim=1)]
        bound = 1e-2 if dtype is BF16 else 0.1
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=bound, atol=bound)
        assert cache.lengths.tolist() == [9, 9]
        cache.free(0)
        assert cache.lengths.tolist() == [0, 9]
        again = layer(x[:, :5], cache=cache.layer(1))
        torch.testing.assert_close(again[0], whole[0, :5], rtol=bound, atol=bound)


@pytest.mark.parametrize('dtype', [BF16, 'e4m3'])
def test_packed_tokens_of_some_sequences_join_a_cache(dtype):
    layer = make(softcap=3.0)
    x = torch.randn(3, 9, 32, device=DEVICE).to(BF16)
    cache = KVCache(1, 3, 20, 2, 16, page=16, dtype=dtype, device=DEVICE)
    part = cache.layer(0)
    with torch.no_grad():
        whole = layer(x)
        first = layer(
            torch.cat((x[0, :4], x[2, :7])), cu_seqlens=torch.tensor([0, 4, 4, 11], device=DEVICE), cache=part
        )
        second = layer(
            torch.cat((x[0, 4:5], x[1, :2], x[2, 7:])), cu_seqlens=torch.tensor([0, 1, 3, 5], device=DEVICE), cache=part
        )
    assert cache.lengths.tolist() == [5, 2, 9]
    bound = 1e-2 if dtype is BF16 else 0.1
    torch.testing.assert_close(first, torch.cat((whole[0, :4], whole[2, :7])), rtol=bound, atol=bound)
    expected = torch.cat((whole[0, 4:5], whole[1, :2], whole[2, 7:]))
    torch.testing.assert_close(second, expected, rtol=bound, atol=bound)


def test_a_full_cache_is_told_and_not_overwritten():
    layer, cache = make(), KVCache(1, 2, 16, 2, 16, page=16, device=DEVICE)
    x = torch.randn(2, 16, 32, device=DEVICE).to(BF16)
    with torch.no_grad():
        layer(x, cache=cache.layer(0))
        before = cache.pages.clone()
        with pytest.raises(ArgumentError, match='cache must have capacity for 1 more tokens, got 16 of 16 taken'):
            layer(x[:, :1], cache=cache.layer(0))
        cache._counts = [[0, 0]]  # as in the replay of a graph
        assert layer(x[:, :1], cache=cache.layer(0)).isnan().all()
        assert torch.equal(cache.pages, before)
        cache = KVCache(1, 2, 16, 2, 16, page=16, device=DEVICE)
        cuts = torch.tensor([0, 1, 10], device=DEVICE)
        layer(x[0, :10], cu_seqlens=cuts, cache=cache.layer(0))
        layer(x[0, :10], cu_seqlens=torch.tensor([0, 10, 10], device=DEVICE), cache=cache.layer(0))
        with pytest.raises(ArgumentError, match='cache must have capacity for 9 more tokens, got 9 of 16 taken'):
            layer(x[0, :10], cu_seqlens=cuts, cache=cache.layer(0))
        assert cache.lengths.tolist() == [11, 9]


def test_bad_arguments_are_told():
    layer, cache = make(), KVCache(1, 1, 16, 2, 16, page=16, device=DEVICE)
    x = torch.zeros(1, 2, 32, device=DEVICE, dtype=BF16)
    with pytest.raises(ArgumentError, match='Attention: cache must come without gradients'):
        layer(x, cache=cache.layer(0))
    with pytest.raises(ArgumentError, match='Attention: x must be'):
        layer(x[0])
    with pytest.raises(ArgumentError, match='Attention: positions must have the shape of x'):
        layer(x, positions=torch.zeros(3, device=DEVICE))
    with pytest.raises(ArgumentError, match='num_heads must be a multiple of 3'):
        Attention(32, 4, 3)
    with pytest.raises(ArgumentError, match='page must be a multiple of 16, got 24'):
        KVCache(1, 1, 16, 2, 16, page=24)


def test_state_dict_and_compile():
    layer, other = make(sink=True), make(sink=True)
    other.load_state_dict(layer.state_dict())
    counter = CompileCounter()
    compiled = torch.compile(other, fullgraph=True, dynamic=True, backend=counter)
    with knobs(interpret=False):
        for tokens in (5, 8, 11):
            x = torch.randn(2, tokens, 32, device=DEVICE).to(BF16)
            assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1
