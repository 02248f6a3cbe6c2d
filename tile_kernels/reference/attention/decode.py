"""Twin of attention over a cache."""

import math

import torch
from torch import Tensor

from tile_kernels.reference.attention._common import attend_sequence


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
    """Attention of every sequence in float64, whose keys are gathered first; how keys are split has no effect."""
    rows = q if cu_seqlens_q is not None else q.flatten(0, 1)
    tokens = 0 if cu_seqlens_q is not None else q.shape[1]
    number = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    o = rows.new_zeros(*rows.shape[:-1], v_cache.shape[-1], dtype=torch.float64)
    lse = rows.new_full(rows.shape[:-1], -math.inf, dtype=torch.float64)
    if k_descale is not None and v_descale is not None and k_descale.dim() == 3:  # factors of every token
        parts = (k_cache, k_descale), (v_cache, v_descale)
        k_cache, v_cache = ((x.float() * factor[..., None]).to(q.dtype) for x, factor in parts)
        k_descale = v_descale = None
    for i in range(number):
        first, end = (i * tokens, (i + 1) * tokens) if cu_seqlens_q is None else cu_seqlens_q[i : i + 2].tolist()
        if seqused_q is not None:
            end = min(end, first + int(seqused_q[i]))
        length = None if cache_seqlens is None else max(int(cache_seqlens[i]), 0)
        hidden, wrong = None, False
        if block_table is not None and length is not None:
            pages, page = k_cache.shape[:2]
            wrong = length > block_table.shape[1] * page
            key = torch.arange(0 if wrong else length, device=q.device)
            ids = block_table[i, key // page].long()
            wrong = wrong or bool((ids >= pages).any())
            hidden, ids = ids < 0, ids.clamp(0, pages - 1)
            k, v = k_cache[ids, key % page], v_cache[ids, key % page]
            k, v = (x.float().masked_fill(hidden[:, None, None], 0.0) for x in (k, v))
        elif cu_seqlens_k is not None:
            start, stop = cu_seqlens_k[i : i + 2].tolist()
            stop = stop if length is None else min(stop, start + length)
            k, v = k_cache[start:stop], v_cache[start:stop]
        else:
            row = i if cache_batch_idx is None else int(cache_batch_idx[i])
            wrong = (length is not None and length > k_cache.shape[1]) or not 0 <= row < k_cache.shape[0]
            pad = 0 if cache_leftpad is None else max(int(cache_leftpad[i]), 0)
            k, v = (x[min(max(row, 0), len(x) - 1), pad:length] for x in (k_cache, v_cache))
        if wrong:
            o[first:end], lse[first:end] = math.nan, math.nan
            continue
        k, v = k.double(), v.double()
        if k_descale is not None and v_descale is not None:
            k, v = k * k_descale[i].double()[:, None], v * v_descale[i].double()[:, None]
        own = attend_sequence(rows[first:end], k, v, sink, scale, left, right, softcap, hidden)
        o[first:end], lse[first:end] = own[0], own[1].T
    return o.to(q.dtype).view(*q.shape[:-1], v_cache.shape[-1]), lse.float().view(q.shape[:-1])
