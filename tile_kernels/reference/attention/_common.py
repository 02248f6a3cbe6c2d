"""Attention of one sequence in float64, which all twins share."""

import math

import torch
from torch import Tensor


def _scores(
    q: Tensor, k: Tensor, scale: float, left: int, right: int, softcap: float, hidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Scores (Hq, Sq, Sk) of q (Hq, Sq, D) and k (Hq, Sk, D), which keys are visible, and the slope of the softcap."""
    queries, keys = q.shape[1], k.shape[1]
    distance = torch.arange(keys) - (torch.arange(queries) + keys - queries)[:, None]
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    visible = visible.to(q.device)
    if hidden is not None:
        visible = visible & ~hidden
    scores = q @ k.transpose(1, 2) * scale
    if softcap <= 0:
        return scores.masked_fill(~visible, -math.inf), visible, 1.0
    bent = torch.tanh(scores / softcap)
    return (softcap * bent).masked_fill(~visible, -math.inf), visible, 1.0 - bent.square()


def _heads_first(x: Tensor, group: int) -> Tensor:
    return x.double().repeat_interleave(group, dim=1).transpose(0, 1)


def _softmax(scores: Tensor, visible: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights relative to the maximum, the maximum, the sum of the weights, and the same with the sink."""
    top = scores.detach().amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.where(visible, (scores - top.unsqueeze(-1)).exp(), 0.0)
    total = weights.sum(-1)
    return weights, top, total, total if sink is None else total + (sink.double()[:, None] - top).exp()


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
    q, k, v = _heads_first(q, 1), _heads_first(k, group), _heads_first(v, group)
    scores, visible, _ = _scores(q, k, scale, left, right, softcap, hidden)
    weights, top, total, below = _softmax(scores, visible, sink)
    if torch.isfinite(v).all():
        o = weights @ v
    else:  # a weight of 0 does not hide what is infinite
        o = torch.where(visible[None, :, :, None], weights.unsqueeze(-1) * v.unsqueeze(1), 0.0).sum(2)
    seen = total != 0
    o = torch.where(seen.unsqueeze(-1), o / torch.where(seen, below, 1.0).unsqueeze(-1), 0.0)
    lse = torch.where(seen, top + torch.where(seen, total, 1.0).log(), -math.inf)
    return o.transpose(0, 1), lse


def gradient_sequence(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    scale: float,
    left: int,
    right: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and sink (Hq,) in float64, in the layouts of `attend_sequence`; autograd is not used.

    `dlse` (Hq, Sq) is the gradient of lse.
    """
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    do, q, k, v = _heads_first(do, 1), _heads_first(q, 1), _heads_first(k, group), _heads_first(v, group)
    scores, visible, slope = _scores(q, k, scale, left, right, softcap, None)
    weights, top, total, below = _softmax(scores, visible, sink)
    p = torch.where((total != 0).unsqueeze(-1), weights / below.unsqueeze(-1), 0.0)
    dp = do @ v.transpose(1, 2)
    delta = torch.where(visible, p * dp, 0.0).sum(-1)
    ds = torch.where(visible, p * (dp - delta.unsqueeze(-1)), 0.0)
    if dlse is not None:  # its weights are without the sink
        alone = torch.where((total != 0).unsqueeze(-1), weights / total.unsqueeze(-1), 0.0)
        ds = ds + torch.where(visible, alone * dlse.double().unsqueeze(-1), 0.0)
    ds = torch.where(visible, ds * slope, 0.0) * scale
    dq, dk, dv = ds @ k, ds.transpose(1, 2) @ q, p.transpose(1, 2) @ do
    dk, dv = (x.transpose(0, 1).unflatten(1, (kv_heads, group)).sum(2) for x in (dk, dv))
    dsink = delta.new_zeros(delta.shape[0])
    if sink is not None:
        p_sink = (sink.double()[:, None] - top).exp() / below
        dsink = -torch.where(total != 0, p_sink * delta, 0.0).sum(-1)
    return dq.transpose(0, 1), dk, dv, dsink
