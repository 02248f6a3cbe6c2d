"""What an op must move, and how long the hardware needs for it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tile_kernels.core.device import DEVICES, DeviceSpec


@dataclass(frozen=True)
class Cost:
    """Bytes an op must move through device memory: each input read once, each output written once."""

    bytes: int

    def floor_us(self, device: DeviceSpec = DEVICES['h200']) -> float:
        """Microseconds the bytes take at the datasheet bandwidth: no implementation is faster."""
        return self.bytes / device.bandwidth * 1e6

    def copy_us(self, device: DeviceSpec = DEVICES['h200']) -> float:
        """Microseconds a device-to-device copy of the same bytes takes: the yardstick of the benchmarks."""
        return self.bytes / device.copy_bandwidth * 1e6


def touched_bytes(x: Tensor) -> int:
    """Bytes of the distinct elements of `x`; a broadcast (stride 0) dimension counts once."""
    count = x.element_size()
    for extent, stride in zip(x.shape, x.stride(), strict=True):
        count *= 1 if stride == 0 else extent
    return count
