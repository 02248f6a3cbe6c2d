"""Inputs of the cases of RMS norm."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core.cases import grid


def sample_rows(num_tokens: int, hidden: int, dtype: torch.dtype, pitch: int | None = None) -> Tensor:
    """Random rows whose squares add up without rounding, so that results do not depend on the order of the sum."""
    magnitude = torch.exp2(torch.randint(-5, 2, (num_tokens, 1))).to(dtype)
    return small_integers(num_tokens, hidden, 7, dtype, pitch).mul_(magnitude)


def small_integers(num_tokens: int, hidden: int, most: int, dtype: torch.dtype, pitch: int | None = None) -> Tensor:
    """Random rows of integers up to `most`; with a pitch they are strided."""
    integers = torch.randint(-most, most + 1, (num_tokens, hidden), dtype=torch.int8)
    return torch.empty(num_tokens, pitch or hidden, dtype=dtype).narrow(1, 0, hidden).copy_(integers)


def sample_weight(hidden: int, dtype: torch.dtype | None) -> Tensor | None:
    """Random weights around one, or None."""
    return None if dtype is None else (1 + 0.2 * torch.randn(hidden)).to(dtype)


def norm_case(
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    weight: torch.dtype | None = None,
    pitch: int | None = None,
    out_scale: float = 1.0,
) -> dict:
    """Arguments of `norm_forward`."""
    x = sample_rows(num_tokens, hidden, dtype, pitch)
    return dict(x=x, weight=sample_weight(hidden, weight), eps=1e-5, out_scale=out_scale)


def add_norm_case(num_tokens: int, hidden: int, dtype: torch.dtype, pitch: int | None = None, **case: Any) -> dict:
    """Rows and a residual of one magnitude, so that the squares of their sum add up without rounding as well."""
    x, residual = (small_integers(num_tokens, hidden, 3, dtype, pitch) for _ in range(2))
    return norm_case(num_tokens, hidden, dtype, **case) | dict(x=x, residual=residual)


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
SMOKE = (
    grid(num_tokens=[0, 1, 5], hidden=[128], dtype=BF16, weight=BF16)  # several rows to a block
    + grid(num_tokens=[3], hidden=[1344], dtype=BF16, weight=F32, out_scale=[0.5])  # a shorter last vector
    + grid(num_tokens=[2], hidden=[99], dtype=F16, pitch=[101])  # odd rows, odd stride
    + grid(num_tokens=[2], hidden=[2304], dtype=F32, weight=BF16, pitch=[2400])
)
FULL = (
    grid(num_tokens=[4001], hidden=[576, 1024, 2560, 7168, 8192, 16384], dtype=BF16, weight=BF16)
    + grid(num_tokens=[257], hidden=[1, 99, 4100, 32768], dtype=F32, weight=F32)
    + grid(num_tokens=[3], hidden=[65536], dtype=F16, weight=[None])
    + grid(num_tokens=[300001], hidden=[7168], dtype=BF16, weight=BF16)  # more than 2^31 elements
    + grid(num_tokens=[300001], hidden=[136], dtype=BF16, weight=BF16, pitch=[8192])
)
BENCH = (
    grid(num_tokens=[64, 4096, 16384], hidden=[7168], dtype=BF16, weight=BF16)
    + grid(num_tokens=[8001], hidden=[1024, 2560, 4096, 16384], dtype=BF16, weight=BF16)
    + grid(num_tokens=[32001], hidden=[1344], dtype=BF16, weight=F32)
    + grid(num_tokens=[8001], hidden=[4096], dtype=F32, weight=F32)
)
