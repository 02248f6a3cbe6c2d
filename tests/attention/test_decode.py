"""What the contract does not see of attention over a cache: pages, splits, fp8, agreement with prefill."""

import math

import pytest
import torch

from tile_kernels import ArgumentError, knobs
from tile_kernels.attention import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from tile_kernels.attention.decode import automatic_splits
from tile_kernels.attention.decode_kernels import decode_kernel
from tile_kernels.sight.guards import unguarded_loads

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def operands(queries=2, keys=40, heads=(2, 1), dim=16, batch=2):
    torch.manual_seed(queries + keys)
    shapes = ((batch, queries, heads[0], dim), (batch, keys, heads[1], dim), (batch, keys, heads[1], dim))
    return [torch.randn(shape, device=DEVICE).to(BF16) for shape in shapes]


def paged(x, page=16):
    """The rows of x (batch, keys, ...) in pages, in reverse order, and the table; tails hold NaN."""
    batch, keys = x.shape[:2]
    count = -(-keys // page)
    whole = x.new_full((batch, count * page, *x.shape[2:]), math.nan)
    whole[:, :keys] = x
    table = torch.arange(batch * count, device=DEVICE).flip(0).view(batch, count).int()
    pages = whole.view(batch * count, page, *x.shape[2:])
    return pages.flip(0).contiguous(), table


def test_decode_of_a_cache_equals_prefill():
    q, k, v = operands(queries=40, keys=40)
    whole = flash_attn_func(q, k, v, causal=True)
    (k_pages, table), (v_pages, _) = paged(k), paged(v)
    cache = dict(cache_seqlens=ints(40, 40), causal=True)
    for count in (1, 3):
        last = q[:, -count:]
        dense = flash_attn_with_kvcache(last, k, v, **cache)
        pages = flash_attn_with_kvcache(last, k_pages, v_pages, page_table=table, **cache)
        assert torch.equal(dense, whole[:, -count:]) and torch.equal(pages, dense)
    cuts, lengths = ints(0, 40, 80), ints(40, 40)
    chunk = flash_attn_varlen_func(
        q.flatten(0, 1), k_pages, v_pages, cuts, None, 40, 40, causal=True, seqused_k=lengths, block_table=table
    )
    assert torch.equal(chunk.view_as(whole), whole)
    chunk = flash_attn_varlen_func(q.flatten(0, 1), k_pages, v_pages, cuts, cuts, causal=True, block_table=table)
    assert torch.equal(chunk.view_as(whole), whole)


def test_splits_are_parts_of_the_keys():
    q, k, v = operands(queries=1, keys=150)
    sink = torch.randn(2, device=DEVICE)
    one, lse = flash_attn_func(q, k, v, sink=sink, return_lse=True)
    for splits in (2, 3, 7):
        o, own = flash_attn_func(q, k, v, sink=sink, num_splits=splits, return_lse=True)
        torch.testing.assert_close(o, one, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(own, lse, rtol=1e-5, atol=1e-5)
    parts = [flash_attn_func(q, k[:, cut], v[:, cut], return_lse=True) for cut in (slice(128), slice(128, 150))]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    merged, _ = flash_attn_combine(outs, lses.transpose(2, 3).contiguous(), sink=sink)
    torch.testing.assert_close(merged, one, rtol=2e-2, atol=2e-2)
    packed = flash_attn_varlen_func(q[:, 0], k[0], v[0], ints(0, 1, 2), ints(0, 100, 150), 1, 100, num_splits=2)
    alone = flash_attn_varlen_func(q[1:, 0], k[0, 100:], v[0, 100:], ints(0, 1), ints(0, 50), 1, 50, num_splits=2)
    assert torch.equal(packed[1:], alone)


def test_shapes_choose_the_splits():
    few = [automatic_splits(256, 4096, 16), automatic_splits(4, 1024, 16), automatic_splits(4, 1 << 17, 16)]
    assert few == [2, 16, 132]
    assert [automatic_splits(4, keys, 16, short_part=32) for keys in (40, 512, 1024, 4096)] == [1, 16, 32, 64]
    assert [automatic_splits(256, 4096, 16, True), automatic_splits(4, 1 << 17, 16, True)] == [4, 198]
    many = [automatic_splits(8, 1 << 20, 64), automatic_splits(1, 100, 16), automatic_splits(600, 1 << 20, 16)]
    assert many == [33, 1, 1]


def test_wrong_pages_and_lengths_give_nan_in_their_sequence_alone():
    q, k, v = operands(queries=3, keys=40, batch=3)
    (k_pages, table), (v_pages, _) = paged(k), paged(v)
    good = flash_attn_with_kvcache(q, k_pages, v_pages, cache_seqlens=40, block_table=table)
    table = table.clone()
    table[0, 2] = k_pages.shape[0]
    for window in ((-1, -1), (0, 0)):
        o, lse = flash_attn_with_kvcache(
            q,
            k_pages,
            v_pages,
            cache_seqlens=ints(40, 49, 40),
            block_table=table,
            window_size=window,
            return_softmax_lse=True,
        )
        assert o[:2].isnan().all() and lse[:2].isnan().all() and o[2].isfinite().all()
    assert torch.equal(flash_attn_with_kvcache(q, k_pages, v_pages, cache_seqlens=40, block_table=table)[1:], good[1:])
    o = flash_attn_with_kvcache(q, k, v, cache_seqlens=ints(41, 40, -5))
    assert o[0].isnan().all() and o[1].isfinite().all() and not o[2].any()
    shorter = flash_attn_with_kvcache(q, k_pages, v_pages, cache_seqlens=32, block_table=table)
    assert shorter.isfinite().all()  # the page that does not exist is behind the length


def test_a_hole_hides_its_keys():
    q, k, v = operands(queries=1, keys=48)
    (k_pages, table), (v_pages, _) = paged(k), paged(v)
    table[:, 1] = -3
    keep = torch.cat((torch.arange(16), torch.arange(32, 48))).to(DEVICE)
    expected, expected_lse = flash_attn_func(q, k[:, keep], v[:, keep], return_lse=True)
    given = dict(cache_seqlens=48, block_table=table, return_softmax_lse=True)
    o, lse = flash_attn_with_kvcache(q, k_pages, v_pages, **given)
    torch.testing.assert_close(o, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    table[:] = -1
    o, lse = flash_attn_with_kvcache(q, k_pages, v_pages, num_splits=2, **given)
    assert not o.any() and (lse == -math.inf).all()


def test_an_fp8_cache_is_the_wide_one_times_its_factors():
    q, k, v = operands(queries=2, keys=40)
    codes, factors = [x.to(FP8) for x in (k, v)], [torch.tensor(2.0, device=DEVICE), torch.rand(2, 1, device=DEVICE)]
    o = flash_attn_with_kvcache(q, *codes, cache_seqlens=40, k_descale=factors[0], v_descale=factors[1])
    wide = [x.to(BF16) for x in codes]
    expected = flash_attn_func(q, wide[0] * 2, wide[1])
    torch.testing.assert_close(o, (expected * factors[1].view(2, 1, 1, 1)).to(BF16), rtol=2e-2, atol=1e-2)
    plain = flash_attn_with_kvcache(q, *codes, cache_seqlens=40)
    torch.testing.assert_close(plain, flash_attn_func(q, *wide), rtol=1e-2, atol=1e-2)


def test_out_is_written():
    q, k, v = operands()
    out = torch.full_like(q, math.nan)
    o = flash_attn_with_kvcache(q, k, v, cache_seqlens=33, out=out)
    assert o is out and torch.equal(out, flash_attn_with_kvcache(q, k, v, cache_seqlens=33))


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        (dict(k=torch.zeros(1), v=torch.zeros(1)), r'k must be \(batch, tokens, heads, dim\)'),
        (dict(k=torch.zeros(2, 1, 1, 16).to(BF16)), 'v must be a tensor'),
        (dict(cache_leftpad=torch.zeros(2)), 'cache_leftpad must be int32 or int64'),
        (dict(cache_batch_idx=ints(0).cpu()), r'cache_batch_idx must be \(sequences\) with sequences = 2'),
        (dict(rotary_cos=torch.zeros(2, 2)), 'rotary_cos must be None'),
        (dict(scheduler_metadata=1), 'scheduler_metadata must be None'),
        (dict(cache_seqlens=ints(1).cpu()), r'cache_seqlens must be \(sequences\) with sequences = 2'),
        (dict(cache_seqlens=-1), 'cache_seqlens must be at least 0'),
        (dict(num_splits=1000), 'num_splits must be at most 256'),
        (dict(k_descale=torch.ones(2, 1)), 'k_descale must be None with a cache of'),
        (dict(block_table=torch.zeros(2, 1).int()), 'page_size must be a multiple of 16, got 40'),
    ],
)
def test_bad_arguments_are_told(given, sentence):
    with pytest.raises(ArgumentError, match='attention.flash_attn_with_kvcache: ' + sentence):
        flash_attn_with_kvcache(*(x.cpu() for x in operands()), **dict(cache_seqlens=3) | given)


def test_pages_have_no_gradient():
    q, k, v = operands()
    (k_pages, table), (v_pages, _) = paged(k), paged(v)
    with pytest.raises(ArgumentError, match='block_table must be None where a gradient is needed'):
        flash_attn_varlen_func(
            q.flatten(0, 1).requires_grad_(), k_pages, v_pages, ints(0, 2, 4), ints(0, 40, 80), block_table=table
        )


def test_generated_code_loads_queries_of_the_tile_only():
    static = (72, 72, torch.bfloat16, torch.float8_e4m3fn, 64, False, False, 'cache', True)
    source = decode_kernel.source((*static, False, False, None, False, False, False, False))
    assert 'q_local_cast' in source and unguarded_loads(source) == []


def test_factors_of_every_token():
    torch.manual_seed(0)
    q = torch.randn(2, 3, 4, 64, device=DEVICE).to(BF16)
    codes = [torch.randn(5, 16, 2, 64, device=DEVICE).to(FP8) for _ in range(2)]
    factors = [
        torch.rand(5, 16, 2, device=DEVICE) * 10.0 ** torch.randint(-3, 2, (5, 16, 2), device=DEVICE) for _ in codes
    ]
    wide = [(x.float() * f[..., None]).to(BF16) for x, f in zip(codes, factors, strict=True)]
    table, given = ints(3, 1, 0, 4).view(2, 2), dict(k_descale=factors[0], v_descale=factors[1])
    options: dict = dict(cache_seqlens=ints(30, 17), block_table=table, causal=True, num_splits=1)
    o = flash_attn_with_kvcache(q, *codes, **given, **options)
    assert torch.equal(o, flash_attn_with_kvcache(q, *wide, **options))  # products are those of the wide cache
    packed = flash_attn_varlen_func(
        q.flatten(0, 1), *codes, ints(0, 3, 6), seqused_k=ints(30, 17), block_table=table, causal=True, **given
    )
    torch.testing.assert_close(packed, o.flatten(0, 1), rtol=1e-2, atol=1e-2)
    for wrong, sentence in (
        (dict(v_descale=torch.ones(2, 2, device=DEVICE)), 'v_descale must have the dimensions of k_descale'),
        (dict(k_descale=factors[0][:4]), r'k_descale must be a scalar or \(2, 2\)'),
        (dict(k=wide[0][:2, :1], v=wide[1][:2, :1]), 'k must be None with factors of every token'),
        (dict(q=q.to(FP8)), r'k_descale must be a scalar or \(2, 2\)'),
    ):
        call = dict(q=q, k_cache=codes[0], v_cache=codes[1]) | given | options | wrong
        with pytest.raises(ArgumentError, match=sentence):
            flash_attn_with_kvcache(**call)
