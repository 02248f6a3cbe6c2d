"""Twin of the dense product of fp8 operands."""

from torch import Tensor

from tile_kernels.reference.gemm._widen import widen
from tile_kernels.reference.gemm.gemm import gemm


def gemm_fp8(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor) -> Tensor:
    """D = A @ B.T of e4m3 operands with scale factors."""
    return gemm(widen(a, a_sf, 1), widen(b, b_sf, 128)).bfloat16()
