"""Casts between model dtypes and quantised formats."""

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.quant.front import (
    per_token_cast,
    per_token_cast_fp8,
    per_token_cast_with_precomputed_sf,
    per_token_cast_with_sf_only,
)

__all__ = [
    'QuantFormat',
    'QuantTensor',
    'per_token_cast',
    'per_token_cast_fp8',
    'per_token_cast_with_precomputed_sf',
    'per_token_cast_with_sf_only',
]
