"""Twin of latent attention over listed keys."""

import math

import torch
from torch import Tensor

from tile_kernels.reference.attention._common import attend_sequence


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float = 1.0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of every token in float64, whose keys are gathered first."""
    tokens, heads, _ = q.shape
    outs, tops, logs = [], [], []
    for t in range(tokens):
        own = indices[t, 0] if topk_length is None else indices[t, 0, : max(int(topk_length[t]), 0)]
        own = own[(own >= 0) & (own < len(kv))].long()
        k = kv[own].double()
        o, lse = attend_sequence(q[t, None], k, k[..., :512], sink, scale, -1, -1, 0.0)
        outs.append(o[0])
        logs.append(lse[:, 0])
        scores = q[t].double() @ k[:, 0].T * scale
        tops.append(scores.amax(-1) if len(own) else scores.new_full((heads,), -math.inf))
    if not outs:
        return q[..., :512].clone(), q.new_zeros(0, heads).float(), q.new_zeros(0, heads).float()
    o, top, lse = (torch.stack(x) for x in (outs, tops, logs))
    return o.to(q.dtype), top.float(), lse.masked_fill(lse == -math.inf, math.inf).float()


def sparse_mla_bwd(
    do: Tensor,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float = 1.0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of every token in float64; those of a key are added up. Nothing of the forward pass is used."""
    dq = torch.zeros_like(q, dtype=torch.float64)
    dkv = torch.zeros_like(kv, dtype=torch.float64)
    dsink = torch.zeros(q.shape[1] if sink is not None else 0, dtype=torch.float64, device=q.device)
    for t in range(len(q)):
        own = indices[t, 0] if topk_length is None else indices[t, 0, : max(int(topk_length[t]), 0)]
        own = own[(own >= 0) & (own < len(kv))].long()
        if not len(own):
            continue
        k, own_q, own_do = kv[own, 0].double(), q[t].double(), do[t].double()
        scores = own_q @ k.T * scale
        below = scores.logsumexp(1, keepdim=True)
        if sink is not None:
            logits = sink.double()[:, None]
            below = torch.logaddexp(below, logits)
        p = (scores - below).exp()
        dp = own_do @ k[:, :512].T
        delta = (p * dp).sum(1, keepdim=True)
        ds = p * (dp - delta) * scale
        dq[t] = ds @ k
        dk = ds.T @ own_q
        dk[:, :512] += p.T @ own_do
        dkv.index_add_(0, own, dk[:, None])
        if sink is not None:
            dsink -= ((logits - below).exp() * delta)[:, 0]
    return dq.to(q.dtype), dkv.to(kv.dtype), dsink.to(torch.float32 if sink is None else sink.dtype)
