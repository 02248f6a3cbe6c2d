"""What the ops of `tile_kernels.quant` mean, in plain PyTorch; those of RMS norm and SwiGLU as well."""

from __future__ import annotations

import importlib
from typing import Any

from tile_kernels.reference.quant.batched_transpose_weight_sf import batched_transpose_weight_sf
from tile_kernels.reference.quant.cast import cast, convert
from tile_kernels.reference.quant.cast_back import cast_back
from tile_kernels.reference.quant.cast_back_from_e5m6 import cast_back_from_e5m6
from tile_kernels.reference.quant.cast_to_e5m6 import cast_to_e5m6
from tile_kernels.reference.quant.dequantize import dequantize
from tile_kernels.reference.quant.fake_quantize import fake_quantize
from tile_kernels.reference.quant.per_block_cast import per_block_cast
from tile_kernels.reference.quant.per_block_cast_fp8 import per_block_cast_fp8
from tile_kernels.reference.quant.per_block_cast_lossless import per_block_cast_lossless
from tile_kernels.reference.quant.per_block_cast_with_precomputed_sf import per_block_cast_with_precomputed_sf
from tile_kernels.reference.quant.per_block_cast_with_sf_only import per_block_cast_with_sf_only
from tile_kernels.reference.quant.per_channel_cast import per_channel_cast
from tile_kernels.reference.quant.per_channel_cast_and_transpose import per_channel_cast_and_transpose
from tile_kernels.reference.quant.per_channel_cast_fp8 import per_channel_cast_fp8
from tile_kernels.reference.quant.per_channel_recast import per_channel_recast
from tile_kernels.reference.quant.per_token_cast import per_token_cast
from tile_kernels.reference.quant.per_token_cast_and_cast_back import per_token_cast_and_cast_back
from tile_kernels.reference.quant.per_token_cast_fp8 import per_token_cast_fp8
from tile_kernels.reference.quant.per_token_cast_with_precomputed_sf import per_token_cast_with_precomputed_sf
from tile_kernels.reference.quant.per_token_cast_with_sf_only import per_token_cast_with_sf_only
from tile_kernels.reference.quant.per_token_recast import per_token_recast
from tile_kernels.reference.quant.per_token_recast_with_precomputed_sf import per_token_recast_with_precomputed_sf
from tile_kernels.reference.quant.per_token_recast_with_sf_only import per_token_recast_with_sf_only
from tile_kernels.reference.quant.transpose_weight_sf import transpose_weight_sf
from tile_kernels.reference.quant.unpack_from_e2m1fn_x2 import unpack_from_e2m1fn_x2

#: The names before American spelling.
dequantise, fake_quantise = dequantize, fake_quantize

#: Twins that moved to families of their own; loaded late, since those import this one.
_ELSEWHERE = {
    'activation': (
        'fused_swiglu_quant_fp8',
        'get_mapping_from_psum',
        'swiglu_backward',
        'swiglu_backward_and_per_token_cast',
        'swiglu_forward',
        'swiglu_forward_and_count',
        'swiglu_forward_and_per_block_cast',
        'swiglu_forward_and_per_channel_cast_and_transpose',
        'swiglu_forward_and_per_token_cast',
    ),
    'norm': (
        'add_norm_backward',
        'add_norm_forward',
        'norm_backward',
        'norm_backward_',
        'norm_backward_ref',
        'norm_forward',
        'norm_forward_',
        'norm_forward_and_per_token_cast',
        'norm_forward_and_per_token_cast_',
        'norm_forward_ref',
    ),
}

__all__ = [name for name in dir() if not name.startswith('_') and name not in ('Any', 'annotations', 'importlib')]
__all__ += [name for names in _ELSEWHERE.values() for name in names]


def __getattr__(name: str) -> Any:
    for family, names in _ELSEWHERE.items():
        if name in names:
            return getattr(importlib.import_module(f'tile_kernels.reference.{family}'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
