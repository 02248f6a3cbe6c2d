"""The layer of latent attention: equal to plain PyTorch in results and gradients; decode equals prefill."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tile_kernels import ArgumentError, knobs
from tile_kernels.attention import LatentCache
from tile_kernels.modeling import MLA

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16
HIDDEN, HEADS = 32, 3


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def make(**options) -> MLA:
    torch.manual_seed(0)
    sizes = dict(q_lora_rank=24, qk_nope_head_dim=16, v_head_dim=24) | options
    return MLA(HIDDEN, HEADS, device=DEVICE, **sizes)


def plain(layer: MLA, x: torch.Tensor) -> torch.Tensor:
    """The layer in plain PyTorch, float32."""

    def norm(y, weight):
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weight

    tokens = x.shape[1]
    angle = torch.arange(tokens)[:, None] * layer.rope_theta ** (-torch.arange(0, layer.rope, 2) / layer.rope)
    turn = torch.polar(torch.ones_like(angle), angle).to(x.device)

    def rotate(y):
        pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn[:, None]).flatten(-2)

    if layer.q_lora_rank is None:
        q = layer.q_proj(x)
    else:
        q = layer.q_b_proj(norm(layer.q_a_proj(x), layer.q_a_layernorm.weight))
    q_nope, q_rope = q.unflatten(-1, (HEADS, -1)).split((layer.nope, layer.rope), -1)
    latent, k_rope = layer.kv_a_proj_with_mqa(x).split((layer.kv_lora_rank, layer.rope), -1)
    kv = layer.kv_b_proj(norm(latent, layer.kv_a_layernorm.weight)).unflatten(-1, (HEADS, -1))
    k_nope, v = kv.split((layer.nope, layer.value), -1)
    q = torch.cat((q_nope, rotate(q_rope)), -1)
    k = torch.cat((k_nope, rotate(k_rope.unsqueeze(-2)).expand(*k_nope.shape[:-1], -1)), -1)
    scores = torch.einsum('bihd,bjhd->bhij', q, k) * layer.scale
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
    weights = scores.masked_fill(later, float('-inf')).softmax(-1)
    return layer.o_proj(torch.einsum('bhij,bjhd->bihd', weights, v).flatten(-2))


@pytest.mark.parametrize('options', [dict(), dict(q_lora_rank=None, kv_lora_rank=40, qk_rope_head_dim=8)])
def test_equals_plain_pytorch(options):
    layer = make(**options)
    x = torch.randn(2, 9, HIDDEN, device=DEVICE).to(BF16).requires_grad_()
    wide, wide_x = copy.deepcopy(layer).float(), x.detach().float().requires_grad_()
    expected, y = plain(wide, wide_x), layer(x)
    torch.testing.assert_close(y.float(), expected, rtol=3e-2, atol=3e-2)
    upstream = torch.randn_like(expected)
    own = torch.autograd.grad(y, [x, *layer.parameters()], upstream.to(BF16))
    other = torch.autograd.grad(expected, [wide_x, *wide.parameters()], upstream)
    for a, b in zip(own, other, strict=True):
        assert (a.float() - b).abs().max() <= 0.05 * b.abs().max() + 1e-2


def test_packed_sequences_equal_dense_ones():
    layer = make()
    x = torch.randn(11, HIDDEN, device=DEVICE).to(BF16)
    with torch.no_grad():
        y = layer(x, cu_seqlens=torch.tensor([0, 4, 11], device=DEVICE))
        assert torch.equal(y[:4], layer(x[None, :4])[0]) and torch.equal(y[4:], layer(x[None, 4:])[0])


@pytest.mark.parametrize('dtype', [BF16, 'e4m3'])
def test_decode_equals_prefill(dtype):
    layer = make()
    x = torch.randn(2, 9, HIDDEN, device=DEVICE).to(BF16)
    cache = LatentCache(2, 2, 20, page=16, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        whole = layer(x)
        steps = [layer(part, cache=cache.layer(1)) for part in x.split([5, 1, 1, 2], dim=1)]
        bound = 1e-2 if dtype is BF16 else 5e-2
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=bound, atol=bound)
        assert cache.lengths.tolist() == [9, 9]
        cache.free(0)
        assert cache.lengths.tolist() == [0, 9]
        again = layer(x[:, :5], cache=cache.layer(1))  # in latent form: the other sequence is not empty
        torch.testing.assert_close(again[0], whole[0, :5], rtol=bound, atol=bound)


@pytest.mark.parametrize('dtype', [BF16, 'e4m3'])
def test_a_full_cache_is_told_and_not_overwritten(dtype):
    layer, cache = make(), LatentCache(1, 2, 16, page=16, dtype=dtype, device=DEVICE)
    x = torch.randn(2, 16, HIDDEN, device=DEVICE).to(BF16)
    with torch.no_grad():
        layer(x, cache=cache.layer(0))
        before = cache.pages.clone()
        with pytest.raises(ArgumentError, match='cache must have capacity for 1 more tokens, got 16 of 16 taken'):
            layer(x[:, :1], cache=cache.layer(0))
        cache._counts = [[1, 1]]  # as in the replay of a graph
        assert layer(x[:, :1], cache=cache.layer(0)).isnan().all()
        assert torch.equal(cache.pages[:, :2], before[:, :2])


def test_parameters_have_the_public_names():
    names = {name for name, _ in make().named_parameters()}
    linear = ('q_a_proj', 'q_b_proj', 'kv_a_proj_with_mqa', 'kv_b_proj', 'o_proj')
    assert names == {f'{name}.weight' for name in (*linear, 'q_a_layernorm', 'kv_a_layernorm')}
    assert 'q_proj.weight' in dict(make(q_lora_rank=None).named_parameters())


def test_bad_arguments_are_told():
    layer, cache = make(), LatentCache(1, 1, 16, page=16, device=DEVICE)
    x = torch.zeros(1, 2, HIDDEN, device=DEVICE, dtype=BF16)
    with pytest.raises(ArgumentError, match='MLA: cache must come without gradients'):
        layer(x, cache=cache.layer(0))
    with pytest.raises(ArgumentError, match='MLA: x must be'):
        layer(x[0])
    with pytest.raises(ArgumentError, match='MLA: positions must have the shape of x'):
        layer(x, positions=torch.zeros(3, device=DEVICE))
    with torch.no_grad(), pytest.raises(ArgumentError, match='kv_lora_rank, qk_rope_head_dim with a cache must be'):
        make(kv_lora_rank=40)(x, cache=cache.layer(0))
    with pytest.raises(ArgumentError, match='v_head_dim must be a multiple of 8, got 12'):
        make(v_head_dim=12)
    with pytest.raises(ArgumentError, match='page must be a multiple of 16, got 24'):
        LatentCache(1, 1, 16, page=24)


def test_state_dict_and_compile():
    layer, other = make(kv_lora_rank=40), make(kv_lora_rank=40)
    other.load_state_dict(layer.state_dict())
    counter = CompileCounter()
    compiled = torch.compile(other, fullgraph=True, dynamic=True, backend=counter)
    with knobs(interpret=False):
        for tokens in (5, 8, 11):
            x = torch.randn(2, tokens, HIDDEN, device=DEVICE).to(BF16)
            assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1
