"""Keys and values of earlier tokens for generation, in pages that `flash_attn_with_kvcache` reads."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from tile_kernels.attention._checks import FP8, HALVES
from tile_kernels.attention.decode import PAGE_MULTIPLE, flash_attn_with_kvcache
from tile_kernels.core import check


class KVCache:
    """Keys and values of all layers and sequences, and their lengths on the device.

    Every sequence owns the pages of `max_tokens` tokens. Lengths advance on the device, so steps may be captured in a
    CUDA graph and replayed. A step beyond the capacity is refused; in a replay, which nobody can refuse, nothing is
    overwritten and the result of that sequence is NaN.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        max_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page: int = 64,
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        """Memory for `max_tokens` tokens of `batch` sequences.

        Args:
            num_layers: layers of the model.
            batch: sequences.
            max_tokens: tokens of a sequence, at most; rounded up to whole pages.
            num_kv_heads: heads of keys and values.
            head_dim: extent of a head, of keys and of values.
            page: tokens of a page, a multiple of 16.
            dtype: bfloat16, float16, or 'e4m3' for fp8 codes with factor 1.
            device: where it lives.
        """
        sizes = dict(num_layers=num_layers, batch=batch, max_tokens=max_tokens, num_kv_heads=num_kv_heads)
        for name, value in (*sizes.items(), ('head_dim', head_dim), ('page', page)):
            check.integer(value, name, least=1)
        check.multiple(page, PAGE_MULTIPLE, 'page')
        stored = FP8 if dtype in ('e4m3', FP8) else dtype
        if stored not in (*HALVES, FP8):
            check.fail('dtype', "must be bfloat16, float16 or 'e4m3'", repr(dtype))
        self.batch, self.page = batch, page
        pages = -(-max_tokens // page)
        self.capacity = pages * page
        shape = (
            num_layers,
            2,
            batch * pages + 1,
            page,
            num_kv_heads,
            head_dim,
        )  # the last page is spare
        self.pages = torch.zeros(shape, dtype=stored, device=device)
        self.block_table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
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

    def layer(self, index: int) -> LayerCache:
        """The part of one layer, which a layer takes as `cache`."""
        check.integer(index, 'index', least=0)
        check.at_most(index, len(self._counts) - 1, 'index')
        return LayerCache(self, index)


class LayerCache:
    """The part of a `KVCache` that belongs to one layer."""

    def __init__(self, cache: KVCache, index: int) -> None:
        """Part `index` of a cache."""
        self.cache = cache
        self.index = index

    @property
    def lengths(self) -> Tensor:
        """Tokens of every sequence that this layer has seen."""
        return self.cache._lengths[self.index]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Append keys and values, (batch, tokens, num_kv_heads, head_dim) each, and advance the lengths."""
        cache = self.cache
        heads, dim = cache.pages.shape[-2:]
        known: dict[str, Any] = dict(batch=cache.batch, heads=heads, dim=dim)
        _, tokens, _, _ = check.shape(k, 'k', 'batch tokens heads dim', **known)
        check.shape(v, 'v', 'batch tokens heads dim', tokens=tokens, **known)
        counts = cache._counts[self.index]
        if max(counts) + tokens > cache.capacity:
            check.fail(
                'cache', f'must have capacity for {tokens} more tokens', f'{max(counts)} of {cache.capacity} taken'
            )
        cache._counts[self.index] = [count + tokens for count in counts]
        own = self.lengths[:, None].long() + torch.arange(tokens, device=k.device)
        first = torch.arange(cache.batch, device=k.device)[:, None] * cache.capacity
        slots = torch.where(own < cache.capacity, first + own, cache.batch * cache.capacity).flatten()
        for part, x in enumerate((k, v)):
            rows = cache.pages[self.index, part].flatten(0, 1)
            values = x.detach().flatten(0, 1)
            if cache.pages.dtype is FP8:
                values = values.float().clamp(-448.0, 448.0).to(FP8).view(torch.uint8)
                rows = rows.view(torch.uint8)
            rows.index_copy_(0, slots, values.to(rows.dtype))
        self.lengths.add_(tokens)

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        """Attention of the last tokens, (batch, tokens, heads, head_dim), over all that was appended."""
        cache = self.cache
        k, v = cache.pages[self.index]
        given: dict[str, Any] = dict(cache_seqlens=self.lengths, block_table=cache.block_table, causal=True)
        return cast('Tensor', flash_attn_with_kvcache(q, k, v, **given | options))
