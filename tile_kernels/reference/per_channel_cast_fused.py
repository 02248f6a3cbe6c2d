"""TileKernels' reference of the gathered per-channel cast; it lives in a module of its own name."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant import cast_back, per_channel_cast


def per_channel_cast_fused(
    x: Tensor | tuple[Tensor, Tensor],
    num_per_tokens: int,
    num_per_channels: int | None,
    round_sf: bool,
    pos_to_token: Tensor | None,
) -> QuantTensor:
    """Gather rows of `x`, dequantise them if it is a pair, and quantise each channel in groups of rows.

    Args:
        x: (num_tokens, hidden) tensor, or e4m3 data and scale factors of `num_per_channels` channels.
        num_per_tokens: rows of the result that share a scale factor.
        num_per_channels: channels that share a scale factor of a quantised `x`.
        round_sf: scale factors are powers of two.
        pos_to_token: the row of `x` for each row of the result; -1 for zeros.
    """
    if not isinstance(x, torch.Tensor):
        x = cast_back(x, 'fp32', (1, num_per_channels))
    return per_channel_cast(x, QuantFormat.from_flags('e4m3', (num_per_tokens, 1), False, round_sf), pos_to_token)
