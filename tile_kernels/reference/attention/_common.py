"""Attention of one sequence in float64, which all twins share."""

import math

import torch
from torch import Tensor


def attend_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Q (Sq, Hq, D), k (Sk, Hk, D), v (Sk, Hk, Dv) -> o (Sq, Hq, Dv), lse (Hq, Sq), both float64.

    `hidden` marks keys that nobody sees.
    """
    group = q.shape[1] // k.shape[1]
    queries, keys = q.shape[0], k.shape[0]
    distance = torch.arange(keys) - (torch.arange(queries) + keys - queries)[:, None]
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    visible = visible.to(q.device)
    if hidden is not None:
        visible = visible & ~hidden
    k, v = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    top = scores.detach().amax(-1) if keys else scores.new_full(scores.shape[:-1], -math.inf)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.where(visible, (scores - top.unsqueeze(-1)).exp(), 0.0)
    total = weights.sum(-1)
    below = total if sink is None else total + (sink.double()[:, None] - top).exp()
    if torch.isfinite(v).all():
        o = weights @ v
    else:  # a weight of 0 does not hide what is infinite
        o = torch.where(visible[None, :, :, None], weights.unsqueeze(-1) * v.unsqueeze(1), 0.0).sum(2)
    seen = total != 0
    o = torch.where(seen.unsqueeze(-1), o / torch.where(seen, below, 1.0).unsqueeze(-1), 0.0)
    lse = torch.where(seen, top + torch.where(seen, total, 1.0).log(), -math.inf)
    return o.transpose(0, 1), lse
