"""Inputs for the cases of the ops that move rows: routings made of traceable tensor operations."""

import torch
from torch import Tensor


def random_choice(num_tokens: int, num_topk: int, num_experts: int, unrouted: float = 0.0) -> Tensor:
    """(num_tokens, num_topk) int64 experts, distinct in a row if possible; a fraction `unrouted` of them is -1."""
    scores = torch.rand(num_tokens, max(num_experts, num_topk))
    chosen = scores.argsort(dim=1)[:, :num_topk] % num_experts
    return torch.where(torch.rand(num_tokens, num_topk) < unrouted, -1, chosen)


def random_places(
    num_tokens: int, num_topk: int, num_experts: int = 8, unrouted: float = 0.2, padding: int = 3
) -> tuple[Tensor, Tensor]:
    """`token_topk_to_pos` and `pos_to_expert` of a random choice; `padding` empty positions follow each expert."""
    chosen = random_choice(num_tokens, num_topk, num_experts, unrouted).flatten()
    num_slots = num_tokens * num_topk
    num_expanded = num_slots + num_experts * padding
    order = torch.where(chosen < 0, num_experts, chosen).argsort(stable=True)
    places = torch.arange(num_slots) + chosen[order] * padding
    token_topk_to_pos = torch.empty(num_slots, dtype=torch.int64).scatter(0, order, places)
    token_topk_to_pos = torch.where(chosen < 0, -1, token_topk_to_pos)
    pos_to_expert = torch.full((num_expanded + 1,), -1)  # the last entry takes slots without a position
    pos_to_expert = pos_to_expert.scatter(0, torch.where(chosen < 0, num_expanded, token_topk_to_pos), chosen)
    return token_topk_to_pos.view(num_tokens, num_topk).int(), pos_to_expert[:num_expanded].int()
