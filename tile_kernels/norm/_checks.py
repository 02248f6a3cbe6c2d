"""Host checks of RMS norm; rows of two or three dimensions, and memory of the caller."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Bytes of the longest row that fits into the registers of a team of warps.
MAX_ROW_BYTES = 128 << 10


# Arguments of ops ---------------------------------------------------------------------------


def check_rows(x: Tensor, name: str = 'x') -> tuple[int, int]:
    """Shape of rows that can be normalized."""
    num_tokens, hidden = check.shape(x, name, 'num_tokens hidden', dtype=DTYPES)
    check.unit_stride(x, name)
    check.at_least(hidden, 1, 'hidden')
    check.at_most(hidden, MAX_ROW_BYTES // x.dtype.itemsize, 'hidden')
    return num_tokens, hidden


def check_like(like: Tensor, **tensors: Tensor | None) -> None:
    """Tensors (given by keyword; None is skipped) must have the shape, dtype and device of `like`, and dense rows."""
    num_tokens, hidden = like.shape
    for name, x in tensors.items():
        if x is not None:
            check.shape(x, name, 'num_tokens hidden', dtype=like.dtype, num_tokens=num_tokens, hidden=hidden)
            check.unit_stride(x, name)
            check.same_device(x=like, **{name: x})


def check_weight(x: Tensor, weight: Tensor | None) -> torch.dtype | None:
    """Dtype of the weight of each channel, if there is one."""
    if weight is None:
        return None
    check.shape(weight, 'weight', 'hidden', dtype=DTYPES, hidden=x.shape[1])
    check.contiguous(weight, 'weight')
    check.same_device(x=x, weight=weight)
    return weight.dtype


# Arguments of public functions --------------------------------------------------------------


def as_rows(x: Tensor, name: str) -> Tensor:
    """(batch, tokens, hidden) as (tokens, hidden); a copy only if the strides leave no other way."""
    if check.tensor(x, name).dim() == 2:
        return x
    if x.dim() != 3:
        check.fail(name, 'must be (num_tokens, hidden) or (batch, num_tokens, hidden)', check.describe(x))
    return x.reshape(-1, x.shape[2])


def out_rows(x: Tensor | None, like: Tensor, name: str) -> Any:
    """Memory of the caller in the shape of `like`, as rows; it is written, so it must not be copied."""
    if x is None or check.tensor(x, name).dim() == 2:
        return x
    if x.shape != like.shape:
        check.fail(name, f'must be {tuple(like.shape)}', check.describe(x))
    return viewed(x, name, x.shape[0] * x.shape[1], x.shape[2])


def viewed(x: Tensor, name: str, *shape: int) -> Tensor:
    """Memory of the caller in another shape: never a copy, which would be written instead."""
    try:
        return x.view(shape)
    except RuntimeError:
        check.fail(name, f'must be viewable as {shape}', check.describe(x))


def shaped_like(rows: Tensor, like: Tensor) -> Tensor:
    """Rows in the shape of `like`; memory of the caller that has it already is returned as it came."""
    return rows if rows.shape == like.shape else rows.view(like.shape)


def check_residual_out(residual: Tensor | None, residual_out: Tensor | None) -> None:
    """Memory for the sum must come with a residual."""
    if residual_out is not None and residual is None:
        check.fail('residual_out', 'must come with residual', 'no residual')
