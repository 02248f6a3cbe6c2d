"""What every op means, in plain PyTorch: obvious, slow, and independent of the kernels.

The same names, arguments and results as the ops, on any device; one module per family.
"""

from tile_kernels.torch.moe import stable_topk, topk_gate, topk_gating
from tile_kernels.torch.quant import (
    cast,
    cast_back,
    per_token_cast,
    per_token_cast_fp8,
    per_token_cast_with_precomputed_sf,
    per_token_cast_with_sf_only,
    unpack_from_e2m1fn_x2,
)
from tile_kernels.torch.transpose import batched_transpose, transpose

__all__ = [
    'batched_transpose',
    'cast',
    'cast_back',
    'per_token_cast',
    'per_token_cast_fp8',
    'per_token_cast_with_precomputed_sf',
    'per_token_cast_with_sf_only',
    'stable_topk',
    'topk_gate',
    'topk_gating',
    'transpose',
    'unpack_from_e2m1fn_x2',
]
