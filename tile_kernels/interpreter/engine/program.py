"""A compiled kernel: binding tensors, launching grids in batches of blocks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tile_kernels.interpreter.checks.flags import Flags
from tile_kernels.interpreter.checks.races import NOBODY, GlobalMarks, SharedMarks, check_all_arrived
from tile_kernels.interpreter.checks.resources import check_launch
from tile_kernels.interpreter.engine.clock import Clock
from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.roles import run_blocks
from tile_kernels.interpreter.engine.translate import Compiler, Options, Storage, is_const
from tile_kernels.interpreter.errors import Deadlock, Site, UnwrittenOutput
from tile_kernels.interpreter.meaning import (  # noqa: F401  (importing them registers the meaning of every construct)
    cluster_ops,
    control_ops,
    expressions,
    launch_control,
    math_ops,
    mma_ops,
    random_ops,
    registers,
    remote_ops,
    sparse_gemm,
    tcgen05_ops,
    thread_loops,
    tile_ops,
    warp_ops,
    wgmma_ops,
)
from tile_kernels.interpreter.meaning.mbarriers import new_barriers
from tile_kernels.interpreter.meaning.statements import Run, waits
from tile_kernels.interpreter.memory.buffers import (
    ByteMemory,
    LocalMemory,
    Place,
    ReplicatedMemory,
    bytes_of,
    memory_at,
    workspace,
)
from tile_kernels.interpreter.memory.dtypes import FP4_PAIR, DType, constant, dtype_of
from tile_kernels.interpreter.session import Session

BATCH_BYTES = 48 << 20  # on-chip memory and temporaries of the blocks of one batch


class Shared:
    """The data that one `interpret` call collects over all launches and batches."""

    max_rounds = 1_000_000  # of a while loop that does not wait for another block
    patience = 10_000  # rounds of a while loop that may wait for another block

    def __init__(self, session: Session | None = None) -> None:
        self.session = session or Session()
        self.observer = self.session.observer
        self.world: Any = None  # the simulated devices (`engine.world`), if there are several
        self.flags = Flags()  # the order that flags create between blocks
        self.marks: list[Any] = []  # accesses of blocks to tensors, if races are checked
        self.waiting = 0  # number of the first block that has not started, if running clusters may take over its work
        self.spun = False  # a loop that polls memory has looked in vain: let other blocks run
        self.events = 0  # increases whenever a thread makes progress at a barrier
        self.covered: set[int] = set()
        self.paths: list[tuple[tuple[str, int, int], ...]] = [()]
        self.generic: set[int] = set()  # numbers of the paths with stores of threads to shared memory
        self.guarded: dict[tuple[Site, str], int] = {}

    def note_guarded(self, site: Site, buffer: str) -> None:
        """Record that a guard was necessary."""
        self.guarded[site, buffer] = self.guarded.get((site, buffer), 0) + 1

    def apart(self, first: int, second: int) -> bool:
        """Whether two paths take different sides of one branch that is in no loop."""
        for one, other in zip(self.paths[first], self.paths[second], strict=False):
            if one != other:
                return one[0] == 'if' and one[:2] == other[:2]
            if one[0] == 'loop':
                return False
        return False

    def fenced_by_compiler(self, path: int) -> bool:
        """Whether TileLang sets a proxy fence ahead of a copy or product, as threads may have stored before it.

        It looks at stores to any shared memory earlier on the path, or in a loop around both.
        """
        for store in self.generic:
            common = [one for one, other in zip(self.paths[store], self.paths[path], strict=False) if one == other]
            looped = any(one[0] == 'loop' for one in common)
            if looped or (store <= path and not self.apart(store, path)):
                return True
        return False

    def grid_sync(self) -> None:
        """A grid barrier: everything the blocks did before is ordered before what follows."""
        for marks in self.marks:
            marks.reset()


@dataclass
class Written:
    """The elements of a tensor that a kernel wrote."""

    tensor: weakref.ref[torch.Tensor]
    address: int
    version: int
    cells: np.ndarray

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor still holds them: the same memory, and PyTorch wrote nothing to it since."""
        return self.tensor() is not None and tensor.data_ptr() == self.address and tensor._version == self.version


