"""Twin of the scores by which NSA selects blocks."""

import itertools
import math

import torch
from torch import Tensor


def nsa_scores(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None = None,
    cu_blocks: Tensor | None = None,
    block_size: int = 64,
    scale: float = 1.0,
) -> Tensor:
    """The formula in float64, token by token."""
    batch, tokens, _, _ = q.shape
    kv_heads, columns = k.shape[2], -(-tokens // block_size)
    scores = torch.full((batch, tokens, kv_heads, columns), -math.inf, device=q.device)
    if k.shape[1] == 0:
        scores.fill_(math.inf)
    cuts = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    block_cuts = [0] * len(cuts) if cu_blocks is None else cu_blocks.tolist()
    for b, ((start, end), first) in itertools.product(
        range(batch), zip(itertools.pairwise(cuts), block_cuts, strict=False)
    ):
        for t in range(start, end):
            own = (t - start) // block_size
            means = k[b, first : first + own].double()
            own_q = q[b, t].double().unflatten(0, (kv_heads, -1))
            powers = torch.einsum('hgd,chd->hgc', own_q, means) * scale
            weights = (powers - lse[b, t].double().unflatten(0, (kv_heads, -1)).unsqueeze(-1)).exp().sum(1)
            scores[b, t, :, :own] = weights.float()
            scores[b, t, :, max(own - 1, 0) : own + 1] = math.inf
            scores[b, t, :, 0] = math.inf
    return scores
