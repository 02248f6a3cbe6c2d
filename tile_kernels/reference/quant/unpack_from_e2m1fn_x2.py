"""What unpacking fp4 means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

#: Magnitudes of e2m1 by code.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_from_e2m1fn_x2(x: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of packed e2m1 bytes: (..., n) int8 or uint8 -> (..., 2n), lower nibble first."""
    if x.dim() == 0:
        raise ValueError('unpack_from_e2m1fn_x2: x must have at least one dimension, got a scalar')
    bytes_ = x.view(torch.uint8)
    code = torch.stack((bytes_ % 16, bytes_ // 16), dim=-1).flatten(-2).long()
    values = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), device=x.device)
    return values[code].to(out_dtype)
