"""Twin of the scores of the lightning indexer."""

import math

import torch
from torch import Tensor


def apart(logits: Tensor) -> Tensor:
    """The same numbers in rows that are a multiple of 16 bytes apart."""
    rows, columns = logits.shape
    result = logits.new_empty(rows, -(-columns // 4) * 4)[:, :columns]
    return result.copy_(logits)


def fp8_mqa_logits(
    q: Tensor, kv: Tensor, sf: Tensor, weights: Tensor, start: Tensor, end: Tensor, clean_logits: bool = True
) -> Tensor:
    """The formula in float64; -inf outside the bounds, whether or not these are to be written."""
    scores = torch.einsum('ihd,jd->ihj', q.float().double(), kv.float().double()).relu()
    logits = (scores * weights.double()[:, :, None]).sum(1) * sf.double()
    column = torch.arange(kv.shape[0], device=q.device)
    inside = (column >= start[:, None]) & (column < end[:, None])
    return apart(logits.masked_fill(~inside, -math.inf).float())
