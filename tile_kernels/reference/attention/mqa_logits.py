"""Twins of the scores of the lightning indexer in half precision and of their gradients."""

import math

import torch
from torch import Tensor

from tile_kernels.reference.attention.fp8_mqa_logits import apart


def _seen(start: Tensor, end: Tensor, keys: int) -> Tensor:
    column = torch.arange(keys, device=start.device)
    return (column >= start[:, None]) & (column < end[:, None])


def mqa_logits(q: Tensor, k: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """The formula in float64."""
    scores = torch.einsum('ihd,jd->ihj', q.double(), k.double()).relu()
    logits = (scores * weights.double()[:, :, None]).sum(1)
    return apart(logits.masked_fill(~_seen(start, end, k.shape[0]), -math.inf).float())


def mqa_logits_bwd(
    dlogits: Tensor, q: Tensor, k: Tensor, weights: Tensor, start: Tensor, end: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in float64; autograd is not used."""
    q64, k64, w64 = q.double(), k.double(), weights.double()
    dl = torch.where(_seen(start, end, k.shape[0]), dlogits.double(), 0.0)[:, None]
    scores = torch.einsum('ihd,jd->ihj', q64, k64)
    ds = torch.where(scores > 0, dl * w64[:, :, None], 0.0)
    dq, dk = torch.einsum('ihj,jd->ihd', ds, k64), torch.einsum('ihj,ihd->jd', ds, q64)
    return dq.to(q.dtype), dk.to(k.dtype), (scores.relu() * dl).sum(2).to(weights.dtype)
