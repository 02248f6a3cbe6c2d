"""Functions that several twins share."""

from __future__ import annotations

import torch
from torch import Tensor


def stable_topk(scores: Tensor, num_topk: int) -> Tensor:
    """Indices of the largest entries of the last dimension: descending, equal ones by index, NaN after everything."""
    order = torch.where(scores.isnan(), -torch.inf, scores).argsort(dim=-1, descending=True, stable=True)
    nan_last = scores.isnan().gather(-1, order).to(torch.int8).argsort(dim=-1, stable=True)
    return first_of(order.gather(-1, nan_last), num_topk)


def first_of(order: Tensor, num_topk: int) -> Tensor:
    return order[..., :num_topk].clone(memory_format=torch.contiguous_format)


def stable_topk_of(scores: Tensor, allowed: Tensor, num_topk: int) -> Tensor:
    """`stable_topk` among the allowed entries."""
    order = stable_topk(scores, scores.shape[-1])
    allowed_first = (~allowed).gather(-1, order).to(torch.int8).argsort(dim=-1, stable=True)
    return first_of(order.gather(-1, allowed_first), num_topk)


def best_groups(ranked: Tensor, num_groups: int | None, num_topk_groups: int | None) -> Tensor:
    """Mask (num_tokens, num_experts) of the experts in the groups with the largest top-2 sums."""
    if num_groups is None or num_topk_groups is None:
        return torch.ones_like(ranked, dtype=torch.bool)
    num_tokens, num_experts = ranked.shape
    grouped = ranked.view(num_tokens, num_groups, num_experts // num_groups)
    two_best = grouped.gather(-1, stable_topk(grouped, 2))
    kept = stable_topk(two_best.sum(-1), num_topk_groups)
    is_kept = torch.zeros(num_tokens, num_groups, dtype=torch.bool, device=ranked.device).scatter(-1, kept, True)
    return is_kept.repeat_interleave(num_experts // num_groups, dim=-1)


def score(logits: Tensor, scoring: str) -> Tensor:
    if scoring == 'softmax':
        return logits.softmax(-1)
    if scoring == 'sigmoid':
        return logits.sigmoid()
    if scoring == 'sqrtsoftplus':
        softplus = torch.where(logits > 20, logits, logits.clamp(max=20).exp().log1p())
        return softplus.sqrt()
    return logits


def empty_slots(logits: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    topk_idx = torch.empty(logits.shape[0], num_slots, dtype=torch.int64, device=logits.device)
    return topk_idx, torch.empty(logits.shape[0], num_slots, dtype=torch.float32, device=logits.device)


FP8 = {'e4m3': torch.float8_e4m3fn}


def placed(token_topk_to_pos: Tensor, num_expanded: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token, k and position of every slot that has a position."""
    token, k = ((token_topk_to_pos >= 0) & (token_topk_to_pos < num_expanded)).nonzero(as_tuple=True)
    return token, k, token_topk_to_pos[token, k].long()


def reduce_sum(
    x: Tensor,
    token_topk_to_pos: Tensor,
    topk_weights: Tensor | None,
    x_sf: Tensor | None,
    sf: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """One fused multiply-add after another, k ascending."""
    num_tokens, num_topk = token_topk_to_pos.shape
    total = torch.zeros(num_tokens, x.shape[1], device=x.device)
    for k in range(num_topk):
        pos = token_topk_to_pos[:, k].long()
        token = ((pos >= 0) & (pos < x.shape[0])).nonzero().flatten()
        pos = pos[token]
        factor = torch.ones(pos.shape, device=x.device) if topk_weights is None else topk_weights[token, k]
        if x_sf is not None:
            factor = factor * x_sf[pos]
        row = FusedMultiplyAdd.apply(x[pos].float(), factor.unsqueeze(1), total[token])
        total = total.index_copy(0, token, row)
    if sf is not None:
        total = total * sf
    if dtype.itemsize == 1:
        total = total.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return total.to(dtype)


class FusedMultiplyAdd(torch.autograd.Function):
    """`a * b + c` in float32, rounded once."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """The product is exact in float64. The sum is rounded to odd there, so the rounding to float32 is correct."""
        ctx.save_for_backward(a, b)
        product, addend = a.double() * b.double(), c.double()
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)  # of the float64 sum, exact
        bits = total.view(torch.int64)
        odd = torch.where((error > 0) == (total > 0), bits + 1, bits - 1)
        inexact = (error != 0) & total.isfinite() & (bits % 2 == 0)
        return torch.where(inexact, odd, bits).view(torch.float64).float()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Plain product rule; factors may broadcast."""
        a, b = ctx.saved_tensors
        return grad * b, (grad * a).sum_to_size(b.shape), grad
