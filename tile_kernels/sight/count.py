"""Count what a lowered kernel does: bytes, sectors, wavefronts, products and operations of the whole grid.

The walker turns the device TIR into Python functions. It runs them for some thread blocks, with all threads of a block
as arrays. Loops and blocks without control flow that depends on them count at their first, middle and last value.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch._subclasses import FakeTensor

from tile_kernels.core.errors import CompileError
from tile_kernels.sight.lines import GENERATED, Place, places
from tile_kernels.sight.lower import Lowered
from tile_kernels.sight.subject import Subject

#: A loop whose control flow depends on its variable is evaluated at up to this many values.
MOST_TURNS = 64
#: The same for one dimension of the grid, and for a loop where more blocks than that are evaluated.
MOST_BLOCKS = 17

_DATA = 'data'

_SFU = ('exp', 'exp2', 'log', 'log2', 'sqrt', 'rsqrt', 'sin', 'cos', 'tanh', 'fast_rcp', 'ieee_frcp', 'ieee_fsqrt')
_ARITHMETIC = {'Add', 'Sub', 'Mul', 'Div', 'Min', 'Max', 'FloorDiv', 'FloorMod', 'Mod'}
_COMPARE = {'EQ', 'NE', 'LT', 'LE', 'GT', 'GE'}

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    'Add': lambda a, b: a + b,
    'Sub': lambda a, b: a - b,
    'Mul': lambda a, b: a * b,
    'Min': np.minimum,
    'Max': np.maximum,
    'FloorDiv': lambda a, b: a // np.where(b == 0, 1, b),
    'FloorMod': lambda a, b: a % np.where(b == 0, 1, b),
    'Div': lambda a, b: _truncated(a, b),
    'Mod': lambda a, b: a - _truncated(a, b) * b,
    'EQ': lambda a, b: a == b,
    'NE': lambda a, b: a != b,
    'LT': lambda a, b: a < b,
    'LE': lambda a, b: a <= b,
    'GT': lambda a, b: a > b,
    'GE': lambda a, b: a >= b,
    'And': np.logical_and,
    'Or': np.logical_or,
    'bitwise_and': lambda a, b: _whole(a) & _whole(b),
    'bitwise_or': lambda a, b: _whole(a) | _whole(b),
    'bitwise_xor': lambda a, b: _whole(a) ^ _whole(b),
    'shift_left': lambda a, b: _whole(a) << (_whole(b) & 63),
    'shift_right': lambda a, b: _whole(a) >> (_whole(b) & 63),
    'truncmod': lambda a, b: a - _truncated(a, b) * b,
}


def _whole(value: Any) -> Any:
    return np.asarray(value).astype(np.int64)


def _truncated(a: Any, b: Any) -> Any:
    """Division as in C: integers round toward zero."""
    b = np.where(b == 0, 1, b)
    if np.asarray(a).dtype.kind == 'f' or b.dtype.kind == 'f':
        return a / b
    return np.sign(a) * np.sign(b) * (abs(a) // abs(b))


@dataclass
class Access:
    """All executions of one kind of access to a buffer, over the grid.

    Attributes:
        space: `'global'` or `'shared'`.
        how: `'load'`, `'store'`, `'atomic'`, `'cp.async'`, `'tma_load'`, `'tma_store'` or `'ldmatrix'`.
        buffer: the name of the buffer.
        width: bytes of one lane; of the whole box for TMA.
        line: the line of the kernel's source, 0 for what the compiler added.
        file: the source file of the line.
        requests: instructions, one per warp.
        bytes: requested bytes; an address that several lanes of a warp share counts once.
        sectors: 32-byte sectors; global memory only.
        least_sectors: the fewest sectors that hold these bytes.
        wavefronts: passes through shared memory.
        least_wavefronts: the passes that these bytes need without bank conflicts.
    """

    space: str
    how: str
    buffer: str
    width: int
    line: int
    file: str
    requests: float = 0
    bytes: float = 0
    sectors: float = 0
    least_sectors: float = 0
    wavefronts: float = 0
    least_wavefronts: float = 0

    @property
    def writes(self) -> bool:
        """Whether the access writes its buffer."""
        return self.how in ('store', 'atomic', 'tma_store')


@dataclass
class Counts:
    """What one device function does over its grid.

    Attributes:
        name: the device function.
        grid: blocks in x, y and z.
        threads: threads of a block.
        shared: bytes of dynamic shared memory.
        cluster: blocks of a cluster.
        accesses: every kind of access.
        flops: operations of matrix products, by element type of the operands.
        flops_at: the same by file and line.
        events: other instructions by class, e.g. `'sfu'`, `'alu'`, `'shuffle'`, `'wgmma'`; `'block_barrier'` by block.
        sizes: bytes of every global buffer.
        assumptions: what the counts take for granted, in words.
    """

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    cluster: int = 1
    accesses: list[Access] = field(default_factory=list)
    flops: dict[str, float] = field(default_factory=dict)
    flops_at: dict[Place, float] = field(default_factory=dict)
    events: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    assumptions: list[str] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return int(np.prod(self.grid))

    def requested(self, buffer: str | None = None, writes: bool | None = None) -> float:
        """Requested bytes of global memory, of one buffer or all, of reads, writes or both."""
        chosen = [a for a in self.accesses if a.space == 'global' and buffer in (None, a.buffer)]
        return sum(a.bytes for a in chosen if writes in (None, a.writes))

    def distinct(self) -> float:
        """Bytes that must move: of each buffer the requested bytes, at most its size, for reads and for writes."""
        total = 0.0
        for name in dict.fromkeys(a.buffer for a in self.accesses if a.space == 'global'):
            for writes in (False, True):
                total += min(self.requested(name, writes), self.sizes.get(name, np.inf))
        return total


#: Called for an execution of an access with the byte address and the activity of each thread, and what it stands for.
Watch = Callable[[Access, np.ndarray, np.ndarray, float], None]


def count(subject: Subject, lowered: Lowered, watch: Watch | None = None) -> list[Counts]:
    """Count every device function of a subject; `watch` sees the addresses of each access, TMA excepted."""
    return [_Walker(subject, name, func, watch).run() for name, func in lowered.functions.items()]


def launch_sizes(subject: Subject, lowered: Lowered) -> list[Counts]:
    """Grid, threads, cluster and shared memory of every device function; nothing else is counted."""
    walkers = [_Walker(subject, name, func) for name, func in lowered.functions.items()]
    for walker in walkers:
        walker.measure()
    return [walker.counts for walker in walkers]


@dataclass
class _State:
    """The values of one run: variables, local integers, active threads, and how many executions this one stands for."""

    env: dict[Any, Any]
    mask: np.ndarray
    weight: float
    local: dict[Any, dict[int, Any]] = field(default_factory=dict)
    place: Place = GENERATED


@dataclass(frozen=True)
class _Vector:
    """The indices of a vector access."""

    base: Any
    stride: int
    lanes: int


Expr = Callable[[_State], Any]
Stmt = Callable[[_State], None]


class _Walker:
    """Turns one device function into Python functions and runs them."""

    def __init__(self, subject: Subject, name: str, func: Any, watch: Watch | None = None) -> None:
        from tilelang import tvm

        self.tvm = tvm
        self.subject, self.func, self.watch = subject, func, watch
        self.places = places(subject.prim_func, func)
        self.deps: dict[Any, set[Any]] = defaultdict(set)
        self.scopes: dict[Any, str] = {}
        self.offsets: dict[Any, Any] = {}
        self.names: dict[Any, str] = {}
        self.found: dict[tuple, Access] = {}
        self.notes: dict[str, None] = {}
        self.values: dict[str, np.ndarray] = {}
        self.launch: dict[str, Any] = {}
        self.most_turns = MOST_TURNS
        self.counts = Counts(name, (1, 1, 1), 1, int(func.attrs.get('dyn_shared_memory_buf', 0)))
        self.env = self._parameters()
        self._analyze()

    # ---- preparation -------------------------------------------------------------------------------------------

    def _parameters(self) -> dict[Any, Any]:
        """Values of the scalar parameters; names of the global buffers and their sizes."""
        env: dict[Any, Any] = {}
        seen: dict[str, int] = defaultdict(int)
        sizes, given = self._buffer_sizes(), self.subject.tensors
        for param in self.func.params:
            if str(param.dtype) != 'handle':
                same = seen[param.name]
                seen[param.name] += 1
                key = f'{param.name}_{same}' if same else param.name
                if key not in self.subject.symbols:
                    raise CompileError(f'{self.counts.name}: the parameter {param.name} has no value')
                env[param] = self.subject.symbols[key]
                continue
            name = param.name.removesuffix('_desc')
            self.names[param], self.scopes[param] = name, 'global'
            if name in sizes:
                self.counts.sizes[name] = sizes[name]
            tensor = given.get(name)
            if tensor is not None and _has_values(tensor):
                self.values[name] = tensor.contiguous().view(-1).cpu().numpy()
        return env

    def _buffer_sizes(self) -> dict[str, int]:
        """Bytes of every parameter: of the tensor if one was given, else of the declared shape."""
        from tile_kernels.core.cost import touched_bytes

        found: dict[str, int] = {}
        names = {}
        for param in self.subject.prim_func.params:
            buffer = self.subject.prim_func.buffer_map.get(param)
            if buffer is None:
                continue
            names[buffer.data.name] = names[buffer.name] = buffer
        for name, buffer in names.items():
            tensor = self.subject.tensors.get(buffer.name)
            if tensor is not None:
                found[name] = touched_bytes(tensor)
                continue
            shape = [self._extent(extent) for extent in buffer.shape]
            known = [extent for extent in shape if extent is not None]
            if len(known) == len(shape):
                found[name] = int(np.prod(known)) * self._bits(buffer.dtype)[0] // 8
        return found

    def _extent(self, extent: Any) -> int | None:
        if hasattr(extent, 'value'):
            return int(extent.value)
        value = self.subject.symbols.get(getattr(extent, 'name', ''))
        return None if value is None else int(value)

    def _bits(self, dtype: Any) -> tuple[int, int]:
        """Bits of an element with all its lanes, and the number of lanes."""
        kind = self.tvm.DataType(str(dtype))
        return kind.bits * kind.lanes, kind.lanes

    def _analyze(self) -> None:
        """Find the iteration variables and data on which every variable and local buffer depends."""
        facts: list[tuple[Any, list[Any]]] = []

        def visit(node: Any) -> None:
            kind = type(node).__name__
            if kind == 'Bind':
                facts.append((node.var, [node.value]))
                self._alias(node.var, node.value)
            elif kind == 'BufferStore':
                facts.append((node.buffer.data, [node.value, *node.indices]))
            elif kind in ('AllocBuffer', 'DeclBuffer'):
                self.scopes.setdefault(node.buffer.data, str(node.buffer.scope()))
                self.names.setdefault(node.buffer.data, node.buffer.name)
            elif kind == 'For':
                self.deps[node.loop_var].add(node.loop_var)
                facts.append((node.loop_var, [node.extent, node.min]))
            elif kind == 'AttrStmt' and str(node.attr_key) == 'thread_extent':
                self.deps[node.node.var].add(node.node.var)

        self.tvm.tirx.stmt_functor.post_order_visit(self.func.body, visit)
        changed = True
        while changed:
            changed = False
            for target, sources in facts:
                before = len(self.deps[target])
                for source in sources:
                    self.deps[target] |= self._depends(source)
                changed |= len(self.deps[target]) > before

    def _alias(self, var: Any, value: Any) -> None:
        """A pointer into shared memory: its scope, name and byte offset."""
        if str(var.dtype) == 'handle' and hasattr(value, 'op') and value.op.name.endswith('handle_add_byte_offset'):
            base = value.args[0]
            self.scopes[var], self.names[var] = self.scopes.get(base, 'shared.dyn'), var.name
            self.offsets[var] = value.args[1]

    def _depends(self, expression: Any) -> set[Any]:
        """What an expression depends on: iteration variables, and `_DATA` for values that only the device knows."""
        found: set[Any] = set()

        def visit(node: Any) -> None:
            kind = type(node).__name__
            if kind == 'Var':
                found.update(self.deps.get(node, ()))
            elif kind == 'BufferLoad':
                self._depends_on_load(node, found)
            elif kind == 'Call' and not self._known_call(node.op.name):
                found.add(_DATA)

        self.tvm.tirx.stmt_functor.post_order_visit(expression, visit)
        return found

    def _depends_on_load(self, node: Any, found: set[Any]) -> None:
        data = node.buffer.data
        scope = self.scopes.get(data, 'global')
        if scope.startswith('local') and not str(node.buffer.dtype).startswith(('float', 'bfloat')):
            found.update(self.deps.get(data, ()))
        elif self.names.get(data) not in self.values:
            found.add(_DATA)

    @staticmethod
    def _known_call(name: str) -> bool:
        short = name.split('.')[-1]
        return short in _OPERATIONS or short in (
            'if_then_else',
            'likely',
            'tl_shuffle_elect',
            'tvm_access_ptr',
            'type_annotation',
            'address_of',
            'reinterpret',
        )

    # ---- running -----------------------------------------------------------------------------------------------

    def measure(self) -> list[int]:
        """Find the sizes of grid, block and cluster; returns the threads of a block along x, y and z."""
        extents = self._extents()
        block = [extents.get(f'threadIdx.{axis}', 1) for axis in 'xyz']
        self.counts.grid = tuple(extents.get(f'blockIdx.{axis}', 1) for axis in 'xyz')  # type: ignore[assignment]
        self.counts.threads, self.counts.cluster = int(np.prod(block)), self._cluster()
        return block

    def run(self) -> Counts:
        """Walk sampled blocks of the grid."""
        block, grid = self.measure(), self.counts.grid
        padded = -(-self.counts.threads // 32) * 32
        index = np.arange(padded, dtype=np.int64)
        body = self._stmt(self.func.body)
        controls = self._controls(self.func.body)
        sampled = _samples_of_grid(grid, controls, self.launch)
        self.most_turns = MOST_TURNS if len(sampled) <= MOST_BLOCKS else MOST_BLOCKS
        for position, weight in sampled:
            state = _State(dict(self.env), index < self.counts.threads, weight)
            state.env.update(
                {
                    self.launch[f'blockIdx.{a}']: p
                    for a, p in zip('xyz', position, strict=True)
                    if f'blockIdx.{a}' in self.launch
                }
            )
            threads = (index % block[0], index // block[0] % block[1], index // (block[0] * block[1]))
            for axis, values in zip('xyz', threads, strict=True):
                if f'threadIdx.{axis}' in self.launch:
                    state.env[self.launch[f'threadIdx.{axis}']] = values
            body(state)
        self.counts.accesses = [a for a in self.found.values() if a.requests]
        self.counts.assumptions = list(self.notes)
        return self.counts

    def _extents(self) -> dict[str, int]:
        found: dict[str, int] = {}
        empty = _State(dict(self.env), np.ones(32, bool), 0)

        def visit(node: Any) -> None:
            if type(node).__name__ == 'AttrStmt' and str(node.attr_key) == 'thread_extent':
                tag = str(node.node.thread_tag)
                self.launch[tag] = node.node.var
                found[tag] = int(self._expr(node.value)(empty))

        self.tvm.tirx.stmt_functor.post_order_visit(self.func.body, visit)
        return found

    def _cluster(self) -> int:
        dims = self.func.attrs.get('cluster_dims', None)
        return int(np.prod([int(d) for d in dims])) if dims is not None else 1

    def _controls(self, body: Any) -> set[Any]:
        """What the control flow of a statement depends on."""
        found: set[Any] = set()

        def visit(node: Any) -> None:
            kind = type(node).__name__
            if kind == 'IfThenElse':
                found.update(self._depends(node.condition))
            elif kind == 'For':
                found.update(self._depends(node.extent))
            elif kind == 'Call' and node.op.name.endswith('if_then_else'):
                found.update(self._depends(node.args[0]))

        self.tvm.tirx.stmt_functor.post_order_visit(body, visit)
        return found

    # ---- statements --------------------------------------------------------------------------------------------

    def _stmt(self, node: Any) -> Stmt:
        kind = type(node).__name__
        make = getattr(self, f'_stmt_{kind.lower()}', None)
        if make is None:
            raise CompileError(f'{self.counts.name}: the walker does not know the statement {kind}')
        inner, place = make(node), self.places[node]

        def placed(state: _State) -> None:
            state.place = place
            inner(state)

        return placed

    def _stmt_seqstmt(self, node: Any) -> Stmt:
        parts = [self._stmt(part) for part in node.seq]

        def run(state: _State) -> None:
            for part in parts:
                part(state)

        return run

    def _stmt_attrstmt(self, node: Any) -> Stmt:
        return self._stmt(node.body)

    def _stmt_declbuffer(self, node: Any) -> Stmt:
        return self._stmt(node.body) if getattr(node, 'body', None) is not None else lambda state: None

    _stmt_allocbuffer = _stmt_declbuffer

    def _stmt_assertstmt(self, node: Any) -> Stmt:
        return lambda state: None

    def _stmt_bind(self, node: Any) -> Stmt:
        value, var = self._expr(node.value), node.var

        def run(state: _State) -> None:
            state.env[var] = value(state)

        return run

    def _stmt_evaluate(self, node: Any) -> Stmt:
        value = self._expr(node.value)

        def run(state: _State) -> None:
            value(state)

        return run

    def _stmt_while(self, node: Any) -> Stmt:
        self.notes['a while loop counts as one turn'] = None
        return self._stmt(node.body)

    def _stmt_ifthenelse(self, node: Any) -> Stmt:
        condition, then = self._expr(node.condition), self._stmt(node.then_case)
        otherwise = self._stmt(node.else_case) if node.else_case is not None else None
        assumed = _DATA in self._depends(node.condition)
        if assumed:
            self.notes[f'`if {_short(node.condition)}` depends on data: it counts as true'] = None

        def run(state: _State) -> None:
            value, before = condition(state), state.mask
            if assumed:
                then(state)
                return
            chosen = before & np.asarray(value).astype(bool)
            if chosen.any():
                state.mask = chosen
                then(state)
            if otherwise is not None and (before & ~chosen).any():
                state.mask = before & ~chosen
                otherwise(state)
            state.mask = before

        return run

    def _stmt_for(self, node: Any) -> Stmt:
        extent, start, body, var = self._expr(node.extent), self._expr(node.min), self._stmt(node.body), node.loop_var
        assumed = _DATA in self._depends(node.extent)
        if assumed:
            self.notes[f'`for {var.name} in range({_short(node.extent)})` depends on data: it counts as one turn'] = (
                None
            )
        decides = var in self._controls(node.body) or self._keeps(node.body, var)
        for axis, of in zip('xyz', self.counts.grid, strict=True):
            if of > MOST_BLOCKS and self.launch.get(f'blockIdx.{axis}') in self._depends(node.extent):
                self.notes[f'loops of a block depend on its number: {MOST_BLOCKS} of {of} blocks were counted'] = None

        def run(state: _State) -> None:
            extents = np.broadcast_to(np.asarray(extent(state)), state.mask.shape)
            begin = start(state)
            active = extents[state.mask]
            turns = 1 if assumed else int(active.max()) if active.size else 0
            uneven = not assumed and bool((active != turns).any())
            weight, mask = state.weight, state.mask
            for turn, times in _samples(turns, self.most_turns if uneven or decides else 3):
                state.env[var], state.weight = begin + turn, weight * times
                state.mask = mask & (extents > turn) if uneven else mask
                body(state)
            state.weight, state.mask = weight, mask

        return run

    def _keeps(self, body: Any, var: Any) -> bool:
        """Whether the body stores integers in a local array at an index that depends on the loop variable."""
        found = False

        def visit(node: Any) -> None:
            nonlocal found
            if type(node).__name__ == 'BufferStore' and self.scopes.get(node.buffer.data, '').startswith('local'):
                whole = not str(node.buffer.dtype).startswith(('float', 'bfloat'))
                found |= whole and any(var in self._depends(index) for index in node.indices)

        self.tvm.tirx.stmt_functor.post_order_visit(body, visit)
        return found

    def _stmt_bufferstore(self, node: Any) -> Stmt:
        value, index, data = self._expr(node.value), self._index(node), node.buffer.data
        scope = self.scopes.get(data, 'global')
        if not scope.startswith('local'):
            record = self._access(node.buffer, 'store', node.value.dtype)

            def run(state: _State) -> None:
                value(state)
                record(state, index(state))

            return run
        whole = not str(node.buffer.dtype).startswith(('float', 'bfloat'))

        def keep(state: _State) -> None:
            number, place = value(state), index(state)
            kept = state.local.setdefault(data, {})
            if not whole:
                return
            if isinstance(place, _Vector) or np.ndim(place) or isinstance(number, _Vector):
                kept.clear()
                return
            before = kept.get(int(place), 0)
            kept[int(place)] = number if state.mask.all() else np.where(state.mask, number, before)

        return keep

    def _index(self, node: Any) -> Expr:
        if len(node.indices) != 1:
            raise CompileError(f'{self.counts.name}: the walker needs flat buffers, got {node.buffer.name}')
        return self._expr(node.indices[0])

    # ---- expressions -------------------------------------------------------------------------------------------

    def _expr(self, node: Any) -> Expr:
        kind = type(node).__name__
        if kind in ('IntImm', 'FloatImm'):
            number = node.value
            return lambda state: number
        if kind == 'Var':
            return lambda state: state.env.get(node, 0)
        if kind == 'StringImm':
            return lambda state: 0
        if kind in _OPERATIONS:
            return self._binary(node, kind)
        make = getattr(self, f'_expr_{kind.lower()}', None)
        if make is None:
            raise CompileError(f'{self.counts.name}: the walker does not know the expression {kind}')
        return make(node)

    def _binary(self, node: Any, kind: str) -> Expr:
        left, right, operation = self._expr(node.a), self._expr(node.b), _OPERATIONS[kind]
        dtype = str(node.a.dtype)
        lanes = self._bits(dtype)[1]
        if dtype.startswith(('float', 'bfloat')) and kind in _ARITHMETIC:

            def arithmetic(state: _State) -> Any:
                a, b = left(state), right(state)
                self._event(state, 'alu', lanes)
                known = not isinstance(a, _Vector) and not isinstance(b, _Vector)
                with np.errstate(all='ignore'):
                    return operation(np.float64(a), np.float64(b)) if known else 0

            return arithmetic

        def run(state: _State) -> Any:
            a, b = left(state), right(state)
            if isinstance(a, _Vector) or isinstance(b, _Vector):
                return _of_vectors(kind, a, b)
            return operation(a, b)

        return run

    def _expr_not(self, node: Any) -> Expr:
        inner = self._expr(node.a)
        return lambda state: np.logical_not(inner(state))

    def _expr_cast(self, node: Any) -> Expr:
        inner = self._expr(node.value)
        before, after = str(node.value.dtype), str(node.dtype)
        whole = after.startswith(('int', 'uint')) and before.startswith(('float', 'bfloat'))

        def run(state: _State) -> Any:
            value = inner(state)
            return value if isinstance(value, _Vector) or not whole else _whole(value)

        return run

    def _expr_select(self, node: Any) -> Expr:
        condition, a, b = self._expr(node.condition), self._expr(node.true_value), self._expr(node.false_value)

        def run(state: _State) -> Any:
            chosen, one, two = condition(state), a(state), b(state)
            return one if any(isinstance(v, _Vector) for v in (chosen, one, two)) else np.where(chosen, one, two)

        return run

    def _expr_let(self, node: Any) -> Expr:
        value, body, var = self._expr(node.value), self._expr(node.body), node.var

        def run(state: _State) -> Any:
            state.env[var] = value(state)
            return body(state)

        return run

    def _expr_ramp(self, node: Any) -> Expr:
        base, stride, lanes = self._expr(node.base), self._expr(node.stride), int(node.lanes)
        return lambda state: _Vector(base(state), int(np.max(stride(state))), lanes)

    def _expr_broadcast(self, node: Any) -> Expr:
        return self._expr(node.value)

    def _expr_shuffle(self, node: Any) -> Expr:
        parts = [self._expr(part) for part in node.vectors]
        return lambda state: next(iter([part(state) for part in parts]))

    def _expr_bufferload(self, node: Any) -> Expr:
        index, data = self._index(node), node.buffer.data
        scope, name = self.scopes.get(data, 'global'), self.names.get(data, node.buffer.name)
        if scope.startswith('local'):

            def local(state: _State) -> Any:
                place, kept = index(state), state.local.get(data)
                if not kept or isinstance(place, _Vector) or np.ndim(place):
                    return 0
                return kept.get(int(place), 0)

            return local
        record, values = self._access(node.buffer, 'load', node.dtype), self.values.get(name)

        def run(state: _State) -> Any:
            place = index(state)
            record(state, place)
            if values is None or isinstance(place, _Vector):
                return 0
            return values[np.clip(place, 0, len(values) - 1)]

        return run

    def _expr_call(self, node: Any) -> Expr:
        name = node.op.name.split('.')[-1]
        if name in _OPERATIONS and len(node.args) == 2:
            left, right, operation = self._expr(node.args[0]), self._expr(node.args[1]), _OPERATIONS[name]

            def binary(state: _State) -> Any:
                a, b = left(state), right(state)
                return 0 if isinstance(a, _Vector) or isinstance(b, _Vector) else operation(a, b)

            return binary
        make = getattr(self, f'_call_{name}', None)
        if make is not None:
            return make(node)
        return self._instruction(node, name)

    def _call_if_then_else(self, node: Any) -> Expr:
        condition, a, b = (self._expr(arg) for arg in node.args)
        assumed = _DATA in self._depends(node.args[0])

        def run(state: _State) -> Any:
            value, before = condition(state), state.mask
            if assumed:
                return a(state)
            chosen = np.broadcast_to(np.asarray(value).astype(bool), before.shape)
            one = two = 0
            if (before & chosen).any():
                state.mask = before & chosen
                one = a(state)
            if (before & ~chosen).any():
                state.mask = before & ~chosen
                two = b(state)
            state.mask = before
            return one if isinstance(one, _Vector) or isinstance(two, _Vector) else np.where(chosen, one, two)

        return run

    def _call_likely(self, node: Any) -> Expr:
        return self._expr(node.args[0])

    def _call_reinterpret(self, node: Any) -> Expr:
        inner = self._expr(node.args[-1])
        same = str(node.dtype).startswith(('int', 'uint')) and str(node.args[-1].dtype).startswith(('int', 'uint'))

        def run(state: _State) -> Any:
            value = inner(state)
            return value if same else 0

        return run

    def _call_tl_shuffle_elect(self, node: Any) -> Expr:
        group = self._expr(node.args[0])

        def run(state: _State) -> Any:
            index, size = np.arange(state.mask.size), int(np.max(group(state)))
            return index % size == 0 if size else index == 0

        return run

    def _call_tvm_access_ptr(self, node: Any) -> Expr:
        index = self._expr(node.args[2])
        return lambda state: index(state)

    def _call_address_of(self, node: Any) -> Expr:
        index = self._index(node.args[0])
        return lambda state: index(state)

    # ---- instructions ------------------------------------------------------------------------------------------

    def _event(self, state: _State, name: str, each: float = 1, per_warp: bool = False) -> None:
        active = state.mask.reshape(-1, 32).any(1).sum() if per_warp else state.mask.sum()
        self.counts.events[name] = self.counts.events.get(name, 0) + float(active) * each * state.weight

    def _instruction(self, node: Any, name: str) -> Expr:
        """An intrinsic that computes no index: its arguments are evaluated, and it is counted by its class."""
        if name in ('ptx_wgmma_ss', 'ptx_wgmma_rs', 'ptx_mma', 'ptx_mma_sp'):
            return self._product(node, name)
        if name in ('tma_load', 'tma_store', 'tma_load_multicast', 'tma_load_im2col'):
            return self._tma(node, 'tma_store' if name == 'tma_store' else 'tma_load')
        if name == 'ptx_cp_async':
            return self._cp_async(node)
        if name in ('ptx_ldmatrix', 'ptx_stmatrix'):
            return self._ldmatrix(node, name)
        if re.fullmatch(r'(ld|st)g\d+', name):
            return self._direct(node, name)
        event = _event_of(name, node)
        lanes = self._bits(node.dtype)[1] if str(node.dtype) not in ('handle', 'void', '') else 1
        atomic = self._atomic(node, name)
        barriers = _block_barriers(name, node)
        quiet = ('address_of', 'tvm_access_ptr')
        args = [self._expr(a) for a in node.args if not (hasattr(a, 'op') and a.op.name.split('.')[-1] in quiet)]

        def run(state: _State) -> Any:
            for arg in args:
                arg(state)
            if event is not None:
                self._event(state, event, lanes if event in ('sfu', 'alu') else 1)
            if atomic is not None:
                atomic(state)
            if barriers:
                done = self.counts.events.get('block_barrier', 0.0)
                self.counts.events['block_barrier'] = done + barriers * state.weight
            return 0

        return run

    def _atomic(self, node: Any, name: str) -> Stmt | None:
        if 'atomic' not in name:
            return None
        pointer = next((a for a in node.args if hasattr(a, 'op')), None)
        if pointer is None:
            return None
        several = re.search(r'x(\d)', name)
        lanes = int(several[1]) if several else 1
        return self._through(pointer, 'atomic', lanes)

    def _through(self, pointer: Any, how: str, lanes: int = 1, width: int | None = None) -> Stmt:
        """An access through the address of an element; `width` is in bytes, else `lanes` elements."""
        if pointer.op.name.endswith('address_of'):
            buffer, index = pointer.args[0].buffer, self._index(pointer.args[0])
            data, dtype, name = buffer.data, buffer.dtype, buffer.name
        else:
            data, index, dtype = pointer.args[1], self._expr(pointer.args[2]), pointer.args[0].dtype
            name = self.names.get(data, getattr(data, 'name', '?'))
        each = self._bits(dtype)[0] // 8 or 1
        record = self._record(data, name, how, width or each * lanes)

        def run(state: _State) -> None:
            place = index(state)
            place = place.base if isinstance(place, _Vector) else place
            record(state, np.asarray(place) * each)

        return run

    def _product(self, node: Any, name: str) -> Expr:
        words = [str(a.value) for a in node.args if type(a).__name__ == 'StringImm']
        shape = next(word for word in words if re.fullmatch(r'm\d+n\d+k\d+', word))
        m, n, k = map(int, re.findall(r'\d+', shape))
        kind = next((w for w in words if w in _TYPES), 'bf16')
        operations = 2 * m * n * k * (2 if name.endswith('_sp') else 1)
        group = 128 if 'wgmma' in name else 32

        def run(state: _State) -> Any:
            times = state.mask.sum() / group * state.weight
            dtype = _TYPES.get(kind, kind)
            done = operations * float(times)
            self.counts.flops[dtype] = self.counts.flops.get(dtype, 0) + done
            self.counts.flops_at[state.place] = self.counts.flops_at.get(state.place, 0) + done
            event = 'wgmma' if group == 128 else 'mma'
            self.counts.events[event] = self.counts.events.get(event, 0) + float(times)
            return 0

        return run

    def _tma(self, node: Any, how: str) -> Expr:
        pointers = [a for a in node.args if hasattr(a, 'op') and a.op.name.split('.')[-1] == 'tvm_access_ptr']
        shared = next((p for p in pointers if self.scopes.get(p.args[1], '').startswith('shared')), None)
        remote = next((p for p in pointers if p is not shared), None)
        first = node.args[0]
        descriptor = first if type(first).__name__ == 'Var' else remote.args[1] if remote is not None else None
        if shared is None or descriptor is None:
            raise CompileError(f'{self.counts.name}: the walker does not know this TMA copy: {_short(node)}')
        size, each = self._expr(shared.args[3]), self._bits(shared.args[0].dtype)[0] / 8
        buffer = self.names.get(descriptor, str(descriptor.name))

        def run(state: _State) -> Any:
            box = int(np.max(size(state)) * each)
            times = float(state.mask.sum()) * state.weight
            access = self._found('global', how, buffer, box, state.place)
            access.requests += times
            access.bytes += times * box
            access.sectors += times * -(-box // 32)
            access.least_sectors += times * -(-box // 32)
            return 0

        return run

    def _cp_async(self, node: Any) -> Expr:
        target, source = node.args[0], node.args[1]
        pointee = source.args[0].buffer if source.op.name.endswith('address_of') else source.args[0]
        size = int(node.args[2].value) * self._bits(pointee.dtype)[0] // 8
        predicate = self._expr(node.args[3]) if len(node.args) > 3 else None
        read, write = self._through(source, 'cp.async', width=size), self._through(target, 'cp.async', width=size)

        def run(state: _State) -> Any:
            before = state.mask
            if predicate is not None:
                state.mask = before & np.asarray(predicate(state)).astype(bool)
            read(state)
            state.mask = before
            write(state)
            return 0

        return run

    def _direct(self, node: Any, name: str) -> Expr:
        """A global access by an intrinsic such as `ldg128` or `stg64`; a last argument may choose the threads."""
        load, width = name.startswith('ld'), int(name[3:]) // 8
        each = self._through(node.args[0], 'load' if load else 'store', width=width)
        value = None if load else self._expr(node.args[1])
        rest = node.args[1:] if load else node.args[2:]
        predicate = self._expr(rest[0]) if len(rest) else None

        def run(state: _State) -> Any:
            before = state.mask
            if value is not None:
                value(state)
            if predicate is not None:
                state.mask = before & np.asarray(predicate(state)).astype(bool)
            each(state)
            state.mask = before
            return 0

        return run

    def _ldmatrix(self, node: Any, name: str) -> Expr:
        numbers = [int(a.value) for a in node.args if type(a).__name__ == 'IntImm']
        matrices = max([n for n in numbers if n in (1, 2, 4)] or [4])
        pointers = [a for a in node.args if type(a).__name__ == 'Call']
        shared = [p for p in pointers if self.scopes.get(_pointee(p), '').startswith('shared')]
        if not shared:
            raise CompileError(f'{self.counts.name}: the walker does not know this matrix copy: {_short(node)}')
        each = self._through(shared[0], 'ldmatrix' if 'ld' in name else 'store', width=16)

        def run(state: _State) -> Any:
            before = state.mask
            state.mask = before & (np.arange(before.size) % 32 < 8 * matrices)
            each(state)
            state.mask = before
            return 0

        return run

    # ---- accesses ----------------------------------------------------------------------------------------------

    def _access(self, buffer: Any, how: str, dtype: Any) -> Callable[[_State, Any], None]:
        """A function that counts a load or store of a value of `dtype` at an index of a buffer."""
        bits, lanes = self._bits(dtype)
        each = self._bits(buffer.dtype)[0] / 8
        name = self.names.get(buffer.data, buffer.name)
        whole = self._record(buffer.data, name, how, max(1, bits // 8))
        single = self._record(buffer.data, name, how, max(1, bits // lanes // 8))

        def run(state: _State, index: Any) -> None:
            if isinstance(index, _Vector) and index.stride != 1:
                for lane in range(index.lanes):
                    single(state, (np.asarray(index.base) + lane * index.stride) * each)
                return
            whole(state, np.asarray(index.base if isinstance(index, _Vector) else index) * each)

        return run

    def _record(self, data: Any, name: str, how: str, width: int) -> Callable[[_State, Any], None]:
        """A function that counts an access of `width` bytes per lane at a byte offset."""
        scope = self.scopes.get(data, 'global')
        if scope.startswith(('local', 'shared.barrier')):
            return lambda state, address: None
        space = 'shared' if scope.startswith('shared') else 'global'
        shift = self._expr(self.offsets[data]) if data in self.offsets else None
        name = self.names.get(data, name)

        def run(state: _State, address: Any) -> None:
            active = state.mask
            if not active.any():
                return
            place = np.broadcast_to(np.asarray(address), active.shape).astype(np.int64)
            access = self._found(space, how, name, width, state.place)
            warps = int(active.reshape(-1, 32).any(1).sum())
            access.requests += warps * -(-width // 16) * state.weight
            access.bytes += _distinct(place.reshape(-1, 32), active.reshape(-1, 32)).sum() * width * state.weight
            if space == 'global':
                used, least = sectors(place, width, active)
                access.sectors += used * state.weight
                access.least_sectors += least * state.weight
            else:
                place = place + (int(np.max(shift(state))) if shift is not None else 0)
                used, least = wavefronts(place, width, active)
                access.wavefronts += used * state.weight
                access.least_wavefronts += least * state.weight
            if self.watch is not None:
                self.watch(access, place, active, state.weight)

        return run

    def _found(self, space: str, how: str, buffer: str, width: int, place: Place) -> Access:
        file, line = place
        key = (space, how, buffer, width, line, file)
        if key not in self.found:
            self.found[key] = Access(*key)
        return self.found[key]


#: Element types of matrix products as PTX names them.
_TYPES = {
    'bf16': 'bfloat16',
    'fp16': 'float16',
    'f16': 'float16',
    'tf32': 'float32',
    'fp32': 'float32',
    'e4m3': 'float8_e4m3fn',
    'e5m2': 'float8_e5m2',
    'float8_e4m3': 'float8_e4m3fn',
    'float8_e4m3fn': 'float8_e4m3fn',
    'float8_e5m2': 'float8_e5m2',
    'int8': 'int8',
    's8': 'int8',
}


def _event_of(name: str, node: Any) -> str | None:
    """The class of an intrinsic that is neither a copy nor a product."""
    if name in _SFU:
        return 'sfu'
    if 'shfl' in name or name.endswith(('any_sync', 'all_sync', 'ballot_sync')):
        return 'shuffle'
    if name == 'tvm_storage_sync' or 'named_barrier' in name or 'mbarrier' in name:
        return 'barrier'
    if name == 'call_extern' and 'AllReduce' in str(node.args[0]):
        return 'shuffle'
    if name.startswith(('ieee_', 'fma')) or name in ('max2', 'min2', 'abs2', 'add2', 'mul2', 'fma2', 'fabs'):
        return 'alu'
    return None


def _block_barriers(name: str, node: Any) -> int:
    """Block-wide barriers of one call: `__syncthreads`, or two for each step of a reduction across warps."""
    if name == 'tvm_storage_sync':
        return int(str(node.args[0].value).startswith('shared'))
    reduction = re.search(r'AllReduce<.*?, *(\d+), *(\d+)', str(node.args[0])) if name == 'call_extern' else None
    if reduction is None:
        return 0
    threads, scale = int(reduction[1]), int(reduction[2])
    steps = (threads >> step for step in range(1, threads.bit_length()))
    return 2 * sum(offset >= max(32, scale) for offset in steps)


def _pointee(pointer: Any) -> Any:
    return pointer.args[0].buffer.data if pointer.op.name.endswith('address_of') else pointer.args[1]


def _short(node: Any) -> str:
    text = ' '.join(str(node).split()).replace('T.', '')
    return text if len(text) <= 60 else f'{text[:57]}...'


def _has_values(tensor: Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return whole and not isinstance(tensor, FakeTensor) and tensor.device.type != 'meta'


def _of_vectors(kind: str, a: Any, b: Any) -> Any:
    """Arithmetic on the indices of a vector access."""
    if kind == 'Add' and not (isinstance(a, _Vector) and isinstance(b, _Vector)):
        vector, other = (a, b) if isinstance(a, _Vector) else (b, a)
        return _Vector(vector.base + other, vector.stride, vector.lanes)
    if kind == 'Mul' and not (isinstance(a, _Vector) and isinstance(b, _Vector)):
        vector, other = (a, b) if isinstance(a, _Vector) else (b, a)
        return _Vector(vector.base * other, vector.stride * int(np.max(other)), vector.lanes)
    return 0


def _samples(turns: int, most: int) -> Iterator[tuple[int, float]]:
    """Turns that stand for all, with how many each stands for: all of them, or the ends and evenly spread ones."""
    if turns <= max(most, 4):
        yield from ((turn, 1) for turn in range(turns))
        return
    inner = most - 2
    yield 0, 1
    for part in range(inner):
        begin, end = 1 + part * (turns - 2) // inner, 1 + (part + 1) * (turns - 2) // inner
        yield (begin + end - 1) // 2, end - begin
    yield turns - 1, 1


def _samples_of_grid(
    grid: tuple[int, ...], controls: set[Any], launch: dict[str, Any]
) -> list[tuple[tuple[int, ...], float]]:
    """Blocks that stand for the grid, with how many each stands for.

    Axes that control flow depends on are crossed. The others only shift addresses: they vary together.
    """
    variables = [launch.get(f'blockIdx.{axis}') for axis in 'xyz']
    decides = [variable is not None and variable in controls for variable in variables]
    others = [extent for extent, decided in zip(grid, decides, strict=True) if not decided]
    free = max(others, default=1)
    found: list[tuple[tuple[int, ...], float]] = [
        (tuple(part * (extent - 1) // max(1, free - 1) for extent in others), times * float(np.prod(others)) / free)
        for part, times in _samples(free, 3)
    ]
    for axis, decided in enumerate(decides):
        if decided:
            sampled = list(_samples(grid[axis], MOST_BLOCKS))
            found = [((*p[:axis], q, *p[axis:]), w * times) for p, w in found for q, times in sampled]
    return found


def _distinct(rows: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The number of distinct valid entries of each row."""
    ordered = np.sort(np.where(valid, rows, -1), axis=1)
    changes = (ordered[:, 1:] != ordered[:, :-1]).sum(1) + 1
    return np.where(valid.any(1), changes - (~valid).any(1), 0)


