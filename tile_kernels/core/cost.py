"""What an op must move and multiply, and how long the hardware needs for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tile_kernels.core.gpus import DEVICES, DeviceSpec


@dataclass(frozen=True)
class Cost:
    """Bytes an op must move through device memory, each input read once, each output written once, and its products.

    `flops` counts the operations of matrix products, whose operands have elements of `operand_bytes`; others are not
    counted.
    """

    bytes: int
    flops: int = 0
    operand_bytes: int = 2

    def floor_us(self, device: DeviceSpec = DEVICES['h200']) -> float:
        """Microseconds at the published bandwidth or the published peak of products, the longer: none is faster."""
        return max(self.bytes / device.bandwidth, self.flops / device.flops[self.operand_bytes]) * 1e6

    def copy_us(self, device: DeviceSpec = DEVICES['h200']) -> float:
        """Microseconds a device-to-device copy of the same bytes takes: the yardstick of the benchmarks."""
        return self.bytes / device.copy_bandwidth * 1e6


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
