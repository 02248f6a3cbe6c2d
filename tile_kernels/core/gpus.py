"""What the library knows about GPUs: architectures, speeds of memory and of products. Nothing here runs at import."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import torch

from tile_kernels.core.errors import ArgumentError, UnsupportedError


@dataclass(frozen=True)
class DeviceSpec:
    """The numbers a cost floor needs: datasheet bandwidth and the one a large copy reaches (bytes per second).

    `flops` are the operations per second of dense products on tensor cores, by the bytes of an operand's element.
    """

    name: str
    bandwidth: float
    copy_bandwidth: float
    flops: dict[int, float]


#: Copy bandwidth is measured where a device is listed in benchmarks/results, else 88 % of the datasheet. Operations per
#: second are the published peaks without sparsity, of the SXM modules: bf16 and fp16, and fp8.
DEVICES: dict[str, DeviceSpec] = {
    'h200': DeviceSpec('H200', 4.8e12, 4.24e12, {2: 989e12, 1: 1979e12}),
    'h100': DeviceSpec('H100', 3.35e12, 2.95e12, {2: 989e12, 1: 1979e12}),
    'b200': DeviceSpec('B200', 8.0e12, 7.0e12, {2: 2250e12, 1: 4500e12}),
}

#: Architectures kernels are lowered for in the tests; others of the same families work as well.
ARCHS = ('sm_80', 'sm_90a', 'sm_100a', 'sm_120a')

#: Lowest compute capability anything here runs on.
MIN_ARCH = 80


def arch_number(arch: str) -> int:
    """`'sm_90a'` -> 90."""
    return int(arch.removeprefix('sm_').rstrip('af'))


def arch_name(number: int) -> str:
    """90 -> `'sm_90a'`: from Hopper on the `a` variant, which wgmma and setmaxnreg need."""
    return f'sm_{number}a' if number >= 90 else f'sm_{number}'


def check_arch(arch: str) -> str:
    """Refuse what is no architecture, or an old one; returns the name its devices look for kernels under."""
    named = isinstance(arch, str) and re.fullmatch('sm_[0-9]+[af]?', arch) is not None
    if not named or arch_number(arch) < MIN_ARCH:
        raise ArgumentError(f'arch must be a name like sm_90a, sm_{MIN_ARCH} or newer, got {arch!r}')
    return arch_name(arch_number(arch))


@functools.cache
def arch_of(device_index: int) -> str:
    """Target architecture of a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device_index)
    number = 10 * major + minor
    if number < MIN_ARCH:
        name = torch.cuda.get_device_name(device_index)
        raise UnsupportedError(
            f'device: {name} (sm_{number}) is not supported; needs compute capability 8.0 (Ampere) or newer'
        )
    return arch_name(number)


@functools.cache
def num_sms_of(device_index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count
