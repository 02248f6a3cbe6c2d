"""Twins of attention to listed blocks of keys and of its gradient."""

import itertools
import math

import torch
from torch import Tensor


def _listed(q: Tensor, k: Tensor, indices: Tensor, counts: Tensor, size: int, left: int, right: int) -> Tensor:
    """Which keys a row sees, (batch, heads, rows, keys)."""
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    seen = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for b, h, m in itertools.product(range(batch), range(heads), range(indices.shape[2])):
        for n in indices[b, h, m, : max(int(counts[b, h, m]), 0)].tolist():
            if n >= 0:
                seen[b, h, m * size : (m + 1) * size, n * size : (n + 1) * size] = True
    distance = torch.arange(keys) - (torch.arange(queries) + keys - queries)[:, None]
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen.to(q.device)


def _products(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, seen: Tensor, scale: float, softcap: float
) -> tuple[Tensor, ...]:
    """Of one batch: operands with heads first, weights with the sink, lse without it, and the slope of the softcap."""
    group = q.shape[1] // k.shape[1]
    rows, columns = seen.any(2).T, seen.any(1).unflatten(0, (-1, group)).any(1).T
    q = torch.where(rows.unsqueeze(-1), q, 0.0).transpose(0, 1)  # what nobody sees may be NaN
    k, v = (torch.where(columns.unsqueeze(-1), x, 0.0).repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores, slope = q @ k.mT * scale, torch.ones((), dtype=q.dtype, device=q.device)
    if softcap > 0:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1.0 - bent.square()
    any_key = seen.any(-1)
    scores = torch.where(any_key.unsqueeze(-1), scores.masked_fill(~seen, -math.inf), 0.0)
    lse = scores.logsumexp(-1)
    below = lse if sink is None else torch.logaddexp(lse, sink[:, None].expand_as(lse))
    weights = torch.where(seen, (scores - below.unsqueeze(-1)).exp(), 0.0)
    return q, k, v, weights, torch.where(any_key, lse, -math.inf), slope


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, seen: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attention (batch, rows, heads, dim) and lse (batch, heads, rows)."""
    if not len(q):
        return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(0, q.shape[2], q.shape[1])
    found = [_products(q[b], k[b], v[b], sink, seen[b], scale, softcap) for b in range(len(q))]
    return torch.stack([(p @ own_v).transpose(0, 1) for _, _, own_v, p, _, _ in found]), torch.stack(
        [x[4] for x in found]
    )


def block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    counts: Tensor,
    sink: Tensor | None = None,
    block: int = 128,
    scale: float = 1.0,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """A dense mask from the lists, then attention in float64."""
    seen = _listed(q, k, indices, counts, block, left, right)
    own_sink = None if sink is None else sink.double()
    o, lse = _attend(q.double(), k.double(), v.double(), own_sink, seen, scale, softcap)
    return o.to(q.dtype).contiguous(), lse.float()


def block_sparse_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    indices: Tensor,
    counts: Tensor,
    sink: Tensor | None = None,
    block: int = 128,
    scale: float = 1.0,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in float64; autograd is not used. dsink has shape (0,) without a sink."""
    seen, kv_heads = _listed(q, k, indices, counts, block, left, right), k.shape[2]
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, k, v))
    dsink = torch.zeros(q.shape[2], dtype=torch.float64, device=q.device)
    own_sink = None if sink is None else sink.double()
    for b in range(len(q)):
        given = (q[b].double(), k[b].double(), v[b].double(), own_sink, seen[b], scale, softcap)
        own_q, own_k, own_v, p, own_lse, slope = _products(*given)
        own_do = torch.where(seen[b].any(-1).T.unsqueeze(-1), do[b].double(), 0.0).transpose(0, 1)
        dp = own_do @ own_v.mT
        delta = (p * dp).sum(-1)
        ds = p * (dp - delta.unsqueeze(-1))
        if dlse is not None:  # its weights are without the sink
            alone = p / p.sum(-1, keepdim=True)
            ds = ds + torch.where(seen[b], alone * dlse[b].double().unsqueeze(-1), 0.0)
        ds = ds * slope * scale
        dq[b] = (ds @ own_k).transpose(0, 1)
        for whole, own in ((dk, ds.mT @ own_q), (dv, p.mT @ own_do)):
            whole[b] = own.transpose(0, 1).unflatten(1, (kv_heads, -1)).sum(2)
        if own_sink is not None:
            p_sink = (own_sink[:, None] - torch.logaddexp(own_lse, own_sink[:, None].expand_as(own_lse))).exp()
            dsink -= (p_sink * delta).sum(-1)
    last = q.new_empty(0, dtype=torch.float32) if sink is None else dsink.to(sink.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), last
