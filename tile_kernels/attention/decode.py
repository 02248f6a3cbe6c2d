"""Attention of few queries over long keys: dense and paged caches, fp8 caches, split keys.

The formula is that of `attend`. Queries and the heads of a kv head share a tile of 16, 32 or 64 rows, and its loads of
keys. If few thread blocks would run, keys are split: parts start at multiples of a block of the own sequence, and
`combine` merges them. Memory bound: the floor is reading the used part of the cache once.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import (
    FP8,
    HALVES,
    SINKS,
    WIDE_DIM,
    bound,
    check_band,
    check_dim,
    check_heads,
    check_sink,
    check_table,
    check_tensors,
    check_vectors,
    lengths_int32,
    refuse,
    take,
    take_margin,
    value_parts,
    window_of,
)
from tile_kernels.attention._macros import CACHE, DENSE, PACKED, PAGED
from tile_kernels.attention._samples import SUMS, cache_products, random_cache
from tile_kernels.attention.append import PAGE_MULTIPLE, append
from tile_kernels.attention.combine import merge
from tile_kernels.attention.decode_kernels import LOG2E, block_keys, decode_kernel
from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.gpus import SUM_SMS
from tile_kernels.core.launch import launch
from tile_kernels.core.op import empty, op

MAX_SPLITS = 256


def tile_rows(rows: Any, dim: int) -> int:
    """Rows of a tile, for that many rows of a sequence and a kv head; wide ones leave little shared memory."""
    if dim == WIDE_DIM:
        return 16
    if not isinstance(rows, int):
        return 64  # fake tensors: nothing is launched
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def automatic_splits(num_blocks: Any, most_keys: Any, block_m: int, fp8: bool = False, short_part: int = 64) -> int:
    """Parts of the keys that fill the SMs, a function of shapes alone.

    A part has 64 keys or more, or `short_part` if that makes at most 32 parts. Of the smallest tile an SM holds four
    thread blocks of one warp each, of eight bits eight. All are needed to hide latency.
    """
    if not isinstance(num_blocks, int) or not isinstance(most_keys, int) or num_blocks == 0:
        return 1  # fake tensors: nothing is launched
    resident = 2 if block_m > 16 else 4 if not fp8 else 8 if num_blocks >= SUM_SMS else 6  # merging costs time, too
    most = max(most_keys // 64, min(most_keys // short_part, 32))
    return max(1, min(resident * SUM_SMS // num_blocks, most, MAX_SPLITS))


def spread_lengths(lengths: Tensor, cu_seqlens_q: Tensor | None, q: Tensor) -> Tensor:
    """The keys of the sequence of every token, 0 behind the last sequence."""
    if cu_seqlens_q is None:
        return lengths[:, None].expand(q.shape[:2])
    index = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    sequence = torch.searchsorted(cu_seqlens_q, index, right=True) - 1
    return torch.cat((lengths, lengths.new_zeros(1)))[sequence]


# Op -----------------------------------------------------------------------------------------


def check_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    block_table: Tensor | None,
    sink: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    num_splits: int,
) -> tuple[int, str]:
    """What the arguments of `decode` must be; the number of sequences, and how keys are stored."""
    packed = cu_seqlens_q is not None
    *batch, tokens, q_heads, dim = check.shape(q, 'q', ('' if packed else 'batch ') + 'tokens heads dim', dtype=HALVES)
    number = check.shape(cu_seqlens_q, 'cu_seqlens_q', 'sequences+1')[0] - 1 if cu_seqlens_q is not None else batch[0]
    check.at_least(number, 0, 'the number of sequences')
    if block_table is not None and cu_seqlens_k is not None:
        check.fail('cu_seqlens_k', 'must be None with pages', check.describe(cu_seqlens_k))
    keys = PAGED if block_table is not None else PACKED if cu_seqlens_k is not None else DENSE
    if keys == DENSE and cache_seqlens is not None:
        keys = CACHE
    lead = 'pages page_size ' if keys == PAGED else 'tokens ' if keys == PACKED else 'batch tokens '
    same = dict(batch=number) if keys in (DENSE, CACHE) and cache_batch_idx is None else {}
    dtypes = (q.dtype, FP8)
    *_, kv_heads, _ = check.shape(k_cache, 'k_cache', f'{lead}heads dim', dtype=dtypes, dim=dim, **same)
    value_dim = check.shape(v_cache, 'v_cache', f'{lead}heads dim', dtype=k_cache.dtype)[-1]
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        check.fail('v_cache', f'must be {(*k_cache.shape[:-1], "dim")}', check.describe(v_cache))
    check_dim(dim, 'the last extent of q', k_cache.dtype is not FP8)
    check_dim(value_dim, 'the last extent of v_cache')
    check_heads(q_heads, kv_heads, 'k_cache')
    check_vectors(q=q, k_cache=k_cache, v_cache=v_cache)
    check_sink(sink, q_heads, q.dtype)
    check_band(left, right)
    check.number(softcap, 'softcap')
    check.at_least(softcap, 0.0, 'softcap')
    check.at_least(num_splits, 0, 'num_splits')
    check.at_most(num_splits, MAX_SPLITS, 'num_splits')
    check.at_most(tokens * q_heads, (1 << 31) - (1 << 17), 'tokens times heads of q')
    for name, x in (('cu_seqlens_q', cu_seqlens_q), ('cu_seqlens_k', cu_seqlens_k)):
        check.packed(x, name, 'sequences+1', torch.int32, **{'sequences+1': number + 1})
    for name, x in (('cache_seqlens', cache_seqlens), ('seqused_q', seqused_q)):
        check.packed(x, name, 'sequences', torch.int32, sequences=number)
    for name, x in (('cache_batch_idx', cache_batch_idx), ('cache_leftpad', cache_leftpad)):
        check.packed(x, name, 'sequences', torch.int32, sequences=number)
        if x is not None and keys != CACHE:
            check.fail(name, 'must come with a dense cache and its lengths', check.describe(x))
    check_table(block_table, number)
    if keys == PAGED:
        check.multiple(k_cache.shape[1], PAGE_MULTIPLE, 'page_size')
        if cache_seqlens is None:
            check.fail('cache_seqlens', 'must come with block_table', 'None')
    fp8 = k_cache.dtype is FP8
    for name, x in (('k_descale', k_descale), ('v_descale', v_descale)):
        if fp8 and x is None:
            check.fail(name, 'must come with a cache of fp8', 'None')
        if not fp8 and x is not None:
            check.fail(name, f'must be None with a cache of {k_cache.dtype}', check.describe(x))
        if x is not None and x.dim() == 3 and keys != PACKED:  # factors of every token
            check.packed(x, name, 'batch tokens kv_heads', torch.float32)
            check.equal(tuple(x.shape), tuple(k_cache.shape[:-1]), f'the shape of {name}')
        else:
            check.packed(x, name, 'sequences kv_heads', torch.float32, sequences=number, kv_heads=kv_heads)
    if k_descale is not None and v_descale is not None and k_descale.dim() != v_descale.dim():
        check.fail('v_descale', 'must have the dimensions of k_descale', check.describe(v_descale))
    check.same_device(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        block_table=block_table,
        sink=sink,
        k_descale=k_descale,
        v_descale=v_descale,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
    )
    return number, keys


@op(outputs='o lse', out=True)
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    block_table: Tensor | None = None,
    sink: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    scale: float = 1.0,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention without gradient over keys that are dense, packed or in pages; see `flash_attn_with_kvcache`.

    Args:
        q: (batch, tokens, heads, dim), or (tokens, heads, dim) with `cu_seqlens_q`.
        k_cache: (batch, keys, kv_heads, dim), (keys, kv_heads, dim) with `cu_seqlens_k`, or
            (pages, page_size, kv_heads, dim) with `block_table`.
        v_cache: the same with a dim of its own.
        cache_seqlens: (sequences,) int32, the keys of every sequence; all of them unless given.
        cu_seqlens_q: (sequences + 1,) int32, where packed sequences of queries start, and the end of the last.
        cu_seqlens_k: the same of keys.
        seqused_q: (sequences,) int32, the queries of a sequence that count.
        block_table: (sequences, most_pages) int32, the pages of every sequence; a negative one is a hole.
        sink: (heads,) logits that join the denominator.
        k_descale: (sequences, kv_heads) float32, factors of fp8 keys. Or one for every token and head: the shape of the
            cache without its last extent; keys are not packed then.
        v_descale: the same of values.
        cache_batch_idx: (sequences,) int32, the row of a dense cache of every sequence; its own number unless given.
        cache_leftpad: (sequences,) int32, tokens at the start of a dense cache that do not count.
        scale: factor of the scores.
        left: keys before the own position that a query sees; -1 is all.
        right: keys behind it.
        softcap: bound of the scores, 0 for none.
        num_splits: into how many parts keys are split; 0 chooses.

    Returns:
        o of q's dtype, and lse (batch, tokens, heads) or (tokens, heads) float32.
    """
    number, keys = check_decode(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        block_table,
        sink,
        k_descale,
        v_descale,
        cache_batch_idx,
        cache_leftpad,
        left,
        right,
        softcap,
        num_splits,
    )
    packed = cu_seqlens_q is not None
    tokens, q_heads, dim = q.shape[-3:]
    if not packed and isinstance(tokens, int) and tokens == 1:
        right = -1  # there is no key behind the only query
    kv_heads, value_dim = k_cache.shape[-2], v_cache.shape[-1]
    o = empty('o', (*q.shape[:-1], value_dim), q.dtype, q.device)
    lse = empty('lse', q.shape[:-1], torch.float32, q.device)
    most_pages = 1 if block_table is None else block_table.shape[1]
    if k_cache.numel() == 0 or most_pages == 0:
        o.zero_()
        lse.fill_(-math.inf)
        if keys in (CACHE, PAGED) and cache_seqlens is not None:  # any key is one too many
            wrong = spread_lengths(cache_seqlens, cu_seqlens_q, q) > 0
            o.masked_fill_(wrong[..., None, None], math.nan)
            lse.masked_fill_(wrong[..., None], math.nan)
        return o, lse
    group = q_heads // kv_heads
    rows = tokens * group
    block_m = tile_rows(-(-rows // max(number, 1)) if packed else rows, dim)
    blocks = rows // block_m + number + 1 if packed else -(-rows // block_m) * number
    most_keys = k_cache.shape[0 if keys == PACKED else 1] * most_pages
    short_part = max(block_keys(dim, value_dim), 32) if block_m == 16 else 64
    splits = num_splits or automatic_splits(blocks * kv_heads, most_keys, block_m, k_cache.dtype is FP8, short_part)
    q_lead, k_lead = (None,) if packed else (), (None,) if keys == PACKED else ()
    if splits > 1:
        out_part = torch.empty(splits, *o.shape, dtype=torch.float32, device=q.device)
        lse_part = torch.empty(splits, *lse.shape, dtype=torch.float32, device=q.device)
    else:
        out_part, lse_part = o[None], lse[None]
    own_sink = sink if splits == 1 else None
    static: tuple = (dim, value_dim, q.dtype, k_cache.dtype, block_m, packed, seqused_q is not None, keys)
    static += (cache_seqlens is not None, left >= 0 or right >= 0, softcap > 0)
    static += (None if own_sink is None else own_sink.dtype, splits > 1, cache_batch_idx is not None)
    token_factors = k_descale is not None and k_descale.dim() == 3
    static += (cache_leftpad is not None, token_factors)
    factors: tuple = (k_descale, v_descale)
    launch(
        decode_kernel,
        static,
        q[q_lead],
        k_cache[k_lead],
        v_cache[k_lead],
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        cache_seqlens,
        block_table,
        *((None, None, *factors) if token_factors else (*factors, None, None)),
        cache_batch_idx,
        cache_leftpad,
        own_sink,
        out_part.unsqueeze(1) if packed else out_part,
        lse_part.unsqueeze(1) if packed else lse_part,
        blocks,
        number,
        number.bit_length() if isinstance(number, int) else 0,
        scale / softcap if softcap > 0 else scale * LOG2E,
        softcap * LOG2E,
        bound(left),
        bound(right),
        size=max(number * most_keys * kv_heads * (dim + value_dim) * k_cache.element_size(), 1) if q.numel() else 0,
    )
    if splits > 1:
        merge(out_part, lse_part, sink, o, lse)
    return o, lse


# Public function ----------------------------------------------------------------------------


def attend_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *lengths: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """`decode`; for heads of 512 columns one call for each half of the values."""
    parts = [decode(q, k_cache, part, *lengths, **options) for part in value_parts(q, v_cache)]
    return parts[0] if len(parts) == 1 else (torch.cat([o for o, _ in parts], dim=-1), parts[0][1])


def spread_scale(
    scale: Tensor | None, name: str, number: int, kv_heads: int, cache: Tensor, by_token: bool = False
) -> Tensor | None:
    """Factors of an fp8 cache, for every sequence and kv head, or also for every token; 1 unless given."""
    if scale is None:
        return None if cache.dtype is not FP8 else torch.ones(number, kv_heads, device=cache.device)
    check.dtype(scale, name, torch.float32)
    if by_token and tuple(scale.shape) == tuple(cache.shape[:-1]):
        return scale.contiguous()
    if tuple(scale.shape) not in ((), (1,), (number, kv_heads)):
        check.fail(name, f'must be a scalar or ({number}, {kv_heads})', check.describe(scale))
    return scale.expand(number, kv_heads).contiguous()


def widen_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    number: int,
) -> tuple[Tensor, dict[str, Any]]:
    """Queries of fp8 in bfloat16, which is exact, and the factors of `decode`: those of queries go to the keys."""
    check.dtype(k, 'k', FP8)
    check.dtype(v, 'v', FP8)
    if k.dim() < 2:
        check.fail('k', 'must have heads and a last extent', check.describe(k))
    given = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    factors: Any = [spread_scale(x, name, number, k.shape[-2], k) for name, x in given.items()]
    return q.to(torch.bfloat16), dict(k_descale=factors[0] * factors[1], v_descale=factors[2])


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    sink: Tensor | None = None,
    num_splits: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of few queries over a cache of keys and values; takes the calls of FlashAttention. No gradient.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16, the last tokens of every sequence. With an fp8 cache also
            float8_e4m3fn; the result is then bfloat16. With another cache dim and value_dim may be 512, too.
        k_cache: (batch, keys, kv_heads, dim), or (pages, page_size, kv_heads, dim) with `block_table`; of q's dtype or
            float8_e4m3fn. page_size is a multiple of 16.
        v_cache: the same with a dim of its own.
        k: (batch, new, kv_heads, dim), keys that are first written behind those of the cache.
        v: the same of values.
        cache_seqlens: (batch,) int32, the keys of every sequence without the new ones, or one number for all.
        block_table: (batch, most_pages) int32, also `page_table`. Entries behind the length are not read. A negative
            one is a hole, whose keys nobody sees.
        cache_batch_idx: (batch,) int32, which row of a dense cache belongs to a sequence.
        cache_leftpad: (batch,) int32, tokens at the start of a dense cache that do not count.
        softmax_scale: factor of the scores, 1 / sqrt(dim) unless given.
        causal: a query sees no key behind its own position; the last query stands at the last key.
        window_size: keys before and behind its own position that a query sees; -1 or None is no bound.
        softcap: bound of the scores, 0 for none.
        sink: (heads,) logits that join the denominator.
        num_splits: into how many parts keys are split; 0 chooses by shapes.
        q_descale: factor of fp8 queries: (batch, kv_heads) float32, or one number on the device.
        k_descale: the same of fp8 keys; 1 unless given. Or one for every token and head: the shape of the cache without
            its last extent. Then queries are not of fp8, and there are no new keys.
        v_descale: the same of values.
        out: (batch, tokens, heads, value_dim) of q's dtype, contiguous: where the result goes.
        return_softmax_lse: also return lse.
        foreign: `sm_margin`, which has no effect here, and arguments of FlashAttention that have no meaning, at their
            neutral value.

    Returns:
        o (batch, tokens, heads, value_dim), with `return_softmax_lse` also lse (batch, heads, tokens) float32. A
        sequence with a page id that does not exist, or with a length beyond its cache, gives NaN.
    """
    sink = take(foreign, sink, None, *SINKS)
    block_table = take(foreign, block_table, None, 'page_table')
    take_margin(foreign)
    refuse(foreign)
    batch, _, _, dim = check.shape(q, 'q', 'batch tokens heads dim')
    check_tensors(k_cache=k_cache, v_cache=v_cache, sink=sink)
    if q.dtype not in (*HALVES, FP8):
        q, k, v = autocast(q, k, v)
    if isinstance(cache_seqlens, Tensor):
        check.dtype(cache_seqlens, 'cache_seqlens', (torch.int32, torch.int64))
        lengths = cache_seqlens.to(torch.int32)
    else:
        check.integer(cache_seqlens, 'cache_seqlens', least=0)
        lengths = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    if k_cache.dim() != 4:
        check.fail('k_cache', 'must have four dimensions', check.describe(k_cache))
    left, right = window_of(causal, window_size)
    check.integer(num_splits, 'num_splits', least=0)
    if softmax_scale is not None:
        check.number(softmax_scale, 'softmax_scale')
    kv_heads = k_cache.shape[2]
    stored: dict[str, Any] = dict(
        k_descale=spread_scale(k_descale, 'k_descale', batch, kv_heads, k_cache, q.dtype is not FP8),
        v_descale=spread_scale(v_descale, 'v_descale', batch, kv_heads, k_cache, q.dtype is not FP8),
    )
    if q.dtype is FP8:
        q, factors = widen_queries(q, k_cache, v_cache, q_descale, k_descale, v_descale, batch)
    else:
        refuse(dict(q_descale=q_descale))
        factors = stored
    pages, rows = lengths_int32(block_table, 'block_table'), lengths_int32(cache_batch_idx, 'cache_batch_idx')
    given: dict[str, Any] = dict(
        cache_seqlens=lengths,
        block_table=pages,
        sink=sink,
        cache_batch_idx=rows,
        cache_leftpad=lengths_int32(cache_leftpad, 'cache_leftpad'),
        scale=max(dim, 1) ** -0.5 if softmax_scale is None else softmax_scale,
        left=left,
        right=right,
        softcap=softcap,
        num_splits=num_splits,
        **factors,
    )
    if k is not None or v is not None:  # everything is checked before the cache is changed
        k, v = check.tensor(k, 'k'), check.tensor(v, 'v')
        for name, x in (('k', k), ('v', v)):
            check.shape(x, name, 'batch tokens heads dim', batch=batch, heads=kv_heads)
        if k_descale is not None and k_descale.dim() == 3:
            check.fail('k', 'must be None with factors of every token', check.describe(k))
        packed: dict[str, Any] = dict(cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None)
        if not torch.compiler.is_compiling():  # tensors have no address there; the ops check them nevertheless
            for part in value_parts(q, v_cache):
                check_decode(q, k_cache, part, **{name: x for name, x in given.items() if name != 'scale'}, **packed)
        if out is not None:
            check.shape(out, 'out', 'batch tokens heads dim', dtype=q.dtype, dim=v_cache.shape[-1], batch=batch)
        append(k, v, k_cache, v_cache, lengths, None, pages, rows, **stored)
        given['cache_seqlens'] = lengths + k.shape[1]
    if out is None:
        out, lse = attend_cache(q, k_cache, v_cache, **given)
    elif dim == WIDE_DIM:
        check.shape(out, 'out', 'batch tokens heads dim', dtype=q.dtype, batch=batch, dim=dim)
        o, lse = attend_cache(q, k_cache, v_cache, **given)
        out.copy_(o)
    else:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        decode.out(q, k_cache, v_cache, **given, o=out, lse=lse)
    return (out, lse.transpose(1, 2)) if return_softmax_lse else out


# Cases --------------------------------------------------------------------------------------

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
D64, D128 = (64, 64), (128, 128)
CAUSAL = (-1, 0)
SMOKE = (
    grid(queries=[0, 1], lengths=[(0, 5, 64)], heads=[(2, 1)], dims=[D64])
    + grid(queries=[1], lengths=[(70, 3)], heads=[(8, 1)], dims=[D64], splits=[2], sink=[BF16], softcap=[2.0])
    + grid(queries=[3], lengths=[(40, 17, 0)], heads=[(3, 1)], dims=[D64], page=[16], band=[CAUSAL, (3, 0)], sink=[F32])
    + grid(
        queries=[2], lengths=[(140, 33)], heads=[(2, 2)], dims=[D64], page=[16], splits=[3], holes=[True], dtype=[F16]
    )
    + grid(queries=[1], lengths=[(20, 300, 9)], heads=[(2, 1)], dims=[D64], page=[16], wrong=[True], splits=[1, 2])
    + grid(queries=[1], lengths=[(33, 50)], heads=[(4, 2)], dims=[(64, 32)], page=[48, 0], fp8=[True], splits=[0])
    + grid(queries=[(3, 0, 2)], lengths=[(30, 4, 17)], heads=[(2, 1)], dims=[(72, 72)], page=[16], band=[CAUSAL])
    + grid(queries=[(3, 0, 2)], lengths=[(30, 4, 17)], heads=[(2, 1)], dims=[D64], packed=[True], splits=[2])
    + grid(queries=[3, 9], lengths=[(5, 70)], heads=[(8, 1)], dims=[(192, 128)], page=[32], band=[(-1, 0), (0, 2)])
    + grid(queries=[2], lengths=[(9, 70, 5)], heads=[(2, 1)], dims=[D64], padding=[(0, 3, 7)], band=[(-1, -1), CAUSAL])
    + grid(queries=[5], lengths=[(64, 1)], heads=[(8, 1)], dims=[D64], fp8=[True], band=[(9, 0)], splits=[2])
    + grid(
        queries=[2],
        lengths=[(33, 50)],
        heads=[(4, 2)],
        dims=[(64, 32)],
        page=[16, 0],
        fp8=[True],
        by_token=[True],
        splits=[2],
        band=[CAUSAL],
    )
    + grid(queries=[2], lengths=[(17, 20)], heads=[(2, 1)], dims=[(512, 64)], page=[16], band=[CAUSAL])
)
BENCH = (
    grid(
        queries=[1], lengths=[(4096,) * 32], heads=[(32, 8)], dims=[D128], page=[16, 64], fp8=[False, True], splits=[0]
    )
    + grid(queries=[1], lengths=[(1024,)], heads=[(32, 4)], dims=[D128], page=[64], splits=[0])
    + grid(queries=[1], lengths=[(131_072,)], heads=[(32, 4)], dims=[D128], page=[64], fp8=[False, True], splits=[0])
    + grid(queries=[1], lengths=[(4000,) * 16], heads=[(32, 32)], dims=[D128], page=[16], splits=[0])
    + grid(queries=[4], lengths=[(8001,) * 33], heads=[(24, 8)], dims=[D128], page=[0], band=[CAUSAL], splits=[0])
    + grid(queries=[16], lengths=[(8192,) * 8], heads=[(32, 8)], dims=[D128], page=[256], band=[CAUSAL], splits=[0])
)
FULL = grid(
    queries=[1, 16], lengths=[(1, 127, 8191, 100_000)], heads=[(8, 1)], dims=[(128, 128)], page=[16, 64], splits=[0]
) + grid(queries=[1], lengths=[(3, 257)], heads=[(6, 2)], dims=[(40, 40), (256, 256)], page=[64], splits=[0, 1, 7])
decode.cases(make=random_cache, match=SUMS, smoke=SMOKE, full=FULL, bench=BENCH, flops=cache_products)
