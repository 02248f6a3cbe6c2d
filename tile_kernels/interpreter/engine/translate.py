"""From TIR to closures: expressions become `f(frame) -> value`, statements become `f(frame)`.

The modules in `meaning` define each construct and register it here: `expressions`, `statements`, `math_ops`,
`tile_ops`, `element_ops`, `warp_ops`, `control_ops`, `barriers`, `mbarriers` and `async_ops`. This module holds what
they have in common: variables, buffers, accesses.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.lanes import axis_values, expand
from tile_kernels.interpreter.engine.source import Source
from tile_kernels.interpreter.errors import Site, UnsupportedConstruct
from tile_kernels.interpreter.memory.access import Access, Buffer, Dim
from tile_kernels.interpreter.memory.dtypes import FP4_PAIR, DType, constant, dtype_of
from tile_kernels.interpreter.session import timed

Closure = Callable[[Frame], Any]

EXPRESSIONS: dict[str, Callable[[Any, Any], Closure]] = {}
STATEMENTS: dict[str, Callable[[Any, Any], Closure]] = {}
OPS: dict[str, Callable[[Any, Any], Closure]] = {}  # calls used for their value or their effect, by operator name
EXTERN_CONSTRUCTS: dict[str, Callable[[Any, Any], Closure]] = {}  # external functions that may wait or order blocks

SCOPES = {
    'global': 'global',
    'shared': 'shared',
    'shared.dyn': 'shared',
    'shared.barrier': 'barrier',
    'shared.cluster_barrier': 'barrier',
    'local': 'local',
    'local.var': 'local',
    'local.descriptor.wgmma': 'local',
    'local.fragment': 'fragment',
    'local.reducer': 'fragment',
    'shared.tmem': 'fragment',  # Blackwell's tensor memory
}

# Annotations and attributes that affect only how the compiler works, not the result.
BLOCK_HINTS = {
    'layout_map',
    'tl.launch_threads',
    'tl.ws_schedule',
    'tl.min_blocks_per_sm',
    'non_restrict_params',
    'tl.non_restrict_params',
    'l2_hit_ratio_map',
    'l2_persistent_map',
    'pragma_import_c',
    'tilelang.is_npu_kernel_frame',
}
BLOCK_MEANINGS = {'safe_value_map', 'barrier_init', 'reducer_info', 'reducer_info_v2', 'cluster_dims'}
ATTRIBUTE_HINTS = {
    'threadblock_swizzle_pattern',
    'pragma_import_c',
    'warp_specialize',
    'tl.min_blocks_per_sm',
    'tl.ws_op_id',
    'reduce_scope',
}


def expression(*names: str) -> Callable[[Any], Any]:
    """Register the meaning of an expression node."""
    return _register(EXPRESSIONS, names)


def statement(*names: str) -> Callable[[Any], Any]:
    """Register the meaning of a statement node."""
    return _register(STATEMENTS, names)


def op(*names: str) -> Callable[[Any], Any]:
    """Register the meaning of calls to the named operators."""
    return _register(OPS, names)


def extern_construct(*names: str) -> Callable[[Any], Any]:
    """Register the meaning of calls to the named external functions."""
    return _register(EXTERN_CONSTRUCTS, names)


def _register(table: dict[str, Any], names: tuple[str, ...]) -> Callable[[Any], Any]:
    def add(builder: Any) -> Any:
        for name in names:
            table[name] = builder
        return builder

    return add


@dataclass(frozen=True)
class Options:
    """Options that change the semantics of a kernel or the amount of checking."""

    checks: str = 'memory'
    guards: bool = True  # False: tl.disable_safe_memory_legalize
    auto_sync: bool = True  # False: tl.disable_thread_storage_sync
    outputs: tuple[int, ...] = ()
    timed: bool = False  # record the time of every line

    @property
    def races(self) -> bool:
        """Whether races are checked."""
        return self.checks in ('races', 'all')


@dataclass
class Storage:
    """Memory of one data variable; several buffers may view it."""

    slot: int
    scope: str
    dtype: DType
    size: Closure | int  # elements
    name: str
    dtypes: set[str] = field(default_factory=set)
    counts: list[Closure] = field(default_factory=list)  # expected arrivals of each mbarrier
    replicated: bool = False  # every thread has its own copy of this fragment
    counts_bytes: bool = False  # blocks of the cluster send bytes to these mbarriers
    zeroed: bool = False  # a variable, which TileLang starts at 0
    shape: tuple[int, ...] = ()  # of the allocation, if it is fixed
    of_cluster: bool = False  # mbarriers for which copies of both blocks of a pair count

    @property
    def unit(self) -> int:
        """Bits of the smallest element of any buffer in this memory."""
        return min(dtype_of(name).bits for name in self.dtypes)


class Compiler:
    """Compiles one PrimFunc."""

    def __init__(self, name: str, options: Options) -> None:
        self.kernel = name
        self.options = options
        self.site = Site(name)
        self.source = Source(name)
        self.slots: dict[Any, tuple[int, int]] = {}  # variable -> (slot, parallel depth of its definition)
        self.axes: dict[Any, int] = {}  # variable of a parallel loop -> axis
        self.macros: dict[Any, Any] = {}  # variable that is bound before its free variables -> expression
        self.storages: dict[Any, Storage] = {}
        self.described: dict[Any, Any] = {}  # data variable of a descriptor -> that of the buffer it describes
        self.layouts: dict[Any, Any] = {}  # layouts that the kernel annotates, by data variable
        self.pointers: dict[Any, Any] = {}  # variable that holds an offset -> data variable to which it belongs
        self.buffers: dict[Any, Buffer] = {}
        self.safe_values: dict[Any, Any] = {}  # for plain loads: an annotation applies to everything that follows
        self.copy_safe_values: dict[Any, Any] = {}  # for copies: an annotation applies to its block
        self.replicated: set[Any] = set()  # data variables of fragments with one copy per thread
        self.overwrites = False  # copies with mbarriers may overwrite data that was read
        self.path: tuple[tuple[str, int, int], ...] = ()  # branches and loops around the current statement
        self.paths: list[tuple[tuple[str, int, int], ...]] = [()]
        self.alone = False  # inside a parallel loop that every thread runs completely, on its own copies
        self.used: set[Any] = set()  # variables that some expression reads
        self.num_slots = 0
        self.num_memories = 0
        self.depth = 0
        self.in_launch = False
        self.touched: list[tuple[Access, list[Any]]] = []  # shared accesses of the current statement
        self.branches: list[tuple[Site, str]] = []
        self.locals_read: set[int] = set()
        self.locals_written: set[int] = set()
        self.thread_dims: tuple[int, int, int] = (1, 1, 1)
        self.spins = False  # a loop polls memory that another block writes: blocks must run alternately
        self.whole_grid = False  # blocks wait for each other: all must run in one batch
        self.whole_cluster = False  # blocks of a cluster wait for each other: all of it must run in one batch
        self.takes_over = False  # running clusters take over the work of those that have not started
        self.cluster_dims: tuple[int, ...] = (1, 1, 1)
        self.barrier_counts: dict[Any, list[Any]] = {}
        self.vector: list[tuple[Access, Any, list[Any]]] | None = None  # accesses of a vectorized loop
        self.begins_early = False  # PDL: the kernel may start before the previous one has ended
        self.launches: list[bool] = []  # for every kernel of the program: whether it may start early
        self.as_arrays = False  # inside a serial loop that runs as an axis
        self.updated: Any = None  # data variable of the reducer that the current statement updates
        self.finalized: set[Any] = set()  # data variables of reducers that are finalized somewhere
        self.reducers: dict[Any, str] = {}  # data variable of a reducer -> how it combines
        self.shown: set[Any] = set()  # variables that only T.print reads
        self.opened: set[Any] = set()  # data variables of reducers in the newer form
        self.wide = False  # the current index needs 64 bits
        self.generic: set[int] = set()  # paths on which threads themselves store to shared memory

    # ---- expressions ---------------------------------------------------------------------------------

    def expr(self, node: Any) -> Closure:
        """Compile an expression."""
        builder = EXPRESSIONS.get(type(node).__name__)
        if builder is None:
            raise self.unsupported(f'expression {type(node).__name__}')
        return builder(self, node)

    def dtype(self, node: Any) -> DType:
        """Element type of an expression or buffer."""
        try:
            return dtype_of(str(node.dtype))
        except KeyError:
            raise self.unsupported(f'data type {node.dtype}') from None

    def memory_dtype(self, buffer: Any, scope: str) -> DType:
        """Type of the elements of a buffer; outside registers, a pair of fp4 numbers is one byte."""
        if str(buffer.dtype) == FP4_PAIR.name and scope != 'local':
            return FP4_PAIR
        return self.dtype(buffer)

    def dtype_of_operand(self, node: Any) -> DType:
        """Element type of an expression or a tile operand."""
        if type(node).__name__ == 'BufferRegion':
            return self.dtype(node.buffer)
        if type(node).__name__ == 'Call' and str(node.op.name) == 'tl.region':
            return self.dtype(node.args[0].buffer)
        return self.dtype(node)

    def unsupported(self, what: str) -> UnsupportedConstruct:
        """An error with a construct and its line."""
        return UnsupportedConstruct(f'{what} is not supported by the interpreter', self.site)

    def stmt(self, node: Any) -> Closure:
        """Compile a statement."""
        outer = self.site
        self.site = self.source.site_of(node, outer)
        try:
            builder = STATEMENTS.get(type(node).__name__)
            if builder is None:
                raise self.unsupported(f'statement {type(node).__name__}')
            made = builder(self, node)
            return timed(made, self.site) if self.options.timed else made
        finally:
            self.site = outer

    # ---- variables -----------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of lane axes of values at this point of the program."""
        return 2 + self.depth

    def new_slot(self, var: Any) -> int:
        """A slot in the frame for a variable defined here."""
        slot = self.num_slots
        self.num_slots += 1
        self.slots[var] = (slot, self.depth)
        return slot

    def variable(self, var: Any) -> Closure:
        """Read a variable."""
        if var in self.axes:
            axis, ndim = self.axes[var], self.ndim
            return lambda frame: axis_values(frame.extents[axis], 2 + axis, ndim)
        if var in self.macros:
            return self.expr(self.macros[var])
        if var not in self.slots:
            raise self.unsupported(f'variable {var} without a definition')
        slot, depth = self.slots[var]
        if depth == self.depth:
            return lambda frame: frame.env[slot]
        ndim = self.ndim
        return lambda frame: expand(frame.env[slot], ndim)

    @contextmanager
    def parallel_axis(self, var: Any) -> Iterator[set[int]]:
        """Compile the inside of one more parallel loop; yields the registers that become private to its iterations."""
        outer = self.locals_read, self.locals_written
        self.locals_read, self.locals_written = set(), set()
        self.axes[var] = self.depth
        self.depth += 1
        written: set[int] = set()
        try:
            yield written
        finally:
            self.depth -= 1
            written |= self.locals_written
            self.locals_read, self.locals_written = (outer[0] | self.locals_read, outer[1] | self.locals_written)

    def read_local(self, node: Any) -> None:
        """Record that a register is read inside T.Parallel before an iteration wrote it."""
        view = self.buffer(node)
        if self.depth and view.scope == 'local' and view.slot not in self.locals_written:
            self.locals_read.add(view.slot)

    def write_local(self, view: Buffer) -> None:
        """Record that a register written inside T.Parallel is private to each iteration."""
        if view.slot in self.locals_read:
            raise self.unsupported(f'carrying {view.name} from one iteration of T.Parallel to another')
        self.locals_written.add(view.slot)

    def new_branch(self, side: str) -> int:
        """Number a branch, for the coverage report."""
        self.branches.append((self.site, side))
        return len(self.branches) - 1

    # ---- buffers -------------------------------------------------------------------------------------

    def declare(self, buffer: Any) -> Storage:
        """Give a newly allocated buffer its memory."""
        scope = SCOPES.get(str(buffer.scope()))
        if scope is None:
            raise self.unsupported(f'memory scope {buffer.scope()!r}')
        if all(is_const(extent) for extent in buffer.shape):
            size: Any = int(np.prod([int(extent) for extent in buffer.shape], dtype=np.int64))
        else:
            closures = [self.expr(extent) for extent in buffer.shape]
            size = lambda frame: int(np.prod([int(closure(frame)) for closure in closures]))
        dtype = self.memory_dtype(buffer, scope)
        storage = Storage(self.num_memories, scope, dtype, size, str(buffer.name), {str(buffer.dtype)})
        storage.replicated = scope == 'fragment' and buffer.data in self.replicated
        storage.zeroed = str(buffer.scope()) == 'local.var'
        storage.of_cluster = str(buffer.scope()) == 'shared.cluster_barrier'
        if all(is_const(extent) for extent in buffer.shape):
            storage.shape = tuple(int(extent) for extent in buffer.shape)
        self.num_memories += 1
        self.storages[buffer.data] = storage
        return storage

    def allocate(self, node: Any) -> Storage:
        """A buffer of the kernel."""
        return self.storages[node.data] if node.data in self.storages else self.declare(node)

    def read_annotations(self, block: Any) -> None:
        """Use the annotations of a block that affect results; the rest are hints."""
        for key, value in block.annotations.items():
            name = str(key)
            if name == 'safe_value_map':
                self.safe_values.update(dict(value.items()))
                self.copy_safe_values = {**self.copy_safe_values, **dict(value.items())}
            elif name == 'barrier_init':
                self.barrier_counts.update({data: list(counts) for data, counts in value.items()})
            elif name in ('reducer_info', 'reducer_info_v2'):
                self.reducers.update({data: str(info['op']) for data, info in value.items()})
            elif name == 'layout_map':
                self.layouts.update(dict(value.items()))
            elif name == 'cluster_dims':
                self.cluster_dims = tuple(int(extent) for extent in value)
            elif name not in BLOCK_HINTS:
                raise self.unsupported(f'block annotation {name!r}')

    def buffer(self, node: Any) -> Buffer:
        """The interpreter's view of a TIR buffer."""
        known = self.buffers.get(node)
        if known is not None:
            return known
        storage = self.storages.get(node.data)
        if storage is None and node.data in self.slots:
            pointer = self.variable(node.data)
            made = Buffer(str(node.name), -1, self.dtype(node), 'global', self._layout(node), None, pointer)
            self.buffers[node] = made
            return made
        if storage is None:
            raise self.unsupported(f'buffer {node.name} without an allocation')
        dtype = self.memory_dtype(node, storage.scope)
        if dtype.lanes > 1 and storage.scope != 'local':
            raise self.unsupported(f'{storage.scope} buffer {node.name} with vector elements {node.dtype}')
        storage.dtypes.add(str(node.dtype))
        vectors = any(dtype_of(name).lanes > 1 for name in storage.dtypes)
        if len(storage.dtypes) > 1 and vectors and storage.scope == 'local':
            raise self.unsupported(f'local buffer {node.name} viewed both as vectors and as {storage.dtype.name}')
        offset = None
        if not (is_const(node.elem_offset) and int(node.elem_offset) == 0):
            offset = self.expr(node.elem_offset)
        fixed = self._fixed_layout(node)
        made = Buffer(str(node.name), storage.slot, dtype, storage.scope, self._layout(node), offset, None, fixed)
        self.buffers[node] = made
        return made

    def _fixed_layout(self, node: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        if not all(is_const(extent) for extent in [*node.shape, *node.strides]):
            return None
        shape = tuple(int(extent) for extent in node.shape)
        return shape, tuple(int(stride) for stride in node.strides) or row_major(shape)

    def _layout(self, node: Any) -> Any:
        fixed = self._fixed_layout(node)
        if fixed is not None:
            return lambda frame: fixed
        strides = list(node.strides)
        exprs = [*node.shape, *strides]
        rank = len(node.shape)
        closures = [self.expr(extent) for extent in exprs]

        def layout(frame: Frame) -> tuple[tuple[int, ...], tuple[int, ...]]:
            numbers = tuple(int(closure(frame)) for closure in closures)
            return numbers[:rank], numbers[rank:] if strides else row_major(numbers[:rank])

        return layout

    def access(self, buffer: Any, indices: Any, guard: str | None = None) -> Access:
        """Compile an element access."""
        view = self.buffer(buffer)
        indices = self.from_the_end(buffer, list(indices))
        self.wide = _needs_64_bits(buffer)
        dims = [self._dim(view, index, guard) for index in indices]
        self.wide = False
        made = Access(view, dims, self.ndim, self.site, self.options.checks != 'none', self.safe_value(buffer))
        made.private = self.as_arrays
        made.updates = self.updated is not None and buffer.data.same_as(self.updated)
        made.path = self.path_number()
        made.per_thread = not self.depth or self.alone
        if view.scope == 'shared':
            self.touched.append((made, list(indices)))
        if self.vector is not None:
            self.vector.append((made, buffer, list(indices)))
        return made

    def require_alignment(self, accesses: list[tuple[Access, Any, list[Any]]], var: Any, count: int) -> None:
        """If the compiler vectorizes a loop, its tensors must start at a multiple of the vector size.

        The compiler does so if all elements are contiguous and it can prove that every vector starts at a multiple of
        its size.
        """
        moving = [part for part in accesses if any(_mentions(index, var) for index in part[2])]
        if not moving or not all(
            self._begins_at_multiple(buffer, indices, var, count) for _, buffer, indices in moving
        ):
            return
        longest = min(count, *(max(1, 128 // access.buffer.dtype.bits) for access, _, _ in moving))
        for access, _, _ in moving:
            size = longest * access.buffer.dtype.bits // 8
            if access.buffer.scope == 'global' and access.buffer.pointer is None and size & (size - 1) == 0:
                access.base_bytes = size

    def _begins_at_multiple(self, buffer: Any, indices: list[Any], var: Any, count: int) -> bool:
        from tvm.arith import detect_linear_equation
        from tvm.tirx.stmt_functor import substitute

        strides = list(buffer.strides) or list(row_major(tuple(_length(extent) for extent in buffer.shape)))
        if not all(is_const(stride) for stride in strides) or int(strides[-1]) != 1 or not is_const(buffer.shape[-1]):
            return False
        step = detect_linear_equation(indices[-1], [var])
        if len(step) != 2 or not is_const(step[0]) or int(step[0]) != 1:
            return False
        if any(_mentions(index, var) for index in indices[:-1]):
            return False
        if not self.analyzer.can_prove(indices[-1] < buffer.shape[-1]):
            return False
        first = substitute(indices[-1], {var: 0})
        parts = [index * int(stride) for index, stride in zip(indices[:-1], strides[:-1], strict=True)]
        return all(self.analyzer.can_prove(part % count == 0) for part in (first, *parts))

    @contextmanager
    def inside(self, kind: str, number: int, side: int = 0) -> Iterator[None]:
        """Compile a side of a branch ('if'), or the body of a loop ('loop')."""
        outer, self.path = self.path, (*self.path, (kind, number, side))
        try:
            yield
        finally:
            self.path = outer

    def path_number(self) -> int:
        """The number of the current path of branches and loops."""
        if self.paths[-1] != self.path:
            self.paths.append(self.path)
        return len(self.paths) - 1

    def words(self, data: Any, dtype: DType, start: Closure) -> Access:
        """An access to element `start` of the memory of a data variable, seen as a flat array of `dtype`."""
        storage = self.storages.get(data)
        if storage is None:
            raise self.unsupported(f'pointer into {data}')
        storage.dtypes.add(dtype.name)
        itemsize = dtype.storage.itemsize

        def layout(frame: Frame) -> tuple[tuple[int, ...], tuple[int, ...]]:
            return (frame.memory[storage.slot].size // itemsize,), (1,)

        view = Buffer(storage.name, storage.slot, dtype, storage.scope, layout)
        return Access(view, [Dim(start, (), 'none')], self.ndim, self.site, self.options.checks != 'none')

    @contextmanager
    def one_statement(self) -> Iterator[None]:
        """Find the shared buffers that one statement (or parallel loop) accesses at several different indices."""
        if self.depth:  # part of the parallel loop around it
            yield
            return
        self.touched = []
        yield
        by_slot: dict[int, list[tuple[Access, list[Any]]]] = {}
        for access, indices in self.touched:
            by_slot.setdefault(access.buffer.slot, []).append((access, indices))
        for accesses in by_slot.values():
            (_, first), *others = accesses
            if any(not same_indices(first, other) for _, other in others):
                for access, _ in accesses:
                    access.contended = True

    def safe_value(self, buffer: Any, copied: bool = False) -> Closure | None:
        """The result of a guarded load outside a buffer (None: 0)."""
        safe = (self.copy_safe_values if copied else self.safe_values).get(buffer.data)
        if safe is None:
            return None
        if isinstance(safe, int | float):
            value = constant(safe, self.dtype(buffer))
            return lambda frame: value
        return self.expr(safe)

    def _dim(self, view: Buffer, index: Any, guard: str | None) -> Dim:
        terms, base = self.affine(index)
        if guard is None:
            # TileLang guards global accesses unless this is disabled, and never guards a literal index.
            guard = 'both' if view.scope == 'global' and self.options.guards and not is_const(index) else 'none'
        return Dim(base, tuple(sorted(terms.items())), guard)

    def from_the_end(self, buffer: Any, indices: list[Any]) -> list[Any]:
        """An index list in which provably negative indices count from the end, as TileLang rewrites them."""
        return [
            extent + index if _may_be_negative(index) and self._surely_negative(index) else index
            for extent, index in zip(buffer.shape, indices, strict=True)
        ]

    def know_range(self, var: Any, start: Any, extent: Any) -> None:
        """Record the range of a variable."""
        from tvm.ir import Range

        self.analyzer.bind(var, Range.from_min_extent(start, extent), True)

    @cached_property
    def analyzer(self) -> Any:
        """The analyzer with the known ranges of variables."""
        from tvm.arith import Analyzer

        return Analyzer()

    def forget_ranges(self) -> None:
        """Free the analyzer: its solver holds about 20 MB, and programs are kept."""
        self.__dict__.pop('analyzer', None)

    def sign_is_open(self, ramp: Any) -> bool:
        """Whether some elements of a vector of indices may be negative and others not."""
        if not _may_be_negative(ramp.base):
            return False
        last = ramp.base + ramp.stride * (int(ramp.lanes) - 1)
        return not any(self.analyzer.can_prove(part) for part in (ramp.base >= 0, last < 0))

    def _surely_negative(self, index: Any) -> bool:
        return int(index) < 0 if is_const(index) else bool(self.analyzer.can_prove(index < 0))

    def affine(self, node: Any) -> tuple[dict[int, int], Closure]:
        """Split an index into coefficients of parallel axes and the rest."""
        if not self.depth:
            return {}, self._index(node)
        kind = type(node).__name__
        if kind == 'Var' and node in self.axes:
            return {self.axes[node]: 1}, _zero
        if kind == 'Var' and node in self.macros:
            return self.affine(self.macros[node])
        if kind in ('Add', 'Sub'):
            left_terms, left = self.affine(node.a)
            right_terms, right = self.affine(node.b)
            if left_terms or right_terms:
                sign = 1 if kind == 'Add' else -1
                terms = dict(left_terms)
                for axis, coefficient in right_terms.items():
                    terms[axis] = terms.get(axis, 0) + sign * coefficient
                return {axis: coefficient for axis, coefficient in terms.items() if coefficient}, _sum(
                    left, right, sign
                )
        if kind == 'Mul' and (is_const(node.a) or is_const(node.b)):
            factor, other = (node.a, node.b) if is_const(node.a) else (node.b, node.a)
            terms, base = self.affine(other)
            if terms and int(factor):
                scale = int(factor)
                scaled = {axis: coefficient * scale for axis, coefficient in terms.items()}
                return scaled, base if base is _zero else (lambda frame: base(frame) * scale)
        return {}, self._index(node)

    def _index(self, node: Any) -> Closure:
        """An index, in 64 bits where TileLang computes it so."""
        if not self.wide:
            return self.expr(node)
        kind = type(node).__name__
        if kind in _SUMS:
            left, right, combine = self._index(node.a), self._index(node.b), _SUMS[kind]
            return lambda frame: combine(left(frame), right(frame))
        self.wide = False  # an index inside the index is its own matter
        value = self.expr(node)
        self.wide = True

        def run(frame: Frame) -> Any:
            found = value(frame)
            return found.astype(np.int64) if isinstance(found, np.ndarray) else int(found)

        return run


_SUMS: dict[str, Callable[[Any, Any], Any]] = {'Add': operator.add, 'Sub': operator.sub, 'Mul': operator.mul}


def _needs_64_bits(buffer: Any) -> bool:
    """Whether an index of 32 bits is too short for a buffer: its shape says so by a number or a symbol of 64 bits."""
    extents = list(buffer.shape)
    if all(is_const(extent) for extent in extents):
        return math.prod(int(extent) for extent in extents) > np.iinfo(np.int32).max
    return any(not is_const(extent) and str(extent.dtype) == 'int64' for extent in extents)


def _zero(frame: Frame) -> int:
    return 0


def _sum(left: Closure, right: Closure, sign: int) -> Closure:
    if right is _zero:
        return left
    if sign > 0:
        return right if left is _zero else lambda frame: left(frame) + right(frame)
    return lambda frame: left(frame) - right(frame)


def is_const(node: Any) -> bool:
    """Whether an index or extent is a literal."""
    return isinstance(node, int) or type(node).__name__ == 'IntImm'


def _may_be_negative(node: Any) -> bool:
    """Whether an index contains a minus; other indices cannot be negative."""
    from tvm.tirx.stmt_functor import post_order_visit

    if is_const(node):
        return int(node) < 0
    if type(node).__name__ in ('Var', 'BufferLoad', 'Ramp', 'Broadcast'):
        return False
    found: list[Any] = []

    def visit(part: Any) -> None:
        kind = type(part).__name__
        if kind == 'Sub' or (kind == 'IntImm' and int(part) < 0):
            found.append(part)

    post_order_visit(node, visit)
    return bool(found)


def _mentions(node: Any, var: Any) -> bool:
    """Whether an expression uses a variable."""
    from tvm.tirx.stmt_functor import post_order_visit

    found: list[bool] = []
    if not isinstance(node, int):
        post_order_visit(node, lambda part: found.append(True) if part.same_as(var) else None)
    return bool(found)


def _length(extent: Any) -> int:
    """A literal extent; the first extent may be symbolic, because strides do not depend on it."""
    return int(extent) if is_const(extent) else 1


def same_indices(first: list[Any], second: list[Any]) -> bool:
    """Whether two index lists are the same expressions."""
    from tvm.ir import structural_equal

    return len(first) == len(second) and all(
        structural_equal(one, other) for one, other in zip(first, second, strict=True)
    )


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a packed array."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)
