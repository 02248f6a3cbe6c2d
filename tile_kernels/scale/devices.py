"""Run a distributed tile program on GPUs: one process per device, or several ranks of one process on one GPU.

Nothing here measures or claims the speed of links. The engine for many machines stays `torch.distributed`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tile_kernels.core import cache, check
from tile_kernels.core.errors import ArgumentError, CompileError, LaunchError, UnsupportedError
from tile_kernels.core.jit import cache_dir
from tile_kernels.core.knobs import knobs
from tile_kernels.scale.language import EPOCH, EPOCH_WORD, FAILED_WORD, LIMIT_WORD, Declared, declarations

_THREADS_PER_SM, _REGISTERS_PER_SM, _BLOCKS_PER_SM = 2048, 65536, 32
_RESERVED_SHARED = 1024  # bytes of shared memory that a block needs besides its own
_POLL = 0.001  # seconds between two looks at an event
_SPARE = 5.0  # seconds beyond the limit of the waits, after which the host gives up


class Compiled:
    """A kernel, compiled for the GPU of one device index; the library stays in the directory of compiled kernels."""

    def __init__(self, prim_func: Any, device_index: int) -> None:
        from tile_kernels.core import gpus, nvcc

        self.arch = gpus.arch_of(device_index)
        self.source, self.shared = nvcc.lower(prim_func, {}, self.arch)
        self.call = nvcc.load_function(library_of(prim_func, self.source, self.arch))

    @functools.cached_property
    def registers(self) -> int:
        """Registers of a thread, from ptxas."""
        from tile_kernels.core import nvcc

        return nvcc.resources(self.source, self.arch)['registers']


def library_of(prim_func: Any, source: str, arch: str) -> Path:
    """The path of the compiled kernel; compiles it if no process has done so before.

    Args:
        prim_func: A `T.prim_func`.
        source: Its CUDA source.
        arch: The architecture.
    """
    from tile_kernels.core import nvcc

    versions = {'tilelang': nvcc.tilelang_version(), **cache.runtime()}
    parts = (source, prim_func.script(), arch, repr(sorted(versions.items())))
    digest = hashlib.sha256('\n'.join(parts).encode()).hexdigest()[:24]
    name = str(prim_func.attrs['global_symbol'])
    entry = cache.Entry(cache_dir(), arch, f'scale.{name}-{digest}')
    with entry.lock():
        found, _ = entry.find(may_compile=not knobs.disable_jit)
        if found is not None:
            return found
        if knobs.disable_jit:
            raise CompileError(
                f'scale.{name} for {arch} is not in {cache_dir()} and TK_DISABLE_JIT is set; run it once without'
            )
        built = Path(_folder().name) / f'{name}-{digest}.so'
        nvcc.compile_library(prim_func, {}, arch, built)
        release = nvcc.nvcc_version()
        about = {'kernel': f'scale.{name}', 'arch': arch, 'tilelang': versions['tilelang']}
        try:
            cache.store(built, entry.path(release), {**about, 'nvcc': '.'.join(map(str, release))})
        except OSError:  # without a writable directory, the library lives as long as the process
            return built
        built.unlink()
    return entry.path(release)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    """Libraries of this process that cannot be stored."""
    return tempfile.TemporaryDirectory(prefix='tile_kernels-')


@functools.lru_cache(maxsize=64)
def compiled_for(prim_func: Any, device_index: int) -> Compiled:
    """The compiled kernel, kept for later calls."""
    return Compiled(prim_func, device_index)


def run(kernel: Any, group: Any, *args: Any, timeout: float = 30.0) -> None:
    """Run a kernel on the GPUs of a process group, whose ranks are on one node. All ranks call it together.

    The ranks meet through PyTorch's symmetric memory. The call returns when the kernel has ended.

    Args:
        kernel: A `T.prim_func`.
        group: The process group.
        *args: Arguments of this rank, in the order of the parameters: for symmetric tensors what `empty` returned, for
            signal pads None.
        timeout: Seconds after which a wait gives up.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError('scale.run: needs one GPU per rank, got none; use scale.simulate on a CPU')
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(f'scale.run: group must be a process group, got {type(group).__name__}')
    rank, world, device = dist.get_rank(group), dist.get_world_size(group), torch.cuda.current_device()
    prim_func, known = _checked('scale.run', kernel, [args], world)
    compiled = compiled_for(prim_func, device)
    values, pads = list(args), []
    for position, declared in enumerate(known):
        if declared is None:
            continue
        if declared.is_pad:
            tensor, addresses = _group_pad(prim_func, position, declared, group, device)
            pads.append(tensor)
        else:
            addresses = _addresses(args[position], group)
        values[position] = _table(addresses, device)
    for pad in pads:
        _arm(pad, timeout)
    torch.cuda.current_stream().synchronize()
    compiled.call(*values)
    _finish('scale.run', [rank], [torch.cuda.current_stream()], [pads], timeout)


