"""Statements: sequences, binds, stores, branches, loops, blocks.

A statement that may wait for other threads (see `roles`) compiles to a generator, which yields while it waits. Every
other statement compiles to a plain function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, active_threads
from tile_kernels.interpreter.engine.lanes import both, expand, splits_warps
from tile_kernels.interpreter.engine.translate import ATTRIBUTE_HINTS, Closure, Compiler, is_const, statement
from tile_kernels.interpreter.errors import Deadlock, InterpreterError, UnsupportedConstruct
from tile_kernels.interpreter.meaning.expressions import is_vector_index, vector_element, vector_lanes
from tile_kernels.interpreter.meaning.independent import as_array, is_independent
from tile_kernels.interpreter.memory.buffers import workspace
from tile_kernels.interpreter.memory.dtypes import FP4_PAIR, narrower, pair_of_bits

Run = Callable[[Frame], Any]
VECTORIZED = 2  # loop type of TIR


def waits(run: Run) -> bool:
    """Whether a compiled statement is a generator."""
    return getattr(run, 'waits', False)


def escapes(run: Run) -> bool:
    """Whether a compiled statement may end threads or loop iterations early."""
    return getattr(run, 'escapes', False)


def marked(run: Run, *parts: Run, waits_: bool = False, escapes_: bool = False) -> Run:
    """Set the labels of a compiled statement from those of its parts."""
    run.waits = waits_ or any(waits(part) for part in parts)  # type: ignore[attr-defined]
    run.escapes = escapes_ or any(escapes(part) for part in parts)  # type: ignore[attr-defined]
    return run


def drive(run: Run, frame: Frame) -> Generator[Any, None, None]:
    """Run a statement, plain or generator, from inside a generator."""
    if waits(run):
        yield from run(frame)
    else:
        run(frame)


def ordered(compiler: Compiler, run: Run) -> Run:
    """With automatic barriers, the compiler may order any two statements that all threads of a warp reach."""
    if not compiler.options.races or compiler.depth or waits(run):
        return run
    automatic = compiler.options.auto_sync

    def run_ordered(frame: Frame) -> Any:
        if frame.clock is not None and automatic:
            together = frame.mask is None or frame.mask.shape[1] == 1
            frame.clock.alone = together
            if together:
                frame.clock.block_sync(None)
            elif not splits_warps(frame.mask, frame.live):
                frame.clock.role_sync(frame.mask)
        return run(frame)

    return marked(run_ordered, run)


@statement('SeqStmt')
def _sequence(compiler: Compiler, node: Any) -> Run:
    """One statement after another."""
    return sequence([compiler.stmt(child) for child in node.seq])


def sequence(parts: list[Run]) -> Run:
    """Run statements in order; threads that have returned or left a loop do not run the rest."""
    if len(parts) == 1:
        return parts[0]
    if any(waits(part) for part in parts):
        from tile_kernels.interpreter.engine.roles import concurrent_sequence

        return marked(concurrent_sequence(parts), *parts)
    if not any(escapes(part) for part in parts):

        def run(frame: Frame) -> None:
            for part in parts:
                part(frame)

        return marked(run, *parts)

    def run_escaping(frame: Frame) -> None:
        for part in parts:
            part(frame)
            if escapes(part):
                frame.mask = frame.refresh(frame.mask)
                if frame.mask is not None and not frame.mask.any():
                    return

    return marked(run_escaping, *parts)


@statement('Bind')
def _bind(compiler: Compiler, node: Any) -> Run:
    """`name = value`, evaluated here and immutable afterwards."""
    if is_vector_index(compiler, node.value):
        compiler.macros[node.var] = node.value
        return marked(lambda frame: None)
    if type(node.value).__name__ == 'Call' and str(node.value.op.name) == 'tirx.tvm_access_ptr':
        compiler.pointers[node.var] = node.value.args[1]
        offset, place = compiler.expr(node.value.args[2]), compiler.new_slot(node.var)
        return marked(lambda frame: frame.env.__setitem__(place, offset(frame)))
    unread = type(node.value).__name__ == 'BufferLoad' and node.var not in compiler.used
    if unread and vector_lanes(compiler, list(node.value.indices)) > 1:
        return marked(lambda frame: None)  # the name of a region, for tile operators
    try:
        with compiler.one_statement():
            value = compiler.expr(node.value)
    except InterpreterError:
        # T.Persistent binds coordinates before their loop variables exist: treat such a name as a macro.
        if not _undefined(compiler, node.value):
            raise
        compiler.macros[node.var] = node.value
        return marked(lambda frame: None)
    narrow = narrower(compiler.dtype(node.value)) if compiler.dtype(node.value).kind != 'handle' else None
    slot = compiler.new_slot(node.var)
    if type(node.value).__name__ == 'Call' and str(node.value.op.name) == 'tl.launch_thread_idx':
        compiler.know_range(node.var, 0, compiler.thread_dims[int(node.value.args[0])])

    def run(frame: Frame) -> None:
        bound = value(frame)
        if isinstance(bound, np.ndarray) and bound.base is not None:
            bound = bound.copy()  # it may be a view of memory that changes later
        frame.env[slot] = bound if narrow is None else narrow(bound)

    if node.var in compiler.shown:
        return ordered(compiler, marked(lambda frame: frame.shared.session.look(lambda: run(frame))))
    return ordered(compiler, marked(run))


def _undefined(compiler: Compiler, node: Any) -> bool:
    from tvm.tirx.stmt_functor import post_order_visit

    found = []

    def visit(part: Any) -> None:
        if type(part).__name__ in ('Var', 'SizeVar') and str(part.dtype) != 'handle':
            known = part in compiler.slots or part in compiler.axes or part in compiler.macros
            found.append(not known)

    post_order_visit(node, visit)
    return any(found)


@statement('BufferStore')
def _store(compiler: Compiler, node: Any) -> Run:
    """Write one element per active lane (a vector of elements with a ramp as last index)."""
    with compiler.one_statement():
        return ordered(compiler, _store_elements(compiler, node))


def _store_elements(compiler: Compiler, node: Any) -> Run:
    from tile_kernels.interpreter.meaning.accumulate import accumulation
    from tile_kernels.interpreter.meaning.tile_ops import forbid_plain_use

    forbid_plain_use(compiler, node.buffer)
    if node.buffer.data in compiler.reducers:
        return _update(compiler, node)
    reduced = accumulation(compiler, node)
    if reduced is not None:
        return marked(reduced)
    return _plain_store(compiler, node)


def _update(compiler: Compiler, node: Any) -> Run:
    """A store to a reducer in the older syntax: afterwards threads may hold parts of its result."""
    from tile_kernels.interpreter.meaning.accumulate import accumulation

    compiler.updated = node.buffer.data
    try:
        run = accumulation(compiler, node) or _plain_store(compiler, node)
    finally:
        compiler.updated = None
    slot, inside = compiler.buffer(node.buffer).slot, compiler.depth > 0

    def update(frame: Frame) -> None:
        run(frame)
        frame.memory[slot].partial = inside

    return marked(update)


def _plain_store(compiler: Compiler, node: Any) -> Run:
    before = len(compiler.touched)
    value = compiler.expr(node.value)
    if type(node.value).__name__ != 'BufferLoad':
        value = _settled(value, always=True)
    elif compiler.buffer(node.buffer).scope in ('local', 'fragment'):
        for access, _ in compiler.touched[before:]:
            access.only_moves = True
    indices = list(node.indices)
    lanes = vector_lanes(compiler, indices)
    if lanes == 1:
        access = compiler.access(node.buffer, indices)
        if access.buffer.scope == 'shared':
            compiler.generic.add(access.path)
        if access.buffer.dtype is FP4_PAIR:
            return marked(lambda frame: access.store(frame, pair_of_bits(value(frame)), frame.mask))
        return marked(lambda frame: access.store(frame, value(frame), frame.mask))
    parts = [
        compiler.access(node.buffer, vector_element(compiler, node.buffer, indices, lane)) for lane in range(lanes)
    ]

    def run(frame: Frame) -> None:
        values = value(frame)
        for lane, part in enumerate(parts):
            part.store(frame, values[lane] if isinstance(values, tuple) else values, frame.mask)

    return marked(run)


@statement('Evaluate')
def _evaluate(compiler: Compiler, node: Any) -> Run:
    """An operator called for its effect."""
    if type(node.value).__name__ in ('IntImm', 'StringImm', 'Var'):
        return marked(lambda frame: None)
    with compiler.one_statement():
        run = compiler.expr(node.value)
    return ordered(compiler, marked(run, run))


def nothing(frame: Frame) -> None:
    """The missing side of a branch."""


@statement('IfThenElse')
def _if(compiler: Compiler, node: Any) -> Run:
    """Branch: on the condition if it is the same for all lanes, by masks otherwise."""
    condition = compiler.expr(node.condition)
    then_id, else_id = compiler.new_branch('then'), compiler.new_branch('else')
    with compiler.inside('if', then_id, 0):
        then = compiler.stmt(node.then_case)
    with compiler.inside('if', then_id, 1):
        otherwise = compiler.stmt(node.else_case) if node.else_case is not None else marked(nothing)
    condition = _settled(condition)
    return branch(condition, then, otherwise, (then_id, else_id))


def _settled(condition: Closure, always: bool = False) -> Closure:
    """An expression after which the reads are complete (always, or only if threads differ in the condition)."""

    def run(frame: Frame) -> Any:
        value = condition(frame)
        if frame.clock is not None and frame.clock.settling and (always or isinstance(value, np.ndarray)):
            frame.clock.settle(active_threads(frame))
        return value

    return run


def branch(condition: Closure, then: Run, otherwise: Run, ids: tuple[int, int]) -> Run:
    """Run each side for the lanes that take it."""
    if waits(then) or waits(otherwise):
        from tile_kernels.interpreter.engine.roles import waiting_branch

        return marked(waiting_branch(condition, then, otherwise, ids), then, otherwise)

    def run(frame: Frame) -> None:
        taken = condition(frame)
        covered = frame.shared.covered
        if not isinstance(taken, np.ndarray):
            covered.add(ids[0] if taken else ids[1])
            (then if taken else otherwise)(frame)
            return
        outer = frame.mask
        for side, lanes, number in ((then, taken, ids[0]), (otherwise, ~taken, ids[1])):
            inner = both(outer, lanes)
            if inner.any():
                covered.add(number)
                frame.mask = None if inner.all() else inner
                try:
                    side(frame)
                finally:
                    frame.mask = outer

    return marked(run, then, otherwise)


@statement('For')
def _for(compiler: Compiler, node: Any) -> Run:
    """Loops; a pipelined loop runs serially, and unrolled and vectorized loops run element by element."""
    kind = int(node.kind)
    if kind == 1:
        return _parallel(compiler, node)
    if node.thread_binding is not None:
        if str(node.thread_binding.thread_tag).startswith('blockIdx'):
            from tile_kernels.interpreter.engine.program import launch

            return marked(launch(compiler, node))
        from tile_kernels.interpreter.meaning.thread_loops import bound_loop

        loop = bound_loop(compiler, node)
        return marked(loop, waits_=inspect.isgeneratorfunction(loop))
    if kind == VECTORIZED and compiler.vector is None and is_const(node.extent) and compiler.options.checks != 'none':
        accesses: list[Any] = []
        compiler.vector = accesses
        try:
            run = _loop(compiler, node)
        finally:
            compiler.vector = None
        compiler.require_alignment(accesses, node.loop_var, int(node.extent))
        return run
    return _loop(compiler, node)


def _loop(compiler: Compiler, node: Any) -> Run:
    """A loop that each thread runs by itself."""
    if compiler.as_arrays:
        return _as_array(compiler, node)
    if is_independent(compiler, node):
        compiler.as_arrays = compiler.alone = True
        try:
            with compiler.one_statement():
                run = _as_array(compiler, node)
        finally:
            compiler.as_arrays = compiler.alone = False
        return ordered(compiler, run)
    require_fixed_bounds(compiler, node)
    start, extent = compiler.expr(node.min), compiler.expr(node.extent)
    step = 1 if node.step is None else compiler.expr(node.step)
    slot = compiler.new_slot(node.loop_var)
    compiler.know_range(node.loop_var, node.min, node.extent)
    with compiler.inside('loop', slot):
        body = compiler.stmt(node.body)
    loop = serial_loop(start, extent, step, slot, body, compiler.ndim)
    return marked(loop, body) if not escapes(body) else marked(loop, waits_=waits(body), escapes_=True)


def require_fixed_bounds(compiler: Compiler, node: Any) -> None:
    """Raise if the body of a serial loop writes what its bounds read: CUDA reads the bounds in every iteration."""
    from tvm.tirx.stmt_functor import post_order_visit

    read: dict[Any, str] = {}
    changed: list[str] = []

    def load(part: Any) -> None:
        if type(part).__name__ == 'BufferLoad':
            read[part.buffer.data] = str(part.buffer.name)

    def store(part: Any) -> None:
        if type(part).__name__ == 'BufferStore' and part.buffer.data in read:
            changed.append(read[part.buffer.data])

    post_order_visit(node.min, load)
    post_order_visit(node.extent, load)
    if read:
        post_order_visit(node.body, store)
    if changed:
        text = f'the loop writes {changed[0]}, which its bounds read: the generated code reads it in every iteration'
        raise UnsupportedConstruct(f'{text}. Copy the bound to a T.alloc_var first', compiler.site, buffer=changed[0])


def _as_array(compiler: Compiler, node: Any) -> Run:
    """A serial loop whose iterations are independent."""
    compiler.know_range(node.loop_var, node.min, node.extent)
    with compiler.inside('loop', compiler.num_slots):
        return marked(as_array(compiler, node, lambda: compiler.stmt(node.body)))


def serial_loop(start: Closure, extent: Closure, step: Any, slot: int, body: Run, ndim: int) -> Run:
    """`for (i = start; i < start + extent; i += step)`. Lanes with fewer iterations become inactive early."""

    def plan(frame: Frame) -> Generator[None, None, None]:
        """Set the variable and the mask of each iteration, then yield."""
        first, count = start(frame), extent(frame)
        stride = step if isinstance(step, int) else step(frame)
        outer, outer_looping = frame.mask, frame.looping
        frame.looping = None
        longest = int(count.max()) if isinstance(count, np.ndarray) else int(count)
        if isinstance(count, np.ndarray) and (count == longest).all():
            count = longest
        try:
            for done in range(0, longest, int(stride)):
                mask = both(outer, expand(count, ndim) > done) if isinstance(count, np.ndarray) else outer
                if frame.looping is not None or frame.live is not None or mask is not outer:
                    mask = frame.refresh(mask)
                    if mask is not None and not mask.any():
                        if frame.looping is not None or frame.live is not None:
                            break
                        continue
                frame.mask = mask
                frame.env[slot] = first + done
                yield
        finally:
            frame.mask, frame.looping = outer, outer_looping

    if waits(body):

        def run_waiting(frame: Frame) -> Generator[None, None, None]:
            for _ in plan(frame):
                yield from body(frame)

        return run_waiting

    def run(frame: Frame) -> None:
        for _ in plan(frame):
            body(frame)

    return run


def _parallel(compiler: Compiler, node: Any) -> Run:
    """T.Parallel: all iterations at once, along their own lane axis."""
    extent = compiler.expr(node.extent)
    if not (is_const(node.min) and int(node.min) == 0):
        raise compiler.unsupported('T.Parallel that does not start at 0')
    if node.step is not None and not (is_const(node.step) and int(node.step) == 1):
        raise compiler.unsupported('T.Parallel with a step')
    site = compiler.site
    compiler.know_range(node.loop_var, node.min, node.extent)
    outermost, compiler.alone = compiler.depth == 0, compiler.alone or _fills_own_copies(compiler, node)
    with compiler.one_statement(), compiler.parallel_axis(node.loop_var) as touched:
        body = compiler.stmt(node.body)
    if outermost:
        compiler.alone = False
    if waits(body):
        raise compiler.unsupported('a wait inside T.Parallel')
    ndim = compiler.ndim

    def run(frame: Frame) -> None:
        count = extent(frame)
        if isinstance(count, np.ndarray):
            if (count != count.flat[0]).any():
                raise frame.error(InterpreterError, 'the extent of T.Parallel differs between lanes', site)
            count = int(count.flat[0])
        if count <= 0:
            return
        outer, outer_live, outer_looping = frame.mask, frame.live, frame.looping
        frame.extents.append(int(count))
        if outer is not None:
            frame.mask = outer[..., None]
        try:
            body(frame)
        finally:
            frame.extents.pop()
            frame.mask, frame.live, frame.looping = outer, outer_live, outer_looping
        for slot in touched:
            frame.memory[slot].forget_inner(ndim)

    return ordered(compiler, marked(run))


def _fills_own_copies(compiler: Compiler, loop: Any) -> bool:
    """Whether a parallel loop stores only to replicated fragments; then every thread runs all iterations."""
    from tvm.tirx.stmt_functor import post_order_visit

    if not compiler.replicated:
        return False
    stores, effects = [], []

    def visit(node: Any) -> None:
        if type(node).__name__ == 'BufferStore':
            stores.append(node.buffer.data in compiler.replicated)
        elif type(node).__name__ == 'Evaluate' and type(node.value).__name__ == 'Call':
            effects.append(node)

    post_order_visit(loop, visit)
    return bool(stores) and all(stores) and not effects


@statement('While')
def _while(compiler: Compiler, node: Any) -> Run:
    """Repeat while the condition holds; each lane leaves separately."""
    condition = _settled(compiler.expr(node.condition))
    with compiler.inside('loop', -len(compiler.paths)):
        body = compiler.stmt(node.body)
    site = compiler.site
    spins = not compiler.depth and (waits(body) or _reads_global(compiler, node.condition))
    compiler.spins = compiler.spins or spins

    def plan(frame: Frame) -> Generator[None, None, None]:
        """Set the mask of each round, then yield."""
        outer, outer_looping = frame.mask, frame.looping
        frame.looping = None
        mask = outer
        try:
            while True:
                frame.mask = mask = frame.refresh(mask)
                if mask is not None and not mask.any():
                    break
                go_on = condition(frame)
                if isinstance(go_on, np.ndarray):
                    mask = both(mask, go_on)
                    if not mask.any():
                        break
                elif not go_on:
                    break
                frame.mask = mask
                yield
        finally:
            frame.mask, frame.looping = outer, outer_looping

    def run(frame: Frame) -> None:
        for rounds, _ in enumerate(plan(frame)):
            body(frame)
            if rounds > frame.shared.max_rounds:
                raise frame.error(Deadlock, f'a while loop has not ended after {rounds} rounds', site)

    def run_spinning(frame: Frame) -> Generator[Any, None, None]:
        """A loop that may wait for another block: it lets the other blocks run after every round."""
        for rounds, _ in enumerate(plan(frame)):
            yield from drive(body, frame)
            frame.shared.events += rounds < frame.shared.patience
            frame.shared.spun = True
            mask, looping = frame.mask, frame.looping
            yield site, lambda: 'the condition of a while loop'
            frame.mask, frame.looping = mask, looping

    return marked(run_spinning if spins else run, waits_=spins, escapes_=escapes(body))


def _reads_global(compiler: Compiler, node: Any) -> bool:
    """Whether an expression reads memory that other blocks may change."""
    from tvm.tirx.stmt_functor import post_order_visit

    found = []

    def visit(part: Any) -> None:
        if type(part).__name__ == 'BufferLoad':
            found.append(compiler.buffer(part.buffer).scope == 'global')

    post_order_visit(node, visit)
    return any(found)


@statement('SBlock')
def _block(compiler: Compiler, node: Any) -> Run:
    """A scope that allocates buffers and carries annotations."""
    outer = compiler.copy_safe_values
    compiler.read_annotations(node)
    made = [compiler.allocate(buffer) for buffer in node.alloc_buffers]
    if node.init is not None:
        raise compiler.unsupported('a block with an init statement')
    body = compiler.stmt(node.body)
    compiler.copy_safe_values = outer
    if not made or compiler.in_launch:
        return body

    def run(frame: Frame) -> None:
        for storage in made:  # workspaces of the host, common to all launches of the program
            frame.memory[storage.slot] = workspace(storage, frame, compiler.options)
        body(frame)

    return marked(run, body)


@statement('SBlockRealize')
def _realize(compiler: Compiler, node: Any) -> Run:
    """Enter a block."""
    return compiler.stmt(node.block)


@statement('AttrStmt')
def _attribute(compiler: Compiler, node: Any) -> Run:
    """Hints to the compiler (rasterization, pragmas, register budgets), which do not change results."""
    if str(node.attr_key) == 'reduce_scope':
        from tile_kernels.interpreter.meaning.thread_loops import reduce_scope

        return reduce_scope(compiler, node)
    if str(node.attr_key) not in ATTRIBUTE_HINTS:
        raise compiler.unsupported(f'attribute {str(node.attr_key)!r}')
    return compiler.stmt(node.body)


@statement('AllocBuffer', 'DeclBuffer')
def _declare(compiler: Compiler, node: Any) -> Run:
    """A buffer declared in the middle of a block."""
    if node.buffer.data not in compiler.storages:
        compiler.allocate(node.buffer)
    return compiler.stmt(node.body) if getattr(node, 'body', None) is not None else marked(lambda frame: None)


@statement('AssertStmt')
def _assert(compiler: Compiler, node: Any) -> Run:
    """A condition the program relies on."""
    from tile_kernels.interpreter.meaning.control_ops import assertion

    return marked(assertion(compiler, node.condition, 'assertion'))