def sectors(address: np.ndarray, width: int, active: np.ndarray) -> tuple[int, int]:
    """32-byte sectors that the warps touch, summed, and the fewest that hold their distinct bytes."""
    rows, valid = address.reshape(-1, 32), active.reshape(-1, 32)
    spans = (rows + width - 1) // 32 - rows // 32 + 1
    steps = int(spans[valid].max())
    wide = np.concatenate([rows // 32 + step for step in range(steps)], axis=1)
    used = _distinct(wide, np.concatenate([valid & (step < spans) for step in range(steps)], axis=1))
    return int(used.sum()), int(np.ceil(_distinct(rows, valid) * width / 32).sum())


def wavefronts(address: np.ndarray, width: int, active: np.ndarray) -> tuple[int, int]:
    """Passes through the 32 banks of shared memory, and the fewest for the same words.

    A pass serves 32 lanes of up to 4 bytes, 16 lanes of 8 bytes or 8 lanes of 16 bytes. Wider accesses are split.
    """
    if width > 16:
        parts = [wavefronts(address + start, min(16, width - start), active) for start in range(0, width, 16)]
        return sum(p[0] for p in parts), sum(p[1] for p in parts)
    words = -(-width // 4)
    lanes = 32 // (1 if words == 1 else 2 if words == 2 else 4)
    rows, valid = (address // 4).reshape(-1, lanes), active.reshape(-1, lanes)
    wide = np.concatenate([rows + step for step in range(words)], axis=1)
    order = np.sort(np.where(np.tile(valid, (1, words)), wide, -1), axis=1)
    fresh = order >= 0
    fresh[:, 1:] &= order[:, 1:] != order[:, :-1]
    group = np.broadcast_to(np.arange(len(order))[:, None], order.shape)
    met = np.bincount((group * 32 + order % 32)[fresh], minlength=len(order) * 32).reshape(-1, 32)
    return int(met.max(1).sum()), int((-(-fresh.sum(1) // 32)).sum())
