"""Twin of the grouped GEMM of fp8 operands."""

from torch import Tensor

from tile_kernels.reference.gemm._widen import widen
from tile_kernels.reference.gemm.grouped_gemm import grouped_gemm


def grouped_gemm_fp8(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor) -> Tensor:
    """The product of every row with the matrix of its group, of e4m3 operands with scale factors."""
    return grouped_gemm(widen(a, a_sf, 1), widen(b, b_sf, 128), group_end).bfloat16()
