"""Casts between model dtypes and quantized formats; RMS norm and SwiGLU with casts are offered here as well."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.quant.batched_transpose_weight_sf import batched_transpose_weight_sf
from tile_kernels.quant.cast import cast
from tile_kernels.quant.cast_back import cast_back
from tile_kernels.quant.fake_quantize import fake_quantize
from tile_kernels.quant.per_block_cast import per_block_cast
from tile_kernels.quant.per_block_cast_fp8 import per_block_cast_fp8
from tile_kernels.quant.per_block_cast_lossless import per_block_cast_lossless
from tile_kernels.quant.per_block_cast_with_precomputed_sf import per_block_cast_with_precomputed_sf
from tile_kernels.quant.per_block_cast_with_sf_only import per_block_cast_with_sf_only
from tile_kernels.quant.per_channel_cast import per_channel_cast
from tile_kernels.quant.per_channel_cast_and_transpose import per_channel_cast_and_transpose
from tile_kernels.quant.per_channel_cast_fp8 import per_channel_cast_fp8
from tile_kernels.quant.per_channel_cast_fused import per_channel_cast_fused
from tile_kernels.quant.per_token_cast import per_token_cast
from tile_kernels.quant.per_token_cast_and_cast_back import per_token_cast_and_cast_back
from tile_kernels.quant.per_token_cast_back import per_token_cast_back
from tile_kernels.quant.per_token_cast_fp8 import per_token_cast_fp8
from tile_kernels.quant.per_token_cast_with_precomputed_sf import per_token_cast_with_precomputed_sf
from tile_kernels.quant.per_token_cast_with_sf_only import per_token_cast_with_sf_only
from tile_kernels.quant.unpack_from_e2m1fn_x2 import unpack_from_e2m1fn_x2

if TYPE_CHECKING:
    from tile_kernels.activation import (
        fused_swiglu_quant_fp8,
        swiglu_backward,
        swiglu_backward_and_per_token_cast,
        swiglu_forward,
        swiglu_forward_and_per_block_cast,
        swiglu_forward_and_per_channel_cast_and_transpose,
        swiglu_forward_and_per_token_cast,
    )
    from tile_kernels.norm import norm_backward, norm_forward, norm_forward_and_per_token_cast

#: The name before American spelling.
fake_quantise = fake_quantize

#: Names that TileKernels has here, by the family that defines them; loaded late, since those families import this one.
_ELSEWHERE = {
    'activation': (
        'fused_swiglu_quant_fp8',
        'swiglu_backward',
        'swiglu_backward_and_per_token_cast',
        'swiglu_forward',
        'swiglu_forward_and_per_block_cast',
        'swiglu_forward_and_per_channel_cast_and_transpose',
        'swiglu_forward_and_per_token_cast',
    ),
    'norm': ('norm_backward', 'norm_forward', 'norm_forward_and_per_token_cast'),
}

__all__ = [
    'QuantFormat',
    'QuantTensor',
    'batched_transpose_weight_sf',
    'cast',
    'cast_back',
    'fake_quantise',
    'fake_quantize',
    'fused_swiglu_quant_fp8',
    'norm_backward',
    'norm_forward',
    'norm_forward_and_per_token_cast',
    'per_block_cast',
    'per_block_cast_fp8',
    'per_block_cast_lossless',
    'per_block_cast_with_precomputed_sf',
    'per_block_cast_with_sf_only',
    'per_channel_cast',
    'per_channel_cast_and_transpose',
    'per_channel_cast_fp8',
    'per_channel_cast_fused',
    'per_token_cast',
    'per_token_cast_and_cast_back',
    'per_token_cast_back',
    'per_token_cast_fp8',
    'per_token_cast_with_precomputed_sf',
    'per_token_cast_with_sf_only',
    'swiglu_backward',
    'swiglu_backward_and_per_token_cast',
    'swiglu_forward',
    'swiglu_forward_and_per_block_cast',
    'swiglu_forward_and_per_channel_cast_and_transpose',
    'swiglu_forward_and_per_token_cast',
    'unpack_from_e2m1fn_x2',
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    for family, names in _ELSEWHERE.items():
        if name in names:
            return getattr(importlib.import_module(f'tile_kernels.{family}'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
