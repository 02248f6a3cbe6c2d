"""Latent attention over a cache: all heads share one key of 576 or 512 channels, whose first 512 are the value.

    s[h, j] = scale * sum_c q[h, c] * k[j, c]                           c < 576 or 512
    p[h, j] = exp(s[h, j]) / (sum_j exp(s[h, j]) + exp(sink[h]))        over the keys that the token sees
    o[h, d] = sum_j p[h, j] * k[j, d]                                   d < 512
    lse[h]  = log sum_j exp(s[h, j])                                    without the sink; +inf if there is no key

Keys are in pages with a table and lengths, or listed for every token. Few heads are memory bound: the floor is reading
the used part of the cache once. 128 heads are compute bound. If few thread blocks would run, keys are split and the
parts merged. The kernels are in `mla_decode_kernels`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import HALVES, check_extents, check_sink, check_vectors, lengths_int32, table_int32
from tile_kernels.attention._samples import LATENT_SUMS, latent_products, random_latent_cache
from tile_kernels.attention.combine import flash_attn_combine
from tile_kernels.attention.mla_decode_hopper_kernels import mla_decode_hopper_kernel
from tile_kernels.attention.mla_decode_kernels import (
    BOXED,
    LISTED,
    LOG2E,
    PACKED_HEADS,
    PAGED,
    SINGLE,
    merge_warps,
    mla_decode_kernel,
    mla_merge_kernel,
    tile_rows,
)
from tile_kernels.attention.pack_mla_cache import (
    CACHES,
    KEY,
    LATENT,
    PAGE_BYTES,
    TOKEN_BYTES,
    check_pages,
    page_parts,
    token_parts,
)
from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.gpus import SUM_SMS
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

#: Variants of the kernel.
MLA_DECODE = mla_decode_hopper_kernel, mla_decode_kernel
MAX_HEADS = 128
MAX_SPLITS = 256
PAGE_MULTIPLE = 16
#: Tokens whose heads share tiles, at least; fewer tokens have tiles of their own, for which Hopper has a kernel.
PACKED_TOKENS = 3
#: Keys of a block that is loaded as a whole, if pages are multiples of it.
BOX_KEYS = 64
#: Keys of a part, at least.
PART_KEYS = 128
MAX_ROWS = (1 << 31) - (1 << 17)


def automatic_splits(num_blocks: Any, most_keys: Any) -> int:
    """Parts of the keys that give every SM work, each of 128 keys or more; a function of shapes alone."""
    if not isinstance(num_blocks, int) or not isinstance(most_keys, int) or num_blocks == 0:
        return 1  # fake tensors: nothing is launched
    return max(1, min(SUM_SMS // num_blocks, most_keys // PART_KEYS))


def check_queries(q: Tensor, spec: str, most_heads: int = MAX_HEADS, width: int = KEY) -> None:
    """Queries of so many channels with so many heads, read 16 bytes at a time."""
    *_, heads, _ = check_extents(q, 'q', f'{spec} heads {width}', HALVES)
    check.at_least(heads, 1, 'heads of q')
    check.at_most(heads, most_heads, 'heads of q')
    check_vectors(q=q)


def latent_parts(cache: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Latent channels or codes, factors, and rotary channels of a cache (pages, page_size, 1, channels or bytes)."""
    if cache.dtype in CACHES and cache.shape[-1] == PAGE_BYTES:
        return page_parts(cache)
    cache = cache.squeeze(2)
    if cache.shape[-1] == LATENT:
        return cache, None, None
    if cache.dtype in CACHES:
        return token_parts(cache)
    return cache[..., :LATENT], None, cache[..., LATENT:]


# Op -----------------------------------------------------------------------------------------


