"""Registers and shared memory of a kernel, and whether a GPU can launch it."""

from __future__ import annotations

from typing import Any

from tile_kernels.core import nvcc
from tile_kernels.core.gpus import Gpu
from tile_kernels.sight.count import Counts, count
from tile_kernels.sight.lower import lower
from tile_kernels.sight.subject import resolve

MAX_THREADS = 1024


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
        for counts in count(subject, lower(subject)):
            reason = reason_against(counts, subject.gpu)
            if reason is not None:
                return reason
    return True


def reason_against(counts: Counts, gpu: Gpu) -> str | None:
    """The first limit of the GPU that a launch exceeds, in one sentence."""
    if counts.threads > MAX_THREADS:
        return f'{counts.name}: a block has at most {MAX_THREADS} threads, got {counts.threads}'
    if counts.shared > gpu.smem_per_block:
        asked, most = counts.shared / 1024, gpu.smem_per_block >> 10
        return f'{counts.name}: a block of the {gpu.name} has at most {most} KB of shared memory, got {asked:.0f} KB'
    if counts.cluster > gpu.max_cluster:
        return f'{counts.name}: a cluster of the {gpu.name} has at most {gpu.max_cluster} blocks, got {counts.cluster}'
    for axis, extent, most in zip('xyz', counts.grid, ((1 << 31) - 1, 65535, 65535), strict=True):
        if not 1 <= extent <= most:
            return f'{counts.name}: the grid has 1 to {most} blocks in {axis}, got {extent}'
    return None
