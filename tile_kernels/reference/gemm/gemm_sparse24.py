"""Twins of the product with 2:4 sparse weights and of its gradient."""

import torch
from torch import Tensor


def expand(values: Tensor, index: Tensor) -> Tensor:
    """The dense matrix in float32."""
    n, half = values.shape
    kept = torch.arange(half, device=values.device)
    places = index[:, kept // 4].long() >> 2 * (kept % 4) & 3
    matrix = torch.zeros((n, 2 * half), device=values.device)
    return matrix.scatter_(1, kept // 2 * 4 + places, values.float())


def gemm_sparse24(a: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """A @ b.T, summed in float32."""
    d = a.float() @ expand(values, index).T
    return d.to(torch.bfloat16 if a.element_size() == 1 else a.dtype)


def gemm_sparse24_bwd(dd: Tensor, a: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """Dd @ b."""
    return (dd.float() @ expand(values, index)).to(a.dtype)
