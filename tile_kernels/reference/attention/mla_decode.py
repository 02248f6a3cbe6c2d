"""Twin of latent attention over a cache."""

import math

import torch
from torch import Tensor

from tile_kernels.reference.attention._common import attend_sequence
from tile_kernels.reference.attention.unpack_mla_cache import unpack_mla_cache


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
    """Attention of every token in float64, whose keys are gathered first; how keys are split has no effect."""
    batch, tokens, heads, _ = q.shape
    kv = unpack_mla_cache(k_cache) if k_cache.dtype in (torch.uint8, torch.float8_e4m3fn) else k_cache
    pages, page = kv.shape[:2]
    flat = kv.flatten(0, 2)
    o = q.new_zeros(batch, tokens, heads, 512, dtype=torch.float64)
    lse = q.new_full((batch, tokens, heads), -math.inf, dtype=torch.float64)
    for b in range(batch):
        if indices is not None:
            length = indices.shape[2] if topk_length is None else int(topk_length[b])
            for t in range(tokens):
                own = indices[b, t, : max(length, 0)].long()
                k = flat[own[(own >= 0) & (own < len(flat))]].double()[:, None]
                found = attend_sequence(q[b, t, None], k, k[..., :512], sink, scale, -1, -1, 0.0)
                o[b, t], lse[b, t] = found[0][0], found[1][:, 0]
            continue
        if block_table is None or cache_seqlens is None:
            raise TypeError('a cache without indices needs a table and lengths')
        length = max(int(cache_seqlens[b]), 0)
        key = torch.arange(min(length, block_table.shape[1] * page), device=q.device)
        ids = block_table[b, key // page].long()
        if length > block_table.shape[1] * page or bool((ids >= pages).any()):
            o[b], lse[b] = math.nan, math.nan
            continue
        hidden = ids < 0
        k = flat[ids.clamp(min=0) * page + key % page].double().masked_fill(hidden[:, None], 0.0)[:, None]
        right = 0 if causal else -1
        found = attend_sequence(q[b], k, k[..., :512], sink, scale, -1, right, 0.0, hidden)
        o[b], lse[b] = found[0], found[1].T
    return o.to(q.dtype), lse.masked_fill(lse == -math.inf, math.inf).float()
