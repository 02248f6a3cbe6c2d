"""What the per-token cast of a quantized matrix means, in plain PyTorch."""

from __future__ import annotations

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant._common import (
    codes_and_factors,
    requantize,
    scale_factors,
    store_sf,
)


def per_token_recast(
    x: QuantTensor, fmt: QuantFormat, amax_floor: float | None = None, stochastic: bool = False
) -> QuantTensor:
    """`per_token_cast` of a quantized `x`."""
    codes, factors = codes_and_factors(x)
    sf, sf_inv = scale_factors(codes * factors, fmt, amax_floor)
    return QuantTensor(requantize(x, sf_inv, fmt, stochastic), store_sf(sf, fmt, *codes.shape), fmt)
