"""Serial loops with independent iterations: they run as a lane axis, not one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.translate import Compiler, is_const, same_indices
from tile_kernels.interpreter.meaning.math_ops import BITWISE, PURE

FEWEST = 16  # fewest iterations that make it faster
MOST_LANES = 1 << 22  # lanes that run together
_PLAIN = {'For', 'SeqStmt', 'BufferStore', 'IfThenElse', 'Bind', 'Evaluate'}
_PURE_CALLS = {*PURE, *BITWISE, 'tirx.if_then_else', 'tirx.reinterpret', 'tirx.bitwise_not', 'tirx.likely'}


def is_independent(compiler: Compiler, loop: Any) -> bool:
    """Whether all iterations of a loop, and of the loops inside it, may run at once.

    Each iteration stores to its own elements, loads no element that another iteration stores, and does nothing else.
    """
    if compiler.depth or not compiler.in_launch or not _fixed(compiler, loop):
        return False
    if not is_const(loop.extent) or int(loop.extent) < FEWEST:
        return False
    found = _Nest()
    if not found.visit(compiler, loop) or not found.stores:
        return False
    stored = {store.buffer.data: store for store in found.stores}
    for access in (*found.stores, *found.loads):
        store = stored.get(access.buffer.data)
        if store is None:
            continue
        if not access.buffer.same_as(store.buffer) or not same_indices(list(access.indices), list(store.indices)):
            return False
    return all(_own_elements(store, found.loops) for store in found.stores)


class _Nest:
    """The loops, stores and loads of a loop nest."""

    def __init__(self) -> None:
        self.loops: list[Any] = []
        self.stores: list[Any] = []
        self.loads: list[Any] = []

    def visit(self, compiler: Compiler, node: Any) -> bool:
        """Collect loops, stores and loads; False if there is anything else."""
        kind = type(node).__name__
        if kind not in _PLAIN:
            return False
        if kind == 'For':
            if int(node.kind) == 1 or node.thread_binding is not None or not _fixed(compiler, node):
                return False
            self.loops.append(node)
            return self.visit(compiler, node.body)
        if kind == 'SeqStmt':
            return all(self.visit(compiler, part) for part in node.seq)
        if kind == 'IfThenElse':
            sides = [side for side in (node.then_case, node.else_case) if side is not None]
            return self.reads(compiler, node.condition) and all(self.visit(compiler, side) for side in sides)
        if kind == 'Evaluate':
            return type(node.value).__name__ in ('IntImm', 'StringImm')
        if kind == 'Bind':
            return self.reads(compiler, node.value)
        storage = compiler.storages.get(node.buffer.data)
        if storage is None or storage.scope not in ('global', 'shared') or node.buffer.data in compiler.reducers:
            return False
        if any(not self.reads(compiler, index) for index in node.indices):
            return False
        self.stores.append(node)
        return self.reads(compiler, node.value)

    def reads(self, compiler: Compiler, node: Any) -> bool:
        """Collect the loads of an expression; False if it may do something else."""
        from tvm.tirx.stmt_functor import post_order_visit

        pure = []

        def visit(part: Any) -> None:
            kind = type(part).__name__
            if kind == 'BufferLoad':
                storage = compiler.storages.get(part.buffer.data)
                pure.append(storage is not None and storage.scope in ('global', 'shared', 'local'))
                self.loads.append(part)
            elif kind == 'Call':
                pure.append(str(part.op.name) in _PURE_CALLS)
            elif kind in ('Ramp', 'Broadcast', 'Let', 'Shuffle'):
                pure.append(False)

        post_order_visit(node, visit)
        return all(pure)


def _fixed(compiler: Compiler, loop: Any) -> bool:
    """Whether a loop has the same literal bounds for all lanes."""
    return is_const(loop.min) and is_const(loop.extent) and (loop.step is None or _is_one(loop.step))


def _is_one(step: Any) -> bool:
    return is_const(step) and int(step) == 1


def _own_elements(store: Any, loops: list[Any]) -> bool:
    """Whether no two iterations of the loops store to one element."""
    from tvm.arith import detect_linear_equation
    from tvm.tirx.stmt_functor import post_order_visit

    variables = [loop.loop_var for loop in loops]
    free = {index for index in range(len(loops)) if int(loops[index].extent) > 1}
    for index in store.indices:
        loads: list[bool] = []
        post_order_visit(index, lambda part, loads=loads: loads.append(type(part).__name__ == 'BufferLoad'))
        if any(loads):
            return False
        linear = detect_linear_equation(index, variables)
        if len(linear) != len(variables) + 1:
            continue
        if not all(is_const(part) for part in linear[: len(variables)]):
            continue
        steps = sorted((abs(int(linear[one])), one) for one in range(len(loops)) if int(linear[one]))
        reach = 0
        for step, one in steps:
            if step <= reach:
                break
            reach += step * (int(loops[one].extent) - 1)
        else:
            free -= {one for _, one in steps}
    return not free


def as_array(compiler: Compiler, node: Any, compile_body: Callable[[], Any]) -> Callable[[Frame], None]:
    """Compile a loop as an axis; `compile_body` compiles its body."""
    from tvm.tirx import Var

    start = Var(f'{node.loop_var.name}_start', 'int32')
    lane = Var(f'{node.loop_var.name}_lane', 'int32')
    slot = compiler.new_slot(start)
    compiler.macros[node.loop_var] = start + lane
    with compiler.parallel_axis(lane):
        body = compile_body()
    first, count = int(node.min), int(node.extent)

    def run(frame: Frame) -> None:
        lanes = frame.blocks * frame.threads
        for extent in frame.extents:
            lanes *= extent
        chunk = max(1, min(count, MOST_LANES // max(1, lanes)))
        outer, outer_live, outer_looping = frame.mask, frame.live, frame.looping
        for done in range(0, count, chunk):
            frame.extents.append(min(chunk, count - done))
            frame.env[slot] = first + done
            if outer is not None:
                frame.mask = outer[..., None]
            try:
                body(frame)
            finally:
                frame.extents.pop()
                frame.mask, frame.live, frame.looping = outer, outer_live, outer_looping

    return run
