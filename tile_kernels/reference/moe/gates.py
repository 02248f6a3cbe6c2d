"""Routing in plain PyTorch: what the ops of `tile_kernels.moe` mean."""

from __future__ import annotations

import torch
from torch import Tensor


def stable_topk(scores: Tensor, num_topk: int) -> Tensor:
    """Indices of the largest entries of the last dimension: descending, equal ones by index, NaN after everything."""
    order = torch.where(scores.isnan(), -torch.inf, scores).argsort(dim=-1, descending=True, stable=True)
    nan_last = scores.isnan().gather(-1, order).to(torch.int8).argsort(dim=-1, stable=True)
    return _first(order.gather(-1, nan_last), num_topk)


def _first(order: Tensor, num_topk: int) -> Tensor:
    return order[..., :num_topk].clone(memory_format=torch.contiguous_format)


def topk_gate(scores: Tensor, num_topk: int) -> Tensor:
    """The experts with the largest scores, best first."""
    return stable_topk(scores, num_topk)


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
    scores = _score(logits, scoring)
    ranked = (logits if scoring == 'softmax' else scores).detach()
    if bias is not None:
        ranked = ranked + bias
    allowed = _best_groups(ranked, num_groups, num_topk_groups)
    indices = _stable_topk_of(ranked, allowed, top_k)
    if renormalize and scoring == 'softmax':
        weights = logits.gather(-1, indices).softmax(-1)
    else:
        weights = scores.gather(-1, indices)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor, indices.to(index_dtype)


def _score(logits: Tensor, scoring: str) -> Tensor:
    if scoring == 'softmax':
        return logits.softmax(-1)
    if scoring == 'sigmoid':
        return logits.sigmoid()
    if scoring == 'sqrtsoftplus':
        softplus = torch.where(logits > 20, logits, logits.clamp(max=20).exp().log1p())
        return softplus.sqrt()
    return logits


def _best_groups(ranked: Tensor, num_groups: int | None, num_topk_groups: int | None) -> Tensor:
    """Which experts (num_tokens, num_experts) belong to a group whose two best scores have one of the largest sums."""
    if num_groups is None or num_topk_groups is None:
        return torch.ones_like(ranked, dtype=torch.bool)
    num_tokens, num_experts = ranked.shape
    grouped = ranked.view(num_tokens, num_groups, num_experts // num_groups)
    two_best = grouped.gather(-1, stable_topk(grouped, 2))
    kept = stable_topk(two_best.sum(-1), num_topk_groups)
    is_kept = torch.zeros(num_tokens, num_groups, dtype=torch.bool, device=ranked.device).scatter(-1, kept, True)
    return is_kept.repeat_interleave(num_experts // num_groups, dim=-1)


def _stable_topk_of(scores: Tensor, allowed: Tensor, num_topk: int) -> Tensor:
    """`stable_topk` among the allowed entries."""
    order = stable_topk(scores, scores.shape[-1])
    allowed_first = (~allowed).gather(-1, order).to(torch.int8).argsort(dim=-1, stable=True)
    return _first(order.gather(-1, allowed_first), num_topk)


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
        scores = _score(x, scoring)
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
