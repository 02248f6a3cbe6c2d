"""What the ops of `tile_kernels.gemm` mean, in plain PyTorch."""

from tile_kernels.reference.gemm.conv2d import conv2d, conv2d_bwd
from tile_kernels.reference.gemm.gemm import gemm, gemm_bwd
from tile_kernels.reference.gemm.gemm_dequant import gemm_dequant, gemm_dequant_bwd
from tile_kernels.reference.gemm.gemm_fp8 import gemm_fp8
from tile_kernels.reference.gemm.gemm_sparse24 import gemm_sparse24, gemm_sparse24_bwd
from tile_kernels.reference.gemm.grouped_gemm import grouped_gemm, grouped_gemm_bwd
from tile_kernels.reference.gemm.grouped_gemm_dequant import grouped_gemm_dequant, grouped_gemm_dequant_bwd
from tile_kernels.reference.gemm.grouped_gemm_fp8 import grouped_gemm_fp8
from tile_kernels.reference.gemm.grouped_gemm_fp8_swiglu_cast import grouped_gemm_fp8_swiglu_cast
from tile_kernels.reference.gemm.grouped_gemm_swiglu import grouped_gemm_swiglu

__all__ = [
    'conv2d',
    'conv2d_bwd',
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
]
