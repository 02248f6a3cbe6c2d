"""The rules of the linter: each looks at a kernel and yields a place, what is wrong there, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tile_kernels.sight.count import Access, Counts
from tile_kernels.sight.guards import lost_guards, unguarded_loads
from tile_kernels.sight.limits import MAX_THREADS, REGISTERS, occupancy
from tile_kernels.sight.lines import (
    GENERATED,
    Place,
    Written,
    buffers_of,
    calls_of,
    leaves,
    pointers_of,
    targets_of,
    walk,
)
from tile_kernels.sight.subject import Subject

#: The most registers of a thread.
MOST_REGISTERS = 255

#: An access with a smaller share of the bytes, sectors or wavefronts of a kernel is not worth a finding.
SHARE = 0.02

WGMMA = {'ptx_wgmma_ss', 'ptx_wgmma_rs'}


@dataclass(frozen=True)
class Kernel:
    """What the rules look at: tile-level statements and loops, CUDA, a device function with its places and counts."""

    subject: Subject
    written: list[Written]
    loops: list[Written]
    error: str = ''
    function: Any = None
    source: str = ''
    places: dict[Any, Place] = field(default_factory=dict)
    counts: Counts = field(default_factory=lambda: Counts('', (1, 1, 1), 1, 0))
    dense: dict[int, bool] = field(default_factory=dict)
    resources: dict[str, int] = field(default_factory=dict)


Told = Iterator[tuple[Place, str, str]]
Rule = Callable[[Kernel], Told]

#: The rules by what they need: the source, the error of the compiler, the lowered kernel, the compiled kernel.
RULES: dict[str, dict[str, Rule]] = {'source': {}, 'error': {}, 'lowered': {}, 'compiled': {}}


def _rule(name: str, needs: str = 'lowered') -> Callable[[Rule], Rule]:
    """Register a rule; it yields the place, what is wrong, and what to do."""

    def register(rule: Rule) -> Rule:
        RULES[needs][name] = rule
        return rule

    return register


# Accesses ----------------------------------------------------------------------------------------------------------


def _times(access: Access, counts: Counts) -> float:
    """How often a warp executes an access."""
    return access.requests / (counts.blocks * -(-counts.threads // 32))


def _scattered(access: Access) -> bool:
    return access.space == 'global' and access.sectors > 1.25 * access.least_sectors


@_rule('narrow-access')
def _narrow(kernel: Kernel) -> Told:
    total, every = kernel.counts.requested(), kernel.counts.accesses
    widest = max((a.bytes for a in every if a.space == 'global' and a.width >= 16), default=0)
    for a in every:  # where a wider type moves by 16 bytes, it decides how many elements a lane has
        ready = kernel.dense.get(id(a), False) and not _scattered(a) and a.how != 'atomic'
        if ready and max(SHARE * total, widest) < a.bytes and _times(a, kernel.counts) >= 16 / a.width:
            why = f'each lane moves {a.width} bytes of {a.buffer}, and the addresses allow 16'
            action = 'give a thread neighboring elements, use fewer threads, or promise T.assume(stride % 8 == 0)'
            yield (a.file, a.line), why, action


@_rule('scattered-access')
def _sectors(kernel: Kernel) -> Told:
    total = sum(a.sectors for a in kernel.counts.accesses)
    for a in kernel.counts.accesses:
        if _scattered(a) and a.sectors > SHARE * total:
            used, least = a.sectors / a.requests, a.least_sectors / a.requests
            why = f'a warp touches {used:.3g} sectors of {a.buffer} where {least:.3g} would hold its bytes'
            action = 'let neighboring lanes access neighboring addresses, or stage the tile in shared memory'
            yield (a.file, a.line), why, action


@_rule('bank-conflict')
def _conflicts(kernel: Kernel) -> Told:
    total = sum(a.wavefronts for a in kernel.counts.accesses)
    for a in kernel.counts.accesses:
        ways = a.wavefronts / max(1, a.least_wavefronts)
        if ways >= 2 and _times(a, kernel.counts) >= 2 and a.wavefronts > SHARE * total:
            why = f'the lanes of a warp meet {ways:.3g}-way in the banks of {a.buffer}, in a loop'
            action = f'swizzle the tile with T.annotate_layout, or pad its rows by {max(4, a.width)} bytes'
            yield (a.file, a.line), why, action


@_rule('int64-index')
def _wide_index(kernel: Kernel) -> Told:
    for node, loops in leaves(kernel.function.body):
        inner = [loop for loop in loops if int(loop.kind) == 0 and int(getattr(loop.extent, 'value', 8)) >= 8][-1:]
        for part in _accesses(node) if inner else []:
            index = part.indices[-1]
            if str(index.dtype) == 'int64' and _uses(index, inner[0]):
                why = f'each turn of a loop computes the index of {part.buffer.name} with 64 bits'
                yield (
                    kernel.places[node],
                    why,
                    'promise a bound, e.g. T.assume(num_tokens < 65536), so that 32 bits suffice',
                )


def _accesses(node: Any, scope: str = '') -> list[Any]:
    """Loads and stores of a statement in a scope."""
    found = [part for part in walk(node) if type(part).__name__ in ('BufferLoad', 'BufferStore')]
    return [part for part in found if str(part.buffer.scope()).startswith(scope)]


def _uses(index: Any, loop: Any) -> bool:
    return any(part.same_as(loop.loop_var) for part in walk(index))


# The order of asynchronous operations ------------------------------------------------------------------------------


@_rule('missing-fence')
def _fence(kernel: Kernel) -> Told:
    """Tiles that cp.async fills: those in flight, and complete ones that no fence followed."""
    flying: dict[Any, str] = {}
    bare: dict[Any, str] = {}
    tiles: dict[Any, Any] = {}  # of the descriptors
    for node, _ in leaves(kernel.function.body, twice=True):
        names, shared = calls_of(node), pointers_of(node, 'shared')
        if 'ptx_cp_async' in names:
            flying |= shared
        elif names.keys() & {'ptx_wait_group', 'mbarrier_wait_parity'}:
            bare, flying = bare | flying, {}
        elif 'fence_proxy_async' in names:
            bare = {}
        elif 'initialize_wgmma_descriptor' in names:
            tiles |= {pointer: tile for pointer in pointers_of(node, 'local') for tile in shared}
        elif names.keys() & WGMMA:
            for tile in dict.fromkeys(tiles.get(pointer) for pointer in pointers_of(node)):
                if tile in bare:
                    why = f'wgmma reads {bare[tile]}, which cp.async wrote, without a proxy fence after the wait'
                    action = 'call T.fence_proxy_async() between the wait and the product, or copy by TMA'
                    yield kernel.places[node], why, action


@_rule('lost-guard')
def _lost_guard(kernel: Kernel) -> Told:
    for name in lost_guards(kernel.source):
        stores = [item.place for item in kernel.written if name in targets_of(item.node) and item.place[1]]
        why = f'the store to {name} converts its dtype, and TileLang 0.1.15 drops the inner condition around it'
        yield (stores or [GENERATED])[0], why, 'join the conditions by T.And, or put them outside of T.Parallel'
    for name in unguarded_loads(kernel.source):
        loads = [item.place for item in kernel.written if name in buffers_of(item.node) and item.place[1]]
        why = f'the load of {name} converts its dtype, and TileLang 0.1.15 drops the condition of T.if_then_else'
        yield (loads or [GENERATED])[0], why, 'clear the tile, then load it under a single if in the loop body'


@_rule('store-not-waited')
def _store_wait(kernel: Kernel) -> Told:
    """TMA stores whose source may still be read, and tensors that may not yet hold what was stored."""
    sources: dict[Any, str] = {}
    results: set[str] = set()
    tensors = {param.name.removesuffix('_desc') for param in kernel.function.params}
    for node, _ in leaves(kernel.function.body, twice=True):
        names, buffers = calls_of(node), buffers_of(node)
        target = node.buffer if type(node).__name__ == 'BufferStore' else None
        if 'tma_store' in names:
            sources |= pointers_of(node, 'shared')
            results |= buffers & tensors
        elif 'tma_store_wait' in names:  # by default it waits for the source only
            sources, results = {}, results if int(names['tma_store_wait'].args[1]) else set()
        elif target is not None and target.data in sources:
            why = f'{target.name} is overwritten while a TMA store may still read it'
            yield kernel.places[node], why, 'call T.tma_store_wait() and a barrier before the next write'
        elif read := results & (buffers - ({target.name} if target is not None else set())):
            why = f'{min(read)} is read while a TMA store to it may not be complete'
            yield kernel.places[node], why, 'call T.tma_store_wait(0, read=False) and a barrier before the read'


# Limits ------------------------------------------------------------------------------------------------------------


@_rule('shared-memory')
def _shared_limit(kernel: Kernel) -> Told:
    gpu, asked = kernel.subject.gpu, kernel.counts.shared / 1024
    if asked > gpu.smem_per_block >> 10:
        why = f'a block asks for {asked:.0f} KB of shared memory, and the {gpu.name} gives {gpu.smem_per_block >> 10}'
        yield GENERATED, why, 'choose a smaller tile or fewer stages'


@_rule('threads')
def _thread_limit(kernel: Kernel) -> Told:
    if (threads := kernel.counts.threads) > MAX_THREADS:
        yield GENERATED, f'a block has {threads} threads, and a GPU allows {MAX_THREADS}', 'launch fewer threads'


@_rule('accumulator')
def _accumulator(kernel: Kernel) -> Told:
    from tilelang import tvm

    sizes: dict[Any, float] = {}
    for node, _ in leaves(kernel.function.body):
        if type(node).__name__ == 'AllocBuffer' and str(node.buffer.scope()).startswith('local'):
            bits = tvm.DataType(str(node.buffer.dtype)).bits
            sizes[node.buffer.data] = np.prod([int(extent) for extent in node.buffer.shape]) * bits / 32
        elif calls_of(node).keys() & (WGMMA | {'ptx_mma'}):
            for pointer, name in pointers_of(node, 'local').items():
                if (size := sizes.get(pointer, 0)) > MOST_REGISTERS:
                    why = f'the accumulator {name} takes {size:.0f} registers of a thread, which has {MOST_REGISTERS}'
                    yield kernel.places[node], why, 'choose a smaller tile or more threads'


@_rule('idle-tail')
def _tail(kernel: Kernel) -> Told:
    """Blocks that an SM holds at once are those by threads and shared memory; registers may allow fewer."""
    counts, gpu = kernel.counts, kernel.subject.gpu
    slots = gpu.sms * max(1, occupancy(counts, gpu).blocks)
    idle = 1 - counts.blocks / (gpu.sms if counts.blocks <= slots else 2 * slots)
    if idle > 0.3:
        where = 'SMs idle' if counts.blocks <= slots else 'slots idle in two waves'
        why = f"{counts.blocks} blocks leave {idle:.0%} of the {gpu.name}'s {where}"
        yield GENERATED, why, 'choose smaller tiles, split the longest axis, or make the blocks persistent'


@_rule('spills', 'compiled')
def _spills(kernel: Kernel) -> Told:
    if spilled := kernel.resources['spill_stores']:
        action = 'choose a smaller tile, more threads, or fewer blocks in T.annotate_min_blocks_per_sm'
        yield GENERATED, f'a thread spills {spilled} bytes of registers to memory', action


@_rule('registers', 'compiled')
def _registers(kernel: Kernel) -> Told:
    each, threads = -(-kernel.resources['registers'] // 8) * 8, -(-kernel.counts.threads // 32) * 32
    if each * threads > REGISTERS:
        why = f'{threads} threads of {each} registers need more than the {REGISTERS} of an SM'
        yield GENERATED, why, 'launch fewer threads, or choose a smaller accumulator'


# The source --------------------------------------------------------------------------------------------------------


@_rule('reduction-width', 'error')
def _reduction_width(kernel: Kernel) -> Told:
    reductions = [item.place for item in kernel.written if any('reduce' in name for name in calls_of(item.node))]
    if reductions and ('no power of two' in kernel.error or 'no layout for a tile' in kernel.error):
        why = 'the width of the reduction does not divide among a power of two of threads'
        yield reductions[0], why, 'pad the row, or launch 64, 128 or 256 threads'


def _stages(loop: Any) -> int:
    return int(loop.annotations.get('num_stages', 0))


@_rule('dynamic-pipeline', 'source')
def _dynamic_pipeline(kernel: Kernel) -> Told:
    for item in kernel.loops:
        if _stages(item.node) and not hasattr(item.node.extent, 'value'):
            why = f'T.Pipelined over {item.node.loop_var.name} has an extent that is known only at run time'
            yield item.place, why, 'make the extent a constant, or pass the buffers by barriers'


@_rule('fragment-in-loop', 'source')
def _fragment_loop(kernel: Kernel) -> Told:
    for item in kernel.written:
        for part in _accesses(item.node, 'local.fragment'):
            used = [loop for loop in item.loops if any(_uses(index, loop) for index in part.indices)]
            if used and all(int(loop.kind) in (0, 3) for loop in used):  # serial or unrolled
                why = f'a sequential loop indexes the fragment {part.buffer.name}, whose elements lie in many threads'
                yield item.place, why, 'use T.Parallel with a reduction, or T.alloc_local'


@_rule('pipeline-overwrite', 'source')
def _overwrite(kernel: Kernel) -> Told:
    read: dict[Any, set[str]] = {}
    for item in kernel.written:
        for loop in item.loops:
            if _stages(loop) >= 2:
                known, writes = read.setdefault(loop.loop_var, set()), targets_of(item.node)
                if again := known & writes:
                    why = f'one turn of T.Pipelined reads and then overwrites {min(again)}, which loses the wait'
                    yield item.place, why, 'write to a second buffer, or set num_stages to 1'
                known |= buffers_of(item.node, 'shared') - writes


@_rule('large-index', 'source')
def _large_index(kernel: Kernel) -> Told:
    for item in kernel.written:
        for part in _accesses(item.node, 'global'):
            flat = 0
            for index, extent in zip(part.indices, part.buffer.shape, strict=True):
                flat = flat * int(getattr(extent, 'value', 0)) + int(getattr(index, 'value', 0))
            if flat >= 1 << 31 and len(part.indices) > 1:
                why = f'the constant index of {part.buffer.name} is element {flat}, and 32 bits wrap at 2^31'
                yield item.place, why, 'pass the row as an argument, or pass a view that starts there'


@_rule('wgmma-width')
def _wgmma_width(kernel: Kernel) -> Told:
    products = {kernel.places[node] for node, _ in leaves(kernel.function.body) if calls_of(node).keys() & WGMMA}
    for item in kernel.written:
        for name, call in calls_of(item.node).items():
            n = int(call.args[6]) if 'gemm' in name and item.place in products else 0
            if n > 8 and n % 16 == 8:
                why = f'wgmma with N = {n} gives wrong results in TileLang 0.1.15 (its issue 2593)'
                yield item.place, why, f'choose N = {n - 8} or {n + 8}'
