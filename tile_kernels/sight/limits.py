"""Registers and shared memory of a kernel, and whether a GPU can launch it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from tile_kernels.core import nvcc
from tile_kernels.core.gpus import Gpu
from tile_kernels.sight.count import Counts, launch_sizes
from tile_kernels.sight.lower import lower
from tile_kernels.sight.subject import resolve

MAX_THREADS = 1024
#: Registers of an SM; a warp gets multiples of 256.
REGISTERS, REGISTER_UNIT = 65536, 256


@dataclass(frozen=True)
class Occupancy:
    """How much of a kernel an SM holds at once.

    Attributes:
        blocks: resident blocks of an SM; 0 if not even one fits.
        warps: their warps.
        of_warps: the most warps that an SM holds.
        limit: what allows no further block: `threads`, `registers`, `shared memory` or `blocks`.
    """

    blocks: int
    warps: int
    of_warps: int
    limit: str

    def __str__(self) -> str:
        noun = 'block' if self.blocks == 1 else 'blocks'
        return f'{self.blocks} {noun}, {self.warps} of {self.of_warps} warps per SM, limited by {self.limit}'


class Block(Protocol):
    """The size of a block."""

    @property
    def threads(self) -> int:
        """Its threads."""

    @property
    def shared(self) -> int:
        """Its bytes of dynamic shared memory."""


def occupancy(counts: Block, gpu: Gpu, registers: int | None = None, static_shared: int = 0) -> Occupancy:
    """Resident blocks of an SM; without `registers` (of a thread) these do not limit."""
    warps = -(-counts.threads // 32)
    allowed = {
        'threads': gpu.threads_per_sm // (32 * warps),
        'shared memory': gpu.smem_per_sm // (counts.shared + static_shared + 1024),
        'blocks': gpu.blocks_per_sm,
    }
    if registers:
        each = -(-32 * registers // REGISTER_UNIT) * REGISTER_UNIT
        allowed['registers'] = REGISTERS // each // 4 * 4 // warps  # the four quarters of an SM share evenly
    limit = min(allowed, key=lambda name: allowed[name])
    return Occupancy(allowed[limit], allowed[limit] * warps, gpu.threads_per_sm // 32, limit)


def resources(kernel: Any, *args: Any, device: str = 'h200', **named: Any) -> dict[str, dict[str, int]]:
    """Registers, spills, stack and shared memory of every launch, by kernel name; needs nvcc but no GPU."""
    found = {}
    for subject in resolve(kernel, *args, device=device, **named):
        lowered = lower(subject)
        shared = max(int(f.attrs.get('dyn_shared_memory_buf', 0)) for f in lowered.functions.values())
        found[subject.name] = nvcc.resources(lowered.source, subject.gpu.target) | {'dynamic_shared': shared}
    return found


def fits(kernel: Any, *args: Any, device: str = 'h200', **named: Any) -> bool | str:
    """True if the GPU can launch the kernel, else the sentence why it cannot; needs neither a GPU nor nvcc."""
    for subject in resolve(kernel, *args, device=device, **named):
        for counts in launch_sizes(subject, lower(subject)):
            reason = reason_against(counts, subject.gpu)
            if reason is not None:
                return reason
    return True


def reason_against(counts: Counts, gpu: Gpu, registers: int | None = None) -> str | None:
    """The first limit of the GPU that a launch exceeds, in one sentence; `registers` are those of a thread."""
    if counts.threads > MAX_THREADS:
        return f'{counts.name}: a block has at most {MAX_THREADS} threads, got {counts.threads}'
    if registers and occupancy(replace(counts, shared=0), gpu, registers).blocks == 0:
        return (
            f'{counts.name}: {counts.threads} threads of {registers} registers need more than the {REGISTERS} of an SM'
        )
    if counts.shared > gpu.smem_per_block:
        asked, most = counts.shared / 1024, gpu.smem_per_block >> 10
        return f'{counts.name}: a block of the {gpu.name} has at most {most} KB of shared memory, got {asked:.0f} KB'
    if counts.cluster > gpu.max_cluster:
        return f'{counts.name}: a cluster of the {gpu.name} has at most {gpu.max_cluster} blocks, got {counts.cluster}'
    for axis, extent, most in zip('xyz', counts.grid, ((1 << 31) - 1, 65535, 65535), strict=True):
        if not 1 <= extent <= most:
            return f'{counts.name}: the grid has 1 to {most} blocks in {axis}, got {extent}'
    return None
