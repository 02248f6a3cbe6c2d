"""Twin of `moe.expand_to_fused_with_sf` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.reference.moe.expand_to_fused import expand_to_fused


def expand_with_sf(
    x: Tensor, x_sf: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor, col: bool = False
) -> tuple[Tensor, Tensor]:
    """Copy codes and scale factors of every token to each of its positions."""
    y = expand_to_fused(x, token_topk_to_pos, pos_to_expert)
    y_sf = expand_to_fused(x_sf, token_topk_to_pos, pos_to_expert)
    return y, _column_major(y_sf) if col else y_sf


def expand_to_fused_with_sf(
    x: tuple[Tensor, Tensor],
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[Tensor, Tensor]:
    """Expand a quantized tensor with one scale factor for each token and `num_per_channels` channels."""
    return expand_with_sf(*x, token_topk_to_pos, pos_to_expert, use_tma_aligned_col_major_sf)


def _column_major(sf: Tensor) -> Tensor:
    """The same factors with columns that begin at multiples of 16 bytes."""
    aligned = 16 // sf.element_size()
    pitch = -(-sf.shape[0] // aligned) * aligned
    columns = torch.empty_strided((pitch, sf.shape[1]), (1, pitch), dtype=sf.dtype, device=sf.device)
    return columns[: sf.shape[0]].copy_(sf)
