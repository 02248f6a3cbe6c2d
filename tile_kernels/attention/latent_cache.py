"""Latent keys of earlier tokens for generation, in pages that `flash_mla_with_kvcache` reads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import FP8, HALVES, check_extents, lengths_int32
from tile_kernels.attention.kv_cache import reserve
from tile_kernels.attention.mla_decode import PAGE_MULTIPLE, flash_mla_with_kvcache
from tile_kernels.attention.pack_mla_cache import KEY, LATENT, TOKEN_BYTES, pack_mla_cache
from tile_kernels.core import check

#: Tokens of a page of `fp8_paged_mqa_logits`.
INDEX_PAGE = 64


class LatentCache:
    """Latent keys of all layers and sequences, and their lengths on the device.

    Every sequence owns the pages of `max_tokens` tokens. Lengths advance on the device, so steps may be captured in a
    CUDA graph and replayed. A step beyond the capacity is refused; in a replay, which nobody can refuse, nothing is
    overwritten and the result of that sequence is NaN.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        max_tokens: int,
        *,
        page: int = 64,
        dtype: torch.dtype | str = torch.bfloat16,
        index_dim: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Memory for `max_tokens` tokens of `batch` sequences.

        Args:
            num_layers: layers of the model.
            batch: sequences.
            max_tokens: tokens of a sequence, at most; rounded up to whole pages.
            page: tokens of a page, a multiple of 16.
            dtype: bfloat16, float16, or 'e4m3' for tokens of 656 bytes as `pack_mla_cache` makes them.
            index_dim: extent of the keys by which an indexer selects tokens, kept in fp8 beside the latent ones; None
                keeps none. Pages then have 64 tokens.
            device: where it lives.
        """
        sizes = dict(num_layers=num_layers, batch=batch, max_tokens=max_tokens, page=page)
        for name, value in sizes.items():
            check.integer(value, name, least=1)
        check.multiple(page, PAGE_MULTIPLE, 'page')
        dtype = check.to_dtype(dtype, 'dtype')
        self.is_fp8 = dtype is FP8
        if not self.is_fp8 and dtype not in HALVES:
            check.fail('dtype', "must be bfloat16, float16 or 'e4m3'", repr(dtype))
        self.batch, self.page = batch, page
        pages = -(-max_tokens // page)
        self.capacity = pages * page
        stored: Any = torch.uint8 if self.is_fp8 else dtype
        width = TOKEN_BYTES if self.is_fp8 else KEY
        # the last page is spare
        self.pages = torch.zeros(num_layers, batch * pages + 1, page, 1, width, dtype=stored, device=device)
        self.block_table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
        self.index_pages: Tensor | None = None
        self.index_dim = index_dim
        if index_dim is not None:
            check.integer(index_dim, 'index_dim', least=1)
            check.equal(page, INDEX_PAGE, 'page with index_dim')
            shape = (num_layers, batch * pages + 1, page, 1, index_dim + 4)
            self.index_pages = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._lengths = torch.zeros(num_layers, batch, dtype=torch.int32, device=device)
        self._counts = [[0] * batch for _ in range(num_layers)]

    @property
    def lengths(self) -> Tensor:
        """Tokens of every sequence that all layers have seen, (batch,) int32 on the device."""
        return self._lengths[-1]

    def free(self, sequence: int) -> None:
        """Forget a sequence; another may take its index."""
        check.integer(sequence, 'sequence', least=0)
        check.at_most(sequence, self.batch - 1, 'sequence')
        self._lengths[:, sequence] = 0
        for counts in self._counts:
            counts[sequence] = 0

    def layer(self, index: int) -> LatentLayerCache:
        """The part of one layer, which a layer takes as `cache`."""
        check.integer(index, 'index', least=0)
        check.at_most(index, len(self._counts) - 1, 'index')
        return LatentLayerCache(self, index)


class LatentLayerCache:
    """The part of a `LatentCache` that belongs to one layer."""

    def __init__(self, cache: LatentCache, index: int) -> None:
        """Part `index` of a cache."""
        self.cache = cache
        self.index = index

    @property
    def lengths(self) -> Tensor:
        """Tokens of every sequence that this layer has seen."""
        return self.cache._lengths[self.index]

    @property
    def is_empty(self) -> bool:
        """Whether this layer has seen no token of any sequence, as far as the host knows."""
        return not any(self.cache._counts[self.index])

    @property
    def pages(self) -> Tensor:
        """The pages of this layer, (pages, page_size, 1, 576) or (pages, page_size, 1, 656)."""
        return self.cache.pages[self.index]

    @property
    def index_pages(self) -> Tensor | None:
        """The keys of the indexer in pages, (pages, 64, 1, index_dim + 4) bytes."""
        return None if self.cache.index_pages is None else self.cache.index_pages[self.index]

    def append(
        self, kv: Tensor, index_keys: tuple[Tensor, Tensor] | None = None, cu_seqlens: Tensor | None = None
    ) -> None:
        """Append latent keys and advance the lengths.

        Args:
            kv: (batch, tokens, 576), or (tokens, 576) with `cu_seqlens`.
            index_keys: fp8 codes of the indexer, (..., index_dim), and their factors; dimensions before as in `kv`.
            cu_seqlens: (batch + 1,) int32 or int64: where the new tokens of every sequence start, and the end of the
                last. Sequences may get no token.
        """
        cache = self.cache
        if (index_keys is None) != (cache.index_pages is None):
            check.fail('index_dim of the cache', 'must be that of the layer', str(cache.index_dim))
        starts = lengths_int32(cu_seqlens, 'cu_seqlens')
        if starts is None:
            _, tokens, _ = check_extents(kv, 'kv', f'batch tokens {KEY}', HALVES, batch=cache.batch)
        else:
            tokens, _ = check_extents(kv, 'kv', f'tokens {KEY}', HALVES)
            check.packed(starts, 'cu_seqlens', 'sequences+1', torch.int32, **{'sequences+1': cache.batch + 1})
        reserve(self, tokens, starts)
        new: Any = tokens if starts is None else starts.diff()
        self.lengths.add_(new)
        table, _, seen = self.units(tokens, starts)
        own = table[:, :1].long() * cache.page + seen - 1
        slots = torch.where((seen > 0) & (seen <= cache.capacity), own, cache.batch * cache.capacity).flatten()
        rows = kv.detach().view(-1, KEY) if starts is not None else kv.detach().flatten(0, 1)
        if cache.is_fp8:
            pack_mla_cache(rows.to(torch.bfloat16), self.pages, slots)
        else:
            self.pages.view(-1, KEY).index_copy_(0, slots, rows.to(cache.pages.dtype))
        if index_keys is not None:
            self._append_index(index_keys, slots)

    def units(self, tokens: int, starts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Pages and length of every unit of queries, and how many keys each of its tokens sees.

        The tokens were appended before. Units are sequences; packed tokens, whose sequences begin at `starts`, are
        units by themselves. A token behind the last sequence sees none.
        """
        cache, token = self.cache, torch.arange(tokens, device=self.lengths.device, dtype=torch.int32)
        if starts is None:
            return cache.block_table, self.lengths, self.lengths[:, None] - tokens + 1 + token
        sequence = torch.searchsorted(starts, token, right=True) - 1
        own = sequence.clamp(max=cache.batch - 1)
        inside = sequence < cache.batch
        length = torch.where(inside, self.lengths[own], 0)
        seen = torch.where(inside, length - starts[own + 1] + token + 1, 0)
        return cache.block_table[own], length, seen[:, None]

    def _append_index(self, index_keys: tuple[Tensor, Tensor], slots: Tensor) -> None:
        """Write codes and factors to their pages: a page has all of its codes first, then its factors."""
        codes, factors = index_keys
        pages = check.tensor(self.index_pages, 'index_pages')
        page_size, dim = pages.shape[1], pages.shape[3] - 4
        check.equal(codes.shape[-1], dim, 'index_dim')
        rows = pages.view(len(pages), -1)
        own_codes = rows[:, : page_size * dim].unflatten(1, (page_size, dim))
        own_factors = rows[:, page_size * dim :].view(torch.float32)
        page, offset = slots // page_size, slots % page_size
        own_codes[page, offset] = codes.reshape(-1, dim).view(torch.uint8)
        own_factors[page, offset] = factors.flatten()

    def attend(
        self,
        q: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        softmax_scale: float,
        indices: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Causal attention of the tokens that were appended last over all that was appended.

        Args:
            q: (batch, tokens, heads, 576), or (tokens, heads, 576) with `cu_seqlens`.
            cu_seqlens: as in `append`.
            softmax_scale: factor of the scores.
            indices: (batch, tokens, topk), or (tokens, 1, topk) with `cu_seqlens`: the only keys that a token sees.
                They are counted from the start of its sequence; -1 is none.
            options: as in `flash_mla_with_kvcache`.
        """
        cache, starts = self.cache, lengths_int32(cu_seqlens, 'cu_seqlens')
        given: dict[str, Any] = dict(softmax_scale=softmax_scale, is_fp8_kvcache=cache.is_fp8, **options)
        rows = q if starts is None else q.unsqueeze(1)
        table, length, seen = self.units(q.shape[-3], starts)
        if indices is None:
            keys = length if starts is None else seen.flatten()
            given |= dict(block_table=table, cache_seqlens=keys, causal=starts is None)
        else:
            listed = torch.where(indices >= 0, indices + table[:, :1, None] * cache.page, -1)
            given |= dict(block_table=None, cache_seqlens=None, indices=listed)
        o, _ = flash_mla_with_kvcache(rows, self.pages, head_dim_v=LATENT, **given)
        if indices is not None or starts is not None:
            o = o.masked_fill((length > cache.capacity).view(-1, 1, 1, 1), math.nan)
        return o if starts is None else o.squeeze(1)
