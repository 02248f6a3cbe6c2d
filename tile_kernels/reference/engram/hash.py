"""The Engram hash."""

import torch
from torch import Tensor


def engram_hash(
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    image_token_mask: Tensor | None = None,
) -> Tensor:
    """Rows of the embedding tables for the n-grams that end at each token."""
    products = ngram_token_ids.long().unsqueeze(0) * multipliers.unsqueeze(1)  # (layers, tokens, ngram), wrapping
    mix = products[:, :, 0]
    columns = []
    for i in range(1, ngram_token_ids.shape[1]):
        mix = mix ^ products[:, :, i]
        columns.append(mix.unsqueeze(-1) % vocab_sizes[:, i - 1].long().unsqueeze(1))
    found = torch.cat(columns, dim=-1) + offsets.long().unsqueeze(1)
    if image_token_mask is not None:
        found = found.masked_fill(image_token_mask[None, :, None], -1)
    return found.int()


engram_hash_ref = engram_hash


def make_offsets(vocab_sizes: Tensor) -> Tensor:
    """Where each table of (num_layers, orders, num_heads) sizes starts: exclusive prefix sums within a layer."""
    flat = vocab_sizes.flatten(1)
    return (flat.cumsum(1) - flat).to(vocab_sizes.dtype)
