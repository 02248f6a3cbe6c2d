"""Twin of `moe.weighted_reduce_rows` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.reference.moe._common import FP8, placed, reduce_sum


def weighted_reduce_rows(
    x: Tensor,
    topk_weights: Tensor,
    token_topk_to_pos: Tensor,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
    fp8_format: str = '',
) -> Tensor:
    """Sum the rows of each token's positions, each times its weight."""
    return reduce_sum(x, token_topk_to_pos, topk_weights, x_sf, sf, FP8[fp8_format] if fp8_format else x.dtype)


def weighted_reduce_rows_bwd(
    dy: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    token_topk_to_pos: Tensor,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of `weighted_reduce_rows`."""
    token, k, pos = placed(token_topk_to_pos, x.shape[0])
    given = torch.ones(pos.shape, device=x.device)
    if x_sf is not None:
        given = given * x_sf[pos]
    if sf is not None:
        given = given * sf
    upstream = dy.float()[token] * given.unsqueeze(1)
    dx = torch.zeros_like(x)
    dx[pos] = (upstream * topk_weights[token, k].unsqueeze(1)).to(x.dtype)
    dtopk_weights = torch.zeros_like(topk_weights)
    dtopk_weights[token, k] = (upstream.double() * x[pos].double()).sum(1).float()
    return dx, dtopk_weights
