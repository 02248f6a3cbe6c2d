"""Inputs of the cases of attention, and the bounds its results keep."""

import collections
import itertools
import math
import random
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core.flops import known

#: Weights are rounded to half precision before they meet the values, whose size is about 1.
SUMS: dict = dict(o=dict(rtol=1e-2, atol=1e-2), lse=dict(rtol=1e-6, atol=1e-4), rtol=1e-2, atol=1e-2)


def random_attention(
    queries: Any,
    keys: Any,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    band: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: torch.dtype | None = None,
    behind: int = 0,
    used: tuple = (),
    used_q: tuple = (),
    fused: bool = False,
) -> dict:
    """Arguments of `attend`; `queries` and `keys` are the lengths of packed sequences if they are tuples.

    `behind` tokens follow the last sequence. They, and keys that are not used, hold NaN. With `fused`, q, k and v are
    slices of one tensor.
    """
    packed = isinstance(queries, tuple)
    rows = [sum(n) + behind if isinstance(n, tuple) else n for n in (queries, keys, keys)]
    lead = () if packed else (batch,)
    num_heads = (heads[0], heads[1], heads[1])
    widths = (dims[0], dims[0], dims[1])
    if fused:
        whole = torch.randn(*lead, rows[0], sum(h * d for h, d in zip(num_heads, widths, strict=True))).to(dtype)
        cut = whole.split([h * d for h, d in zip(num_heads, widths, strict=True)], dim=-1)
        q, k, v = (x.unflatten(-1, (h, -1)) for x, h in zip(cut, num_heads, strict=True))
    else:
        q, k, v = (torch.randn(*lead, n, h, d).to(dtype) for n, h, d in zip(rows, num_heads, widths, strict=True))
    made = dict(q=q, k=k, v=v, sink=None if sink is None else torch.randn(heads[0]).to(sink))
    if packed:
        made |= dict(cu_seqlens_q=starts(queries), cu_seqlens_k=starts(keys))
        if behind:
            for x in (q, k, v):
                x[-behind:] = math.nan
    if used:
        made['seqused_k'] = torch.tensor(used, dtype=torch.int32)
        first = [0, *itertools.accumulate(keys)] if packed else None
        for i, number in enumerate(used):
            for x in (k, v):
                own = x[first[i] : first[i + 1]] if first else x[i]
                own[number:] = math.nan
    if used_q:
        made['seqused_q'] = torch.tensor(used_q, dtype=torch.int32)
    return made | dict(scale=dims[0] ** -0.5, left=band[0], right=band[1], softcap=softcap)