@op(outputs='o lse')
def mla_decode(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """Latent attention over a cache; see `flash_mla_with_kvcache`.

    Args:
        q: (batch, tokens, heads, 576) or (batch, tokens, heads, 512) bfloat16 or float16.
        k_cache: (pages, page_size, 1, 576 or 512) of q's dtype, or (pages, page_size, 1, 656 or 584) uint8 or
            float8_e4m3fn.
        block_table: (batch, most_pages) int32, the pages of every sequence.
        cache_seqlens: (batch,) int32, the keys of every sequence.
        indices: (batch, tokens, topk) int32, the keys of every token; then there is no table.
        topk_length: (batch,) int32, how many of them count.
        sink: (heads,) logits that join the denominator.
        scale: factor of the scores.
        causal: a token sees no key behind its own position.
        num_splits: into how many parts keys are split; 0 chooses.

    Returns:
        o (batch, tokens, heads, 512) of q's dtype, and lse (batch, tokens, heads) float32.
    """
    short = check.tensor(q, 'q').shape[-1:] == (LATENT,)
    check_queries(q, 'batch tokens', width=LATENT if short else KEY)
    batch, tokens, heads, width = q.shape
    fp8 = check.tensor(k_cache, 'k_cache').dtype in CACHES
    spec = f'pages page_size 1 {(PAGE_BYTES if short else TOKEN_BYTES) if fp8 else width}'
    pages, page_size, _, _ = check_extents(k_cache, 'k_cache', spec, (q.dtype, *CACHES))
    if fp8 and q.dtype is not torch.bfloat16:
        check.fail('q', 'must be bfloat16 with an fp8 cache', check.describe(q))
    if fp8 and short:
        check_pages(k_cache, 'k_cache')
    else:
        check_vectors(k_cache=k_cache)
    check_sink(sink, heads, q.dtype)
    check.at_least(num_splits, 0, 'num_splits')
    check.at_most(num_splits, MAX_SPLITS, 'num_splits')
    check.at_most(tokens * heads, MAX_ROWS, 'tokens times heads of q')
    check.at_most(pages * page_size, MAX_ROWS, 'tokens of k_cache')
    if indices is None:
        for name, x in (('block_table', block_table), ('cache_seqlens', cache_seqlens)):
            if x is None:
                check.fail(name, 'must come with a cache without indices', 'None')
        check.packed(block_table, 'block_table', 'batch most_pages', torch.int32, batch=batch)
        check.packed(cache_seqlens, 'cache_seqlens', 'batch', torch.int32, batch=batch)
        check.multiple(page_size, PAGE_MULTIPLE, 'page_size')
        if topk_length is not None:
            check.fail('topk_length', 'must come with indices', check.describe(topk_length))
    else:
        for name, x in (('block_table', block_table), ('cache_seqlens', cache_seqlens)):
            if x is not None:
                check.fail(name, 'must be None with indices', check.describe(x))
        check.packed(indices, 'indices', 'batch tokens topk', torch.int32, batch=batch, tokens=tokens)
        check.packed(topk_length, 'topk_length', 'batch', torch.int32, batch=batch)
        if causal:
            check.fail('causal', 'must be False with indices, which say what a token sees', 'True')
    operands = dict(q=q, k_cache=k_cache, block_table=block_table, cache_seqlens=cache_seqlens, indices=indices)
    check.same_device(**operands, topk_length=topk_length, sink=sink)
    o = torch.empty(batch, tokens, heads, LATENT, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, tokens, heads, dtype=torch.float32, device=q.device)
    keys = LISTED if indices is not None else PAGED
    if keys == PAGED and (heads > PACKED_HEADS or tokens < PACKED_TOKENS):
        keys = BOXED if page_size % BOX_KEYS == 0 and not fp8 else SINGLE
    table = check.tensor(block_table, 'block_table') if indices is None else indices.flatten(0, 1)
    if pages * page_size == 0 or table.shape[1] == 0:
        o.zero_()
        lse.fill_(math.inf)
        if cache_seqlens is not None:  # any key is one too many
            wrong = (cache_seqlens > 0).view(-1, 1, 1)
            o.masked_fill_(wrong[..., None], math.nan)
            lse.masked_fill_(wrong, math.nan)
        return o, lse
    unit_tokens = tokens if keys == PAGED else 1
    units = batch if keys == PAGED else batch * tokens
    rows = unit_tokens * heads
    blocks = -(-rows // tile_rows(rows)) * units
    splits = num_splits or automatic_splits(blocks, table.shape[1] * (1 if keys == LISTED else page_size))
    if splits > 1:
        parts = torch.empty(splits, *o.shape, dtype=torch.float32, device=q.device)
        lse_parts = torch.empty(splits, *lse.shape, dtype=torch.float32, device=q.device)
    else:
        parts, lse_parts = o[None], lse[None]
    own_sink = sink if splits == 1 else None
    lengths = topk_length if keys == LISTED else cache_seqlens
    static: tuple = (q.dtype, fp8, keys, lengths is not None, keys == PAGED and causal and tokens > 1)
    static += (
        None if own_sink is None else own_sink.dtype,
        splits > 1,
        False,
        keys in (SINGLE, BOXED) or rows > PACKED_HEADS,
        short,
    )
    launch(
        MLA_DECODE,
        static,
        q,
        *latent_parts(k_cache),
        table,
        lengths,
        own_sink,
        parts,
        lse_parts,
        None,
        units,
        unit_tokens,
        int(causal),
        scale * LOG2E,
        size=rows if q.numel() else 0,
    )
    if splits > 1:
        number = lse.numel()
        merged = parts.view(splits, number, LATENT), lse_parts.view(splits, number)
        static = (q.dtype, None if sink is None else sink.dtype, merge_warps(splits))
        launch(mla_merge_kernel, static, *merged, sink, o.view(number, LATENT), lse.view(number), size=number)
    return o, lse


# Public functions ---------------------------------------------------------------------------


class MLASchedule:
    """What FlashMLA needs to know before a call; here it is empty, so nothing can go stale in a CUDA graph."""

    def __repr__(self) -> str:
        return 'MLASchedule()'


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[MLASchedule, None]:
    """The first two arguments of FlashMLA's decode call: an empty object and None. Arguments have no effect."""
    return MLASchedule(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: MLASchedule | None = None,
    num_splits: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    *,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Latent attention of few tokens over a cache; takes the calls of FlashMLA. No gradient.

    Args:
        q: (batch, tokens, heads, 576) bfloat16 or float16, the last tokens of every sequence; 1 to 128 heads. Or 512
            channels, for keys that are values as a whole.
        k_cache: (pages, page_size, 1, 576 or 512) of q's dtype. With `is_fp8_kvcache` (pages, page_size, 1, 656 or 584)
            uint8 or float8_e4m3fn as `pack_mla_cache` makes it; then q is bfloat16.
        block_table: (batch, most_pages) int32; page_size is a multiple of 16. Entries behind the length are not read. A
            negative one is a hole, whose keys nobody sees. None with `indices`.
        cache_seqlens: (batch,) int32, the keys of every sequence. None with `indices`.
        head_dim_v: 512.
        tile_scheduler_metadata: what `get_mla_metadata` returned, or None.
        num_splits: into how many parts keys are split; None or 0 chooses by shapes.
        softmax_scale: factor of the scores, 1 / sqrt(576) or 1 / sqrt(512) unless given.
        causal: a token sees no key behind its own position; the last token stands at the last key.
        is_fp8_kvcache: whether the cache is packed.
        indices: (batch, tokens, topk) int32: the keys that a token sees, page * page_size + offset. Entries outside
            the cache, such as -1, are none; a key that occurs twice counts twice.
        attn_sink: (heads,) logits that join the denominator.
        topk_length: (batch,) int32: only so many entries of `indices` count.
        extra_k_cache: a second cache, of the same form, whose keys join the same softmax; only with `indices`. It is
            attended to on its own, and the two results, of q's dtype, are merged.
        extra_indices_in_kvcache: (batch, tokens, extra_topk) int32, as `indices` of the second cache.
        extra_topk_length: as `topk_length` of the second cache.

    Returns:
        o (batch, tokens, heads, 512) and lse (batch, heads, tokens) float32, without the sink. A token that sees no key
        has o = 0 and lse = +inf. A sequence with a page id that does not exist, or with a length beyond its table,
        gives NaN.
    """
    check.together(extra_k_cache=extra_k_cache, extra_indices_in_kvcache=extra_indices_in_kvcache)
    if extra_k_cache is None and extra_topk_length is not None:
        check.fail('extra_topk_length', 'must come with extra_k_cache', check.describe(extra_topk_length))
    if extra_k_cache is not None and indices is None:
        check.fail('extra_k_cache', 'must come with indices', check.describe(extra_k_cache))
    check.equal(head_dim_v, LATENT, 'head_dim_v')
    if tile_scheduler_metadata is not None and not isinstance(tile_scheduler_metadata, MLASchedule):
        fact = check.describe(tile_scheduler_metadata)
        check.fail('tile_scheduler_metadata', 'must be None or what get_mla_metadata returned', fact)
    if num_splits is not None:
        check.integer(num_splits, 'num_splits', least=0)
    if softmax_scale is not None:
        check.number(softmax_scale, 'softmax_scale')
    check.tensor(k_cache, 'k_cache')
    (q,) = autocast(check.tensor(q, 'q'))
    if bool(is_fp8_kvcache) != (k_cache.dtype in CACHES):
        kinds = 'uint8 or float8_e4m3fn' if is_fp8_kvcache else 'of the dtype of q'
        check.fail('k_cache', f'must be {kinds} with is_fp8_kvcache={is_fp8_kvcache}', check.describe(k_cache))
    given: dict[str, Any] = dict(
        scale=max(q.shape[-1], 1) ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        num_splits=num_splits or 0,
    )
    listed, limit = table_int32(indices, 'indices'), lengths_int32(topk_length, 'topk_length')
    table, lengths = table_int32(block_table, 'block_table'), lengths_int32(cache_seqlens, 'cache_seqlens')
    own_sink = attn_sink if extra_k_cache is None else None
    o, lse = mla_decode(q, k_cache, table, lengths, listed, limit, own_sink, **given)
    if extra_k_cache is not None:
        if attn_sink is not None:
            check_sink(attn_sink, q.shape[2], q.dtype)
        listed = table_int32(extra_indices_in_kvcache, 'extra_indices_in_kvcache')
        limit = lengths_int32(extra_topk_length, 'extra_topk_length')
        more, more_lse = mla_decode(q, extra_k_cache, None, None, listed, limit, None, **given)
        logs = torch.stack((lse, more_lse))
        logs = logs.masked_fill(logs == math.inf, -math.inf)  # parts without keys
        o, lse = flash_attn_combine(torch.stack((o, more)), logs, sink=attn_sink)
        lse = lse.masked_fill(lse == -math.inf, math.inf)
    return o, lse.transpose(1, 2)


# Cases --------------------------------------------------------------------------------------

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMOKE = (
    grid(queries=[0, 1], lengths=[(0, 5, 33)], heads=[1])
    + grid(queries=[3], lengths=[(40, 2)], heads=[3], causal=[True], sink=[F32], splits=[1])
    + grid(queries=[5], lengths=[(37,)], heads=[7], causal=[True], dtype=[F16])
    + grid(queries=[1], lengths=[(70, 49)], heads=[20], splits=[2], holes=[True], sink=[BF16])
    + grid(queries=[1], lengths=[(20, 40, 9)], heads=[2], wrong=[True], splits=[1, 2])
    + grid(queries=[2], lengths=[(70,)], heads=[33], fp8=[True], causal=[True], splits=[1])
    + grid(queries=[2], lengths=[(50, 64)], heads=[5], topk=[40], fp8=[True], short=[True], splits=[2])
    + grid(queries=[2], lengths=[(150,)], heads=[40], causal=[True], sink=[BF16], splits=[1])
    + grid(queries=[1], lengths=[(17, 20)], heads=[33], wrong=[True], splits=[1])
    + grid(queries=[1], lengths=[(70,)], heads=[64], holes=[True], dtype=[F16], splits=[2])
    + grid(queries=[1], lengths=[(70,)], heads=[65], topk=[64], sink=[F32], splits=[1])
    + grid(queries=[1], lengths=[(37, 70)], heads=[33], width=[512], wrong=[True], dtype=[F16], splits=[1])
    + grid(queries=[3], lengths=[(40, 2)], heads=[3], width=[512], fp8=[False, True], causal=[True], splits=[1])
    + grid(queries=[1], lengths=[(70,)], heads=[40], width=[512], fp8=[True], topk=[40], short=[True], splits=[2])
)
BENCH = (
    grid(queries=[1], lengths=[(4096,) * 128], heads=[128, 16], page=[64], splits=[0])
    + grid(queries=[1], lengths=[tuple(range(8, 2312, 18))], heads=[128], page=[64], splits=[0])  # 1151 on average
    + grid(queries=[1], lengths=[(32768,)], heads=[16], page=[64], splits=[0])
    + grid(queries=[2], lengths=[(8192,) * 128], heads=[128], page=[64], topk=[2048], fp8=[True], splits=[0])
    + grid(queries=[2], lengths=[(8001,) * 33], heads=[24], page=[64], causal=[True], fp8=[True], splits=[0])
    + grid(queries=[1], lengths=[(8192,) * 64], heads=[64], page=[64], width=[512], topk=[512], fp8=[True], splits=[0])
)
FULL = (
    grid(queries=[1, 2], lengths=[(1, 127, 8191, 100_000)], heads=[8, 16, 64, 128], page=[64], splits=[0])
    + grid(
        queries=[4], lengths=[(300, 257)], heads=[16, 24], page=[16, 64], causal=[True], fp8=[True], splits=[0, 1, 7]
    )
    + grid(
        queries=[2], lengths=[(5000, 3000)], heads=[128, 16], topk=[2048], page=[64], fp8=[False, True], short=[True]
    )
)
mla_decode.cases(
    make=random_latent_cache, match=LATENT_SUMS, smoke=SMOKE, full=FULL, bench=BENCH, flops=latent_products
)