_LAST_KERNEL: list[Written] = []  # what the last kernel of this process wrote


class Program:
    """One PrimFunc, compiled."""

    def __init__(self, prim_func: Any, options: Options) -> None:
        symbol = prim_func.attrs['global_symbol'] if prim_func.attrs and 'global_symbol' in prim_func.attrs else 'main'
        self.name = str(symbol)
        compiler = Compiler(self.name, options)
        self.compiler = compiler
        self.params: list[Param] = [Param(compiler, var, prim_func.buffer_map) for var in prim_func.params]
        for param in self.params:
            param.bind_symbols(compiler)
        self.usage = Usage(prim_func)
        compiler.used = self.usage.variables
        compiler.finalized = self.usage.finalized
        compiler.shown = self.usage.shown
        compiler.opened = self.usage.opened
        compiler.replicated = replicated_fragments(prim_func)
        self.body = compiler.stmt(prim_func.body)
        compiler.forget_ranges()
        self.branches = compiler.branches
        self.options = options
        self.declared = {index % len(self.params) for index in options.outputs}
        # An output is declared as one, or it is stored to and never read.
        self.outputs = self.declared | {
            position
            for position, param in enumerate(self.params)
            if param.node is not None
            and param.node.data in self.usage.stored
            and param.node.data not in self.usage.loaded
        }

    def run(self, tensors: tuple[Any, ...], shared: Shared | None = None) -> float:
        """Execute on tensors in parameter order; returns the time."""
        if len(tensors) != len(self.params):
            raise TypeError(f'{self.name} takes {len(self.params)} arguments, got {len(tensors)}')
        started = time.perf_counter()
        frame = self.bound(tensors, shared or Shared())
        left = _LAST_KERNEL.copy()
        _LAST_KERNEL.clear()
        if self.compiler.launches[:1] == [True]:
            self._inherit(frame, tensors, left)
        with np.errstate(all='ignore'):
            self.body(frame)
        self._leave(frame, tensors)
        self.require_written(frame)
        return time.perf_counter() - started

    def bound(self, tensors: tuple[Any, ...], shared: Shared) -> Frame:
        """The frame of the host code, with the arguments."""
        frame = Frame(self.compiler.num_slots, self.compiler.num_memories, shared)
        for param, tensor in zip(self.params, tensors, strict=True):
            param.bind(frame, tensor, self.name)
        for param, tensor in zip(self.params, tensors, strict=True):
            param.check(frame, tensor, self.name)
        self._watch(frame)
        return frame

    def require_written(self, frame: Frame) -> None:
        """Report the elements of outputs that no thread wrote."""
        if self.options.checks == 'all':
            for position, param in enumerate(self.params):
                if position in self.outputs:
                    param.require_written(frame, self.name)

    def _watch(self, frame: Frame) -> None:
        """Set up the state that the checks need for the tensors."""
        for position, param in enumerate(self.params):
            memory = None if param.node is None else frame.memory[param.storage.slot]
            if memory is None:
                continue
            declared = position in self.declared and self.options.checks != 'none'
            if declared or (self.options.races and position in self.outputs):
                memory.track_writes()
            if self.options.races and param.node.data in self.usage.stored:
                memory.race = GlobalMarks(memory, param.storage.unit)
                frame.shared.marks.append(memory.race)

    def _inherit(self, frame: Frame, tensors: tuple[Any, ...], left: list[Written]) -> None:
        """Mark what the kernel before this program wrote: this one may start before it is visible."""
        for param, tensor in zip(self.params, tensors, strict=True):
            memory = None if param.node is None else frame.memory[param.storage.slot]
            if memory is None or not isinstance(tensor, torch.Tensor) or not self.options.races:
                continue
            for written in left:
                if written.holds(tensor):
                    marks = memory.race or GlobalMarks(memory, param.storage.unit)
                    if marks.writer.shape != written.cells.shape:
                        continue
                    marks.inherited = written.cells
                    if memory.race is None:
                        memory.race = marks
                        frame.shared.marks.append(marks)

    def _leave(self, frame: Frame, tensors: tuple[Any, ...]) -> None:
        """Keep what the last kernel wrote, for a next program that may start early."""
        for param, tensor in zip(self.params, tensors, strict=True):
            memory = None if param.node is None else frame.memory[param.storage.slot]
            if memory is not None and isinstance(memory.race, GlobalMarks) and isinstance(tensor, torch.Tensor):
                cells = memory.race.writer != NOBODY
                if cells.any():
                    _LAST_KERNEL.append(Written(weakref.ref(tensor), tensor.data_ptr(), tensor._version, cells))

    def new_outputs(self, tensors: tuple[Any, ...], wanted: list[int]) -> dict[int, torch.Tensor]:
        """Allocate output tensors; their shapes follow from the inputs."""
        frame = Frame(self.compiler.num_slots, self.compiler.num_memories, Shared())
        for param, tensor in zip(self.params, tensors, strict=True):
            if tensor is not None:
                param.bind(frame, tensor, self.name)
        return {index: self.params[index].new_tensor(frame) for index in wanted}


