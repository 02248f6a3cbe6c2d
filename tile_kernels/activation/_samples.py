"""Rows for the cases of the SwiGLU ops: plain, weighted, and between experts in both layouts."""

import itertools

import torch
from torch import Tensor

NUM_TOPK = 2


def random_halves(num_tokens: int, columns: int, dtype: torch.dtype, pitch: int | None = None) -> Tensor:
    """Random numbers that reach far past every clamp; `pitch` makes the rows strided."""
    x = torch.randn(num_tokens, pitch or columns, dtype=dtype) * 3
    return x.narrow(1, 0, columns)


def sample_psum(num_tokens: int) -> tuple[list[int], int]:
    """Ends of the rows of experts of many sizes, and the alignment of their starts; the last rows are nobody's."""
    alignment = 128 if num_tokens > 1000 else 4
    ends, start = [], 0
    for size in itertools.cycle((alignment // 2 + 1, 0, alignment, 1, 2 * alignment - 1)):
        if start + size > num_tokens:
            break
        ends.append(start + size)
        start = -(-ends[-1] // alignment) * alignment
    return ends, alignment


def random_map(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """pos_to_expert, pos_to_token_topk and its inverse; every fifth row is padding, some slots have no row."""
    num_slots = (num_tokens // NUM_TOPK + 1) * NUM_TOPK
    padding = torch.arange(num_tokens) % 5 == 4
    slots = torch.randperm(num_slots)[:num_tokens]
    places = torch.where(padding, -1, torch.arange(num_tokens))
    token_topk_to_pos = torch.full((num_slots,), -1).index_put((slots,), places)
    pos_to_expert = torch.where(padding, -1, torch.arange(num_tokens) // 7)
    pos_to_token_topk = torch.where(padding, -1, slots)
    return pos_to_expert.int(), pos_to_token_topk.int(), token_topk_to_pos.int().view(-1, NUM_TOPK)


def row_arguments(num_tokens: int, rows: str) -> dict:
    """Weights and layout of rows: '' (neither), 'row' (weights), 'map' (maps of positions) or 'psum' (prefix sums)."""
    if rows == 'map':
        pos_to_expert, pos_to_token_topk, token_topk_to_pos = random_map(num_tokens)
        topk_weights = torch.rand(token_topk_to_pos.shape)
        return dict(topk_weights=topk_weights, pos_to_token_topk=pos_to_token_topk, pos_to_expert=pos_to_expert)
    arguments: dict = {}
    if rows:
        arguments['topk_weights'] = torch.rand(num_tokens)
    if rows == 'psum':
        ends, alignment = sample_psum(num_tokens)
        arguments.update(psum=torch.tensor(ends, dtype=torch.int32), alignment=alignment)
    return arguments


def random_rows(num_tokens: int, hidden: int, dtype: torch.dtype, rows: str) -> dict:
    """Arguments of a SwiGLU op: x, and weights and layout."""
    return dict(x=random_halves(num_tokens, 2 * hidden, dtype), **row_arguments(num_tokens, rows))
