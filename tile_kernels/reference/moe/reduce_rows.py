"""Twin of `moe.reduce_rows` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.reference.moe._common import FP8, reduce_sum
from tile_kernels.reference.moe.weighted_reduce_rows import weighted_reduce_rows_bwd


def reduce_rows(
    x: Tensor,
    token_topk_to_pos: Tensor,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
    fp8_format: str = '',
) -> Tensor:
    """Sum the rows of each token's positions."""
    return reduce_sum(x, token_topk_to_pos, None, x_sf, sf, FP8[fp8_format] if fp8_format else x.dtype)


def reduce_rows_(
    out: Tensor,
    x: Tensor,
    token_topk_to_pos: Tensor,
    topk_weights: Tensor | None = None,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
) -> None:
    """Reduce into memory of the caller."""
    out.copy_(reduce_sum(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))


def reduce_rows_bwd(
    dy: Tensor, x: Tensor, token_topk_to_pos: Tensor, x_sf: Tensor | None = None, sf: Tensor | None = None
) -> Tensor:
    """Gradient of `reduce_rows`."""
    ones = torch.ones(token_topk_to_pos.shape, device=x.device)
    return weighted_reduce_rows_bwd(dy, x, ones, token_topk_to_pos, x_sf, sf)[0]