class Param:
    """A parameter: a tensor or a scalar."""

    def __init__(self, compiler: Compiler, var: Any, buffer_map: Any) -> None:
        self.node: Any = buffer_map.get(var, None)
        self.name = str(var.name) if self.node is None else str(self.node.name)
        self.symbols: list[tuple[str, int, int]] = []
        self.solve: list[tuple[str, int, Any]] = []  # extents such as `n * 4`, from which n is computed
        if self.node is None:
            self.dtype = compiler.dtype(var)
            self.slot = compiler.new_slot(var)
            return
        self.dtype = compiler.memory_dtype(self.node, 'global')
        self.storage = _declare_tensor(compiler, self.node)

    def bind_symbols(self, compiler: Compiler) -> None:
        """Give every new symbol of a shape or stride a slot."""
        if self.node is None:
            return
        for kind, extents in (('shape', self.node.shape), ('stride', self.node.strides)):
            for axis, extent in enumerate(extents):
                if type(extent).__name__ in ('Var', 'SizeVar'):
                    if extent not in compiler.slots:
                        compiler.new_slot(extent)
                    self.symbols.append((kind, axis, compiler.slots[extent][0]))
                elif not is_const(extent):
                    self.solve.append((kind, axis, extent))
        for _, _, extent in self.solve:
            for var in undefined_vars(extent):
                if var not in compiler.slots:
                    compiler.new_slot(var)
        self._compiler = compiler

    def layout(self, frame: Frame) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Declared shape and strides."""
        return self._compiler.buffer(self.node).layout(frame)

    def bind(self, frame: Frame, tensor: Any, kernel: str) -> None:
        """Store an argument in the frame and read symbols from its shape and strides."""
        if self.node is None:
            if isinstance(tensor, torch.Tensor):
                tensor = tensor.item()
            frame.env[self.slot] = constant(tensor, self.dtype)
            return
        if tensor is None:
            return
        if isinstance(tensor, int) and not isinstance(tensor, bool):
            return  # an address; `check` uses it when the shape is known
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f'{kernel}: {self.name} must be a tensor, got {type(tensor).__name__}')
        if tensor.device.type != 'cpu':
            raise ValueError(f'{kernel}: {self.name} must be on the CPU, got {tensor.device}')
        _check_container(kernel, self.name, tensor, self.dtype)
        shape, strides = logical_layout(tensor, self.dtype)
        if len(shape) != len(self.node.shape):
            raise ValueError(f'{kernel}: {self.name} must have {len(self.node.shape)} dimensions, got {len(shape)}')
        for kind, axis, slot in self.symbols:
            number = (shape if kind == 'shape' else strides)[axis]
            if frame.env[slot] is None:
                frame.env[slot] = number
            elif kind == 'shape' and frame.env[slot] != number:
                raise ValueError(f'{kernel}: dimension {axis} of {self.name} must be {frame.env[slot]}, got {number}')
        for kind, axis, extent in self.solve:
            self._solve(frame, extent, (shape if kind == 'shape' else strides)[axis])
        frame.memory[self.storage.slot] = tensor_memory(tensor)

    def _solve(self, frame: Frame, extent: Any, number: int) -> None:
        """Compute the one unknown symbol of a linear extent; `check` verifies the tensor against it."""
        slots = [self._compiler.slots[var][0] for var in undefined_vars(extent)]
        unknown = [slot for slot in slots if frame.env[slot] is None]
        if len(unknown) != 1:
            return
        value = self._compiler.expr(extent)
        found = []
        for trial in (0, 1):
            frame.env[unknown[0]] = trial
            found.append(int(value(frame)))
        step = found[1] - found[0]
        frame.env[unknown[0]] = (number - found[0]) // step if step else 0

    def new_tensor(self, frame: Frame) -> torch.Tensor:
        """A tensor of the declared shape with arbitrary contents."""
        shape = [int(self._compiler.expr(extent)(frame)) for extent in self.node.shape]
        name = 'float8_e4m3fn' if self.dtype.name == 'float8_e4m3' else self.dtype.name
        if self.dtype.packed:
            shape[-1] //= 2
        if self.dtype.packed or self.dtype is FP4_PAIR:
            name = 'int8' if self.dtype.is_int else 'float4_e2m1fn_x2'
        return torch.empty(shape, dtype=getattr(torch, name))

    def require_written(self, frame: Frame, kernel: str) -> None:
        """Raise if an element of this output was not written."""
        memory = frame.memory[self.storage.slot]
        if memory is None or memory.written is None:
            return
        shape, strides = self.layout(frame)
        missing = memory.unwritten(Place(0, shape, strides), self.dtype)
        if missing is None or not missing.any():
            return
        index = tuple(int(part) for part in np.argwhere(missing)[0][2:])
        count = int(missing.sum())
        error = UnwrittenOutput(
            f'{count} of {missing.size} elements of output {self.name} are never written, the first at index {index}',
            Site(kernel),
            buffer=self.name,
            index=index,
        )
        frame.shared.session.found(error)

    def check(self, frame: Frame, tensor: Any, kernel: str) -> None:
        """Check the argument against the declared shape and strides."""
        if self.node is None or tensor is None:
            return
        want, steps = self.layout(frame)
        if isinstance(tensor, int):
            if tensor <= 0:
                raise ValueError(f'{kernel}: {self.name} must be a tensor or its address, got {tensor}')
            reach = 1 + sum((max(1, extent) - 1) * step for extent, step in zip(want, steps, strict=True))
            frame.memory[self.storage.slot] = memory_at(tensor, -(-reach * self.dtype.bits // 8))
            return
        shape, strides = logical_layout(tensor, self.dtype)
        if want != shape:
            raise ValueError(f'{kernel}: {self.name} must have shape {want}, got {shape}')
        for extent, step, stride in zip(shape, steps, strides, strict=True):
            if 0 not in shape and extent > 1 and step != stride:
                raise ValueError(f'{kernel}: {self.name} must have strides {steps}, got {strides}')


def undefined_vars(extent: Any) -> list[Any]:
    """The symbols of a shape or stride."""
    from tvm.tirx.analysis import undefined_vars as find

    return list(find(extent))


class Usage:
    """The buffers that a kernel loads from and stores to, by data variable."""

    def __init__(self, prim_func: Any) -> None:
        from tvm.tirx.stmt_functor import post_order_visit, pre_order_visit

        self.loaded: set[Any] = set()
        self.stored: set[Any] = set()
        self.finalized: set[Any] = set()  # reducers with a used result
        self.variables: set[Any] = set()  # variables that some expression reads
        self.shown: set[Any] = set()  # variables that only T.print reads
        self.opened: set[Any] = set()  # reducers that T.reducer_init, T.reducer_update or a finalize with a target use
        loads: list[Any] = []
        operands: set[Any] = set()

        def visit(node: Any) -> None:
            kind = type(node).__name__
            if kind == 'Var':
                self.variables.add(node)
            elif kind == 'BufferStore':
                self.stored.add(node.buffer.data)
            elif kind == 'BufferLoad':
                loads.append(node)
            elif kind == 'Call' and str(node.op.name) in ('tl.region', 'tl.access_ptr'):
                operands.add(node.args[0])
                mode = int(node.args[1 if str(node.op.name) == 'tl.region' else 2])
                self._note(node.args[0].buffer.data, mode)
            elif kind == 'Call':
                self._visit_call(node, operands)

        post_order_visit(prim_func.body, visit)
        self.loaded |= {load.buffer.data for load in loads if load not in operands}
        if self.shown:
            others: set[Any] = set()

            def outside_prints(node: Any) -> bool:
                if type(node).__name__ == 'Var':
                    others.add(node)
                return not _is_print(node)

            pre_order_visit(prim_func.body, outside_prints)
            self.shown -= others

    def _visit_call(self, call: Any, operands: set[Any]) -> None:
        name = str(call.op.name)
        if _is_print(call) and type(call.args[-1]).__name__ == 'Var':
            self.shown.add(call.args[-1])
        if name.startswith('tl.tileop.finalize_reducer'):
            self.finalized.add(_first_buffer(call).data)
        if name in ('tl.tileop.reducer_init', 'tl.reducer_update', 'tl.tileop.finalize_reducer_v2'):
            self.opened.add(_first_buffer(call).data)
        for argument in call.args:
            kind = type(argument).__name__
            if kind == 'BufferRegion':
                self._note(argument.buffer.data, 3)
            elif 'atomic' in name and kind == 'Call' and str(argument.op.name) in ('tl.region', 'tl.access_ptr'):
                self._note(argument.args[0].buffer.data, 3)
            elif kind == 'Call' and str(argument.op.name) == 'tirx.address_of':
                operands.add(argument.args[0])
                self._note(argument.args[0].buffer.data, 3)

    def _note(self, data: Any, mode: int) -> None:
        if mode & 1:
            self.loaded.add(data)
        if mode & 2:
            self.stored.add(data)


def _first_buffer(call: Any) -> Any:
    """The buffer that the first operand of a call names."""
    first = call.args[0]
    return first.args[0].buffer if type(first).__name__ == 'Call' else first.buffer


def _is_print(node: Any) -> bool:
    if type(node).__name__ != 'Call' or str(node.op.name) != 'tirx.call_extern':
        return False
    return str(getattr(node.args[0], 'value', '')).startswith('debug_print')


def replicated_fragments(prim_func: Any) -> set[Any]:
    """Data variables of the fragments of which TileLang gives every thread its own copy.

    These fragments have no annotated layout, and the kernel uses single elements of them outside T.Parallel and tile
    operators.
    """
    from tvm.tirx.stmt_functor import post_order_visit

    together: set[Any] = set()  # accesses in parallel loops and tile operators
    accesses: list[Any] = []
    annotated: set[Any] = set()

    def enter(node: Any) -> None:
        if type(node).__name__ in ('BufferLoad', 'BufferStore'):
            together.add(node)

    def visit(node: Any) -> None:
        kind = type(node).__name__
        if kind in ('BufferLoad', 'BufferStore'):
            if str(node.buffer.scope()) == 'local.fragment':
                accesses.append(node)
        elif (kind == 'For' and int(node.kind) == 1) or (
            kind == 'Call' and str(node.op.name).startswith(('tl.tileop.', 'tl.reducer'))
        ):
            post_order_visit(node, enter)
        elif kind == 'SBlock' and 'layout_map' in node.annotations:
            annotated.update(node.annotations['layout_map'].keys())

    post_order_visit(prim_func.body, visit)
    return {node.buffer.data for node in accesses if node not in together} - annotated


def _declare_tensor(compiler: Compiler, node: Any) -> Storage:
    dtype = compiler.memory_dtype(node, 'global')
    storage = Storage(compiler.num_memories, 'global', dtype, 0, str(node.name), {dtype.name})
    compiler.num_memories += 1
    compiler.storages[node.data] = storage
    return storage


def _check_container(kernel: str, name: str, tensor: torch.Tensor, dtype: DType) -> None:
    if dtype.packed:
        fits = tensor.element_size() == 1
    else:
        fits = tensor.element_size() == dtype.storage.itemsize and tensor.dtype.is_floating_point == dtype.is_float
        fits = fits or (tensor.element_size() == 1 and dtype.storage.itemsize == 1)
    if not fits:
        raise TypeError(f'{kernel}: {name} must hold {dtype.name}, got {tensor.dtype}')


def logical_layout(tensor: torch.Tensor, dtype: DType) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides in elements; a byte of a packed type counts as two elements."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    if dtype.packed and shape:
        shape[-1] *= 2
        strides = [*(stride * 2 for stride in strides[:-1]), strides[-1]]
    return tuple(shape), tuple(strides)


def tensor_memory(tensor: torch.Tensor) -> ByteMemory:
    """The bytes that a tensor can reach; the memory aliases the tensor."""
    reach = 1 + sum((max(1, n) - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = reach * tensor.element_size()
    if not tensor.numel():  # it owns no bytes, but inactive lanes still need an address
        return ByteMemory(np.zeros((1, size), np.uint8), False, 0)
    raw = torch.empty(0, dtype=torch.uint8)
    raw.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (size,), (1,))
    return ByteMemory(raw.numpy().reshape(1, size), False, size)


def launch(compiler: Compiler, node: Any) -> Callable[[Frame], None]:
    """A grid of blocks; runs them in batches, with all threads of a batch at once."""
    variables: dict[str, Any] = {}
    extents: dict[str, Any] = {}
    while type(node).__name__ == 'For' and node.thread_binding is not None:
        tag = str(node.thread_binding.thread_tag)
        variables[tag], extents[tag] = node.loop_var, compiler.expr(node.extent)
        compiler.know_range(node.loop_var, node.min, node.extent)
        node = node.body
    tensors = compiler.num_memories
    compiler.thread_dims = _thread_dims(node)
    slots = {tag: compiler.new_slot(var) for tag, var in variables.items()}
    before = set(compiler.storages)
    compiler.in_launch, compiler.begins_early = True, False
    body = compiler.stmt(node)
    compiler.in_launch = False
    early = compiler.begins_early and compiler.options.races
    compiler.launches.append(early)
    storages = [storage for data, storage in compiler.storages.items() if data not in before]
    counts = compiler.barrier_counts
    for data in counts:
        if data in compiler.storages:
            compiler.storages[data].counts = [compiler.expr(count) for count in counts[data]]
    threads = int(np.prod(compiler.thread_dims))
    if compiler.options.checks != 'none':
        check_launch(node, compiler.storages, threads, compiler.site)
    tags = sorted(variables)
    bytes_per_block = _footprint(storages, threads)
    whole_grid, site = compiler.whole_grid, compiler.site
    clusters = compiler.whole_cluster and int(np.prod(compiler.cluster_dims)) > 1
    if whole_grid and compiler.spins:
        raise compiler.unsupported('a loop that waits for other blocks together with barriers of the grid')

    def batches(host: Frame, grid: list[int], batch: int) -> Iterator[Frame]:
        total = host.shared.waiting = int(np.prod(grid))
        start = 0
        while start < total:
            count = min(batch, total - start)
            if compiler.takes_over:
                host.shared.waiting = start + count
            frame = host.batch_for(compiler.num_slots, compiler.num_memories)
            frame.blocks, frame.threads, frame.barriers = count, threads, {}
            frame.first_block, frame.grid = host.first_block + start, grid
            frame.block_ids = _coordinates(start, count, grid)
            frame.clock = Clock(frame, compiler.cluster_dims) if compiler.options.races else None
            if frame.clock is not None:
                frame.clock.settling = compiler.overwrites
            host.shared.paths, host.shared.generic = compiler.paths, compiler.generic
            frame.early = np.ones((count, threads), bool) if early else None
            for tag, ids in zip(tags, frame.block_ids, strict=True):
                frame.env[slots[tag]] = int(ids[0]) if count == 1 else ids.astype(np.int32).reshape(-1, 1)
            for storage in storages:
                frame.memory[storage.slot] = allocate(storage, frame, compiler.options, host)
            yield frame
            start = host.shared.waiting if compiler.takes_over else start + count

    def run_grid(host: Frame, grid: list[int], batch: int) -> None:
        for frame in batches(host, grid, batch):
            run_all(body, [frame])
            if frame.clock is not None:
                check_all_arrived(frame, site)

    def smallest(grid: list[int]) -> int:
        """The number of blocks that must run in one batch: the rows of blocks that contain a whole cluster."""
        if not clusters:
            return 1
        for axis in reversed(range(len(grid))):
            if compiler.cluster_dims[axis] > 1:
                return int(np.prod(grid[:axis])) * compiler.cluster_dims[axis]
        return 1

    def run(host: Frame) -> None:
        grid = [int(extents[tag](host)) for tag in tags]
        total = int(np.prod(grid))
        unit = smallest(grid)
        if host.shared.world is not None:
            if whole_grid:
                raise compiler.unsupported('a grid barrier in a simulation of several devices')
            host.shared.world.add(body, list(batches(host, grid, unit)), site)
            return
        for marks in host.shared.marks:
            marks.keep_for_next_kernel()
        host.shared.grid_sync()
        if compiler.spins:
            run_all(body, list(batches(host, grid, unit)))
            return
        most = -(-total // 2) if compiler.takes_over else total  # so that some clusters have not started
        batch = max(unit, min(most, BATCH_BYTES // bytes_per_block) // unit * unit)
        if whole_grid or not waits(body):
            run_grid(host, grid, total if whole_grid else batch)
            return
        # Blocks of a batch wait together. After a deadlock, each block runs alone to show which one caused it.
        kept = [None if memory is None else memory.data.copy() for memory in host.memory[:tensors]]
        try:
            run_grid(host, grid, batch)
        except Deadlock:
            if total <= unit:
                raise
            for memory, data in zip(host.memory, kept, strict=False):
                if memory is not None:
                    memory.data[...] = data
            host.shared.grid_sync()
            run_grid(host, grid, unit)

    return run


def run_all(body: Run, frames: list[Frame]) -> None:
    """Run batches of blocks to the end, and check that all could get the registers they requested."""
    run_blocks(body, frames)
    for frame in frames:
        if frame.registers is not None:
            frame.registers.check(frame)


def _thread_dims(node: Any) -> tuple[int, int, int]:
    """Threads of a block, from the annotation of the kernel's root block (default 128)."""
    children = list(node.seq) if type(node).__name__ == 'SeqStmt' else [node]
    for child in children:
        if type(child).__name__ == 'SBlockRealize' and 'tl.launch_threads' in child.block.annotations:
            dims = [int(extent) for extent in child.block.annotations['tl.launch_threads']]
            x, y, z = [*dims, 1, 1, 1][:3]
            return x, y, z
    return 128, 1, 1


