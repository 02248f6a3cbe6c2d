"""Twins of the grouped GEMM in half precision and of its gradients."""

import torch
from torch import Tensor


def ends_of(group_end: Tensor, num_rows: int) -> list[int]:
    """The ends of the groups: at most the number of rows, and at least the end of the group before (0 at first)."""
    ends, last = [], 0
    for end in group_end.tolist():
        last = max(last, min(end, num_rows))
        ends.append(last)
    return ends


def grouped_gemm(a: Tensor, b: Tensor, group_end: Tensor) -> Tensor:
    """The product of every row with the matrix of its group."""
    parts, start = [], 0
    for matrix, end in zip(b, ends_of(group_end, a.shape[0]), strict=True):
        parts.append(a[start:end].float() @ matrix.float().T)
        start = end
    behind = a.new_zeros(a.shape[0] - start, b.shape[1], dtype=torch.float32)
    return torch.cat([*parts, behind]).to(a.dtype)


def grouped_gemm_bwd(dd: Tensor, a: Tensor, b: Tensor, group_end: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `grouped_gemm`."""
    da, db, start = torch.zeros_like(a), torch.zeros_like(b), 0
    for group, end in enumerate(ends_of(group_end, a.shape[0])):
        da[start:end] = (dd[start:end].float() @ b[group].float()).to(a.dtype)
        db[group] = (dd[start:end].float().T @ a[start:end].float()).to(b.dtype)
        start = end
    return da, db
