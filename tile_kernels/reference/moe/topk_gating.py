"""Twin of `moe.topk_gating` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.reference.moe._common import best_groups, score, stable_topk_of


def topk_gating(
    logits: Tensor,
    top_k: int = 8,
    *,
    scoring: str = 'softmax',
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int | None = None,
    num_topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts per token and weigh them; differentiable in `logits`."""
    logits = logits.float() if logits.dtype != torch.float64 else logits
    scores = score(logits, scoring)
    ranked = (logits if scoring == 'softmax' else scores).detach()
    if bias is not None:
        ranked = ranked + bias
    allowed = best_groups(ranked, num_groups, num_topk_groups)
    indices = stable_topk_of(ranked, allowed, top_k)
    if renormalize and scoring == 'softmax':
        weights = logits.gather(-1, indices).softmax(-1)
    else:
        weights = scores.gather(-1, indices)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor, indices.to(index_dtype)


def topk_gating_bwd(
    dweights: Tensor,
    logits: Tensor,
    indices: Tensor,
    scoring: str = 'softmax',
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> Tensor:
    """Gradient of the logits of the chosen experts; of all of them where weights are a softmax over all."""
    logits_f32, chosen = logits.float(), indices.long()
    x, dscore = logits_f32.gather(-1, chosen), dweights * routed_scaling_factor
    if scoring == 'softmax' and not renormalize:
        share = logits_f32.softmax(-1)
        dshare = torch.zeros_like(share).scatter(-1, chosen, dscore)
        return (share * (dshare - (share * dshare).sum(-1, keepdim=True))).to(logits.dtype)
    if scoring == 'softmax':
        share = x.softmax(-1)
        dx = share * (dscore - (share * dscore).sum(-1, keepdim=True))
    else:
        scores = score(x, scoring)
        if renormalize:
            total = scores.sum(-1, keepdim=True) + 1e-20
            dscore = (dscore - (scores / total * dscore).sum(-1, keepdim=True)) / total
        dx = dscore * _slope(x, scores, scoring)
    return torch.zeros_like(logits_f32).scatter(-1, chosen, dx).to(logits.dtype)


def _slope(logits: Tensor, scores: Tensor, scoring: str) -> Tensor:
    """Derivative of `_score`, element by element."""
    if scoring == 'sigmoid':
        return scores * (1 - scores)
    if scoring == 'sqrtsoftplus':
        softplus_slope = torch.where(logits > 20, 1.0, logits.sigmoid())
        return torch.where(scores > 0, softplus_slope / (2 * scores), 0.0)
    return torch.ones_like(scores)