def empty(*shape: int, dtype: torch.dtype, group: Any) -> Tensor:
    """A symmetric tensor: memory of this GPU that the other ranks of a group can access. All ranks call it together.

    Args:
        *shape: Its extents, the same on all ranks.
        dtype: Its element type.
        group: The process group.

    Raises:
        UnsupportedError: PyTorch cannot share memory between these ranks; the message says why.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError('scale.empty: needs one GPU per rank, got none; use scale.simulate on a CPU')
    from torch.distributed import _symmetric_memory as symmetric

    with _explained():
        tensor = symmetric.empty(*shape, dtype=dtype, device=torch.device('cuda', torch.cuda.current_device()))
    _addresses(tensor, group)
    return tensor


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say what the ranks need if PyTorch cannot share memory between them."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition('\n')[0]
        raise UnsupportedError(
            f'scale: the ranks cannot share memory; they must be on GPUs of one node that access each other ({reason})'
        ) from error


def _addresses(tensor: Tensor, group: Any) -> list[int]:
    """The address of a symmetric tensor on every rank of a group."""
    from torch.distributed import _symmetric_memory as symmetric

    with _explained():
        handle = symmetric.rendezvous(tensor, group)
    inside = tensor.data_ptr() - handle.buffer_ptrs[handle.rank]  # a pool may have placed it inside a buffer
    return [start + inside for start in handle.buffer_ptrs]


_PADS: dict[tuple[Any, int, str], tuple[Tensor, list[int]]] = {}


def _group_pad(prim_func: Any, position: int, declared: Declared, group: Any, device: int) -> tuple[Tensor, list[int]]:
    """The signal pad of this rank for a kernel, made at its first run. PyTorch's own pads must stay zero."""
    key = prim_func, position, group.group_name
    if key not in _PADS:
        pad = empty(*declared.shape, dtype=torch.int64, group=group).zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)
        _PADS[key] = pad, _addresses(pad, group)
    return _PADS[key]


