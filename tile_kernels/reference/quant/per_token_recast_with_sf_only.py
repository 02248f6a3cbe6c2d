"""What its scale factors mean, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant.per_token_recast import per_token_recast


def per_token_recast_with_sf_only(x: QuantTensor, fmt: QuantFormat, amax_floor: float | None = None) -> Tensor:
    """The scale factors of `per_token_recast`."""
    return per_token_recast(x, fmt, amax_floor).sf
