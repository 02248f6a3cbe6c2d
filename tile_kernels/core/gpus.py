"""Properties of GPUs: architecture, SMs, memory, peaks. Nothing here runs at import."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tile_kernels.core.errors import ArgumentError, UnsupportedError

#: The architectures for which the tests lower kernels; others of the same families work as well.
ARCHS = ('sm_80', 'sm_90a', 'sm_100a', 'sm_120a')

#: The lowest supported compute capability.
MIN_ARCH = 80

#: The number of SMs that kernels assume if the number of thread blocks fixes the order of a sum. It is that of an H200.
#: It is a constant, so that results have the same bits on every GPU.
SUM_SMS = 132


@dataclass(frozen=True)
class Gpu:
    """A GPU model or a device: all that `serves` and `choose` of a kernel and the floor of a cost may depend on."""

    name: str
    arch: int  #: compute capability, 90 for Hopper
    sms: int
    smem_per_block: int  #: maximum bytes of shared memory per block
    l2_bytes: int
    bandwidth: float  #: published, bytes per second
    copy_bandwidth: float  #: measured with a large copy
    #: Peak FLOP/s of dense matrix products on tensor cores by element type; float32 means TF32.
    peaks: Mapping[torch.dtype, float] = field(hash=False)
    threads_per_sm: int
    blocks_per_sm: int
    smem_per_sm: int  #: bytes of shared memory, of which each block takes 1 KB more than it asks for
    #: Measured numbers, see `SPEEDS`; empty for a GPU that was not measured.
    speeds: Mapping[str, float] = field(hash=False, default_factory=dict)

    @property
    def target(self) -> str:
        """The architecture as compilers name it: `'sm_90a'`."""
        return arch_name(self.arch)

    @property
    def has_wgmma(self) -> bool:
        """Whether the GPU has wgmma; only Hopper does."""
        return self.arch == 90

    @property
    def has_tma(self) -> bool:
        """Whether the GPU has the tensor memory accelerator (TMA)."""
        return self.arch >= 90

    @property
    def max_cluster(self) -> int:
        """Maximum number of thread blocks in a cluster; 1 without clusters."""
        return 1 if self.arch < 90 else 16 if self.arch < 120 else 8

    def stages(self, most: int, num_bytes: int) -> int:
        """How many stages of a pipeline, up to `most` and at least 2, the shared memory of a block holds."""
        return max(2, min(most, self.smem_per_block // num_bytes))

    def __str__(self) -> str:
        return f'{self.name} ({self.target})'


def _gpu(about: Mapping[str, Any]) -> Gpu:
    """The record of a device file."""
    numbers = {name: value for name, (value, _) in about['numbers'].items()}
    peaks = {getattr(torch, name): float(numbers[name]) for name in ('float32', 'bfloat16', 'float8_e4m3fn')}
    peaks |= {torch.float16: peaks[torch.bfloat16], torch.float8_e5m2: peaks[torch.float8_e4m3fn]}
    fields = ('sms', 'smem_per_block', 'l2_bytes', 'threads_per_sm', 'blocks_per_sm', 'smem_per_sm')
    speeds = {name: float(numbers[name]) for name in SPEEDS if name in numbers}
    return Gpu(
        about['name'],
        about['arch'],
        **{name: numbers[name] for name in fields},
        bandwidth=float(numbers['bandwidth']),
        copy_bandwidth=float(numbers['copy_bandwidth']),
        peaks=peaks,
        speeds=speeds,
    )


#: Numbers of a device file that only measurements give; `sight.predict` needs them.
SPEEDS = ('event_us', 'graph_us', 'next_us', 'stream_bandwidth', 'half_rate', 'alu_rate')

#: The device files, each number with its source.
DEVICES = Path(__file__).parents[1] / 'sight' / 'devices'

#: Known GPUs. The first GPU of an architecture represents it.
GPUS: dict[str, Gpu] = {
    name: _gpu(json.loads((DEVICES / f'{name}.json').read_text()))
    for name in ('h200', 'h100', 'b200', 'a100', 'rtx3090', 'l40s', 'rtx4090', 'rtx5090')
}

#: AMD architectures for which kernels can be lowered, and the KB of shared memory (LDS) of a block; nothing runs there.
AMD_SHARED_KB = {'gfx942': 64, 'gfx950': 160}

#: The GPU of a dry run without an explicit GPU.
DEFAULT_GPU = GPUS['h200']


def arch_number(arch: str) -> int:
    """`'sm_90a'` -> 90."""
    return int(arch.removeprefix('sm_').rstrip('af'))


def arch_name(number: int) -> str:
    """90 -> `'sm_90a'`: from Hopper on, the name has the `a` that wgmma and setmaxnreg need."""
    return f'sm_{number}a' if number >= 90 else f'sm_{number}'


def check_arch(arch: str) -> str:
    """Reject unknown and unsupported architectures; returns the name under which kernels are cached."""
    named = isinstance(arch, str) and re.fullmatch('sm_[0-9]+[af]?', arch) is not None
    if not named or arch_number(arch) < MIN_ARCH:
        known = ', '.join(GPUS)
        raise ArgumentError(
            f'arch must be a name like sm_90a, sm_{MIN_ARCH} or newer, got {arch!r}; known GPUs are {known}'
        )
    return arch_name(arch_number(arch))


def gpu_named(name: str) -> Gpu:
    """A GPU by its name in `GPUS`, or by an architecture: its first known GPU, or that of the closest older one.

    For an AMD architecture it is an A100 with other shared memory: kernels are chosen without wgmma, TMA and clusters.
    """
    if name in GPUS:
        return GPUS[name]
    if name in AMD_SHARED_KB:
        return replace(GPUS['a100'], name=name, smem_per_block=AMD_SHARED_KB[name] << 10, speeds={})
    number = arch_number(check_arch(name))
    closest = max(gpu.arch for gpu in GPUS.values() if gpu.arch <= number)
    gpu = next(gpu for gpu in GPUS.values() if gpu.arch == closest)
    return gpu if closest == number else replace(gpu, name=arch_name(number), arch=number, speeds={})


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
def cuda_gpu(device_index: int) -> Gpu:
    """The record of a CUDA device; its speeds are those of the known GPU of that name, scaled by the number of SMs."""
    properties = torch.cuda.get_device_properties(device_index)
    arch = arch_of(device_index)
    words = re.sub('[^a-z0-9]', '', properties.name.lower())
    named = next((gpu for key, gpu in GPUS.items() if key in words and gpu.target == arch), None)
    known = named or gpu_named(arch)
    sms = properties.multi_processor_count
    return replace(
        known,
        name=properties.name.removeprefix('NVIDIA '),
        sms=sms,
        smem_per_block=getattr(properties, 'shared_memory_per_block_optin', known.smem_per_block),
        l2_bytes=properties.L2_cache_size,
        bandwidth=known.bandwidth * sms / known.sms,
        copy_bandwidth=known.copy_bandwidth * sms / known.sms,
        peaks={dtype: peak * sms / known.sms for dtype, peak in known.peaks.items()},
        speeds=known.speeds if named is not None and sms == known.sms else {},
    )
