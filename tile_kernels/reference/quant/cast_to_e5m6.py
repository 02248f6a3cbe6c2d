"""TileKernels' reference of the e5m6 cast, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant.per_token_cast import per_token_cast


def cast_to_e5m6(
    x: Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Quantize to e5m6: one scale factor for each row of `num_per_channels` channels."""
    block = (1, 0 if num_per_channels == x.shape[1] else num_per_channels)
    fmt = QuantFormat.from_flags('e5m6', block, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return per_token_cast(x, fmt)
