"""Twin of `moe.reduce_fused` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.reference.moe._common import FP8, reduce_sum


def reduce_fused(
    x: Tensor | tuple[Tensor, Tensor],
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str = '',
    sf: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Reduce expanded rows to tokens: the weighted sum over the positions of each token."""
    x, x_sf = x if isinstance(x, tuple) else (x, None)
    y = reduce_sum(x, token_topk_to_pos, topk_weights, x_sf, sf, FP8[fp8_format] if fp8_format else x.dtype)
    return y if out is None else out.copy_(y)
