"""Matrix products: dense, and grouped, where each group of rows has its own matrix."""

from tile_kernels.gemm.conv2d import conv2d, conv2d_bwd
from tile_kernels.gemm.gemm import gemm, gemm_bwd
from tile_kernels.gemm.gemm_dequant import gemm_dequant, gemm_dequant_bwd
from tile_kernels.gemm.gemm_fp8 import gemm_fp8
from tile_kernels.gemm.gemm_sparse24 import Sparse24, compress24, gemm_sparse24, gemm_sparse24_bwd
from tile_kernels.gemm.grouped_gemm import grouped_gemm, grouped_gemm_bwd
from tile_kernels.gemm.grouped_gemm_dequant import grouped_gemm_dequant, grouped_gemm_dequant_bwd
from tile_kernels.gemm.grouped_gemm_fp8 import grouped_gemm_fp8
from tile_kernels.gemm.grouped_gemm_fp8_swiglu_cast import grouped_gemm_fp8_swiglu_cast
from tile_kernels.gemm.grouped_gemm_swiglu import grouped_gemm_swiglu
from tile_kernels.gemm.packed_weight import (
    PackedWeight,
    from_awq,
    from_compressed_tensors,
    from_gptq,
    pack_weight,
    quantize_weight,
)

__all__ = [
    'PackedWeight',
    'Sparse24',
    'compress24',
    'conv2d',
    'conv2d_bwd',
    'from_awq',
    'from_compressed_tensors',
    'from_gptq',
    'gemm',
    'gemm_bwd',
    'gemm_dequant',
    'gemm_dequant_bwd',
    'gemm_fp8',
    'gemm_sparse24',
    'gemm_sparse24_bwd',
    'grouped_gemm',
    'grouped_gemm_bwd',
    'grouped_gemm_dequant',
    'grouped_gemm_dequant_bwd',
    'grouped_gemm_fp8',
    'grouped_gemm_fp8_swiglu_cast',
    'grouped_gemm_swiglu',
    'pack_weight',
    'quantize_weight',
]


def __dir__() -> list[str]:
    return __all__
