"""What the contract does not see of latent attention: holes, lists, splits, fp8, and faults that tests must catch."""

import importlib.util
import math
import pathlib

import pytest
import torch

from tile_kernels import ArgumentError, knobs
from tile_kernels.attention import (
    MLASchedule,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
    mla_decode,
    pack_mla_cache,
    unpack_mla_cache,
)
from tile_kernels.attention import mla_decode_kernels as kernels_file
from tile_kernels.attention.mla_decode import automatic_splits
from tile_kernels.core import jit
from tile_kernels.interpreter import AsyncReadBeforeWait, DataRace, UninitializedRead

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def operands(batch=2, tokens=1, heads=2, keys=40, page=16, width=576):
    """Queries, keys, and a cache with shuffled pages and its table; behind the keys the cache holds NaN."""
    q = torch.randn(batch, tokens, heads, width, device=DEVICE).to(BF16)
    kv = torch.randn(batch, keys, width, device=DEVICE).to(BF16)
    pages = -(-keys // page)
    table = torch.randperm(batch * pages, device=DEVICE).int().view(batch, pages)
    filled = torch.full((batch, pages * page, width), math.nan, device=DEVICE, dtype=BF16)
    filled[:, :keys] = kv
    cache = torch.full((batch * pages, page, 1, width), math.nan, device=DEVICE, dtype=BF16)
    cache[table.flatten().long()] = filled.view(batch * pages, page, 1, width)
    return q, kv, cache, table


def plain(q, k, hidden=None, sink=None):
    """Latent attention of (batch, tokens, heads, 576) over (batch, keys, 576) in float32."""
    scores = torch.einsum('bthc,bjc->bthj', q.float(), k.float()) * q.shape[-1] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    below = scores.logsumexp(-1)
    total = below if sink is None else torch.logaddexp(below, sink.expand_as(below))
    weights = (scores - total.unsqueeze(-1)).exp()
    return torch.einsum('bthj,bjd->bthd', weights, k[..., :512].float()), below


def run(q, cache, table, lengths, **options):
    lengths = ints(*lengths) if isinstance(lengths, (list, tuple)) else ints(*[lengths] * len(q))
    return flash_mla_with_kvcache(q, cache, table, lengths, 512, **options)


def check_plain(o, lse, expected):
    torch.testing.assert_close(o.float(), expected[0], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse.transpose(1, 2), expected[1], rtol=1e-5, atol=1e-4)


def test_equals_plain_pytorch_whatever_the_pages_hold_behind_the_length():
    q, kv, cache, table = operands(tokens=3, heads=5, keys=40)
    check_plain(*run(q, cache, table, 40), plain(q, kv))
    later = torch.arange(40) > torch.arange(37, 40)[:, None]
    check_plain(*run(q, cache, table, 40, causal=True), plain(q, kv, later[:, None].to(DEVICE)))
    table = torch.cat((table, ints(9999, -1).expand(2, 2)), 1)  # never read
    o, lse = run(q, cache, table, [40, 0])
    check_plain(o[:1], lse[:1], plain(q[:1], kv[:1]))
    assert not o[1].any() and (lse[1] == math.inf).all()


def test_a_hole_hides_its_keys():
    q, kv, cache, table = operands(keys=48)
    cache[table[:, 1].long()] = math.nan
    table[:, 1] = ints(-1, -77)
    keep = torch.cat((torch.arange(16), torch.arange(32, 48))).to(DEVICE)
    for splits in (1, 2):
        check_plain(*run(q, cache, table, 48, num_splits=splits), plain(q, kv[:, keep]))
    table[:] = -1
    o, lse = run(q, cache, table, 48, num_splits=2)
    assert not o.any() and (lse == math.inf).all()


def test_nan_reaches_the_rows_that_see_it_and_no_other():
    q, kv, cache, table = operands(batch=1, tokens=3, keys=40)
    cache[table[0, 38 // 16], 38 % 16, 0, 7] = math.nan
    o, lse = run(q, cache, table, 40, causal=True)
    assert o[0, 0].isfinite().all() and o[0, 1:].isnan().all()
    assert lse[0, :, 0].isfinite().all() and lse[0, :, 1:].isnan().all()
    check_plain(o[:, :1], lse[:, :, :1], plain(q[:, :1], kv[:, :38]))


def test_wrong_pages_and_lengths_give_nan_in_their_sequence_alone():
    q, _, cache, table = operands(batch=3, tokens=2, keys=40)
    good, _ = run(q, cache, table, 40, causal=True)
    table[0, 2] = len(cache)
    for splits in (1, 2):
        o, lse = run(q, cache, table, [40, 49, 40], causal=True, num_splits=splits)
        assert o[:2].isnan().all() and lse[:2].isnan().all() and o[2].isfinite().all()
    assert torch.equal(run(q, cache, table, 40, causal=True, num_splits=1)[0][1:], good[1:])
    assert run(q, cache, table, 32)[0].isfinite().all()  # the page that does not exist is behind the length


def test_lists_are_the_keys_of_a_token():
    q, kv, cache, table = operands(tokens=2, keys=40)
    slots = table.long()[:, torch.arange(40) // 16] * 16 + (torch.arange(40) % 16).to(DEVICE)
    lists = slots.int()[:, None, :].repeat(1, 2, 1)
    lists[:, 1, 1::2] = -1
    o, lse = flash_mla_with_kvcache(q, cache, None, None, 512, indices=lists)
    check_plain(o[:, :1], lse[..., :1], plain(q[:, :1], kv))
    check_plain(o[:, 1:], lse[..., 1:], plain(q[:, 1:], kv[:, ::2]))
    o, lse = flash_mla_with_kvcache(q, cache, None, None, 512, indices=lists, topk_length=ints(7, 0))
    check_plain(o[:1, :1], lse[:1, :, :1], plain(q[:1, :1], kv[:1, :7]))
    assert not o[1].any() and (lse[1] == math.inf).all()
    twice = lists[:, :1, [0, 1, 1]]
    check_plain(
        *flash_mla_with_kvcache(q[:, :1], cache, None, None, 512, indices=twice), plain(q[:, :1], kv[:, [0, 1, 1]])
    )


def test_a_second_cache_joins_the_softmax():
    q, kv, _, _ = operands(tokens=2, keys=40)
    cache, sink = kv.reshape(5, 16, 1, 576), torch.randn(2, device=DEVICE)
    lists = (torch.arange(40, device=DEVICE) + torch.tensor([[[0]], [[40]]], device=DEVICE)).expand(2, 2, 40).int()
    whole = flash_mla_with_kvcache(q, cache, None, None, 512, indices=lists.contiguous(), attn_sink=sink)
    first, second = lists[..., :24].contiguous(), lists[..., 24:].clone()
    given = dict(attn_sink=sink, extra_k_cache=cache, extra_indices_in_kvcache=second)
    parts = flash_mla_with_kvcache(q, cache, None, None, 512, indices=first, **given)
    torch.testing.assert_close(parts[0], whole[0], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-5, atol=1e-4)
    none = torch.full_like(first, -1)
    o, lse = flash_mla_with_kvcache(q, cache, None, None, 512, indices=none, extra_topk_length=ints(16, 0), **given)
    check_plain(o[:1], lse[:1], plain(q[:1], kv[:1, 24:], sink=sink))
    assert not o[1].any() and (lse[1] == math.inf).all()
    with pytest.raises(ArgumentError, match='extra_k_cache must come with indices'):
        flash_mla_with_kvcache(q, cache, ints(0, 1).view(2, 1), ints(1, 1), 512, **given)


def test_sparse_prefill_equals_decode_with_lists():
    q, kv, _, _ = operands(batch=1, tokens=5, heads=3, keys=20)
    lists = torch.randint(-3, 23, (5, 1, 64), device=DEVICE).int()
    sink = torch.randn(3, device=DEVICE)
    o, top, lse = flash_mla_sparse_fwd(q[0], kv[0, :, None], lists, 0.1, attn_sink=sink)
    cache = torch.full((2, 16, 1, 576), math.nan, device=DEVICE, dtype=BF16)
    cache.view(-1, 576)[:20] = kv[0]
    lists = torch.where(lists < 20, lists, -1).transpose(0, 1)
    own = flash_mla_with_kvcache(
        q, cache, None, None, 512, softmax_scale=0.1, indices=lists, attn_sink=sink, num_splits=1
    )
    torch.testing.assert_close(o, own[0][0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, own[1][0].T, rtol=1e-5, atol=1e-5)
    seen = (lists[0, :, None] >= 0).expand(-1, 3, -1)
    scores = torch.einsum('thc,tjc->thj', q[0].float(), kv[0].float()[lists[0].clamp(min=0)]) * 0.1
    expected = scores.masked_fill(~seen, -math.inf).amax(-1)
    torch.testing.assert_close(top, expected, rtol=1e-5, atol=1e-4)


def test_keys_of_512_channels_are_values_as_a_whole():
    for tokens, heads in ((3, 2), (1, 33)):
        q, kv, cache, table = operands(tokens=tokens, heads=heads, keys=37, width=512)
        check_plain(*run(q, cache, table, 37), plain(q, kv))


@pytest.mark.parametrize('width', [576, 512])
def test_an_fp8_cache_is_its_wide_form(width):
    q, _, cache, table = operands(tokens=2, heads=3, keys=40, width=width)
    packed = pack_mla_cache(cache)
    wide = unpack_mla_cache(packed)
    expected = run(q, wide, table, 40, causal=True, num_splits=2)
    for codes in (packed, packed.view(torch.float8_e4m3fn)):
        own = run(q, codes, table, 40, causal=True, num_splits=2, is_fp8_kvcache=True)
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def test_splits_are_parts_of_the_keys_and_sequences_are_independent():
    q, _, cache, table = operands(keys=150)
    sink = torch.randn(2, device=DEVICE)
    one, lse = run(q, cache, table, [150, 70], attn_sink=sink, num_splits=1)
    for splits in (2, 5):
        o, own = run(q, cache, table, [150, 70], attn_sink=sink, num_splits=splits)
        torch.testing.assert_close(o, one, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(own, lse, rtol=1e-5, atol=1e-5)
        alone = run(q[1:], cache, table[1:], [70], attn_sink=sink, num_splits=splits)
        assert torch.equal(o[1:], alone[0]) and torch.equal(own[1:], alone[1])


def test_shapes_choose_the_splits():
    assert automatic_splits(1, 32768) == 132 and automatic_splits(256, 1 << 20) == 1 and automatic_splits(33, 8192) == 4
    assert automatic_splits(1, 100) == 1 and automatic_splits(1, 1024) == 8


def test_sinks_may_be_infinite():
    q, kv, cache, table = operands(batch=1, keys=20)
    o, lse = run(q, cache, table, 20, attn_sink=torch.tensor([math.inf, -math.inf], device=DEVICE))
    assert not o[:, :, 0].any()
    check_plain(o[:, :, 1:], lse[:, 1:], [x[:, :, 1:] for x in plain(q, kv)])


def test_autocast_casts_the_operands():
    q, kv, _, _ = operands(batch=1, tokens=2, keys=9)
    lists = torch.arange(9, device=DEVICE).int().expand(2, 1, 9).contiguous()
    expected = flash_mla_sparse_fwd(q[0], kv[0, :, None], lists, 0.1)
    with torch.autocast(DEVICE, dtype=BF16):
        own = flash_mla_sparse_fwd(q[0].float(), kv[0, :, None].float(), lists, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def test_the_schedule_is_empty():
    schedule, splits = get_mla_metadata(torch.zeros(1), 128, num_heads_k=1)
    assert isinstance(schedule, MLASchedule) and not vars(schedule) and splits is None
    q, _, cache, table = operands()
    assert torch.equal(run(q, cache, table, 40, tile_scheduler_metadata=schedule)[0], run(q, cache, table, 40)[0])


@pytest.mark.parametrize('heads', [2, 20])
def test_the_gradient_of_sparse_attention(heads):
    q = torch.randn(3, heads, 576, device=DEVICE).to(BF16).requires_grad_()
    kv = torch.randn(30, 1, 576, device=DEVICE).to(BF16).requires_grad_()
    sink = torch.randn(heads, device=DEVICE).requires_grad_()
    lists = torch.randint(-2, 33, (3, 1, 40), device=DEVICE).int()
    lists[1] = -1
    lists[2, 0, :2] = 7  # twice
    upstream = torch.randn(3, heads, 512, device=DEVICE).to(BF16)
    operands = (q, kv, sink)

    def gradients(deterministic):
        torch.use_deterministic_algorithms(deterministic)
        try:
            o, _, _ = flash_mla_sparse_fwd(q, kv, lists, 0.05, attn_sink=sink)
            return torch.autograd.grad(o, operands, upstream)
        finally:
            torch.use_deterministic_algorithms(False)

    wide_q, wide_kv, wide_sink = (x.detach().double().requires_grad_() for x in operands)
    rows = []
    for t in range(3):
        own = lists[t, 0][(lists[t, 0] >= 0) & (lists[t, 0] < 30)].long()
        scores = wide_q[t] @ wide_kv[own, 0].T * 0.05
        weights = torch.cat((scores, wide_sink[:, None]), 1).softmax(1)[:, :-1]
        rows.append(weights @ wide_kv[own, 0, :512])
    expected = torch.autograd.grad(torch.stack(rows), (wide_q, wide_kv, wide_sink), upstream.double())
    for found in (gradients(False), gradients(True)):
        assert not found[0][1].any()
        for a, b in zip(found, expected, strict=True):
            assert (a.double() - b).abs().max() <= 0.02 * b.abs().max()


def test_a_deterministic_gradient_may_come_in_chunks(monkeypatch):
    from tile_kernels.attention import sparse_mla_bwd

    home = importlib.import_module('tile_kernels.attention.sparse_mla')
    given = home._make_bwd(deterministic=True, tokens=5, keys=9, heads=3, topk=32, short=True)
    given = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    whole = sparse_mla_bwd(**given)
    monkeypatch.setattr(home, 'CHUNK_BYTES', 2 * 4 * 576 * 32)
    assert all(torch.equal(a, b) for a, b in zip(sparse_mla_bwd(**given), whole, strict=True))


# Faults that a test must catch --------------------------------------------------------------

#: Kernel, text, and what replaces it.
FAULTS = {
    'a wrong page offset': ('', 'found = key - page * page_size', 'found = T.truncmod(key + 1, page_size)'),
    'a wrong base of lse': ('', '(top[i] + T.log2(total[i])) * LN2', '(top[i] + T.log2(total[i]))'),
    'a page of the wrong sequence': ('', 'page = table[unit, page]', 'page = table[0, page]'),
    'a wrong page offset, Hopper': (
        '_hopper',
        'found = found - page * page_size',
        'found = T.truncmod(found + 1, page_size)',
    ),
    'a wrong base of lse, Hopper': ('_hopper', '(top[i] + T.log2(total[i])) * LN2', '(top[i] + T.log2(total[i]))'),
    'weights of the wrong maximum, Hopper': (
        '_hopper',
        'factor[0][i] = exp2(block_top[0]',
        'factor[0][i] = exp2(top[0]',
    ),
}
RACES = {
    'no barrier before weights are read': (
        '',
        'T.sync_threads()\n                T.gemm(weight_shared,',
        'T.gemm(weight_shared,',
    ),
    'keys are used before they are loaded': (
        '_hopper',
        'T.mbarrier_wait_parity(full[which], step & 1)\n        if copied:',
        'if copied:',
    ),
}


def plant(monkeypatch, tmp_path, fault):
    """Replace a kernel by one with a fault; kernels need a file."""
    name, old, new = f'mla_decode{fault[0]}_kernels', *fault[1:]
    source = (pathlib.Path(kernels_file.__file__).parent / f'{name}.py').read_text()
    assert source.count(old) >= 1
    path = tmp_path / f'faulty_{name}.py'
    path.write_text(source.replace(old, new))
    monkeypatch.setattr(jit, 'kernels', dict(jit.kernels))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    home = importlib.import_module('tile_kernels.attention.mla_decode')
    kernel = f'mla_decode{fault[0]}_kernel'
    variants = tuple(getattr(module, kernel) if v.name == kernel else v for v in home.MLA_DECODE)
    monkeypatch.setattr(home, 'MLA_DECODE', variants)


@pytest.mark.skipif(DEVICE != 'cpu', reason='the fault is planted for the interpreter')
@pytest.mark.parametrize('fault', FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch, tmp_path):
    keys, heads = (100, 33) if FAULTS[fault][0] else (20, 2)
    tokens = 1 if FAULTS[fault][0] else 3  # few tokens are for the kernel of Hopper
    q, kv, cache, table = operands(batch=2 if 'sequence' in fault else 1, tokens=tokens, heads=heads, keys=keys)
    check_plain(*run(q, cache, table, keys), plain(q, kv))
    plant(monkeypatch, tmp_path, FAULTS[fault])
    with pytest.raises(AssertionError):
        check_plain(*run(q, cache, table, keys), plain(q, kv))


@pytest.mark.skipif(DEVICE != 'cpu', reason='the interpreter finds races')
@pytest.mark.parametrize('race', RACES)
def test_a_planted_race_is_found(race, monkeypatch, tmp_path):
    keys, heads = (100, 33) if RACES[race][0] else (20, 2)
    q, _, cache, table = operands(batch=1, tokens=1 if RACES[race][0] else 3, heads=heads, keys=keys)
    plant(monkeypatch, tmp_path, RACES[race])
    with knobs(checks='races'), pytest.raises((DataRace, UninitializedRead, AsyncReadBeforeWait), match='_shared'):
        run(q, cache, table, keys)


# Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        (dict(extra_k_cache=torch.zeros(1)), 'extra_k_cache must come with extra_indices_in_kvcache'),
        (dict(extra_topk_length=torch.zeros(1)), 'extra_topk_length must come with extra_k_cache'),
        (dict(head_dim_v=256), 'head_dim_v must be 512, got 256'),
        (dict(tile_scheduler_metadata=torch.zeros(1)), 'tile_scheduler_metadata must be None or what get_mla_metadata'),
        (dict(num_splits=1000), 'num_splits must be at most 256'),
        (dict(is_fp8_kvcache=True), 'k_cache must be uint8 or float8_e4m3fn with is_fp8_kvcache=True'),
        (dict(block_table=None), 'block_table must come with a cache without indices'),
        (dict(indices=torch.zeros(2, 1, 64).int()), 'block_table must be None with indices'),
        (dict(cache_seqlens=ints(1).cpu()), r'cache_seqlens must be \(batch\) with batch = 2'),
        (dict(topk_length=ints(1).cpu()), 'topk_length must come with indices'),
        (dict(k_cache=torch.zeros(5, 24, 1, 576, dtype=BF16)), 'page_size must be a multiple of 16, got 24'),
        (dict(q=torch.zeros(2, 1, 129, 576, dtype=BF16)), 'heads of q must be at most 128'),
        (dict(q=torch.zeros(2, 1, 2, 544, dtype=BF16)), r'q must be \(batch, tokens, heads, 576\)'),
        (dict(q=torch.zeros(2, 1, 2, 512, dtype=BF16)), r'k_cache must be \(pages, page_size, 1, 512\)'),
    ],
)
def test_bad_arguments_are_told(given, sentence):
    q, _, cache, table = (x.cpu() for x in operands())
    good = dict(q=q, k_cache=cache, block_table=table, cache_seqlens=torch.tensor([3, 3]), head_dim_v=512)
    with pytest.raises(ArgumentError, match=r'attention\.\w+: ' + sentence):
        flash_mla_with_kvcache(**good | given)


def test_bad_lists_are_told():
    q, kv = torch.zeros(2, 3, 576, dtype=BF16), torch.zeros(9, 1, 576, dtype=BF16)
    with pytest.raises(ArgumentError, match='d_v must be 512'):
        flash_mla_sparse_fwd(q, kv, torch.zeros(2, 1, 64).int(), 1.0, d_v=256)
    with pytest.raises(ArgumentError, match=r'indices must be \(tokens, 1, topk\)'):
        flash_mla_sparse_fwd(q, kv, torch.zeros(3, 1, 64).int(), 1.0)
    with pytest.raises(ArgumentError, match='indices must be int32 or int64'):
        flash_mla_sparse_fwd(q, kv, torch.zeros(2, 1, 64), 1.0)


def test_compiles_in_one_graph():
    def step(q, cache, table, lengths):
        return flash_mla_with_kvcache(q, cache, table, lengths, 512, causal=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend='aot_eager')
    with knobs(interpret=False):
        for keys in (20, 33):
            q, _, cache, table = operands(keys=keys)
            own, expected = (f(q, cache, table, ints(keys, 7)) for f in (compiled, step))
            assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def test_the_number_of_kernels_is_small():
    """Lengths, batch, heads and pages are no part of the key of a compiled kernel."""
    keys = set()
    for case in mla_decode.case_set.bench:
        keys |= {
            (launch.kernel.name, launch.static, tuple(launch.config.items())) for launch in mla_decode.trace_case(case)
        }
    assert len(keys) <= len(mla_decode.case_set.bench) + 2
