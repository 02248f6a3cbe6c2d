"""Twin of the merge of parts of attention."""

import math

import torch
from torch import Tensor


def combine(
    out_partial: Tensor, lse_partial: Tensor, sink: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Parts weighted by exp(lse), in float64; those with lse = -inf count for nothing."""
    lse = torch.logsumexp(lse_partial.double(), dim=0)
    total = lse if sink is None else torch.logaddexp(lse, sink.double().expand_as(lse))
    weights = (lse_partial.double() - total).exp()
    weights = weights.masked_fill(lse == -math.inf, 0.0).masked_fill(lse_partial == -math.inf, 0.0).unsqueeze(-1)
    parts = out_partial.double().masked_fill((lse_partial == -math.inf).unsqueeze(-1), 0.0)
    return (weights * parts).sum(0).to(out_dtype or out_partial.dtype), lse.float()
