"""Calls of other libraries: what they may pass, what is rare, and what PyTorch traces."""

import inspect
import math
import sys

import pytest
import tile_kernels.torch as twins
import torch
from torch._dynamo.testing import CompileCounter

from tile_kernels import ArgumentError, attention, knobs
from tile_kernels.attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    index_topk,
    mqa_logits,
    pack_mla_cache,
    topk_indices,
)
from tile_kernels.attention.fp8_paged_mqa_logits import pack_page
from tile_kernels.core.launch import on_gpu
from tile_kernels.modeling import MLA
from tile_kernels.reference.attention import fronts

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def normal(*shape, dtype=BF16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def plain(q, k, v, scale, visible=None):
    """Attention of (batch, tokens, heads, dim) in float64 and its lse (batch, heads, tokens)."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.mT * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def floor(o):
    """Twice a rounding of the largest number."""
    return 2 * 2.0**-8 * o.abs().max().item()


# Arguments ----------------------------------------------------------------------------------

OTHER = dict(q_descale=None, cu_seqlens_q=None, max_seqlen_q=None, block_sparse_tensors=None, zero_tensors=False)


def test_neutral_arguments_of_all_versions_and_a_margin_are_taken():
    q, cuts, pages = normal(1, 3, 2, 64), ints(0, 3), normal(1, 16, 2, 64)
    others = dict(q_descale=None, leftpad_k=None, zero_tensors=False)
    calls = [
        (lambda **given: flash_attn_func(q, q, q, **given), OTHER),
        (lambda **given: flash_attn_func(q, q, q, num_splits=0, **given), OTHER),
        (lambda **given: flash_attn_with_kvcache(q, q, q, cache_seqlens=3, **given), OTHER),
        (lambda **given: flash_attn_varlen_func(q[0], q[0], q[0], cuts, cuts, 3, 3, **given), others),
        (
            lambda **given: flash_attn_varlen_func(
                q[0], pages, pages, cuts, None, 3, 9, seqused_k=ints(9), block_table=ints([0]), **given
            ),
            others,
        ),
    ]
    for call, neutral in calls:
        assert torch.equal(call(**neutral, sm_margin=3), call())
        with pytest.raises(ArgumentError, match='sm_margin must be at least 0'):
            call(sm_margin=-1)
        with pytest.raises(ArgumentError, match='block_sparse_tensors must be None'):
            call(block_sparse_tensors=1)


def test_what_is_no_tensor_is_told_before_gradients_are_asked_for():
    q, cuts = normal(1, 3, 2, 64), ints(0, 3)
    for splits in (0, 1, 2):
        with pytest.raises(ArgumentError, match='k must be a tensor'):
            flash_attn_func(q, [1], q, num_splits=splits)
        with pytest.raises(ArgumentError, match='sink must be a tensor'):
            flash_attn_varlen_func(q[0], q[0], q[0], cuts, cuts, 3, 3, num_splits=splits, sink=1.0)
    with pytest.raises(ArgumentError, match='v_cache must be a tensor'):
        flash_attn_with_kvcache(q, q, None, cache_seqlens=3)


# Wide heads ---------------------------------------------------------------------------------


@pytest.mark.parametrize('gpu', ['a100', 'h200'])
def test_heads_of_512_columns(gpu):
    torch.manual_seed(0)
    q, k, v = normal(1, 5, 2, 512), normal(1, 20, 1, 512), normal(1, 20, 1, 512)
    scale, sink = 512**-0.5, torch.tensor([0.5, -math.inf], device=DEVICE)
    visible = torch.ones(5, 20, dtype=torch.bool, device=DEVICE).tril(15)
    expected, expected_lse = plain(q, k, v, scale, visible)
    with on_gpu(gpu), knobs(interpret=True):
        o, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
        below = flash_attn_varlen_func(q[0], k[0], v[0], ints(0, 5), ints(0, 20), 5, 20, causal=True, sink=sink)
    assert o.shape == q.shape and (o - expected).abs().max().item() <= floor(expected)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)
    shrunk = expected[0] * torch.sigmoid(expected_lse[0] - sink[:, None]).T.unsqueeze(-1)
    assert (below - shrunk).abs().max().item() <= floor(shrunk)
    with pytest.raises(ArgumentError, match='q must not require a gradient with 512 columns'):
        flash_attn_func(q.requires_grad_(), k, v)
    with pytest.raises(ArgumentError, match='last extent of v with queries of 512 columns must be 512'):
        flash_attn_func(q.detach(), k, v[..., :256])


def test_heads_of_512_columns_in_pages():
    torch.manual_seed(0)
    q, k, v = normal(1, 3, 2, 512), normal(3, 16, 1, 512), normal(3, 16, 1, 512)
    own = [x[[2, 0]].flatten(0, 1)[None, :20] for x in (k, v)]
    visible = torch.ones(3, 20, dtype=torch.bool, device=DEVICE).tril(17)
    expected, expected_lse = plain(q, *own, 512**-0.5, visible)
    table, lengths, out = ints(2, 0)[None], ints(17), torch.empty_like(q)
    k[0, 1:4], v[0, 1:4] = math.nan, math.nan  # to be overwritten
    with knobs(interpret=True):
        given: dict = dict(block_table=table, causal=True, return_softmax_lse=True, out=out)
        o, lse = flash_attn_with_kvcache(q, k, v, own[0][:, 17:], own[1][:, 17:], cache_seqlens=lengths, **given)
        given = dict(seqused_k=lengths + 3, block_table=table, causal=True)
        packed = flash_attn_varlen_func(q[0], k, v, ints(0, 3), **given)
    assert o is out and (o - expected).abs().max().item() <= floor(expected)
    assert (packed - expected[0]).abs().max().item() <= floor(expected)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)
    with pytest.raises(ArgumentError, match='last extent of q must be a multiple of 8 up to 256, got 512'):
        flash_attn_with_kvcache(q, k.to(FP8), v.to(FP8), cache_seqlens=lengths, block_table=table)


# fp8 ----------------------------------------------------------------------------------------


def test_operands_of_fp8_are_products_of_codes_and_factors():
    torch.manual_seed(1)
    codes = [normal(2, n, h, 64).to(FP8) for n, h in ((3, 4), (37, 2), (37, 2))]
    factors = [torch.rand(2, 2, device=DEVICE) + 0.5 for _ in range(3)]
    wide = [
        x.double() * f.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None].double()
        for x, f in zip(codes, factors, strict=True)
    ]
    expected, expected_lse = plain(*wide, 0.125)
    given = dict(zip(('q_descale', 'k_descale', 'v_descale'), factors, strict=True))
    table = torch.arange(6, device=DEVICE).view(2, 3)
    pages = [
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 11)).reshape(6, 16, 2, 64)
        for x in (x.view(torch.uint8) for x in codes[1:])
    ]
    pages = [x.view(FP8) for x in pages]
    flat, cuts = [x.flatten(0, 1) for x in codes], (ints(0, 3, 6), ints(0, 37, 74))
    with knobs(interpret=True):
        found = [flash_attn_func(*codes, **given, return_lse=True)]
        o, lse = flash_attn_varlen_func(*flat, *cuts, 3, 37, **given, return_lse=True)
        found.append((o.view(2, 3, 4, 64), lse.view(4, 2, 3).transpose(0, 1)))
        cached = dict(cache_seqlens=37, block_table=table.int(), return_softmax_lse=True)
        found.append(flash_attn_with_kvcache(codes[0], *pages, **cached, **given))
        half = flash_attn_func(*codes, num_splits=2)
    for o, lse in found:
        assert o.dtype is BF16 and (o - expected).abs().max().item() <= floor(expected)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)
    whole = plain(*codes, 0.125)[0]
    assert (half - whole).abs().max().item() <= floor(whole)
    with pytest.raises(ArgumentError, match='k must be float8_e4m3fn, got bfloat16'):
        flash_attn_func(codes[0], codes[1].to(BF16), codes[2])
    with pytest.raises(ArgumentError, match='q_descale must be None'):
        flash_attn_func(*(x.to(BF16) for x in codes), q_descale=factors[0])
    with pytest.raises(ArgumentError, match=r'q_descale must be a scalar or \(2, 2\)'):
        flash_attn_func(*codes, q_descale=factors[0][:1])


# Latent attention ---------------------------------------------------------------------------


@pytest.mark.parametrize('gpu', ['a100', 'h200'])
def test_any_number_of_heads_and_the_sum_of_weights(gpu):
    torch.manual_seed(2)
    q, kv, sink = normal(2, 130, 576), normal(9, 1, 576), torch.randn(130, device=DEVICE)
    listed = torch.randint(-1, 11, (2, 1, 80), device=DEVICE)[..., :64]  # int64, with gaps
    limit = ints(64, 20)
    with on_gpu(gpu), knobs(interpret=True):
        o, top, lse, p_sum = flash_mla_sparse_fwd(q, kv, listed, 0.05, 512, sink, limit, return_p_sum=True)
    for t in range(2):
        own = listed[t, 0, : int(limit[t])]
        valid = (own >= 0) & (own < 9)
        k = kv[own[valid], 0].double()
        scores = q[t].double() @ k.T * 0.05
        p = (scores - torch.logaddexp(scores.logsumexp(1), sink.double())[:, None]).exp()
        expected = p @ k[:, :512]
        assert (o[t] - expected).abs().max().item() <= floor(expected)
        torch.testing.assert_close(lse[t].double(), scores.logsumexp(1), rtol=0, atol=1e-4)
        torch.testing.assert_close(top[t].double(), scores.amax(1), rtol=0, atol=1e-4)
        sums = torch.zeros(64, device=DEVICE, dtype=torch.float64)
        sums[: len(own)][valid] = p.sum(0)
        torch.testing.assert_close(p_sum[t].double(), sums, rtol=2e-3, atol=1e-4)
    assert p_sum.shape == (2, 64)
    leaves = [x.requires_grad_() for x in (q, kv, sink)]
    found = flash_mla_sparse_fwd(leaves[0], leaves[1], listed, 0.05, attn_sink=leaves[2], return_p_sum=True)
    assert found[0].requires_grad and not found[3].requires_grad


def test_latent_caches_without_keys():
    q, pages = normal(2, 1, 3, 576), normal(2, 16, 1, 576)
    for cache, width in ((pages[:0], 2), (pages, 0)):
        table = torch.zeros(2, width, dtype=torch.int32, device=DEVICE)
        o, lse = flash_mla_with_kvcache(q, cache, table, ints(0, 3), 512)
        assert not o[0].any() and (lse[0] == math.inf).all() and o[1].isnan().all() and lse[1].isnan().all()
    wide = torch.zeros(2, 5, dtype=torch.int32, device=DEVICE)
    o, _ = flash_mla_with_kvcache(q, pages, wide[:, :2], ints(5, 3), 512)  # a slice of a longer table
    assert torch.equal(o, flash_mla_with_kvcache(q, pages, wide[:, :2].contiguous(), ints(5, 3), 512)[0])


# Indexer ------------------------------------------------------------------------------------


def test_scores_and_selection_in_one_call(monkeypatch):
    torch.manual_seed(3)
    q, k = (torch.randint(-2, 3, shape, device=DEVICE).to(FP8) for shape in ((5, 16, 32), (70, 64)))
    kv, weights = (k[:, :32], 2.0 ** torch.randint(-1, 2, (70,), device=DEVICE)), torch.ones(5, 16, device=DEVICE)
    start, end = ints(0, 3, -2, 60, 9), ints(70, 40, 99, 62, 9)
    with knobs(interpret=True):
        whole = index_topk(q[:, :8], kv, weights[:, :8], start, end, 6)  # slices with gaps
        monkeypatch.setattr(sys.modules[index_topk.fn.__module__], 'SCORES_BYTES', 2 * 4 * 70)
        parts = index_topk(q[:, :8], kv, weights[:, :8], start.long(), end.long(), 6)
    logits = fp8_mqa_logits(q[:, :8], kv, weights[:, :8], start, end)
    assert torch.equal(whole, topk_indices(logits, 6, start, end)) and torch.equal(parts, whole)
    assert whole[3].tolist() == [0, 1, -1, -1, -1, -1] and (whole[4] == -1).all()


def test_slices_are_scored_where_rows_have_gaps():
    q, k, weights = normal(3, 16, 32), normal(9, 64), torch.rand(3, 16, device=DEVICE)
    bounds = ints(0, 0, 0), ints(9, 4, 2)
    given = (q[:, :8], k[:, :32], weights[:, :8])
    assert torch.equal(mqa_logits(*given, *bounds), mqa_logits(*(x.contiguous() for x in given), *bounds))
    pages = pack_page(normal(2, 64, 32).to(FP8), torch.ones(2, 64, device=DEVICE))
    table = torch.zeros(3, 7, dtype=torch.int32, device=DEVICE)
    own = (q[:, None, :8].to(FP8), pages, weights[:, :8], bounds[1])
    found = fp8_paged_mqa_logits(*own, table[:, :2], None, 9, clean_logits=True)
    rows = (own[0].contiguous(), pages, own[2].contiguous(), own[3], table[:, :2].contiguous())
    assert torch.equal(found, fp8_paged_mqa_logits(*rows, None, 9, clean_logits=True)) and found[0].isfinite().all()
    with pytest.raises(ArgumentError, match='q must have stride 1 in the last dimension'):
        mqa_logits(q[:, :8].mT.contiguous().mT, *given[1:], *bounds)


# torch.compile ------------------------------------------------------------------------------


def test_one_graph_appends_selects_and_weighs():
    def run(q, k, v, new, lengths, latent, kv, listed):
        o = flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=lengths, causal=True)
        found = flash_mla_sparse_fwd(latent, kv, listed, 0.05, return_p_sum=True)
        codes, ends = q[:, 0].to(FP8), lengths + 1
        weights, factors = q[:, 0, :, 0].float(), q[:, 0, 0, 1].float()
        best = index_topk(codes, (codes[:, 0].contiguous(), factors), weights, lengths * 0, ends, 3)
        eights = flash_attn_func(codes[:, None], codes[:, None], codes[:, None])
        return o, k, found[0], found[3], best, eights

    counter = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for batch, keys in ((5, 21), (6, 34), (9, 47)):
            torch.manual_seed(batch)
            q, k, v, new = (normal(batch, n, 8, 32) for n in (2, keys, keys, 2))
            lengths = torch.full((batch,), keys - 3, dtype=torch.int32, device=DEVICE)
            listed = torch.randint(-1, keys, (batch, 1, keys), device=DEVICE)
            rest = (q, v, new, lengths, normal(batch, 3, 576), normal(keys, 1, 576), listed)
            copy = k.clone()
            actual = compiled(q, copy, *rest[1:])
            for x, y in zip(actual, run(q, k, *rest[1:]), strict=True):
                assert torch.equal(x, y)
    assert counter.frame_count == 1


def test_selecting_layers_are_one_graph():
    torch.manual_seed(0)
    layer = MLA(128, 2, q_lora_rank=32, index_topk=4, index_heads=8, index_dim=64, device=DEVICE)
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for batch, tokens in ((5, 7), (6, 9)):
        x = normal(batch, tokens, 128)
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


# Twins --------------------------------------------------------------------------------------


def calls() -> list[tuple]:
    """A call of every public function: name, arguments, keyword arguments."""
    torch.manual_seed(5)
    q, k, v, sink = normal(2, 3, 4, 32), normal(2, 20, 2, 32), normal(2, 20, 2, 16), normal(4, dtype=torch.float32)
    cuts, pages, table = (ints(0, 3, 6), ints(0, 20, 40)), normal(3, 16, 2, 32), ints(2, 0, 1, -1).view(2, 2)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    codes, ones = [x.to(FP8) for x in (q, k, k)], torch.rand(2, 2, device=DEVICE) + 0.5
    band = dict(causal=True, window_size=(5, None), softcap=2.0, s_aux=sink)
    paged = dict(page_table=table, seqused_k=ints(20, 9), return_lse=True)
    latent, cache, listed = normal(2, 2, 3, 576), normal(3, 16, 1, 576), torch.randint(-1, 40, (2, 2, 8), device=DEVICE)
    packed, own = pack_mla_cache(cache), listed.int()
    extra = dict(indices=own, extra_k_cache=cache, extra_indices_in_kvcache=own, attn_sink=sink[:3])
    rows = (
        normal(4, 8, 32).to(FP8),
        (normal(9, 32).to(FP8), torch.rand(9, device=DEVICE)),
        torch.rand(4, 8, device=DEVICE),
    )
    bounds = ints(0, 2, 5, 8), ints(9, 4, 5, 99)
    indexed = pack_page(normal(2, 64, 32).to(FP8), torch.rand(2, 64, device=DEVICE))
    nsa = normal(1, 40, 4, 32), normal(1, 40, 2, 32), normal(1, 40, 2, 16), *torch.rand(3, 1, 40, 4, device=DEVICE)
    lists = torch.randint(-1, 3, (1, 40, 2, 2), device=DEVICE)
    counts = torch.randint(0, 3, (1, 40, 2), device=DEVICE)
    paged_rows = rows[0][:, None], indexed, rows[2], bounds[1][[0, 1, 2, 0]], ints(1, 1, 1, 1)[:, None]
    blocks = torch.ones(2, 4, 1, 2, device=DEVICE, dtype=torch.int32) - ints(1, 0)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    return [
        ('flash_attn_func', (q, k, v), dict(return_attn_probs=True, **band)),
        ('flash_attn_func', codes, dict(q_descale=ones, k_descale=ones, v_descale=ones, return_lse=True)),
        ('block_sparse_attn_func', (q, k, v, blocks, blocks[..., 0]), dict(block=(64, 64), return_lse=True, **band)),
        ('flash_attn_varlen_func', (*flat, *cuts, 3, 20), dict(return_lse=True, seqused_k=ints(20, 7), **band)),
        ('flash_attn_varlen_func', (flat[0], pages, pages, cuts[0], None, 3, 20), paged),
        ('flash_attn_varlen_func', [x.flatten(0, 1) for x in codes] + [*cuts, 3, 20], dict(k_descale=ones)),
        ('flash_attn_with_kvcache', (q, pages, pages), dict(cache_seqlens=9, block_table=table, **band)),
        ('flash_attn_with_kvcache', (q, k, v, k[:, :2], v[:, :2]), dict(cache_seqlens=ints(3, 18), causal=True)),
        ('flash_attn_with_kvcache', codes, dict(cache_seqlens=9, q_descale=ones, return_softmax_lse=True)),
        ('flash_attn_combine', (q.float(), q[..., 0].float()), dict(sink=sink, out_dtype=BF16)),
        ('scaled_dot_product_attention', heads_first, dict(is_causal=True, scale=0.3, enable_gqa=True)),
        ('flash_mla_with_kvcache', (latent, cache, table, ints(20, 9), 512), dict(causal=True)),
        ('flash_mla_with_kvcache', (latent, packed, None, None, 512, None, None, 0.1, False, True, own), {}),
        ('flash_mla_with_kvcache', (latent, cache, None, None, 512), extra),
        ('flash_mla_sparse_fwd', (latent[0], cache[0], listed[0][:, None], 0.1), dict(return_p_sum=True)),
        ('pack_mla_cache', (cache,), {}),
        ('unpack_mla_cache', (packed,), {}),
        ('fp8_mqa_logits', (*rows, *bounds), {}),
        ('fp8_paged_mqa_logits', paged_rows, dict(max_context_len=64, clean_logits=True)),
        ('mqa_logits', (rows[0].to(BF16), rows[1][0].to(BF16), rows[2], *bounds), {}),
        ('topk_indices', (torch.randn(4, 9, device=DEVICE), 3, *bounds), dict(return_values=True)),
        ('index_topk', (*rows, *bounds, 3), {}),
        ('parallel_nsa', (*nsa, None, 2, 16, 8), {}),
        ('parallel_nsa', (*nsa, lists, counts, 16, 8, 0.3), dict(cu_seqlens=ints(0, 7, 40))),
    ]  # fmt: skip


def test_twins_take_the_same_calls():
    made = calls()
    names = {name for name, _, _ in made}
    assert names == {name for name in fronts.__all__}
    for name in names:
        parameters = [list(inspect.signature(getattr(place, name)).parameters) for place in (attention, twins)]
        assert parameters[0] == parameters[1], name
    copies = calls()  # some calls write their arguments
    for (name, args, given), (_, other, same) in zip(made, copies, strict=True):
        found, expected = (
            getattr(place, name)(*a, **g) for place, a, g in ((attention, args, given), (twins, other, same))
        )
        for own, twin in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
            assert own.dtype is twin.dtype
            torch.testing.assert_close(
                own, twin, rtol=1e-2, atol=1e-2, equal_nan=True, msg=lambda m, n=name: f'{n}: {m}'
            )
