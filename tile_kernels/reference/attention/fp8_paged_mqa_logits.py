"""Twin of the scores of the lightning indexer over a paged cache."""

import math

import torch
from torch import Tensor

from tile_kernels.reference.attention.fp8_mqa_logits import apart, fp8_mqa_logits


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
) -> Tensor:
    """Collect the pages of every sequence and score them; holes are -inf, pages that do not exist are NaN."""
    batch, tokens, _, dim = q.shape
    pages, size, _, _ = kv_cache.shape
    flat = kv_cache.view(torch.uint8).flatten(1)
    if pages == 0:
        flat = flat.new_zeros(1, size * (dim + 4))  # its factors become NaN
    logits = torch.full((batch * tokens, max_context_len), -math.inf, device=q.device)
    for b in range(batch):
        table = block_table[b].long()
        own = flat[table.clamp(0, max(pages - 1, 0))]
        codes = own[:, : size * dim].reshape(-1, dim).view(torch.float8_e4m3fn)
        sf = own[:, size * dim :].contiguous().view(torch.float32).flatten().clone()
        sf[(table >= pages).repeat_interleave(size)] = math.nan
        number = min(len(sf), max_context_len)
        lengths = context_lens[b].expand(tokens)
        if context_lens.shape[1] == 1:
            lengths = lengths - tokens + torch.arange(tokens, device=q.device) + 1
        rows = slice(b * tokens, (b + 1) * tokens)
        own_logits = fp8_mqa_logits(q[b], codes, sf, weights[rows], torch.zeros_like(lengths), lengths)[:, :number]
        own_logits.masked_fill_((table < 0).repeat_interleave(size)[:number], -math.inf)
        logits[rows, :number] = own_logits
    return apart(logits)
