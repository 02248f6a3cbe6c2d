"""The layout of every shared buffer and fragment, as TileLang's layout inference chose it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tile_kernels.core import nvcc
from tile_kernels.core.errors import CompileError, TileKernelsError
from tile_kernels.sight.subject import Subject, resolve

#: Shared memory has 32 banks of 4 bytes.
BANKS, BANK_BYTES = 32, 4


@dataclass(frozen=True)
class BufferLayout:
    """Where the elements of a buffer lie.

    Attributes:
        buffer: the name of the buffer.
        scope: the memory scope, e.g. `'shared.dyn'` or `'local.fragment'`.
        dtype: the element type.
        shape: the extents of the buffer.
        bits: the size of an element in bits.
        offsets: for each element its position in the buffer, or in the registers of its thread.
        threads: for each replica and element its thread; None outside fragments.
    """

    buffer: str
    scope: str
    dtype: str
    shape: tuple[int, ...]
    bits: int
    offsets: NDArray[np.int64] = field(repr=False)
    threads: NDArray[np.int64] | None = field(default=None, repr=False)

    @property
    def banks(self) -> NDArray[np.int64]:
        """For each element its bank of shared memory; a fragment has none, the array is then empty."""
        if self.threads is not None:
            return np.empty(0, np.int64)
        return self.offsets * self.bits // (8 * BANK_BYTES) % BANKS

    def __str__(self) -> str:
        extents = 'x'.join(map(str, self.shape))
        head = f'{self.buffer}  {self.scope}  {self.dtype}[{extents}]'
        if self.threads is not None:
            copies = f', {len(self.threads)} copies' if len(self.threads) > 1 else ''
            return f'{head}  {len(np.unique(self.threads))} threads x {int(self.offsets.max()) + 1} registers{copies}'
        linear = np.array_equal(self.offsets.ravel(), np.arange(self.offsets.size))
        return f'{head}  {"row-major" if linear else "swizzled or permuted"}'


def layouts(kernel: Any, *args: Any, device: str = 'h200', **named: Any) -> dict[str, BufferLayout]:
    """The layouts of the shared buffers and fragments of a kernel.

    Args:
        kernel: a kernel, a builder or an op, as `tile_kernels.sight.subject.resolve` takes it.
        args: arguments of the kernel or the builder.
        device: the GPU to compile for.
        named: dynamic extents, arguments of the builder or entries of the case.

    Returns:
        Layouts by name of the buffer. If the subject has several launches, `kernel.buffer` is the name.
    """
    subjects = resolve(kernel, *args, device=device, **named)
    found: dict[str, BufferLayout] = {}
    for subject in subjects:
        start = f'{subject.name}.' if len(subjects) > 1 else ''
        found.update({f'{start}{name}': layout for name, layout in layouts_of(subject).items()})
    return found


def layouts_of(subject: Subject) -> dict[str, BufferLayout]:
    """The layouts of one launch by name of the buffer; a repeated name gets a number."""
    seen: dict[Any, Any] = {}

    def collect(module: Any, name: str) -> None:
        if name == 'tl.LayoutInference':
            for function in module.functions.values():
                seen.update(_annotated(function))

    lower_observed(subject, collect)
    found: dict[str, BufferLayout] = {}
    for buffer, layout in seen.items():
        name, number = buffer.name, 1
        while name in found:
            name, number = f'{buffer.name}_{number}', number + 1
        found[name] = evaluate(layout, name, buffer.scope(), str(buffer.dtype))
    return found


def _annotated(function: Any) -> dict[Any, Any]:
    """Layouts by buffer, from the annotation `layout_map` of every block; other shared buffers are row-major."""
    from tilelang import tvm
    from tilelang.layout import make_linear_layout

    found: dict[Any, Any] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tvm.tirx.SBlock):
            shared = [buffer for buffer in node.alloc_buffers if str(buffer.scope()) in ('shared', 'shared.dyn')]
            found.update({buffer: make_linear_layout(buffer) for buffer in shared if buffer not in found})
            found.update(node.annotations['layout_map'].items() if 'layout_map' in node.annotations else {})

    tvm.tirx.stmt_functor.post_order_visit(function.body, visit)
    return found


def lower_observed(
    subject: Subject, after: Callable[[Any, str], None], before: Callable[[Any, str], None] | None = None
) -> Any:
    """Lower a subject without nvcc, call `after(module, name)` after each pass, and return the lowered artifact."""
    nvcc.require_tilelang()
    import tilelang
    from tilelang import tvm

    class Observer:
        """Passes the module of each compiler pass on."""

        def run_before_pass(self, module: Any, info: Any) -> None:
            if before is not None:
                before(module, info.name)

        def run_after_pass(self, module: Any, info: Any) -> None:
            after(module, info.name)

    target = tvm.target.Target({'kind': 'cuda', 'arch': subject.gpu.target})
    instruments = [tvm.instrument.pass_instrument(Observer)()]
    try:
        with (
            nvcc.quiet(),
            target,
            tvm.transform.PassContext(opt_level=3, config=subject.pass_configs, instruments=instruments),
        ):
            return tilelang.lower(subject.prim_func, target=target, enable_device_compile=False)
    except TileKernelsError:
        raise
    except Exception as error:
        raise CompileError(f'{subject.name}: {nvcc.explain(str(error) or type(error).__name__)}') from error


def evaluate(layout: Any, buffer: str, scope: str, dtype: str) -> BufferLayout:
    """Evaluate a `T.Layout` or `T.Fragment` at every element."""
    from tilelang import tvm
    from tilelang.layout import Fragment

    shape = tuple(int(extent) for extent in layout.get_input_shape())
    grid = list(np.indices(shape, dtype=np.int64))
    bits = int(tvm.DataType(dtype).bits)
    variables = list(layout.get_forward_vars())  # the replica if there are several, then one for each axis
    values = dict(zip(variables[-len(shape) :], grid, strict=True))
    offsets = np.zeros(shape, np.int64)
    for position, extent in zip(layout.get_forward_index(), layout.get_output_shape(), strict=True):
        offsets = offsets * int(extent) + _value(position, values)
    if not isinstance(layout, Fragment):
        return BufferLayout(buffer, scope, dtype, shape, bits, offsets)
    threads = []
    for replica in range(int(layout.replicate_size)):
        copy = {variable: np.int64(replica) for variable in variables[: -len(shape)]}
        threads.append(np.broadcast_to(_value(layout.thread, values | copy), shape))
    return BufferLayout(buffer, scope, dtype, shape, bits, offsets, np.stack(threads))


def _value(expression: Any, values: dict[Any, Any]) -> Any:
    """The value of an integer expression for arrays of variables."""
    from tilelang import tvm

    tirx = tvm.tirx
    if isinstance(expression, int):
        return expression
    if isinstance(expression, tirx.IntImm):
        return int(expression.value)
    if isinstance(expression, tirx.Var):
        for variable, value in values.items():
            if variable.same_as(expression):
                return value
    if isinstance(expression, tirx.Cast):
        return _value(expression.value, values)
    if isinstance(expression, tirx.Select):
        parts = (expression.condition, expression.true_value, expression.false_value)
        return np.where(*(_value(part, values) for part in parts))
    kind = type(expression).__name__
    if kind in _BINARY:
        return _BINARY[kind](_value(expression.a, values), _value(expression.b, values))
    if kind == 'Call' and expression.op.name.split('.')[-1] in _CALLS:
        return _CALLS[expression.op.name.split('.')[-1]](*(_value(a, values) for a in expression.args))
    raise CompileError(f'layout: {expression} is no integer expression that can be evaluated')


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    'Add': lambda a, b: a + b,
    'Sub': lambda a, b: a - b,
    'Mul': lambda a, b: a * b,
    'FloorDiv': lambda a, b: a // b,
    'FloorMod': lambda a, b: a % b,
    'Div': lambda a, b: a // b,
    'Mod': lambda a, b: a % b,
    'Min': np.minimum,
    'Max': np.maximum,
    'EQ': lambda a, b: a == b,
    'NE': lambda a, b: a != b,
    'LT': lambda a, b: a < b,
    'LE': lambda a, b: a <= b,
    'GT': lambda a, b: a > b,
    'GE': lambda a, b: a >= b,
}
_CALLS: dict[str, Callable[..., Any]] = {
    'bitwise_xor': np.bitwise_xor,
    'bitwise_and': np.bitwise_and,
    'bitwise_or': np.bitwise_or,
    'shift_left': np.left_shift,
    'shift_right': np.right_shift,
    'if_then_else': np.where,
}
