"""Scores of the lightning indexer over a paged cache of fp8 keys; the formula is that of `fp8_mqa_logits`.

A page holds 64 tokens: first their codes, then their float32 factors. A thread block owns the new tokens of a sequence
and a part of its pages, so every page is read once. Memory bound unless heads and new tokens are many: the floor is
reading the used pages once.
"""

import math

import torch
from torch import Tensor

from tile_kernels.attention._checks import dense, lengths_int32, table_int32
from tile_kernels.attention.fp8_mqa_logits import LOGITS, check_heads_and_dim, num_parts, padded_rows
from tile_kernels.attention.fp8_mqa_logits_kernels import FP8, MQA_LOGITS, TILE
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

MAX_TOKENS = 4
CODES = (torch.uint8, FP8)


def _without_pages(logits: Tensor, tokens: int, context_lens: Tensor, block_table: Tensor) -> Tensor:
    """Logits of an empty cache: NaN where a page would have to exist, -inf elsewhere."""
    rows, columns = logits.shape
    hidden = logits.new_full((rows, columns), -math.inf)
    if block_table.shape[1] == 0:
        return hidden
    token = torch.arange(tokens, device=logits.device)
    seen = context_lens if context_lens.shape[1] == tokens > 1 else context_lens - tokens + token + 1
    column = torch.arange(columns, device=logits.device)
    page = column // TILE
    named = block_table[:, page.clamp(max=block_table.shape[1] - 1)] >= 0
    missing = (named & (page < block_table.shape[1]))[:, None] & (column < seen[..., None])
    return hidden.masked_fill(missing.view(rows, columns), math.nan)


# Op -----------------------------------------------------------------------------------------


@op(outputs='logits')
def _fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
) -> Tensor:
    """See `fp8_paged_mqa_logits`; `context_lens` has one or `tokens` columns."""
    batch, tokens, heads, dim = check.shape(q, 'q', 'batch tokens heads dim', dtype=FP8)
    check_heads_and_dim(heads, dim)
    if tokens < 1 or tokens > MAX_TOKENS:
        check.fail('the tokens of q', f'must be 1 to {MAX_TOKENS}', str(tokens))
    pages, *_ = check.shape(
        kv_cache, 'kv_cache', 'pages 64 1 dim+4', dtype=CODES, **{'64': TILE, '1': 1, 'dim+4': dim + 4}
    )
    check.packed(
        weights, 'weights', 'batch*tokens heads', torch.float32, **{'batch*tokens': batch * tokens}, heads=heads
    )
    columns = check.shape(context_lens, 'context_lens', 'batch columns', dtype=torch.int32, batch=batch)[1]
    if columns not in (1, tokens):
        check.fail('context_lens', 'must have one length per sequence or per token', check.describe(context_lens))
    check.contiguous(context_lens, 'context_lens')
    check.packed(block_table, 'block_table', 'batch most_pages', torch.int32, batch=batch)
    check.at_least(max_context_len, 0, 'max_context_len')
    check.at_most(max_context_len, 1 << 30, 'max_context_len')
    check.contiguous(q, 'q')
    if (
        (pages and not kv_cache[0].is_contiguous())
        or kv_cache.stride(0) % 16
        or check.vector_bytes(q, kv_cache[:, 0, 0]) < 16
    ):
        check.fail('kv_cache', 'must have contiguous pages at multiples of 16 bytes', check.describe(kv_cache))
    check.same_device(q=q, kv_cache=kv_cache, weights=weights, context_lens=context_lens, block_table=block_table)
    logits = padded_rows(batch * tokens, max_context_len, q.device)
    if pages == 0 or block_table.shape[1] == 0:
        return logits.copy_(_without_pages(logits, tokens, context_lens, block_table))
    flat = kv_cache.view(torch.uint8).flatten(1)
    launch(
        MQA_LOGITS,
        (heads, dim, tokens, columns > 1, clean_logits),
        q.view(batch * tokens * heads, dim),
        flat[:, : TILE * dim].view(FP8).unflatten(1, (TILE, dim)),
        flat[:, TILE * dim :].view(torch.float32),
        weights.view(batch * tokens * heads),
        None,
        context_lens,
        block_table,
        logits,
        batch,
        num_parts(batch, max_context_len),
        size=batch if logits.numel() else 0,
    )
    return logits