def starts(lengths: tuple) -> Tensor:
    """Where packed sequences start, and the end of the last."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: int = -1,
    right: int = -1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **others: object,
) -> int:
    """Operations of the two products for the pairs of query and key that the mask lets through.

    Shortened lengths count as whole ones. A dry run, which knows no lengths, takes packed sequences as one.
    """
    cuts = [x for x in (cu_seqlens_q, cu_seqlens_k) if x is not None and known(x)]
    if len(cuts) == 2:
        lengths = collections.Counter(zip(*(x.diff().tolist() for x in cuts), strict=True))
    else:
        lengths = collections.Counter({(q.shape[-3], k.shape[-3]): q.shape[0] if q.dim() == 4 else 1})
    pairs = sum(count * visible_pairs(m, n, left, right) for (m, n), count in lengths.items())
    return 2 * pairs * q.shape[-2] * (q.shape[-1] + v.shape[-1])


def visible_pairs(queries: int, keys: int, left: int, right: int) -> int:
    """Pairs of query and key inside the band of a sequence."""
    place = torch.arange(queries, device='cpu') + keys - queries
    first = place.mul(0) if left < 0 else (place - left).clamp(min=0)
    last = place.mul(0) + keys - 1 if right < 0 else (place + right).clamp(max=keys - 1)
    return int((last - first + 1).clamp(min=0).sum())


def cache_products(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    block_table: Tensor | None = None,
    **others: object,
) -> int:
    """Operations of the two products without a mask; lengths that cannot be read count as full caches."""
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if cache_seqlens is not None and known(cache_seqlens):
        keys = int(cache_seqlens.sum())
    elif block_table is not None:
        keys = block_table.numel() * k_cache.shape[1]
    else:
        keys = k_cache.shape[0] * (k_cache.shape[1] if k_cache.dim() == 4 else 1)
    return 2 * math.prod(q.shape[:-1]) * keys // max(batch, 1) * (q.shape[-1] + v_cache.shape[-1])


def random_cache(
    queries: Any,
    lengths: tuple,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    page: int = 0,
    fp8: bool = False,
    packed: bool = False,
    band: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: torch.dtype | None = None,
    splits: int = 1,
    holes: bool = False,
    wrong: bool = False,
    padding: tuple = (),
    by_token: bool = False,
) -> dict:
    """Arguments of `decode`. Whatever no sequence uses holds NaN: tails, spare pages, holes.

    Pages are shuffled. With `wrong`, the first sequence has a page that does not exist and the second is too long.
    With `by_token`, every token of an fp8 cache has factors. With `padding`, sequences start behind as many tokens and
    own the rows of a larger cache in reverse order; the first has none.
    """
    number = len(lengths)
    together = isinstance(queries, tuple)
    q = torch.randn(*((sum(queries),) if together else (number, queries)), heads[0], dims[0]).to(dtype)
    made = dict(q=q, cu_seqlens_q=starts(queries) if together else None)
    if page:
        counts = [-(-length // page) for length in lengths]
        most, pages = max(counts) + 1, sum(counts) + 2
        order = random.Random(pages).sample(range(pages), pages)  # not of torch: a dry run has no numbers
        shape: tuple = (pages, page)
        table = torch.full((number, most), pages + 7, dtype=torch.int32, device='cpu')  # never read behind the length
        taken = 0
        slots = []
        for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            own = order[taken : taken + count]
            taken += count
            table[i, :count] = torch.tensor(own, dtype=torch.int32, device='cpu')
            slots += [(own[t // page], t % page) for t in range(length)] if length < 1 << 12 else []
            if holes and count:
                table[i, count // 2] = -1 - i
        used = torch.zeros(shape, dtype=torch.bool, device='cpu')
        if slots:
            used[tuple(torch.tensor(slots, device='cpu').T)] = True
        else:
            used[:] = True
        if wrong:
            table[0, 0] = pages
        made['block_table'] = table.to(q.device)
    elif packed:
        shape = (sum(lengths),)
        used = torch.ones(shape, dtype=torch.bool, device='cpu')
        made['cu_seqlens_k'] = starts(lengths)
    else:
        shape = (number, max(lengths) + 5)
        used = torch.arange(shape[1], device='cpu') < torch.tensor(lengths, device='cpu')[:, None]
        if padding:
            used &= torch.arange(shape[1], device='cpu') >= torch.tensor(padding, device='cpu')[:, None]
            used = torch.cat((used, used[:1])).flip(0)
            shape = (number + 1, shape[1])
            rows = torch.arange(number, 0, -1)
            rows[0] = shape[0]
            made |= dict(cache_batch_idx=rows.int(), cache_leftpad=torch.tensor(padding).int())
    if not packed:
        given = torch.tensor(lengths)
        if wrong:
            given[1] += 10_000
        made['cache_seqlens'] = given.int()
    caches = [torch.randn(*shape, heads[1], dim) for dim in dims]
    caches = [x.masked_fill(~used.to(x.device)[..., None, None], math.nan) for x in caches]
    stored = torch.float8_e4m3fn if fp8 else dtype
    made |= dict(k_cache=caches[0].to(stored), v_cache=caches[1].to(stored))
    if fp8:
        factors = [torch.rand(*shape, heads[1]) if by_token else torch.rand(number, heads[1]) for _ in dims]
        if by_token:
            factors = [x.masked_fill(~used.to(x.device)[..., None], math.nan) for x in factors]
        made |= dict(k_descale=factors[0] + 0.5, v_descale=factors[1] + 0.5)
    made['sink'] = None if sink is None else torch.randn(heads[0]).to(sink)
    return made | dict(scale=dims[0] ** -0.5, left=band[0], right=band[1], softcap=softcap, num_splits=splits)


# Latent attention ---------------------------------------------------------------------------

LATENT, KEY, TOKEN_BYTES, PAGE_BYTES = 512, 576, 656, 584


def random_latents(
    tokens: int,
    spare: int,
    placed: bool = False,
    fp8: bool = False,
    odd: bool = False,
    strided: bool = False,
    last: bool = False,
    page: int = 0,
) -> dict:
    """Arguments of `pack_mla_cache`; with `placed`, slots are shuffled and some tokens are skipped.

    With `odd`, tokens hold NaN, infinities, zeros and exact powers of two. With `last`, the last slot is used. With
    `page`, keys have 512 channels, and pages so many tokens and a gap behind them if `strided`.
    """
    width = LATENT if page else KEY
    kv = torch.randn(tokens, width + 24 * strided).to(torch.bfloat16)[:, 8 * strided : width + 8 * strided]
    if odd:
        kv[0, 3], kv[0, 200], kv[0, 300:302] = math.nan, math.inf, -0.0
        kv[1, :256] = 0.0
        kv[2, :512] = kv[2, :512] * 1e-30
        kv[3, :512] = 448.0
        kv[4, 0], kv[4, 128] = 3e38, -449.0
    capacity = tokens + spare
    slots = None
    if placed:
        chosen = [capacity - 1] if last else random.Random(capacity).sample(range(capacity), tokens)
        chosen[1::3] = [-1 - i if i % 2 else capacity + i for i in range(len(chosen[1::3]))]
        slots = torch.tensor(chosen, dtype=torch.int64)
    if page:
        rows = torch.randint(0, 256, (capacity // page, page * PAGE_BYTES + 16 * strided), dtype=torch.uint8)
        cache = rows[:, : page * PAGE_BYTES].unflatten(1, (page, 1, PAGE_BYTES))
    else:
        cache = torch.randint(0, 256, (capacity, TOKEN_BYTES), dtype=torch.uint8)
    return dict(kv=kv, cache=cache.view(torch.float8_e4m3fn) if fp8 else cache, slots=slots)


def random_pages(pages: int, page: int, odd: bool = False) -> Tensor:
    """Tokens of 584 bytes: half of all codes, NaN not among them, and any exponents; `odd` ones are extreme."""
    rows = torch.randint(0, 256, (pages, page, 576), dtype=torch.uint8) & 0xFE
    rows[..., 448:] = torch.randn(pages, page, 64).to(torch.bfloat16).view(torch.uint8)
    exponents = torch.randint(110, 140, (pages, page, 8), dtype=torch.uint8)
    if odd:
        exponents[0, 0, :4] = torch.tensor([0, 1, 254, 127], dtype=torch.uint8)
    flat = torch.cat((rows.flatten(1), exponents.flatten(1)), dim=1)
    return flat.unflatten(1, (page, 1, PAGE_BYTES))


def random_tokens(shape: tuple, fp8: bool = False, odd: bool = False, paged: bool = False) -> dict:
    """The argument of `unpack_mla_cache`: half of all codes, NaN not among them; factors are any numbers."""
    if paged:
        return dict(cache=random_pages(shape[0], shape[1], odd))
    cache = torch.randint(0, 256, (*shape, TOKEN_BYTES), dtype=torch.uint8) & 0xFE
    factors = torch.randn(*shape, 4)
    if odd:
        factors[0], factors[1], factors[2, ..., 1] = 2.0**-13, 1e-30, -0.0
    cache[..., LATENT : LATENT + 16] = factors.view(torch.uint8)
    cache[..., LATENT + 16 :] = torch.randn(*shape, KEY - LATENT).to(torch.bfloat16).view(torch.uint8)
    return dict(cache=cache.view(torch.float8_e4m3fn) if fp8 else cache)


#: As `SUMS`; the values are the keys.
LATENT_SUMS: dict = dict(o=dict(rtol=1e-2, atol=1e-2), lse=dict(rtol=1e-6, atol=1e-4), rtol=1e-2, atol=1e-2)


def packed_latents(kv: Tensor) -> Tensor:
    """Tokens of 656 bytes with factors that are any powers of two; bit-exactness is not the point here."""
    codes = (kv[..., :LATENT].float() * 64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    factors = torch.full((*kv.shape[:-1], 4), 2.0**-6, dtype=torch.float32)
    rotary = kv[..., LATENT:].to(torch.bfloat16).contiguous()
    return torch.cat((codes, factors.view(torch.uint8), rotary.view(torch.uint8)), dim=-1)


def packed_pages(kv: Tensor) -> Tensor:
    """The same for pages (pages, page, 1, 512) of 584 bytes per token."""
    pages, page = kv.shape[:2]
    codes = (kv[..., :448].float() * 64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    rows = torch.cat((codes, kv[..., 448:].to(torch.bfloat16).contiguous().view(torch.uint8)), dim=-1)
    factors = torch.full((pages, page * 8), 127 - 6, dtype=torch.uint8)
    return torch.cat((rows.flatten(1), factors), dim=1).unflatten(1, (page, 1, PAGE_BYTES))


def random_latent_cache(
    queries: int,
    lengths: tuple,
    heads: int,
    dtype: torch.dtype = torch.bfloat16,
    page: int = 16,
    fp8: bool = False,
    causal: bool = False,
    sink: torch.dtype | None = None,
    splits: int = 1,
    topk: int = 0,
    short: bool = False,
    holes: bool = False,
    wrong: bool = False,
    width: int = KEY,
) -> dict:
    """Arguments of `mla_decode`, whose keys have `width` channels.

    Whatever no sequence uses holds NaN: tails, spare pages, holes, keys not listed.
    With `topk`, every token has a list that may name keys twice; the lists behind the first token are empty. With
    `short`, only part of it counts. With `wrong`, the first sequence has a page that does not exist and the second is
    too long.
    """
    number, small = len(lengths), sum(lengths) < 1 << 12
    counts = [-(-length // page) for length in lengths]
    most, pages = max(counts) + 1, sum(counts) + 2
    chosen = random.Random(pages)  # not of torch: a dry run has no numbers
    order = chosen.sample(range(pages), pages)
    table = torch.full((number, most), pages + 7, dtype=torch.int32, device='cpu')  # never read behind the length
    own_slots, taken = [], 0
    seen: set[int] = set()
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        own = order[taken : taken + count]
        taken += count
        if holes and count:
            own[count // 2] = -1 - i
        table[i, :count] = torch.tensor(own, dtype=torch.int32, device='cpu')
        slots = [own[t // page] * page + t % page for t in range(length if small else 0) if own[t // page] >= 0]
        own_slots.append(slots)
        seen.update(slots if not topk else ())
    q = torch.randn(number, queries, heads, width).to(dtype)
    made: dict = dict(q=q)
    if topk:
        limits = [topk * (i + 1) // (number + 1) if short else topk for i in range(number)]
        made['indices'] = torch.randint(0, sum(lengths), (number, queries, topk), dtype=torch.int32)
        if small:
            lists = [[chosen.choices(slots, k=topk) for _ in range(queries)] for slots in own_slots]
            for own_lists, limit in zip(lists, limits, strict=True):
                for t, entries in enumerate(own_lists):
                    entries[5::7] = [-1 - n if n % 2 else pages * page + n for n in range(len(entries[5::7]))]
                    if t:
                        entries[:] = [-1] * topk
                    seen.update(entries[:limit])
            made['indices'] = torch.tensor(lists, dtype=torch.int32)
        if short:
            made['topk_length'] = torch.tensor(limits, dtype=torch.int32)
    else:
        given = torch.tensor(lengths, dtype=torch.int32)
        if wrong:
            table[0, 0] = pages
            given[1] += 10_000
        made |= dict(block_table=table.to(q.device), cache_seqlens=given)
    used = torch.tensor([not small or slot in seen for slot in range(pages * page if small else 1)])
    kv = torch.randn(pages * page, width)
    kv = torch.where(used[:, None], kv, math.nan).view(pages, page, 1, width)
    made['k_cache'] = (packed_latents(kv) if width == KEY else packed_pages(kv)) if fp8 else kv.to(dtype)
    made['sink'] = None if sink is None else torch.randn(heads).to(sink)
    return made | dict(scale=width**-0.5, causal=causal, num_splits=splits)


def latent_products(
    q: Tensor, k_cache: Tensor, indices: Tensor | None = None, block_table: Tensor | None = None, **others: object
) -> int:
    """Operations of the two products if every sequence fills its pages."""
    rows = math.prod(q.shape[:-1])
    if indices is not None:
        return 2 * rows * indices.shape[-1] * (q.shape[-1] + LATENT)
    return 2 * rows * k_cache.shape[0] * k_cache.shape[1] // max(q.shape[0], 1) * (q.shape[-1] + LATENT)


def random_lists(
    tokens: int,
    keys: int,
    heads: int,
    topk: int,
    dtype: torch.dtype = torch.bfloat16,
    sink: torch.dtype | None = None,
    short: bool = False,
) -> dict:
    """Arguments of `sparse_mla`. Keys that no token lists hold NaN; the last of several tokens lists none."""
    q = torch.randn(tokens, heads, KEY).to(dtype)
    made: dict = dict(q=q, indices=torch.randint(0, max(keys, 1), (tokens, 1, topk), dtype=torch.int32))
    kv = torch.randn(keys, 1, KEY)
    limits = [topk * (t + 1) // (tokens + 1) if short else topk for t in range(tokens)]
    if tokens * topk < 1 << 12 and keys:
        chosen = random.Random(keys)
        lists = [[chosen.randrange(keys) for _ in range(topk)] for _ in range(tokens)]
        seen = set()
        for t, (entries, limit) in enumerate(zip(lists, limits, strict=True)):
            entries[5::7] = [-1 - n if n % 2 else keys + n for n in range(len(entries[5::7]))]
            if t and t == tokens - 1:
                entries[:] = [-1] * topk
            seen.update(entries[:limit])
        made['indices'] = torch.tensor(lists, dtype=torch.int32).view(tokens, 1, topk)
        kv = torch.where(torch.tensor([key in seen for key in range(keys)])[:, None, None], kv, math.nan)
    if short:
        made['topk_length'] = torch.tensor(limits, dtype=torch.int32)
    made['sink'] = None if sink is None else torch.randn(heads).to(sink)
    return made | dict(kv=kv.to(dtype), scale=KEY**-0.5)
