"""Twins of the public functions of products whose weights are objects: packed, sparse, or of a convolution."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.reference.gemm.grouped_gemm import ends_of


def gemm_dequant(a: Tensor, weight: Any, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Product with the unpacked weight and bias, in float64."""
    d = a.double() @ weight.dequantize(torch.float64).T
    d = (d if bias is None else d + bias.double()).to(a.dtype)
    return d if out is None else out.copy_(d)


def grouped_gemm_dequant(a: Tensor, weight: Any, group_end: Tensor) -> Tensor:
    """The product of every row with the unpacked weight of its group; 0 behind the last group."""
    parts, start = [], 0
    for matrix, end in zip(weight.dequantize(torch.float64), ends_of(group_end, a.shape[0]), strict=True):
        parts.append(a[start:end].double() @ matrix.T)
        start = end
    behind = a[start:].double() @ a.new_zeros(a.shape[1], weight.shape[-2], dtype=torch.float64)
    return torch.cat([*parts, behind]).to(a.dtype)


def gemm_sparse24(a: Tensor, b: Any) -> Tensor:
    """Product with the zeros of b; float8 gives bfloat16."""
    return (a.double() @ b.dense().double().T).to(torch.bfloat16 if a.element_size() == 1 else a.dtype)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    """The convolution of NHWC images in float64."""
    planes, kernel = x.double().permute(0, 3, 1, 2), weight.double().permute(0, 3, 1, 2)
    added = None if bias is None else bias.double()
    y = torch.nn.functional.conv2d(planes, kernel, added, stride, padding, dilation)
    return y.permute(0, 2, 3, 1).to(x.dtype).contiguous()
