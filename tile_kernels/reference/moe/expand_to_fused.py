"""Twin of `moe.expand_to_fused` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.reference.moe._common import placed
from tile_kernels.reference.moe.reduce_rows import reduce_rows


def expand_to_fused(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> Tensor:
    """Copy the row of every token to each of its positions; padding is zero."""
    num_expanded = pos_to_expert.shape[0]
    token, _, pos = placed(token_topk_to_pos, num_expanded)
    row_of_pos = pos.new_full((num_expanded,), x.shape[0])  # a row of zeros after the last token
    row_of_pos[pos] = token
    rows = x.float() if x.requires_grad else x  # gradients of a token add up in float32
    return torch.cat([rows, rows.new_zeros(1, x.shape[1])])[row_of_pos].to(x.dtype)


def expand_to_fused_bwd(dy: Tensor, token_topk_to_pos: Tensor) -> Tensor:
    """Gradient of `expand_to_fused`."""
    return reduce_rows(dy, token_topk_to_pos)
