"""The bytes an op must move, the operations it must compute, and the time the hardware needs for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core.gpus import DEFAULT_GPU, Gpu


@dataclass(frozen=True)
class Cost:
    """Bytes that an op moves through device memory and its operations; it reads and writes each tensor once.

    `flops` counts only the operations of matrix products; `dtype` is the element type of their operands.
    """

    bytes: int
    flops: int = 0
    dtype: torch.dtype = torch.bfloat16

    def floor_us(self, gpu: Gpu = DEFAULT_GPU) -> float:
        """The least time in microseconds: bytes at peak bandwidth or operations at peak rate, the longer one."""
        return max(self.bytes / gpu.bandwidth, self.flops / gpu.peaks[self.dtype]) * 1e6

    def copy_us(self, gpu: Gpu = DEFAULT_GPU) -> float:
        """Microseconds of a device-to-device copy of the same bytes, to which the benchmarks compare."""
        return self.bytes / gpu.copy_bandwidth * 1e6


def count_product(static: Sequence[Any], args: Sequence[Any]) -> int:
    """Operations of a product of (rows, k) and (n, k); the static arguments begin with n and k, in any order.

    The first argument has the rows. If only the device knows how many rows count, all rows count here.
    """
    return 2 * args[0].shape[0] * static[0] * static[1]


def touched_bytes(x: Tensor) -> int:
    """Bytes of the distinct elements of `x`; a broadcast (stride 0) dimension counts once."""
    count = x.element_size()
    for extent, stride in zip(x.shape, x.stride(), strict=True):
        count *= 1 if stride == 0 else extent
    return count