def _footprint(storages: list[Storage], threads: int) -> int:
    size = 4096
    for storage in storages:
        if isinstance(storage.size, int):
            per = threads * 8 if storage.scope == 'local' else storage.dtype.storage.itemsize + 8
            size += storage.size * per
            if storage.replicated:
                size += min(storage.size * storage.dtype.storage.itemsize * threads, 1 << 18)
    return size


def _coordinates(start: int, count: int, grid: list[int]) -> tuple[np.ndarray, ...]:
    linear = np.arange(start, start + count)
    found = []
    for extent in grid:
        found.append(linear % extent)
        linear = linear // extent
    return tuple(found)


def allocate(storage: Storage, frame: Frame, options: Options, host: Frame) -> Any:
    """Fresh memory for one buffer of a batch."""
    size = storage.size if isinstance(storage.size, int) else storage.size(frame)
    if storage.scope == 'local':
        unit = 0 if len(storage.dtypes) == 1 else min(dtype_of(name).bits for name in storage.dtypes)
        registers = LocalMemory(-(-size * storage.dtype.bits // unit) if unit else size, unit)
        if storage.zeroed and not frame.shared.session.strict:
            registers.written = None
        return registers
    if storage.scope == 'barrier':
        return new_barriers(storage, frame)
    size_bytes = bytes_of(storage, frame)
    if storage.scope == 'global':
        if host.memory[storage.slot] is None:
            host.memory[storage.slot] = workspace(storage, frame, options)
        return host.memory[storage.slot]
    if storage.replicated:
        return ReplicatedMemory(frame.blocks, frame.threads, size_bytes, options.checks != 'none')
    memory = ByteMemory.of_blocks(frame.blocks, size_bytes, options.checks != 'none')
    if options.races and storage.scope == 'shared':
        memory.race = SharedMarks(memory, storage.unit)
    return memory


@lru_cache(maxsize=512)
def compiled(prim_func: Any, options: Options) -> Program:
    """Compile once per kernel and options."""
    return Program(prim_func, options)
