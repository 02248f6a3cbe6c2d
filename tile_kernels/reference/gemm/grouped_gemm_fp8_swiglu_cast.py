"""Twin of the grouped GEMM of fp8 operands with SwiGLU and a cast behind it."""

import torch
from torch import Tensor

from tile_kernels.reference.gemm._widen import widen
from tile_kernels.reference.gemm.grouped_gemm_swiglu import grouped_gemm_swiglu


def grouped_gemm_fp8_swiglu_cast(
    a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor
) -> tuple[Tensor, Tensor]:
    """`grouped_gemm_fp8` with SwiGLU behind it, quantised in groups of 128 channels."""
    y = grouped_gemm_swiglu(widen(a, a_sf, 1), widen(b, b_sf, 128), group_end).unflatten(1, (-1, 128))
    y_sf = y.abs().amax(-1).clamp(min=1e-4) / 448.0
    codes = (y / y_sf.unsqueeze(-1)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.flatten(1), y_sf
