"""The layer of latent attention: equal to plain PyTorch in results and gradients; decode equals prefill."""

import copy
import runpy
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tile_kernels import ArgumentError, attention, knobs
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


def plain(layer: MLA, x: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
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
    weights = scores.masked_fill(later if hidden is None else hidden, float('-inf')).softmax(-1)
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


def packed_steps(layer: MLA, x: torch.Tensor, cache: LatentCache) -> None:
    """Three sequences of 7 tokens in packed steps, some without a token, agree with whole ones."""
    part = cache.layer(0)
    with torch.no_grad():
        whole = layer(x)
        first = torch.cat((x[0, :4], x[2, :7]))
        first = layer(first, cu_seqlens=torch.tensor([0, 4, 4, 11], device=DEVICE), cache=part)
        assert cache.lengths.tolist() == [4, 0, 7]
        second = torch.cat((x[0, 4:], x[1, :2], x[2, :1]))  # the last token belongs to nobody
        second = layer(second, cu_seqlens=torch.tensor([0, 3, 5, 5], device=DEVICE), cache=part)
        assert cache.lengths.tolist() == [7, 2, 7]
        third = layer(torch.cat((x[1, 2:], x[2, :0])), cu_seqlens=torch.tensor([0, 0, 5, 5], device=DEVICE), cache=part)
    bound = 1e-2 if cache.pages.dtype is BF16 else 5e-2
    own = (first[:4], second[:3], second[3:5], third, first[4:])
    torch.testing.assert_close(torch.cat(own), whole.flatten(0, 1), rtol=bound, atol=bound)
    assert not second[5:].any()


@pytest.mark.parametrize('dtype', [BF16, 'e4m3'])
def test_packed_tokens_are_appended_to_a_cache(dtype):
    layer, cache = make(), LatentCache(1, 3, 16, page=16, dtype=dtype, device=DEVICE)
    x = torch.randn(3, 7, HIDDEN, device=DEVICE).to(BF16)
    packed_steps(layer, x, cache)
    with torch.no_grad():
        cuts = torch.tensor([0, 10, 10, 10], device=DEVICE)
        with pytest.raises(ArgumentError, match='cache must have capacity for 10 more tokens, got 7 of 16 taken'):
            layer(x.flatten(0, 1)[:10], cu_seqlens=cuts, cache=cache.layer(0))
        with pytest.raises(ArgumentError, match='cu_seqlens must be'):
            layer(x[0], cu_seqlens=cuts[:3], cache=cache.layer(0))
        cache._counts = [[1, 1, 1]]  # as in the replay of a graph
        cache._lengths[0, 0] = 16
        y = layer(x[0, :2], cu_seqlens=torch.tensor([0, 1, 2, 2], device=DEVICE), cache=cache.layer(0))
        assert y[0].isnan().all() and y[1].isfinite().all()


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


# Selected keys ------------------------------------------------------------------------------


def scores_of(q, k, factor, weights):
    """Scores of the indexer, (rows, keys)."""
    dots = torch.einsum('ihd,jd->hij', q.float(), k.float()).relu()
    return torch.einsum('hij,ih->ij', dots, weights) * factor


def plain_logits(q, kv, weights, start, end, clean=True):
    scores, key = scores_of(q, *kv, weights), torch.arange(len(kv[0]), device=q.device)
    return scores.masked_fill((key < start[:, None]) | (key >= end[:, None]), float('-inf'))


def plain_paged_logits(q, cache, weights, lengths, table, meta, columns, clean=False):
    pages, page, _, width = cache.shape
    dim, rows = width - 4, cache.reshape(pages, -1)
    codes = rows[:, : page * dim].reshape(pages, page, dim).view(torch.float8_e4m3fn)
    factors = rows[:, page * dim :].contiguous().view(torch.float32)
    own = [table[b].long() for b in range(len(q))]
    weights = weights.view(*q.shape[:2], -1)
    found = [scores_of(q[b], codes[i].flatten(0, 1), factors[i].flatten(), weights[b]) for b, i in enumerate(own)]
    return torch.cat(found)[:, :columns]


def plain_topk(logits, k, start=None, end=None):
    start = torch.zeros_like(end) if start is None else start
    listed = torch.full((len(logits), k), -1, dtype=torch.int32, device=logits.device)
    for r, row in enumerate(logits):
        own = row[start[r] : end[r]]
        best = own.sort(descending=True, stable=True).indices[:k].sort().values
        listed[r, : len(best)] = best.int()
    return listed


@pytest.fixture
def indexing(monkeypatch):
    """Plain PyTorch for the ops of the indexer where this version has none."""
    names = dict(fp8_mqa_logits=plain_logits, fp8_paged_mqa_logits=plain_paged_logits, topk_indices=plain_topk)
    for name, function in names.items():
        if not hasattr(attention, name):
            monkeypatch.setattr(attention, name, function, raising=False)


def make_sparse(topk: int) -> MLA:
    return make(index_topk=topk, index_heads=8, index_dim=64)


def selected(layer: MLA, x: torch.Tensor) -> torch.Tensor:
    """Which keys (j) every token (i) of a single sequence sees."""
    compressed = layer.q_a_layernorm(layer.q_a_proj(x))
    angles = layer._angles(torch.arange(x.shape[1], device=x.device))
    q, (k, factor), weights = layer.indexer(x, compressed, angles)
    scores = scores_of(q, k, factor, weights).masked_fill(
        torch.ones(len(q), len(q), dtype=torch.bool, device=x.device).triu(1), float('-inf')
    )
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : layer.index_topk]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)
    return chosen & ~torch.ones_like(chosen).triu(1)


