"""Twin of the grouped GEMM with SwiGLU behind it."""

import torch
from torch import Tensor

from tile_kernels.reference.gemm.grouped_gemm import grouped_gemm


def grouped_gemm_swiglu(a: Tensor, b: Tensor, group_end: Tensor) -> Tensor:
    """SwiGLU of the product of every row with the matrix of its group."""
    gate, up = grouped_gemm(a.float(), b.float(), group_end).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(a.dtype)
