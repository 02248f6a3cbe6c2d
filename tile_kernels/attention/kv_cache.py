"""Keys and values of earlier tokens for generation, in pages that `flash_attn_with_kvcache` reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import FP8, HALVES, SINKS, lengths_int32, take, window_of
from tile_kernels.attention.append import PAGE_MULTIPLE, append
from tile_kernels.attention.decode import decode
from tile_kernels.core import check


class KVCache:
    """Keys and values of all layers and sequences, and their lengths on the device.

    Every sequence owns the pages of `max_tokens` tokens. Lengths advance on the device, so steps may be captured in a
    CUDA graph and replayed. A step beyond the capacity is refused; in a replay, which nobody can refuse, nothing is
    overwritten and the result of that sequence is NaN. The host counts tokens to refuse without a look at the device;
    tokens of replays are not among them.
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
        stored = check.to_dtype(dtype, 'dtype')
        if stored not in (*HALVES, FP8):
            check.fail('dtype', "must be bfloat16, float16 or 'e4m3'", repr(dtype))
        pages = -(-max_tokens // page)
        self.batch, self.page, self.capacity = batch, page, pages * page
        shape = (num_layers, 2, batch * pages, page, num_kv_heads, head_dim)
        self.pages = torch.zeros(shape, dtype=stored, device=device)
        self.block_table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
        self._lengths = torch.zeros(num_layers, batch, dtype=torch.int32, device=device)
        self._counts = [[0] * batch for _ in range(num_layers)]  # at most so many tokens, replays aside
        self._factor = torch.ones(batch, num_kv_heads, device=device) if stored is FP8 else None

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

    def append(self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> None:
        """Append keys and values, and advance the lengths.

        Args:
            k: (batch, tokens, num_kv_heads, head_dim), or (tokens, num_kv_heads, head_dim) with `cu_seqlens`.
            v: the same.
            cu_seqlens: (batch + 1,) int32 or int64: where the new tokens of every sequence start, and the end of the
                last. Sequences may get no token.
        """
        cache = self.cache
        heads, dim = cache.pages.shape[-2:]
        known: dict[str, Any] = dict(heads=heads, dim=dim)
        starts = lengths_int32(cu_seqlens, 'cu_seqlens')
        if starts is None:
            tokens = check.shape(k, 'k', 'batch tokens heads dim', batch=cache.batch, **known)[1]
            check.shape(v, 'v', 'batch tokens heads dim', batch=cache.batch, tokens=tokens, **known)
        else:
            tokens = check.shape(k, 'k', 'tokens heads dim', **known)[0]
            check.shape(v, 'v', 'tokens heads dim', tokens=tokens, **known)
            check.packed(starts, 'cu_seqlens', 'sequences+1', torch.int32, **{'sequences+1': cache.batch + 1})
        reserve(self, tokens, starts)
        k_pages, v_pages = cache.pages[self.index]
        given: dict[str, Any] = dict(cu_seqlens=starts, block_table=cache.block_table)
        given |= dict(k_descale=cache._factor, v_descale=cache._factor)
        append(k.detach(), v.detach(), k_pages, v_pages, self.lengths, **given)
        self.lengths.add_(tokens if starts is None else starts.diff())

    def attend(
        self,
        q: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        softmax_scale: float | None = None,
        window_size: tuple[int | None, int | None] = (-1, -1),
        softcap: float = 0.0,
        sink: Tensor | None = None,
        num_splits: int = 0,
        **aliases: Any,
    ) -> Tensor:
        """Causal attention of the tokens that were appended last over all that was appended.

        Args:
            q: (batch, tokens, heads, head_dim), or (tokens, heads, head_dim) with `cu_seqlens`.
            cu_seqlens: as in `append`.
            softmax_scale: as in `flash_attn_with_kvcache`.
            window_size: as there.
            softcap: as there.
            sink: as there.
            num_splits: as there.
            aliases: other names of `sink`.
        """
        cache = self.cache
        left, right = window_of(True, window_size)
        k_pages, v_pages = cache.pages[self.index]
        return decode(
            q,
            k_pages,
            v_pages,
            self.lengths,
            cu_seqlens_q=lengths_int32(cu_seqlens, 'cu_seqlens'),
            block_table=cache.block_table,
            sink=take(aliases, sink, None, *SINKS),
            k_descale=cache._factor,
            v_descale=cache._factor,
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            left=left,
            right=right,
            softcap=softcap,
            num_splits=num_splits,
        )[0]


def reserve(layer: Any, tokens: int, starts: Tensor | None) -> None:
    """Count new tokens in the cache of a layer; the device is asked only if packed ones might be too many."""
    cache = layer.cache
    counts = cache._counts[layer.index]
    new = [tokens] * cache.batch
    if starts is not None and max(counts) + tokens > cache.capacity and not _is_capturing(starts):
        counts, new = layer.lengths.tolist(), starts.diff().tolist()
    for count, number in zip(counts, new, strict=True):
        if count + number > cache.capacity and (starts is None or not _is_capturing(starts)):
            fact = f'{count} of {cache.capacity} taken'
            check.fail('cache', f'must have capacity for {number} more tokens', fact)
    cache._counts[layer.index] = [count + number for count, number in zip(counts, new, strict=True)]


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
