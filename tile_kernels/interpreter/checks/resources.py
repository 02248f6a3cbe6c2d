"""Resource limits of a block: threads and shared memory, checked without lowering or by lowering."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tile_kernels.interpreter.errors import LoweringFailed, ResourceLimit, Site

MOST_THREADS = 1024  # per block
MOST_STATIC = 48 << 10  # bytes of shared memory without a request at the launch

#: Most bytes of shared memory per block, by compute capability; unknown GPUs get the largest value.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 120: 99 << 10, 121: 99 << 10}
MOST_SHARED = 227 << 10


def check_launch(body: Any, storages: dict[Any, Any], threads: int, site: Site) -> None:
    """Raise if a block has more threads, or needs more shared memory at a time, than any GPU provides.

    The compiler reuses the memory of dead buffers, so only buffers with overlapping lifetimes count.
    """
    if threads > MOST_THREADS:
        raise ResourceLimit(f'a block has {threads} threads, and no GPU allows more than {MOST_THREADS}', site)
    first, last = _lifetimes(body)
    sizes = {
        data: -(-storage.size * storage.dtype.bits // 8)
        for data, storage in storages.items()
        if storage.scope == 'shared' and isinstance(storage.size, int) and data in first
    }
    static = sum(size for data, size in sizes.items() if _scope(data) == 'shared')
    if static > MOST_STATIC:
        text = f'a block needs {static} bytes of static shared memory, and no GPU has more than {MOST_STATIC}'
        raise ResourceLimit(f"{text}; allocate it with scope 'shared.dyn'", site)
    for moment in set(first.values()):
        live = {data: size for data, size in sizes.items() if first[data] <= moment <= last[data]}
        if sum(live.values()) > MOST_SHARED:
            names = ', '.join(sorted(storages[data].name for data in live))
            text = f'a block needs {sum(live.values())} bytes of shared memory at a time ({names})'
            raise ResourceLimit(f'{text}, and no GPU has more than {MOST_SHARED}', site)


def _scope(data: Any) -> str:
    return str(getattr(data.type_annotation, 'storage_scope', ''))


def _lifetimes(body: Any) -> tuple[dict[Any, int], dict[Any, int]]:
    """First and last use of every buffer, by data variable, in the order of the program."""
    from tvm.tirx.stmt_functor import post_order_visit

    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    moments = 0

    def visit(node: Any) -> None:
        nonlocal moments
        if type(node).__name__ in ('BufferLoad', 'BufferStore'):
            moments += 1
            first.setdefault(node.buffer.data, moments)
            last[node.buffer.data] = moments

    post_order_visit(body, visit)
    return first, last


def check_lowering(prim_func: Any, pass_configs: dict[str, Any], arch: str) -> None:
    """Raise if TileLang rejects a kernel for an architecture, or if the kernel needs too much shared memory."""
    symbol = prim_func.attrs['global_symbol'] if prim_func.attrs and 'global_symbol' in prim_func.attrs else 'main'
    site = Site(str(symbol))
    known = tuple(sorted((key, value) for key, value in pass_configs.items() if isinstance(value, (bool, int, str))))
    error, needed = _lowered(prim_func, known, arch)
    if error:
        raise LoweringFailed(f'TileLang does not lower it for {arch}: {error}', site)
    from tile_kernels.core.gpus import arch_number

    most = SHARED_MEMORY.get(arch_number(arch), MOST_SHARED)
    if needed > most:
        raise ResourceLimit(f'a block asks for {needed} bytes of shared memory, and {arch} has {most}', site)


@lru_cache(maxsize=256)
def _lowered(prim_func: Any, pass_configs: tuple[tuple[str, Any], ...], arch: str) -> tuple[str, int]:
    """Why a kernel cannot be lowered ('' if it can), and the bytes of shared memory per block."""
    from tile_kernels.core.nvcc import lower_with

    try:
        return '', lower_with(prim_func, dict(pass_configs), arch)[1]
    except Exception as error:  # any exception of a compiler pass
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1] if lines else type(error).__name__, 0