@_fp8_paged_mqa_logits.public
def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: object = None,
    max_context_len: int = 0,
    clean_logits: bool = False,
) -> Tensor:
    """Scores of all keys of a paged cache for new tokens, summed over heads; takes the calls of DeepGEMM.

    Args:
        q: (batch, tokens, heads, dim) float8_e4m3fn with 1 to 4 new tokens; otherwise as in `fp8_mqa_logits`.
        kv_cache: (pages, 64, 1, dim + 4) uint8: a page holds 64 * dim codes and then 64 float32 factors.
        weights: (batch * tokens, heads) float32, with the factors of q.
        context_lens: (batch,) int32 or int64, the keys of a sequence with its new tokens. Token t of n sees
            context_lens - n + t + 1 of them. Or (batch, tokens), the keys that each token sees.
        block_table: (batch, most_pages) int32 or int64, the pages of every sequence. A negative page is a hole, its
            logits are -inf; those of a page that does not exist are NaN. An empty cache has no page that exists.
        schedule_meta: accepted; nothing is scheduled on the host.
        max_context_len: columns of the result.
        clean_logits: whether -inf is written behind the length; otherwise nothing is written there.

    Returns:
        (batch * tokens, max_context_len) float32; its rows are a multiple of 16 bytes apart.
    """
    check.integer(max_context_len, 'max_context_len', least=0)
    lengths, table = lengths_int32(context_lens, 'context_lens'), table_int32(block_table, 'block_table')
    if lengths is not None and lengths.dim() == 1:
        lengths = lengths[:, None]
    rows = dense(q, 'q'), kv_cache, dense(weights, 'weights')
    return fp8_paged_mqa_logits.call(*rows, lengths, table, max_context_len, clean_logits)


# Cases --------------------------------------------------------------------------------------


def pack_page(codes: Tensor, sf: Tensor) -> Tensor:
    """Pages (pages, 64, dim) of codes and their factors (pages, 64) in one tensor of bytes."""
    pages, tokens, dim = codes.shape
    flat = torch.cat((codes.view(torch.uint8).flatten(1), sf.contiguous().view(torch.uint8)), dim=1)
    return flat.view(pages, tokens, 1, dim + 4)


def _make(
    batch: int,
    lengths: tuple,
    tokens: int = 1,
    heads: int = 64,
    dim: int = 128,
    wide: bool = False,
    clean_logits: bool = True,
    hole: bool = False,
    empty: bool = False,
) -> dict:
    """Sequences with these lengths in turn, in shuffled pages; what lies behind a length is NaN. Or no page exists."""
    longest = max(lengths, default=0)
    own = [-(-n // TILE) for n in lengths]
    most = max(max(own, default=0), 1)
    needed = [own[i % len(own)] for i in range(batch)]
    pages = max(sum(needed), 1) + 1
    order = torch.randperm(pages) if sum(needed) < 4096 else torch.arange(pages)
    codes, sf = torch.randn(pages, TILE, dim).to(FP8), torch.rand(pages, TILE) + 0.5
    table = torch.full((batch, most), -1, dtype=torch.int32)
    lens = torch.tensor([lengths[i % len(lengths)] for i in range(batch)], dtype=torch.int32)
    used = 0
    real = type(sf) is Tensor
    for b in range(batch if real else 0):
        number = needed[b]
        table[b, :number] = order[used : used + number]
        if number and lengths[b % len(lengths)] % TILE:
            sf[table[b, number - 1], lengths[b % len(lengths)] % TILE :] = float('nan')
        used += number
    if hole and real:
        table[0, 0], table[-1, 0] = -1, pages
    if wide:
        lens = lens[:, None] - torch.randint(0, 3, (batch, tokens), dtype=torch.int32)
    return dict(
        q=torch.randn(batch, tokens, heads, dim).to(FP8),
        kv_cache=pack_page(codes, sf)[: 0 if empty else pages],
        weights=torch.randn(batch * tokens, heads) / (heads * dim) ** 0.5 * 8,
        context_lens=lens if wide else lens[:, None],
        block_table=table,
        max_context_len=longest + 3,
        clean_logits=clean_logits,
    )


fp8_paged_mqa_logits.cases(
    make=_make,
    match=LOGITS,
    smoke=grid(batch=[0, 2], lengths=[(0, 1), (130, 64)], heads=[64], dim=[128])
    + grid(batch=[3], lengths=[(70, 3, 150)], tokens=[1, 3], heads=[8], dim=[64], wide=[False, True], hole=[True])
    + grid(batch=[2], lengths=[(70, 0)], tokens=[2], heads=[8], dim=[32], wide=[False, True], empty=[True])
    + grid(batch=[2], lengths=[(100,)], tokens=[4], heads=[24], dim=[32]),
    full=grid(batch=[33], lengths=[(1, 4000, 65, 8191)], tokens=[1, 2, 3, 4], heads=[8, 56, 64], dim=[32, 64, 128])
    + grid(batch=[2], lengths=[(300_000, 5)], tokens=[1], heads=[64], dim=[128]),
    bench=grid(batch=[128], lengths=[(8192,)], tokens=[1, 2], heads=[64], dim=[128], clean_logits=[False])
    + grid(batch=[1], lengths=[(131072,)], tokens=[1], heads=[64], dim=[128], clean_logits=[False]),
    flops=lambda q, max_context_len, **_: 2 * q.numel() * max_context_len,
)
