"""What the library knows about GPUs: architecture, SMs, memory, peaks. Nothing here runs at import."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from tile_kernels.core.errors import ArgumentError, UnsupportedError

#: Architectures kernels are lowered for in the tests; others of the same families work as well.
ARCHS = ('sm_80', 'sm_90a', 'sm_100a', 'sm_120a')

#: Lowest compute capability anything here runs on.
MIN_ARCH = 80

#: SMs that kernels assume where the number of thread blocks fixes the order of a sum: those of an H200. This is a
#: constant, so that results have the same bits on every GPU.
SUM_SMS = 132


@dataclass(frozen=True)
class Gpu:
    """A model of GPU, or a device: what `serves` and `choose` of a kernel and the floor of a cost may depend on."""

    name: str
    arch: int  #: compute capability, 90 for Hopper
    sms: int
    smem_per_block: int  #: bytes of shared memory a block may ask for
    l2_bytes: int
    bandwidth: float  #: published, bytes per second
    copy_bandwidth: float  #: what a large copy reaches
    #: FLOP/s of dense products on tensor cores by element type; float32 stands for TF32.
    peaks: Mapping[torch.dtype, float] = field(hash=False)

    @property
    def target(self) -> str:
        """The architecture as compilers name it: `'sm_90a'`."""
        return arch_name(self.arch)

    @property
    def has_wgmma(self) -> bool:
        """Products of warpgroups: Hopper alone."""
        return self.arch == 90

    @property
    def has_tma(self) -> bool:
        """Copies of tiles by the tensor memory accelerator."""
        return self.arch >= 90

    @property
    def max_cluster(self) -> int:
        """Thread blocks of a cluster, at most; 1 without clusters."""
        return 1 if self.arch < 90 else 16 if self.arch < 120 else 8

    def __str__(self) -> str:
        return f'{self.name} ({self.target})'


def _gpu(
    name: str,
    arch: int,
    sms: int,
    smem_kb: int,
    l2_mb: int,
    bandwidth: float,
    peaks: tuple[float, float, float],
    copy_bandwidth: float | None = None,
) -> Gpu:
    """Sizes in KB and MB, TB/s, and TFLOP/s of TF32, of half precision and of fp8. Copies reach 88 % unless given."""
    tf32, half, fp8 = (peak * 1e12 for peak in peaks)
    return Gpu(
        name,
        arch,
        sms,
        smem_kb << 10,
        l2_mb << 20,
        bandwidth * 1e12,
        (0.88 * bandwidth if copy_bandwidth is None else copy_bandwidth) * 1e12,
        {
            torch.float32: tf32,
            torch.bfloat16: half,
            torch.float16: half,
            torch.float8_e4m3fn: fp8,
            torch.float8_e5m2: fp8,
        },
    )


#: Known GPUs. The first of an architecture stands for it.
#:
#: Sources: NVIDIA's datasheets (H200, H100 SXM5, HGX B200, A100 80 GB SXM4, L40S) and its whitepapers on GA102, AD102
#: and Blackwell RTX give SMs, L2, bandwidth and peaks; these are without sparsity, of sums in float32. Shared memory is
#: from the CUDA programming guide, by compute capability. Ampere has no fp8 tensor cores: codes are widened, and the
#: peak is that of bfloat16. The copy of the H200 is measured (benchmarks/results).
GPUS: dict[str, Gpu] = {
    'h200': _gpu('H200', 90, 132, 227, 50, 4.8, (494.7, 989, 1979), copy_bandwidth=4.24),
    'h100': _gpu('H100', 90, 132, 227, 50, 3.35, (494.7, 989, 1979), copy_bandwidth=2.95),
    'b200': _gpu('B200', 100, 148, 227, 126, 8.0, (1125, 2250, 4500), copy_bandwidth=7.0),
    'a100': _gpu('A100', 80, 108, 163, 40, 2.039, (156, 312, 312)),
    'rtx3090': _gpu('RTX 3090', 86, 82, 99, 6, 0.936, (35.6, 71, 71)),
    'l40s': _gpu('L40S', 89, 142, 99, 96, 0.864, (183, 362, 733)),
    'rtx4090': _gpu('RTX 4090', 89, 128, 99, 72, 1.008, (82.6, 165.2, 330.3)),
    'rtx5090': _gpu('RTX 5090', 120, 170, 99, 96, 1.792, (104.8, 209.5, 419)),
}

#: The GPU of a dry run that names none.
DEFAULT_GPU = GPUS['h200']


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
        known = ', '.join(GPUS)
        raise ArgumentError(
            f'arch must be a name like sm_90a, sm_{MIN_ARCH} or newer, got {arch!r}; known GPUs are {known}'
        )
    return arch_name(arch_number(arch))


def gpu_named(name: str) -> Gpu:
    """A GPU by its name in `GPUS`, or by an architecture: the first known GPU of it, or of the closest older one."""
    if name in GPUS:
        return GPUS[name]
    number = arch_number(check_arch(name))
    closest = max(gpu.arch for gpu in GPUS.values() if gpu.arch <= number)
    gpu = next(gpu for gpu in GPUS.values() if gpu.arch == closest)
    return gpu if closest == number else replace(gpu, name=arch_name(number), arch=number)


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
    """The record of a CUDA device. Its speeds are those of the known GPU it is named after, by its share of the SMs."""
    properties = torch.cuda.get_device_properties(device_index)
    arch = arch_of(device_index)
    words = re.sub('[^a-z0-9]', '', properties.name.lower())
    known = next((gpu for key, gpu in GPUS.items() if key in words and gpu.target == arch), gpu_named(arch))
    sms = properties.multi_processor_count
    return replace(
        known,
        name=properties.name.removeprefix('NVIDIA '),
        sms=sms,
        smem_per_block=properties.shared_memory_per_block_optin,
        l2_bytes=properties.L2_cache_size,
        bandwidth=known.bandwidth * sms / known.sms,
        copy_bandwidth=known.copy_bandwidth * sms / known.sms,
        peaks={dtype: peak * sms / known.sms for dtype, peak in known.peaks.items()},
    )