def on_one_gpu(
    kernel: Any, world: int, args: Callable[[int], tuple[Any, ...]], timeout: float = 30.0, launches: int = 1
) -> None:
    """Run all ranks of a kernel on the current GPU: one process, one stream for each rank.

    This tests the generated code. It says nothing about the speed of links.

    Args:
        kernel: A `T.prim_func`.
        world: Number of ranks.
        args: Gives the arguments of each rank, as for `simulate`, on the GPU.
        timeout: Seconds after which a wait gives up.
        launches: How often each rank runs the kernel.

    Raises:
        UnsupportedError: There is no GPU, or the blocks of all ranks cannot be resident together.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError('scale.on_one_gpu: needs a GPU, got none; use scale.simulate on a CPU')
    given = [tuple(args(rank)) for rank in range(world)]
    prim_func, known = _checked('scale.on_one_gpu', kernel, given, world)
    device = torch.cuda.current_device()
    compiled = compiled_for(prim_func, device)
    blocks, threads = launch_size(prim_func)
    properties = torch.cuda.get_device_properties(device)
    shared = int(getattr(properties, 'shared_memory_per_multiprocessor', 228 << 10))
    room = properties.multi_processor_count  # every SM holds a block
    if blocks * world > room:
        room *= resident_blocks(threads, compiled.registers, compiled.shared, shared)
    check_resident(blocks, world, room)
    pads: list[list[Tensor]] = [[] for _ in range(world)]
    tables: dict[int, Tensor] = {}
    for position, declared in enumerate(known):
        if declared is None:
            continue
        parts = [values[position] for values in given]
        if declared.is_pad:
            parts = [torch.zeros(declared.shape, dtype=torch.int64, device='cuda') for _ in range(world)]
            for rank, pad in enumerate(parts):
                pads[rank].append(pad)
                _arm(pad, timeout)
        tables[position] = _table([part.data_ptr() for part in parts], device)
    streams = [torch.cuda.Stream(device) for _ in range(world)]
    torch.cuda.synchronize(device)  # nothing may wait for memory or modules once a kernel spins
    for launch in range(launches):
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if launch:
                    _next_epoch(pads[rank])
                compiled.call(*(tables.get(position, value) for position, value in enumerate(given[rank])))
    _finish('scale.on_one_gpu', list(range(world)), streams, pads, timeout)


def check_resident(blocks: int, world: int, room: int) -> None:
    """Raise if the blocks of all ranks cannot run at the same time."""
    if blocks * world > room:
        raise UnsupportedError(
            f'scale.on_one_gpu: the {world} ranks need {blocks * world} resident blocks, the GPU holds {room}; '
            'use fewer ranks or a smaller grid'
        )


def resident_blocks(threads: int, registers: int, shared: int, shared_per_sm: int) -> int:
    """Blocks of a kernel that one SM holds.

    Args:
        threads: Threads of a block.
        registers: Registers of a thread.
        shared: Bytes of shared memory of a block.
        shared_per_sm: Bytes of shared memory of an SM.
    """
    warps = -(-threads // 32)
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    limits = (
        _BLOCKS_PER_SM,
        _THREADS_PER_SM // (warps * 32),
        _REGISTERS_PER_SM // (warps * per_warp),
        shared_per_sm // (shared + _RESERVED_SHARED),
    )
    return min(limits)


def launch_size(prim_func: Any) -> tuple[int, int]:
    """Number of blocks and threads of a block of a kernel, whose grid must be a number."""
    from tvm.tirx.stmt_functor import post_order_visit

    blocks, threads = [], [1]

    def visit(node: Any) -> None:
        kind = type(node).__name__
        if kind == 'For' and node.thread_binding is not None:
            if str(node.thread_binding.thread_tag).startswith('blockIdx'):
                blocks.append(node.extent)
        elif kind == 'SBlock' and 'tl.launch_threads' in node.annotations:
            threads[0] = int(torch.tensor([int(part) for part in node.annotations['tl.launch_threads']]).prod())

    post_order_visit(prim_func.body, visit)
    total = 1
    for extent in blocks:
        if type(extent).__name__ != 'IntImm':
            raise ArgumentError(f'scale: the grid of the kernel must be a number, got {extent}')
        total *= int(extent)
    return total, threads[0]


def _checked(name: str, kernel: Any, given: list[tuple[Any, ...]], world: int) -> tuple[Any, list[Declared | None]]:
    """The kernel and its declarations, after a check of the arguments of all given ranks."""
    prim_func = getattr(kernel, 'prim_func', kernel)
    if not hasattr(prim_func, 'buffer_map'):
        raise ArgumentError(f'{name}: kernel must be a T.prim_func, got {type(kernel).__name__}')
    known = declarations(prim_func)
    for args in given:
        if len(args) != len(known):
            raise ArgumentError(f'{name}: the kernel takes {len(known)} arguments, got {len(args)}')
        for declared, value in zip(known, args, strict=True):
            if declared is None:
                continue
            check.equal(declared.world, world, 'world of the kernel')
            if declared.is_pad and value is not None:
                raise ArgumentError(f'{name}: signal pads must be None, got {type(value).__name__}')
            if not declared.is_pad and (not isinstance(value, Tensor) or tuple(value.shape) != declared.shape):
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ArgumentError(f'{name}: a symmetric tensor must have shape {declared.shape}, got {got}')
    return prim_func, known


def _table(addresses: list[int], device: int) -> Tensor:
    """The addresses of a symmetric tensor, in memory of the GPU."""
    return torch.tensor(addresses, dtype=torch.int64, device=f'cuda:{device}').view(torch.uint64)


def _arm(pad: Tensor, timeout: float) -> None:
    """Set the limit of the waits, and begin a new epoch."""
    pad[LIMIT_WORD] = int(timeout * 1e9)
    pad[EPOCH_WORD] += EPOCH


def _next_epoch(pads: list[Tensor]) -> None:
    for pad in pads:
        pad[EPOCH_WORD].add_(EPOCH)


def _finish(name: str, ranks: list[int], streams: list[Any], pads: list[list[Tensor]], timeout: float) -> None:
    """Wait for the kernels; a wait that gave up becomes an error that names the missing rank."""
    events = [stream.record_event() for stream in streams]
    deadline = time.monotonic() + timeout + _SPARE
    while not all(event.query() for event in events):
        if time.monotonic() > deadline:
            raise LaunchError(
                f'{name}: the kernel has not ended after {timeout + _SPARE:.0f} s; it waits for no signal'
            )
        time.sleep(_POLL)
    for rank, of_rank in zip(ranks, pads, strict=True):
        for pad in of_rank:
            missing = int(pad[FAILED_WORD])
            if missing:
                pad[FAILED_WORD] = 0
                raise LaunchError(
                    f'{name}: rank {rank} waited {timeout:.0f} s for a signal of rank {missing - 1}, which did not come'
                )
