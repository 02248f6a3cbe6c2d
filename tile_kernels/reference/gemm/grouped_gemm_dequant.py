"""Twins of the grouped GEMM with packed weights and of its gradient."""

import torch
from torch import Tensor

from tile_kernels.reference.gemm.gemm_dequant import dequantize
from tile_kernels.reference.gemm.grouped_gemm import grouped_gemm


def matrices(
    codes: Tensor, scale: Tensor, zero: Tensor | None, whole: Tensor | None, fmt: str, n: int, k: int
) -> Tensor:
    """All matrices in float32."""
    made = []
    for g in range(codes.shape[0]):
        points, factor = (None if x is None else x[g] for x in (zero, whole))
        made.append(dequantize(codes[g], scale[g], points, factor, fmt, n, k))
    return torch.stack(made)


def grouped_gemm_dequant(
    a: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    whole: Tensor | None,
    group_end: Tensor,
    fmt: str,
    n: int,
) -> Tensor:
    """The product of every row with the matrix of its group."""
    b = matrices(codes, scale, zero, whole, fmt, n, a.shape[1])
    return grouped_gemm(a.float(), b, group_end).to(a.dtype)


def grouped_gemm_dequant_bwd(
    dd: Tensor,
    a: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    whole: Tensor | None,
    group_end: Tensor,
    fmt: str,
    n: int,
) -> Tensor:
    """The product of every gradient with the matrix of its group."""
    b = matrices(codes, scale, zero, whole, fmt, n, a.shape[1])
    return grouped_gemm(dd.float(), b.transpose(1, 2), group_end).to(a.dtype)
