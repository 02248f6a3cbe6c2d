"""Twins of attention to listed blocks and of its gradient."""

import itertools
import math

import torch
from torch import Tensor


def _times_seen(block_indices: Tensor, block_counts: Tensor | None, cuts: list[int], size: int) -> Tensor:
    """How often a token (row) lists a key (column) of its sequence, up to itself: (tokens, tokens) for each head."""
    tokens, heads, listed = block_indices.shape
    times = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
    for start, end in itertools.pairwise(cuts):
        for t, head, n in itertools.product(range(start, end), range(heads), range(listed)):
            block = int(block_indices[t, head, n])
            if block < 0 or (block_counts is not None and n >= int(block_counts[t, head])):
                continue
            first = start + block * size
            times[head, t, first : min(first + size, t + 1)] += 1
    return times


def _products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_counts: Tensor | None,
    cu_seqlens: Tensor | None,
    block_size: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """Operands (heads, tokens, dim) in float64, with 0 for what nobody sees; weights, lse."""
    group = q.shape[1] // k.shape[1]
    cuts = [0, q.shape[0]] if cu_seqlens is None else cu_seqlens.tolist()
    times = _times_seen(block_indices.cpu(), block_counts, cuts, block_size).to(q.device)
    rows, columns = times.sum((0, 2)) > 0, times.sum((0, 1)) > 0
    q = torch.where(rows[:, None, None], q.double(), 0.0).transpose(0, 1)
    k, v = (
        torch.where(columns[:, None, None], x.double(), 0.0).repeat_interleave(group, 1).transpose(0, 1) for x in (k, v)
    )
    times = times.repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(times == 0, -math.inf)
    top = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = times * torch.where(times > 0, (scores - top).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    seen = total > 0
    p = torch.where(seen, weights / torch.where(seen, total, 1.0), 0.0)
    lse = torch.where(seen, top + torch.where(seen, total, 1.0).log(), -math.inf)
    return q, k, v, p, lse.squeeze(-1)


def nsa_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_counts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    block_size: int = 64,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Attention of every token to the keys of its list in float64."""
    outs, stats = [], []
    for b in range(q.shape[0]):
        counts = None if block_counts is None else block_counts[b]
        _, _, own_v, p, lse = _products(q[b], k[b], v[b], block_indices[b], counts, cu_seqlens, block_size, scale)
        outs.append((p @ own_v).transpose(0, 1))
        stats.append(lse)
    if not outs:
        return q.new_empty(*q.shape[:-1], v.shape[3]), q.new_empty(0, q.shape[2], q.shape[1], dtype=torch.float32)
    return torch.stack(outs).to(q.dtype).contiguous(), torch.stack(stats).float()


def nsa_attend_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    block_counts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    block_size: int = 64,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in float64; autograd is not used."""
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    kv_heads = k.shape[2]
    for b in range(q.shape[0]):
        counts = None if block_counts is None else block_counts[b]
        own_q, own_k, own_v, p, _ = _products(q[b], k[b], v[b], block_indices[b], counts, cu_seqlens, block_size, scale)
        own_do = do[b].double().transpose(0, 1)
        dp = own_do @ own_v.transpose(1, 2)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        parts = (ds @ own_k, ds.transpose(1, 2) @ own_q, p.transpose(1, 2) @ own_do)
        for i, part in enumerate(parts):
            part = part.transpose(0, 1)
            if i:
                part = part.unflatten(1, (kv_heads, -1)).sum(2)
            gradients[i][b] = part.to(q.dtype)
    return gradients[0], gradients[1], gradients[2]
