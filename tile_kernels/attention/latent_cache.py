"""Latent keys of earlier tokens for generation, in pages that `flash_mla_with_kvcache` reads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import FP8, HALVES, check_extents
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

    def append(self, kv: Tensor, index_keys: tuple[Tensor, Tensor] | None = None) -> None:
        """Append latent keys, (batch, tokens, 576), and advance the lengths.

        `index_keys` are fp8 codes (batch, tokens, index_dim) and their factors (batch, tokens).
        """
        cache = self.cache
        if (index_keys is None) != (cache.index_pages is None):
            check.fail('index_dim of the cache', 'must be that of the layer', str(cache.index_dim))
        _, tokens, _ = check_extents(kv, 'kv', f'batch tokens {KEY}', HALVES, batch=cache.batch)
        counts = cache._counts[self.index]
        if max(counts) + tokens > cache.capacity:
            fact = f'{max(counts)} of {cache.capacity} taken'
            check.fail('cache', f'must have capacity for {tokens} more tokens', fact)
        cache._counts[self.index] = [count + tokens for count in counts]
        own = self.lengths[:, None].long() + torch.arange(tokens, device=kv.device)
        first = torch.arange(cache.batch, device=kv.device)[:, None] * cache.capacity
        slots = torch.where(own < cache.capacity, first + own, cache.batch * cache.capacity).flatten()
        rows = kv.detach().flatten(0, 1)
        if cache.is_fp8:
            pack_mla_cache(rows.to(torch.bfloat16), self.pages, slots)
        else:
            self.pages.view(-1, KEY).index_copy_(0, slots, rows.to(cache.pages.dtype))
        if index_keys is not None:
            self._append_index(index_keys, slots)
        self.lengths.add_(tokens)

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
        own_codes[page, offset] = codes.flatten(0, 1).view(torch.uint8)
        own_factors[page, offset] = factors.flatten()

    def attend(self, q: Tensor, *, softmax_scale: float, indices: Tensor | None = None, **options: Any) -> Tensor:
        """Attention of the last tokens, (batch, tokens, heads, 576), over all that was appended.

        With `indices` (batch, tokens, topk) a token sees these keys only, counted from the start of its sequence; -1 is
        none.
        """
        cache = self.cache
        given: dict[str, Any] = dict(softmax_scale=softmax_scale, is_fp8_kvcache=cache.is_fp8, **options)
        if indices is None:
            given |= dict(block_table=cache.block_table, cache_seqlens=self.lengths, causal=True)
        else:
            first = torch.arange(cache.batch, device=q.device, dtype=indices.dtype)[:, None, None] * cache.capacity
            listed = torch.where(indices >= 0, indices + first, -1)
            given |= dict(block_table=None, cache_seqlens=None, indices=listed)
        o, _ = flash_mla_with_kvcache(q, self.pages, head_dim_v=LATENT, **given)
        if indices is None:
            return o
        return o.masked_fill((self.lengths > cache.capacity).view(-1, 1, 1, 1), math.nan)
