"""Attention as its contract words it: the oracle below is written from the text alone and knows no twin."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tile_kernels import ArgumentError, attention, knobs
from tile_kernels.attention import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)
from tile_kernels.interpreter.errors import InterpreterError

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16, F16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def normal(*shape, dtype=BF16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def oracle(q, k, v, *, scale=None, left=-1, right=-1, softcap=0.0, sink=None, hidden=()):
    """Attention of one sequence, key by key of the text: q (Sq, Hq, D), k (Sk, Hk, D), v (Sk, Hk, Dv)."""
    queries, heads, dim = q.shape
    keys, kv_heads = k.shape[:2]
    dtype, q, k, v = q.dtype, q.double().cpu(), k.double().cpu(), v.double().cpu()
    rounded = torch.zeros(queries, heads, v.shape[-1], dtype=torch.float64)  # as plain PyTorch in half precision
    o = torch.zeros(queries, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((heads, queries), -INF, dtype=torch.float64)
    for h in range(heads):
        own = h // (heads // kv_heads)
        for i in range(queries):
            seen = [
                j
                for j in range(keys)
                if j not in hidden
                and (left < 0 or j - (i + keys - queries) >= -left)
                and (right < 0 or j - (i + keys - queries) <= right)
            ]
            if not seen:
                continue
            s = k[seen, own] @ q[i, h] * (dim**-0.5 if scale is None else scale)
            if softcap > 0:
                s = softcap * torch.tanh(s / softcap)
            lse[h, i] = torch.logsumexp(s, 0)
            below = lse[h, i] if sink is None else torch.logaddexp(lse[h, i], sink[h].double().cpu())
            weights = (s - below).exp()
            o[i, h] = weights @ v[seen, own]
            rounded[i, h] = (weights.to(dtype).double() @ v[seen, own]).to(dtype).double()
    o.error = max(e.max().item() for e in ((rounded - o).abs(), o.abs() * 2.0**-9)) if o.numel() else 0.0
    return o, lse


def close(o, expected, lse=None, expected_lse=None):
    """The bound of the contract: twice the error of plain PyTorch in half precision, and 1e-4 for lse."""
    assert o.shape == expected.shape
    assert not o.numel() or (o.double().cpu() - expected).abs().max().item() <= 2 * expected.error + 1e-5
    if lse is not None:
        assert lse.dtype is torch.float32 and lse.shape == expected_lse.shape
        torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=0, atol=1e-4)


def store(sequences, page, hole=None):
    """Pages of (keys, heads, dim) sequences in shuffled order, NaN wherever nobody looks, and their table."""
    counts = [-(-len(x) // page) for x in sequences]
    total = sum(counts) + 1
    order = torch.randperm(total).tolist()
    pages = sequences[0].new_full((total, page, *sequences[0].shape[1:]), NAN)
    table = torch.full((len(sequences), max(counts) + 1), 10**6, dtype=torch.int32)
    for b, x in enumerate(sequences):
        for n in range(counts[b]):
            own = order.pop()
            part = x[n * page : (n + 1) * page]
            if hole != (b, n):
                pages[own, : len(part)] = part
            table[b, n] = -7 if hole == (b, n) else own
    return pages, table.to(DEVICE)


# Decode -------------------------------------------------------------------------------------

SWEEP = [  # queries, keys of two sequences, (heads, kv_heads), dims, window, causal, page, options
    (1, (0, 5), (1, 1), (64, 64), (-1, -1), False, 16, {}),
    (1, (64, 70), (8, 1), (64, 64), (-1, -1), True, 64, dict(softcap=1.5)),
    (5, (1, 70), (3, 1), (72, 72), (-1, -1), True, 16, dict(sink=True)),
    (5, (64, 5), (3, 3), (192, 128), (3, 0), False, 16, {}),
    (5, (70, 0), (8, 1), (64, 64), (0, 2), False, 0, dict(sink=True)),
    (70, (64, 5), (1, 1), (64, 64), (-1, -1), True, 16, {}),
    (0, (5, 64), (3, 1), (64, 64), (-1, -1), False, 16, {}),
    (1, (70, 33), (3, 1), (64, 64), (3, 0), True, 16, dict(num_splits=3, sink=True)),
    (2, (70, 64), (8, 8), (64, 64), (None, None), True, 16, dict(num_splits=2, softmax_scale=0.3)),
]


@pytest.mark.parametrize(('queries', 'lengths', 'heads', 'dims', 'window', 'causal', 'page', 'options'), SWEEP)
def test_decode(queries, lengths, heads, dims, window, causal, page, options):
    dtype = F16 if heads == (3, 3) else BF16
    q = normal(2, queries, heads[0], dims[0], dtype=dtype)
    ks, vs = ([normal(n, heads[1], d, dtype=dtype) for n in lengths] for d in dims)
    options = dict(options)
    if options.get('sink'):
        options['sink'] = normal(heads[0], dtype=torch.float32)
    given = dict(causal=causal, window_size=window, return_softmax_lse=True, **options)
    if page:
        torch.manual_seed(1)
        k_cache, table = store(ks, page)
        torch.manual_seed(1)
        v_cache, _ = store(vs, page)
        o, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=ints(*lengths), page_table=table, **given)
    else:
        caches = [q.new_full((2, 75, heads[1], d), NAN) for d in dims]
        for cache, own in zip(caches, (ks, vs), strict=True):
            for b, x in enumerate(own):
                cache[b, : len(x)] = x
        o, lse = flash_attn_with_kvcache(q, *caches, cache_seqlens=ints(*lengths, dtype=torch.int64), **given)
    for b in range(2):
        left, right = (-1 if side is None else side for side in window)
        plain = dict(left=left, right=0 if causal else right, softcap=options.get('softcap', 0.0))
        plain |= dict(sink=options.get('sink'), scale=options.get('softmax_scale'))
        expected, expected_lse = oracle(q[b], ks[b], vs[b], **plain)
        close(o[b], expected, lse[b], expected_lse)


def test_decode_with_a_hole_and_shared_pages():
    q, k, v = normal(2, 2, 3, 64), normal(40, 1, 64), normal(40, 1, 64)
    torch.manual_seed(3)
    k_cache, table = store([k], 16, hole=(0, 1))
    torch.manual_seed(3)
    v_cache, _ = store([v], 16, hole=(0, 1))
    o, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=40, block_table=table.expand(2, -1), causal=True, return_softmax_lse=True
    )
    for b in range(2):
        expected = oracle(q[b], k, v, right=0, hidden=range(16, 32))
        close(o[b], expected[0], lse[b], expected[1])


def test_decode_of_fp8_with_factors():
    q, codes = normal(2, 1, 4, 64), [normal(2, 37, 2, 64).to(FP8) for _ in range(2)]
    factors = [torch.rand(2, 2, device=DEVICE) + 0.5 for _ in range(2)]
    o, lse = flash_attn_with_kvcache(
        q, *codes, cache_seqlens=ints(37, 20), k_descale=factors[0], v_descale=factors[1], return_softmax_lse=True
    )
    for b, length in enumerate((37, 20)):
        wide = [x[b, :length].double() * f[b].double()[:, None] for x, f in zip(codes, factors, strict=True)]
        expected = oracle(q[b], *wide)
        close(o[b], expected[0], lse[b], expected[1])
    huge = q * 2.0**100  # queries beyond the range of float16
    scale = 2.0**-100 / 8
    o, lse = flash_attn_with_kvcache(huge, *codes, cache_seqlens=37, softmax_scale=scale, return_softmax_lse=True)
    expected = oracle(q[0], codes[0][0].double(), codes[1][0].double(), scale=1 / 8)
    close(o[0], expected[0], lse[0], expected[1])
    codes[1].view(torch.uint8)[1, 3, 0, 5] = 0x7F  # NaN
    o = flash_attn_with_kvcache(q, *codes, cache_seqlens=37)
    assert o[1, 0, :2, 5].isnan().all() and o.isnan().sum() == 2


def test_decode_appends():
    q, k, v = normal(3, 2, 2, 64), normal(3, 2, 1, 64), normal(3, 2, 1, 64)
    k_cache, v_cache = normal(3, 20, 1, 64), normal(3, 20, 1, 64)
    before = [x.clone() for x in (k_cache, v_cache)]
    lengths = ints(0, 17, 19)
    o = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    for cache, old, new in ((k_cache, before[0], k), (v_cache, before[1], v)):
        for b, length in enumerate((0, 17)):
            assert torch.equal(cache[b, length : length + 2], new[b])
            old[b, length : length + 2] = new[b]
        assert torch.equal(cache, old)  # nothing else has changed, the sequence that has no room least of all
    for b, length in enumerate((2, 19)):
        close(o[b], oracle(q[b], k_cache[b, :length], v_cache[b, :length], right=0)[0])
    assert o[2].isnan().all() and lengths.tolist() == [0, 17, 19]
    codes = [x.to(FP8) for x in before]
    factor = torch.tensor(2.0, device=DEVICE)
    flash_attn_with_kvcache(q, *codes, k, v, cache_seqlens=3, k_descale=factor, v_descale=factor)
    assert torch.equal(codes[0][:, 3:5].float(), (k.float() / 2).to(FP8).float())


def test_decode_of_rows_and_left_padding():
    q, k_cache, v_cache = normal(2, 1, 2, 64), normal(4, 30, 2, 64), normal(4, 30, 2, 64)
    k_cache[1, :4], v_cache[1, :4] = NAN, NAN
    given = dict(cache_seqlens=ints(9, 30), cache_batch_idx=ints(3, 1), cache_leftpad=ints(0, 4), causal=True)
    o = flash_attn_with_kvcache(q, k_cache, v_cache, **given)
    close(o[0], oracle(q[0], k_cache[3, :9], v_cache[3, :9])[0])
    close(o[1], oracle(q[1], k_cache[1, 4:], v_cache[1, 4:])[0])
    o = flash_attn_with_kvcache(q, k_cache, v_cache, **given | dict(cache_batch_idx=ints(4, -1)))
    assert o.isnan().all()
    with pytest.raises(ArgumentError, match='cache_leftpad must come with a dense cache'):
        table = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
        pages = normal(4, 16, 2, 64)
        flash_attn_with_kvcache(q, pages, pages, cache_seqlens=3, block_table=table, cache_leftpad=ints(0, 4))


def test_pages_outside_the_window_are_not_read():
    q, k, v = normal(1, 1, 1, 64), normal(64, 1, 64), normal(64, 1, 64)
    torch.manual_seed(0)
    k_cache, table = store([k], 16)
    torch.manual_seed(0)
    v_cache, _ = store([v], 16)
    expected = oracle(q[0], k, v, left=3, right=0)[0]
    for cache in (k_cache, v_cache):
        cache[table[0, :3].long()] = NAN
    o = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=64, block_table=table, window_size=(3, 0))
    close(o[0], expected)


def test_nan_shows_in_the_rows_that_see_it_alone():
    q, k, v = normal(1, 4, 1, 64), normal(1, 20, 1, 64), normal(1, 20, 1, 64)
    for cache in (k, v):
        keep = cache[0, 18].clone()
        cache[0, 18, 0, 3] = NAN
        o = flash_attn_with_kvcache(q, k, v, cache_seqlens=20, causal=True)
        assert o[0, :2].isfinite().all() and o[0, 2:].isnan().any(-1).all()
        cache[0, 18] = keep
    q[0, 1, 0, 0] = NAN
    o = flash_attn_with_kvcache(q, k, v, cache_seqlens=20)
    assert o[0, 1].isnan().all() and o[0, [0, 2, 3]].isfinite().all()


def test_results_do_not_depend_on_other_sequences():
    q, k, v = normal(3, 2, 8, 64), normal(3, 100, 1, 64), normal(3, 100, 1, 64)
    lengths = ints(100, 33, 70)
    for splits in (1, 3):
        given = dict(num_splits=splits, causal=True)
        whole = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **given)
        for b in range(3):
            alone = flash_attn_with_kvcache(
                q[b : b + 1], k[b : b + 1], v[b : b + 1], cache_seqlens=lengths[b : b + 1], **given
            )
            assert torch.equal(alone[0], whole[b])
    pages, table = store([x[:n] for x, n in zip(k, (100, 33, 70), strict=True)], 16)
    given = dict(seqused_k=lengths, causal=True, num_splits=2)
    packed = flash_attn_varlen_func(
        q.flatten(0, 1), pages, pages, ints(0, 2, 4, 6), None, 2, 100, block_table=table, **given
    )
    many = torch.cat((q[0], normal(20, 8, 64)))  # other tiles
    wide = flash_attn_varlen_func(
        many, pages, pages, ints(0, 2, 22), None, 20, 100, block_table=table[:2], **given | dict(seqused_k=lengths[:2])
    )
    assert torch.equal(wide[:2], packed[:2])


PLANTED = [  # mistakes in the kernel that the comparison above must find
    ('- source.page[c] * source.page_size', '- (source.page[c] - 1) * source.page_size'),
    ('block_table[source.batch, source.page[c]]', 'block_table[source.batch, T.max(source.page[c] - 1, 0)]'),
    ('left - c * CHUNK, 0)', 'CHUNK, 0)'),
]


@pytest.mark.parametrize(('right', 'wrong'), PLANTED)
def test_a_planted_mistake_is_found(right, wrong, tmp_path, monkeypatch):
    path = Path(attention.__file__).with_name('decode_kernels.py')
    text = path.read_text()
    assert text.count(right) == 1
    (tmp_path / 'planted.py').write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location('planted', tmp_path / 'planted.py')
    planted = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(importlib.sys.modules, 'planted', planted)
    spec.loader.exec_module(planted)
    monkeypatch.setattr(importlib.sys.modules['tile_kernels.attention.decode'], 'decode_kernel', planted.decode_kernel)
    with pytest.raises((AssertionError, InterpreterError)):
        test_decode(1, (64, 70), (8, 1), (64, 64), (-1, -1), False, 32, {})


# Dense and packed ---------------------------------------------------------------------------


def test_aliases_and_both_names():
    q, sink = normal(1, 3, 2, 64), normal(2, dtype=torch.float32)
    expected, lse = oracle(q[0], q[0], q[0], sink=sink)
    cuts = ints(0, 3)
    for name in ('sink', 'learnable_sink', 's_aux', 'attn_sink'):
        close(flash_attn_func(q, q, q, **{name: sink})[0], expected)
        close(flash_attn_with_kvcache(q, q, q, cache_seqlens=3, **{name: sink})[0], expected)
        close(flash_attn_varlen_func(q[0], q[0], q[0], cuts, cuts, 3, 3, **{name: sink}), expected)
    for name in ('return_lse', 'return_attn_probs'):
        found = flash_attn_func(q, q, q, sink=sink, **{name: True})
        assert len(found) == 2
        close(found[0][0], expected, found[1][0], lse)
        found = flash_attn_varlen_func(q[0], q[0], q[0], cuts.long(), cuts.long(), 3, 3, sink=sink, **{name: True})
        close(found[0], expected, found[1], lse)
    with pytest.raises(ArgumentError, match='s_aux must not come with another name of the same argument'):
        flash_attn_func(q, q, q, sink=sink, s_aux=sink)
    for extreme in (-INF, INF):
        o = flash_attn_with_kvcache(q, q, q, cache_seqlens=3, sink=torch.full_like(sink, extreme))
        plain = oracle(q[0], q[0], q[0], sink=None if extreme < 0 else torch.full_like(sink, 1e4))[0]
        close(o[0], plain)


def test_positional_arguments_end_where_versions_differ():
    q, cuts = normal(1, 3, 1, 64), ints(0, 3)
    with pytest.raises(TypeError):
        flash_attn_func(q, q, q, 0.0)
    with pytest.raises(TypeError):
        flash_attn_varlen_func(q[0], q[0], q[0], cuts, cuts, 3, 3, 0.0)
    with pytest.raises(TypeError):
        flash_attn_with_kvcache(q, q, q, None, None, None, cache_seqlens=3)
    with pytest.raises(TypeError):
        flash_attn_combine(q.float(), q[..., 0].float(), None)


NEUTRAL = dict(dropout_p=0.0, alibi_slopes=None, qv=None, attention_chunk=0, cp_context=None, pack_gqa=None)


def test_foreign_parameters_are_taken_at_their_neutral_value_alone():
    q, cuts = normal(1, 3, 1, 64), ints(0, 3)
    calls = [
        lambda **given: flash_attn_func(q, q, q, **given),
        lambda **given: flash_attn_varlen_func(q[0], q[0], q[0], cuts, cuts, 3, 3, **given)[None],
        lambda **given: flash_attn_with_kvcache(q, q, q, cache_seqlens=3, **given),
    ]
    for call in calls:
        assert torch.equal(call(**NEUTRAL), call())
        for name in NEUTRAL.keys() - {'sm_margin'}:
            for value in (0.5, torch.ones(1, device=DEVICE)):
                with pytest.raises(ArgumentError, match=f'{name} must be .*, since it has no meaning here'):
                    call(**{name: value})
        with pytest.raises(ArgumentError, match='nonsense must be an argument of the function'):
            call(nonsense=1)


def test_views_are_read_where_they_are():
    qkv = normal(1, 9, 3, 2, 64)
    q, k, v = qkv.unbind(2)
    expected = oracle(q[0], k[0], v[0], right=0)[0]
    close(flash_attn_func(q, k, v, causal=True)[0], expected)
    close(flash_attn_with_kvcache(q, k, v, cache_seqlens=9, causal=True)[0], expected)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not turned[0].is_contiguous()
    close(flash_attn_func(*turned, causal=True)[0], expected)
    close(flash_attn_with_kvcache(*turned, cache_seqlens=9, causal=True)[0], expected)
    odd = torch.zeros(1, 9, 2, 65, device=DEVICE, dtype=BF16)[..., 1:]
    for call in (flash_attn_func, lambda *x: flash_attn_with_kvcache(*x, cache_seqlens=9)):
        with pytest.raises(ArgumentError, match=r'multiples of 16 bytes.*contiguous'):
            call(q, odd, v)
        with pytest.raises(ArgumentError, match='contiguous'):
            call(q, k.mT.contiguous().mT, v)


def test_packed_sequences_zeros_and_what_is_behind():
    q, k, v = normal(13, 2, 64), normal(12, 1, 64), normal(12, 1, 64)
    q[-2:], k[-2:], v[-2:] = NAN, NAN, NAN
    cu_q, cu_k = (0, 0, 4, 11, 11), (0, 3, 5, 10, 10)
    o, lse = flash_attn_varlen_func(q, k, v, ints(*cu_q), ints(*cu_k), 1, 1, causal=True, return_lse=True)
    for b in range(4):
        own, other = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        expected = oracle(q[own], k[other], v[other], right=0)
        close(o[own], expected[0], lse[:, own], expected[1])
    assert not o[11:].any() and (lse[:, 11:] == -INF).all()
    used = flash_attn_varlen_func(
        q, k, v, ints(*cu_q), ints(*cu_k), 7, 5, causal=True, seqused_q=ints(0, 3, 5, 0), seqused_k=ints(0, 1, 4, 0)
    )
    close(used[0:3], oracle(q[0:3], k[3:4], v[3:4], right=0)[0])
    close(used[4:9], oracle(q[4:9], k[5:9], v[5:9], right=0)[0])
    assert not used[3].any() and not used[9:].any()


def test_packed_queries_over_pages():
    q, k, v = normal(9, 4, 64), normal(40, 2, 64), normal(40, 2, 64)
    torch.manual_seed(5)
    k_cache, table = store([k[:23], k[23:]], 16)
    torch.manual_seed(5)
    v_cache, _ = store([v[:23], v[23:]], 16)
    for cu_k, used in ((None, ints(23, 17)), (ints(0, 23, 40), None)):
        o, lse = flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            ints(0, 2, 7),
            cu_k,
            5,
            23,
            seqused_k=used,
            page_table=table,
            causal=True,
            return_lse=True,
        )
        for own, other in ((slice(0, 2), slice(0, 23)), (slice(2, 7), slice(23, 40))):
            expected = oracle(q[own], k[other], v[other], right=0)
            close(o[own], expected[0], lse[:, own], expected[1])
        assert not o[7:].any() and (lse[:, 7:] == -INF).all()


def test_nothing_gives_nothing():
    empty, some = normal(2, 0, 2, 64), normal(2, 3, 2, 64)
    assert flash_attn_func(empty, some, some).shape == (2, 0, 2, 64)
    o, lse = flash_attn_func(some, empty, empty, return_lse=True)
    assert not o.any() and (lse == -INF).all()
    o, lse = flash_attn_with_kvcache(some, empty, empty, cache_seqlens=ints(0, 1), return_softmax_lse=True)
    assert not o[0].any() and (lse[0] == -INF).all() and o[1].isnan().all() and lse[1].isnan().all()
    assert flash_attn_with_kvcache(some[:0], some[:0], some[:0], cache_seqlens=ints()).shape == (0, 3, 2, 64)
    none = flash_attn_varlen_func(some[0], some[0], some[0], ints(0), ints(0), 0, 0)
    assert none.shape == (3, 2, 64) and not none.any()
    table = torch.zeros(2, 0, dtype=torch.int32, device=DEVICE)
    pages = normal(1, 16, 2, 64)
    o = flash_attn_with_kvcache(some, pages, pages, cache_seqlens=ints(0, 2), block_table=table)
    assert not o[0].any() and o[1].isnan().all()


def test_parts_of_a_ring_merge():
    q, k, v, sink = normal(1, 5, 2, 64), normal(1, 30, 1, 64), normal(1, 30, 1, 64), normal(2, dtype=torch.float32)
    cuts = [slice(0, 7), slice(7, 7), slice(7, 30)]
    parts = [flash_attn_func(q, k[:, cut], v[:, cut], return_lse=True) for cut in cuts]
    outs = torch.stack([o.float() for o, _ in parts])
    outs[1] = NAN
    lses = torch.stack([lse.transpose(1, 2) for _, lse in parts]).contiguous()
    o, lse = flash_attn_combine(outs, lses, sink=sink, out_dtype=BF16)
    expected = oracle(q[0], k[0], v[0], sink=sink)
    assert o.dtype is BF16
    torch.testing.assert_close(o[0].double().cpu(), expected[0], rtol=0, atol=2e-2)
    torch.testing.assert_close(lse[0].T.double().cpu(), expected[1], rtol=0, atol=1e-4)


# torch --------------------------------------------------------------------------------------


def test_autocast_casts_operands():
    q, k, v = (torch.randn(1, 5, 2, 64, device=DEVICE) for _ in range(3))
    cuts = ints(0, 5)
    with torch.autocast(DEVICE, dtype=BF16):
        found = [
            flash_attn_func(q, k, v),
            flash_attn_varlen_func(q[0], k[0], v[0], cuts, cuts, 5, 5)[None],
            flash_attn_with_kvcache(q, k.to(BF16), v.to(BF16), cache_seqlens=5),
            scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2),
        ]
    expected = oracle(q[0].to(BF16), k[0].to(BF16), v[0].to(BF16))[0]
    for o in found:
        assert o.dtype is BF16
        close(o[0], expected)
    with pytest.raises(ArgumentError, match='q must be bfloat16 or float16'):
        flash_attn_func(q, k, v)


def test_one_graph_serves_every_shape():
    def run(q, k, v, lengths, cuts):
        dense = flash_attn_func(q, k, v, causal=True)
        packed = flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cuts, cuts, 9, 9)
        cached, lse = flash_attn_with_kvcache(q[:, -1:], k, v, cache_seqlens=lengths, return_softmax_lse=True)
        merged = flash_attn_combine(cached[None].float(), lse.transpose(1, 2)[None].contiguous())[0]
        plain = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return dense.sum() + packed.sum() + merged.sum() + plain.sum()

    counter = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    with knobs(interpret=False):
        for batch, tokens in ((3, 5), (4, 8), (7, 11)):
            given = [normal(batch, tokens, 2, 64) for _ in range(3)]
            lengths = torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE)
            cuts = torch.arange(batch + 1, device=DEVICE) * tokens
            assert torch.equal(compiled(*given, lengths, cuts), run(*given, lengths, cuts))
    assert counter.frame_count == 1


BAD = [
    (dict(q=lambda x: x.float()), 'q must be bfloat16 or float16'),
    (dict(k_cache=lambda x: x.half()), 'k_cache must be'),
    (dict(v_cache=lambda x: x[:, :3]), 'v_cache must be'),
    (dict.fromkeys(('q', 'k_cache', 'v_cache'), lambda x: x[..., :60]), 'must be a multiple of 8 up to 256'),
    (dict(q=lambda x: x[..., :56]), r'k_cache must be .* with dim = 56'),
    (dict(q=lambda x: x[:, :, :3]), r'heads of q must be a multiple of the heads of k_cache \(2\)'),
    (dict(window_size=(1,)), r'window_size must be a pair \(left, right\)'),
    (dict(window_size=(-2, 0)), 'window_size must hold numbers of keys'),
    (dict(softcap=-1.0), 'softcap must be at least 0'),
    (dict(sink=torch.zeros(3)), r'sink must be \(heads\) with heads = 4'),
    (dict(num_splits=-1), 'num_splits must be at least 0'),
    (dict(softmax_scale='1'), 'softmax_scale must be'),
    (dict(cache_seqlens=torch.zeros(1)), 'cache_seqlens must be int32 or int64'),
    (dict(cache_seqlens=torch.zeros(3).int()), r'cache_seqlens must be \(sequences\) with sequences = 1'),
    (dict(block_table=torch.zeros(1, 1)), 'block_table must be int32 or int64'),
    (dict(block_table=torch.zeros(2, 1).int()), 'block_table must be'),
    (dict(out=torch.zeros(1, 2, 4, 8).bfloat16()), r'out must be \(1, 2, 4, 64\) bfloat16'),
    (dict(q_descale=torch.ones(1)), 'q_descale must be None'),
    (dict(k=torch.zeros(1, 1, 2, 64).half(), v=torch.zeros(1, 1, 2, 64).half()), 'k_cache must be'),
]


@pytest.mark.parametrize(('change', 'sentence'), BAD)
def test_bad_input_is_one_sentence(change, sentence):
    given = dict(q=torch.zeros(1, 2, 4, 64).bfloat16(), k_cache=torch.zeros(1, 16, 2, 64).bfloat16(), cache_seqlens=3)
    given['v_cache'] = given['k_cache'].clone()
    for name, value in change.items():
        given[name] = value(given[name]) if callable(value) else value
    with pytest.raises(ArgumentError, match=sentence) as found:
        flash_attn_with_kvcache(**given)
    assert '\n' not in str(found.value)
