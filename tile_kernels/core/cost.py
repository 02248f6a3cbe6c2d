"""What an op must move and multiply, and how long the hardware needs for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core.gpus import DEFAULT_GPU, Gpu


@dataclass(frozen=True)
class Cost:
    """Bytes an op must move through device memory, each input read once, each output written once, and its products.

    `flops` counts the operations of matrix products, whose operands have elements of `dtype`; others are not counted.
    """

    bytes: int
    flops: int = 0
    dtype: torch.dtype = torch.bfloat16

    def floor_us(self, gpu: Gpu = DEFAULT_GPU) -> float:
        """Microseconds at the published bandwidth or the published peak of products, the longer: none is faster."""
        return max(self.bytes / gpu.bandwidth, self.flops / gpu.peaks[self.dtype]) * 1e6

    def copy_us(self, gpu: Gpu = DEFAULT_GPU) -> float:
        """Microseconds a device-to-device copy of the same bytes takes: the yardstick of the benchmarks."""
        return self.bytes / gpu.copy_bandwidth * 1e6


def count_product(static: Sequence[Any], args: Sequence[Any]) -> int:
    """Operations of a product of (rows, k) and (n, k), where the static arguments begin with n and k, in any order.

    The first argument has the rows. Where only the device knows how many of them count, all do.
    """
    return 2 * args[0].shape[0] * static[0] * static[1]


def touched_bytes(x: Tensor) -> int:
    """Bytes of the distinct elements of `x`; a broadcast (stride 0) dimension counts once."""
    count = x.element_size()
    for extent, stride in zip(x.shape, x.stride(), strict=True):
        count *= 1 if stride == 0 else extent
    return count
