"""The language of distributed tile programs: tensors that every device has, copies between devices, signals.

A kernel gets one address per device for each symmetric tensor. Everything here is plain TileLang: a view of the memory
behind such an address, and `T.copy`. Two small CUDA functions store and load with system scope.

    words of a signal pad    epoch, failed rank + 1, time limit (ns), unused,
                             (slots + blocks) x world cells, one phase for each block

A cell holds the last value that one rank stored into it. Values only grow: each launch adds `EPOCH` to the epoch, which
is part of every value. So nothing is ever reset, and a launch cannot take a signal of an earlier one for its own.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tile_kernels.core import check
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.lang import T

#: Words of a signal pad before its cells, and the words that the host reads and writes.
HEADER, EPOCH_WORD, FAILED_WORD, LIMIT_WORD = 4, 0, 1, 2

#: What one launch adds to the epoch: its signals carry values below this.
EPOCH = 1 << 20

#: Most ranks of a program: every rank is one thread of a barrier.
MOST_RANKS = 32

SOURCE = f"""
#ifndef TK_SCALE
#define TK_SCALE
typedef unsigned long long tk_word;
static __device__ __forceinline__ tk_word *tk_scale_cell(tk_word pad, int row, int world, int rank) {{
  return reinterpret_cast<tk_word *>(pad) + {HEADER} + row * world + rank;
}}
static __device__ __forceinline__ tk_word tk_scale_time() {{
  tk_word now; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); return now;
}}
// Everything that the block did before (ahead of a block barrier) is visible to whoever acquires the value.
static __device__ __forceinline__ void tk_scale_signal(tk_word own, tk_word peer, int row, int rows, int world,
                                                       int rank, tk_word value) {{
  value += reinterpret_cast<tk_word *>(own)[{EPOCH_WORD}];
  asm volatile("st.release.sys.global.u64 [%0], %1;"
               ::"l"(tk_scale_cell(peer, row, world, rank)), "l"(value) : "memory");
}}
// A wait that exceeds the limit leaves the number of the missing rank; later waits of the launch then return at once.
static __device__ __noinline__ void tk_scale_wait(tk_word own, int row, int rows, int world, int rank, tk_word value) {{
  volatile tk_word *words = reinterpret_cast<volatile tk_word *>(own);
  tk_word start = tk_scale_time(), limit = words[{LIMIT_WORD}], found;
  value += words[{EPOCH_WORD}];
  while (true) {{
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                 : "=l"(found) : "l"(tk_scale_cell(own, row, world, rank)) : "memory");
    if (found >= value || words[{FAILED_WORD}]) return;
    if (limit && tk_scale_time() - start > limit) {{
      atomicCAS(reinterpret_cast<tk_word *>(own) + {FAILED_WORD}, 0ull, 1ull + rank);
      return;
    }}
  }}
}}
#endif
"""


@dataclass(frozen=True)
class Declared:
    """What a parameter of a kernel is: a symmetric tensor, or the signal pads if it has slots.

    Attributes:
        shape: Extents on each device.
        dtype: Name of the element type.
        world: Number of devices.
        slots: Number of independent values that each rank keeps for each other rank.
        blocks: Number of blocks of a device that take part in `barrier`.
    """

    shape: tuple[int, ...]
    dtype: str
    world: int
    slots: int = 0
    blocks: int = 0

    @property
    def is_pad(self) -> bool:
        """Whether this declares signal pads."""
        return self.slots > 0

    @property
    def phases(self) -> int:
        """The word of the first phase."""
        return HEADER + (self.slots + self.blocks) * self.world


_DECLARED: dict[Any, Declared] = {}  # by the buffer of the parameter
_SCOPES = threading.local()


def Symmetric(shape: tuple[int, ...], dtype: str, world: int) -> Any:
    """Annotation of a parameter: a tensor of a fixed shape that each of `world` devices has."""
    extents = tuple(int(extent) for extent in shape)
    return _parameter(Declared(extents, str(T.dtype(dtype)), world))


def Signals(world: int, slots: int = 1, blocks: int = 1) -> Any:
    """Annotation of a parameter: the signal pads of `world` devices.

    Args:
        world: Number of devices.
        slots: Number of independent signals from each rank to each other rank.
        blocks: Number of blocks of a device that call `barrier`.
    """
    check.integer(slots, 'slots', 1)
    check.integer(blocks, 'blocks', 1)
    words = HEADER + (slots + blocks) * world + blocks
    return _parameter(Declared((words,), 'uint64', world, slots, blocks))


def _parameter(declared: Declared) -> Any:
    check.integer(declared.world, 'world', 1)
    check.at_most(declared.world, MOST_RANKS, 'world')
    table = T.Tensor((declared.world,), 'uint64')
    _DECLARED[table] = declared
    return table


def declarations(prim_func: Any) -> list[Declared | None]:
    """For every parameter of a kernel, what it was declared as; None for ordinary tensors and scalars."""
    buffers = [prim_func.buffer_map.get(var, None) for var in prim_func.params]
    return [None if buffer is None else _DECLARED.get(buffer) for buffer in buffers]


class Scale:
    """A scope of ids: `with Scale('device', rank, world) as (dev_id, dev_num)`.

    Args:
        name: 'device', 'cta_cluster' (rank of the block and size of its cluster) or 'block' (number and count along x).
        rank: Of 'device': the rank of this device, a parameter of the kernel.
        world: Of 'device': the number of devices.
    """

    def __init__(self, name: str, rank: Any = None, world: int | None = None) -> None:
        check.one_of(name, ('device', 'cta_cluster', 'block'), 'name')
        if (name == 'device') is (rank is None or world is None):
            raise ArgumentError("scale.Scale: rank and world belong to 'device', and 'device' needs both")
        self.name, self.rank, self.world = name, rank, world

    def __enter__(self) -> tuple[Any, Any]:
        if self.name == 'cta_cluster':
            return T.block_rank_in_cluster(), T.get_cluster_size()
        if self.name == 'block':
            return T.get_block_binding(0), T.get_block_extent(0)
        T.import_source(SOURCE)
        _SCOPES.stack = [*getattr(_SCOPES, 'stack', []), self]
        return self.rank, self.world

    def __exit__(self, *_: object) -> None:
        if self.name == 'device':
            _SCOPES.stack.pop()


def _device(declared: Declared, name: str) -> Any:
    """The rank of the device whose scope surrounds a call."""
    if not (stack := getattr(_SCOPES, 'stack', [])):
        raise ArgumentError(f"scale.{name}: must be inside `with Scale('device', rank, world)`, got no scope")
    if stack[-1].world != declared.world:
        raise ArgumentError(
            f'scale.{name}: the parameter is declared for {declared.world} devices, the scope has {stack[-1].world}'
        )
    return stack[-1].rank


def _found(tensor: Any, name: str, pad: bool) -> Declared:
    found = _DECLARED.get(tensor)
    if found is None or found.is_pad is not pad:
        wanted = 'Signals' if pad else 'Symmetric'
        raise ArgumentError(f'scale.{name}: needs a parameter declared as {wanted}, got {tensor}')
    return found


def peer(tensor: Any, rank: Any) -> Any:
    """The symmetric tensor of one device, as a buffer that can be indexed and sliced.

    Args:
        tensor: A parameter declared as `Symmetric`.
        rank: The device.
    """
    found = _found(tensor, 'peer', pad=False)
    return T.make_tensor_from_addr(tensor[rank], found.shape, found.dtype)


def copy(source: Any, target: Any, /, *, src: Any = None, dst: Any = None) -> Any:
    """Copy a region to a device (`dst`: put) or from one (`src`: get), by loads and stores of all threads of the block.

    It never uses TMA: signals order only what threads themselves load and store.

    Args:
        source: A buffer or region; the symmetric parameter itself if `src` is given.
        target: The same, with `dst`. Slices of a peer's tensor are written `peer(tensor, rank)[...]`.
        src: The device to read from.
        dst: The device to write to.
    """
    source = source if src is None else peer(source, src)
    target = target if dst is None else peer(target, dst)
    return T.copy(source, target, annotations={'disable_tma': True})


def signal(signals: Any, *, dst: Any, slot: Any = 0, value: Any = 1) -> None:
    """Tell a device that everything this block did so far is done: a store with release semantics, at system scope.

    All threads of the block call it together.

    Args:
        signals: The signal pads.
        dst: The device to tell.
        slot: Which of the pad's slots.
        value: What to store, at least 1 and more than the last value of this launch.
    """
    pads = _Pads(signals, 'signal', slot)
    T.evaluate(T.sync_threads())
    with pads.threads_below(1):
        pads.store(dst, slot, pads.declared.slots, value)


def wait(signals: Any, *, src: Any, slot: Any = 0, value: Any = 1) -> None:
    """Wait until a device has signaled a value or a larger one. All threads of the block call it together.

    Args:
        signals: The signal pads.
        src: The device to wait for.
        slot: Which of the pad's slots.
        value: The value to wait for.
    """
    pads = _Pads(signals, 'wait', slot)
    with pads.threads_below(1):
        pads.await_(src, slot, pads.declared.slots, value)
    T.evaluate(T.sync_threads())


def barrier(signals: Any, *, block: Any = 0) -> None:
    """Wait for all devices: what every participating block of every device did before is visible after it.

    On each device as many blocks call it as `Signals(blocks=...)` says, all threads of them.

    Args:
        signals: The signal pads.
        block: Number of this block among the participating ones.
    """
    from tvm.tirx.script.builder import bind, buffer_store, serial

    pads = _Pads(signals, 'barrier')
    declared, thread = pads.declared, T.get_thread_binding()
    rows, place = declared.slots + declared.blocks, declared.phases + block
    words = T.make_tensor_from_addr(signals[pads.rank], declared.shape, 'uint64')
    T.evaluate(T.sync_threads())
    phase = bind(words[place] + T.uint64(1))
    T.evaluate(T.sync_threads())
    with pads.threads_below(1):
        buffer_store(words, phase, [place])
    with pads.threads_below(declared.world):
        pads.store(thread, declared.slots + block, rows, phase)
    with pads.builder.with_frame(serial(0, declared.blocks)) as other, pads.threads_below(declared.world):
        pads.await_(thread, declared.slots + other, rows, phase)
    T.evaluate(T.sync_threads())


class _Pads:
    """Writes statements. They are no macro, so that they get the line of the kernel that calls them."""

    def __init__(self, signals: Any, name: str, slot: Any = 0) -> None:
        from tilelang.language.eager.builder import Builder

        self.signals, self.declared, self.builder = signals, _found(signals, name, pad=True), Builder.current()
        self.rank = _device(self.declared, name)
        if isinstance(slot, int) and not 0 <= slot < self.declared.slots:
            raise ArgumentError(f'scale.{name}: slot must be from 0 to {self.declared.slots - 1}, got {slot}')

    @contextmanager
    def threads_below(self, count: int) -> Iterator[None]:
        """Statements for the first threads of the block."""
        from tvm.tirx.script.builder import If, Then

        with self.builder.with_frame(If(T.get_thread_binding() < count)), self.builder.with_frame(Then()):
            yield

    def store(self, dst: Any, row: Any, rows: int, value: Any) -> None:
        """Signal one device."""
        pads = self.signals[self.rank], self.signals[dst]
        self._call('tk_scale_signal', *pads, row, rows, self.declared.world, self.rank, value)

    def await_(self, src: Any, row: Any, rows: int, value: Any) -> None:
        """Wait for one device."""
        self._call('tk_scale_wait', self.signals[self.rank], row, rows, self.declared.world, src, value)

    def _call(self, name: str, *arguments: Any) -> None:
        *others, value = arguments
        word = T.uint64(value) if isinstance(value, int) else T.cast(value, 'uint64')
        T.evaluate(T.call_extern('handle', name, *others, word))