def test_a_token_sees_the_keys_that_the_indexer_selects(indexing):
    layer = make_sparse(3)
    x = torch.randn(1, 9, HIDDEN, device=DEVICE).to(BF16)
    with torch.no_grad():
        chosen = selected(layer, x)
        assert chosen.sum(1).tolist() == [1, 2, *[3] * 7]
        expected = plain(copy.deepcopy(layer).float(), x.float(), ~chosen)
        torch.testing.assert_close(layer(x).float(), expected, rtol=3e-2, atol=3e-2)
        both = layer(x.expand(2, -1, -1))
        assert torch.equal(both[0], both[1])
        packed = layer(torch.cat((x[0], x[0, :4])), cu_seqlens=torch.tensor([0, 9, 13], device=DEVICE))
        torch.testing.assert_close(packed[:9], both[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(packed[9:], both[0, :4], rtol=1e-2, atol=1e-2)


def test_selected_keys_have_gradients(indexing):
    layer = make_sparse(3)
    x = torch.randn(1, 7, HIDDEN, device=DEVICE).to(BF16).requires_grad_()
    names = [name for name, _ in layer.named_parameters() if not name.startswith('indexer.')]
    wide, wide_x = copy.deepcopy(layer).float(), x.detach().float().requires_grad_()
    upstream = torch.randn_like(wide_x)
    own = torch.autograd.grad(layer(x), [x, *map(layer.get_parameter, names)], upstream.to(BF16))
    with torch.no_grad():
        hidden = ~selected(layer, x)
    other = torch.autograd.grad(plain(wide, wide_x, hidden), [wide_x, *map(wide.get_parameter, names)], upstream)
    for a, b in zip(own, other, strict=True):
        assert (a.float() - b).abs().max() <= 0.05 * b.abs().max() + 1e-2


def test_selecting_all_keys_changes_nothing(indexing):
    layer, dense = make_sparse(9), make()
    dense.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(1, 9, HIDDEN, device=DEVICE).to(BF16)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), dense(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize('dtype', [BF16, 'e4m3'])
def test_sparse_decode_equals_sparse_prefill(indexing, dtype):
    layer = make_sparse(3)
    x = torch.randn(2, 8, HIDDEN, device=DEVICE).to(BF16)
    cache = LatentCache(1, 2, 64, dtype=dtype, index_dim=64, device=DEVICE)
    with torch.no_grad():
        whole = layer(x)
        steps = [layer(part, cache=cache.layer(0)) for part in x.split([5, 1, 2], dim=1)]
        bound = 1e-2 if dtype is BF16 else 5e-2
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=bound, atol=bound)


def test_packed_tokens_select_keys_of_a_cache(indexing):
    cache = LatentCache(1, 3, 64, index_dim=64, device=DEVICE)
    packed_steps(make_sparse(3), torch.randn(3, 7, HIDDEN, device=DEVICE).to(BF16), cache)


def test_a_full_cache_gives_nan_with_selected_keys_too(indexing):
    layer, cache = make_sparse(3), LatentCache(1, 1, 64, index_dim=64, device=DEVICE)
    cache._lengths += 64
    cache._counts = [[1]]  # as in the replay of a graph
    with torch.no_grad():
        assert layer(torch.randn(1, 1, HIDDEN, device=DEVICE).to(BF16), cache=cache.layer(0)).isnan().all()
    assert not cache.pages[:, :1].any() and not cache.index_pages[:, :1].any()


def test_the_cache_of_an_indexer_is_told():
    layer, x = make_sparse(3), torch.zeros(1, 2, HIDDEN, device=DEVICE, dtype=BF16)
    with (
        torch.no_grad(),
        pytest.raises(ArgumentError, match='index_dim of the cache must be that of the layer, got None'),
    ):
        layer(x, cache=LatentCache(1, 1, 64, device=DEVICE).layer(0))
    with torch.no_grad(), pytest.raises(ArgumentError, match='index_dim must be 32, got 64'):
        layer(x, cache=LatentCache(1, 1, 64, index_dim=32, device=DEVICE).layer(0))
    with pytest.raises(ArgumentError, match='page with index_dim must be 64, got 16'):
        LatentCache(1, 1, 64, page=16, index_dim=64)
    with pytest.raises(ArgumentError, match='q_lora_rank must be a number with index_topk, got None'):
        make(q_lora_rank=None, index_topk=4)


def test_the_example_runs(indexing, capsys):
    path = Path(__file__).parents[2] / 'examples' / 'mla_decode.py'
    with knobs(interpret=False):
        runpy.run_path(str(path), run_name='__main__')
    dense, sparse, recall = capsys.readouterr().out.splitlines()
    assert dense.startswith('dense: prefill 40, decode 6') or DEVICE == 'cuda'
    assert sparse.startswith('sparse: prefill') and recall.endswith('keys selected in fp8')
    assert float(recall.split()[1].rstrip('%')) > 80
