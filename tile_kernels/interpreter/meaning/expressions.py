"""Expressions: literals, variables, arithmetic, comparisons, casts, loads, choices."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.lanes import both, select
from tile_kernels.interpreter.engine.translate import OPS, Closure, Compiler, expression, op
from tile_kernels.interpreter.memory.dtypes import (
    FP4_PAIR,
    DType,
    caster,
    constant,
    dtype_of,
    pair_of_numbers,
    rounder,
    wrap_int,
)


@expression('IntImm', 'FloatImm')
def _literal(compiler: Compiler, node: Any) -> Closure:
    """A number written in the kernel."""
    value = constant(node.value, compiler.dtype(node))
    return lambda frame: value


@expression('StringImm')
def _string(compiler: Compiler, node: Any) -> Closure:
    """Text, for messages."""
    text = str(node.value)
    return lambda frame: text


@expression('Var', 'SizeVar')
def _variable(compiler: Compiler, node: Any) -> Closure:
    """The value bound to a name."""
    return compiler.variable(node)


def elementwise(function: Callable[..., Any], dtype: DType, *operands: Closure) -> Closure:
    """Apply `function` lane by lane (component by component for vectors), rounding to `dtype`."""
    rounding = rounder(dtype) if dtype.is_float else None
    if dtype.lanes > 1:

        def run_vector(frame: Frame) -> Any:
            columns = [_components(operand(frame), dtype.lanes) for operand in operands]
            results = (function(*parts) for parts in zip(*columns, strict=True))
            return tuple(rounding(result) for result in results) if rounding else tuple(results)

        return run_vector
    if len(operands) == 1:
        (only,) = operands
        if rounding is None:
            return lambda frame: function(only(frame))
        return lambda frame: rounding(function(only(frame)))
    if len(operands) == 2:
        left, right = operands
        if rounding is None:
            return lambda frame: function(left(frame), right(frame))
        return lambda frame: rounding(function(left(frame), right(frame)))
    if rounding is None:
        return lambda frame: function(*[operand(frame) for operand in operands])
    return lambda frame: rounding(function(*[operand(frame) for operand in operands]))


def _components(value: Any, lanes: int) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,) * lanes


def wrapping(function: Callable[[Any, Any], Any], dtype: DType) -> Callable[[Any, Any], Any]:
    """Integer arithmetic that wraps: NumPy arrays wrap by themselves, Python integers need code for it."""
    low, high = (0, 1 << dtype.bits) if dtype.kind == 'uint' and dtype.bits >= 32 else (-(1 << 31), 1 << 31)
    if dtype.bits == 64 and dtype.kind == 'int':
        low, high = -(1 << 63), 1 << 63

    def run(left: Any, right: Any) -> Any:
        result = function(left, right)
        if type(result) is int and not low <= result < high:
            return wrap_int(result, dtype)
        return result

    return run


def maximum(left: Any, right: Any) -> Any:
    """`max`: the number if the other operand is NaN, and +0 above -0."""
    result = np.fmax(left, right)
    if np.any(result == 0):
        result = np.where((left == 0) & (right == 0) & ~(np.signbit(left) & np.signbit(right)), np.abs(result), result)
    return _scalar(result)


def minimum(left: Any, right: Any) -> Any:
    """`min`: the number if the other operand is NaN, and -0 below +0."""
    result = np.fmin(left, right)
    if np.any(result == 0):
        result = np.where((left == 0) & (right == 0) & (np.signbit(left) | np.signbit(right)), -np.abs(result), result)
    return _scalar(result)


def _scalar(value: Any) -> Any:
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _int_max(left: Any, right: Any) -> Any:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.maximum(left, right)
    return max(left, right)


def _int_min(left: Any, right: Any) -> Any:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.minimum(left, right)
    return min(left, right)


def floor_divide(left: Any, right: Any) -> Any:
    """Integer division rounding down; a zero divisor, in inactive or undefined lanes, gives 0."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.floor_divide(left, right)
    return left // right if right else 0


def floor_modulo(left: Any, right: Any) -> Any:
    """Remainder with the sign of the divisor."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.mod(left, right)
    return left % right if right else 0


def truncating_divide(left: Any, right: Any) -> Any:
    """C integer division, rounding toward zero."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        left, right = np.broadcast_arrays(left, right)
        quotient = np.floor_divide(left, right)
        if quotient.dtype.kind == 'u':
            return quotient
        return quotient + ((quotient < 0) & (quotient * right != left)).astype(quotient.dtype)
    return 0 if not right else abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


def truncating_modulo(left: Any, right: Any) -> Any:
    """C remainder, with the sign of the dividend."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.fmod(left, right)
    return 0 if not right else abs(left) % abs(right) * (-1 if left < 0 else 1)


# node: (function for integers, function for floats)
ARITHMETIC: dict[str, tuple[Any, Any]] = {
    'Add': (operator.add, operator.add),
    'Sub': (operator.sub, operator.sub),
    'Mul': (operator.mul, operator.mul),
    'Div': (truncating_divide, np.divide),  # IEEE division for floats
    'Mod': (truncating_modulo, np.fmod),
    'FloorDiv': (floor_divide, lambda left, right: np.floor(np.divide(left, right))),
    'FloorMod': (floor_modulo, np.mod),
    'Max': (_int_max, maximum),
    'Min': (_int_min, minimum),
}


@expression(*ARITHMETIC)
def _arithmetic(compiler: Compiler, node: Any) -> Closure:
    """`a + b` and similar, in the type of the node: integers wrap, small floats round after each operation."""
    dtype = compiler.dtype(node)
    for_ints, for_floats = ARITHMETIC[type(node).__name__]
    function = for_floats if dtype.is_float else wrapping(for_ints, dtype)
    return elementwise(function, dtype, compiler.expr(node.a), compiler.expr(node.b))


COMPARISONS = {
    'EQ': operator.eq,
    'NE': operator.ne,
    'LT': operator.lt,
    'LE': operator.le,
    'GT': operator.gt,
    'GE': operator.ge,
}


@expression(*COMPARISONS)
def _comparison(compiler: Compiler, node: Any) -> Closure:
    """`a < b` and similar; false for NaN except `!=`."""
    return elementwise(
        COMPARISONS[type(node).__name__], compiler.dtype(node), compiler.expr(node.a), compiler.expr(node.b)
    )


@expression('And', 'Or')
def _logical(compiler: Compiler, node: Any) -> Closure:
    """Short-circuit and / or: the second operand is evaluated only for the lanes that need it."""
    left, right = compiler.expr(node.a), compiler.expr(node.b)
    stop = type(node).__name__ == 'Or'

    def run(frame: Frame) -> Any:
        first = left(frame)
        if not isinstance(first, np.ndarray):
            return first if bool(first) is stop else right(frame)
        needed = ~first if stop else first
        outer = frame.mask
        frame.mask = both(outer, needed)
        try:
            second = right(frame) if needed.any() else stop
        finally:
            frame.mask = outer
        return first | second if stop else first & second

    return run


@expression('Not')
def _not(compiler: Compiler, node: Any) -> Closure:
    """Logical negation."""
    operand = compiler.expr(node.a)

    def run(frame: Frame) -> Any:
        value = operand(frame)
        return ~value if isinstance(value, np.ndarray) else not value

    return run


@expression('Cast')
def _cast(compiler: Compiler, node: Any) -> Closure:
    """Conversion: floats to nearest even (8 bits and fewer saturate), integers toward zero."""
    source, target = compiler.dtype(node.value), compiler.dtype(node)
    convert = caster(dtype_of(source.name), dtype_of(target.name))
    return elementwise(convert, dtype_of('handle') if target.lanes == 1 else target, compiler.expr(node.value))


@expression('Select')
def _select(compiler: Compiler, node: Any) -> Closure:
    """`c ? a : b`; each branch is evaluated for its own lanes only."""
    parts = (compiler.expr(node.condition), compiler.expr(node.true_value), compiler.expr(node.false_value))
    return choose(*parts, compiler.dtype(node))


@op('tirx.if_then_else')
def _if_then_else(compiler: Compiler, call: Any) -> Closure:
    """`c ? a : b`; each branch is evaluated for its own lanes only."""
    condition, if_true, if_false = (compiler.expr(argument) for argument in call.args)
    return choose(condition, if_true, if_false, compiler.dtype(call))


def choose(condition: Closure, if_true: Closure, if_false: Closure, dtype: DType) -> Closure:
    """Lane-wise choice."""
    kind = dtype.value

    def run(frame: Frame) -> Any:
        chosen = condition(frame)
        if not isinstance(chosen, np.ndarray):
            return if_true(frame) if chosen else if_false(frame)
        outer = frame.mask
        try:
            frame.mask = both(outer, chosen)
            first = if_true(frame)
            frame.mask = both(outer, ~chosen)
            second = if_false(frame)
        finally:
            frame.mask = outer
        return select(chosen, first, second, kind)

    return run


@expression('Let')
def _let(compiler: Compiler, node: Any) -> Closure:
    """Bind a value inside an expression."""
    value = compiler.expr(node.value)
    slot = compiler.new_slot(node.var)
    body = compiler.expr(node.body)

    def run(frame: Frame) -> Any:
        frame.env[slot] = value(frame)
        return body(frame)

    return run


@expression('BufferLoad')
def _load(compiler: Compiler, node: Any) -> Closure:
    """Read an element (or, with a ramp as last index, a vector of them)."""
    from tile_kernels.interpreter.meaning.tile_ops import forbid_plain_use

    forbid_plain_use(compiler, node.buffer)
    indices = list(node.indices)
    lanes = vector_lanes(compiler, indices)
    compiler.read_local(node.buffer)
    if lanes == 1:
        access = compiler.access(node.buffer, indices)
        if access.buffer.dtype is FP4_PAIR:
            return lambda frame: pair_of_numbers(access.load(frame, frame.mask))
        return lambda frame: access.load(frame, frame.mask)
    parts = [
        compiler.access(node.buffer, vector_element(compiler, node.buffer, indices, lane)) for lane in range(lanes)
    ]
    return lambda frame: tuple(part.load(frame, frame.mask).copy() for part in parts)


def is_vector_index(compiler: Compiler, node: Any) -> bool:
    """Whether a value is a vector of indices, each with its own expression."""
    kind = type(node).__name__
    if kind == 'Var':
        return node in compiler.macros and is_vector_index(compiler, compiler.macros[node])
    if kind in ('Add', 'Sub', 'Mul'):
        return is_vector_index(compiler, node.a) and is_vector_index(compiler, node.b)
    return kind in ('Ramp', 'Broadcast') and str(node.dtype).startswith(('int', 'uint'))


def vector_lanes(compiler: Compiler, indices: list[Any]) -> int:
    """How many elements an index list addresses."""
    return max((dtype_of(str(index.dtype)).lanes for index in indices if is_vector_index(compiler, index)), default=1)


def vector_element(compiler: Compiler, buffer: Any, indices: list[Any], lane: int) -> list[Any]:
    """The index list of one element of a vector access.

    Where a vector may begin below 0 and end above, TileLang lets every negative element count from the end.
    """
    from tvm.tirx import Select

    def one(index: Any) -> Any:
        kind = type(index).__name__
        if not is_vector_index(compiler, index):
            return index
        if kind == 'Var':
            return one(compiler.macros[index])
        if kind == 'Ramp':
            return index.base + index.stride * lane
        return index.value if kind == 'Broadcast' else type(index)(one(index.a), one(index.b))

    def wrapped(index: Any, extent: Any) -> Any:
        element = one(index)
        if type(index).__name__ == 'Ramp' and compiler.sign_is_open(index):
            return Select(element < 0, extent + element, element)
        return element

    return [wrapped(index, extent) for index, extent in zip(indices, buffer.shape, strict=True)]


@expression('Ramp')
def _ramp(compiler: Compiler, node: Any) -> Closure:
    """The vector base, base + stride, ..."""
    base, stride, lanes = (compiler.expr(node.base), compiler.expr(node.stride), int(node.lanes))

    def run(frame: Frame) -> Any:
        start, step = base(frame), stride(frame)
        return tuple(start + step * lane for lane in range(lanes))

    return run


@expression('Broadcast')
def _broadcast(compiler: Compiler, node: Any) -> Closure:
    """A vector of equal elements."""
    value, lanes = compiler.expr(node.value), int(node.lanes)
    return lambda frame: (value(frame),) * lanes


@expression('Shuffle')
def _shuffle(compiler: Compiler, node: Any) -> Closure:
    """Pick elements of concatenated vectors."""
    vectors = [compiler.expr(vector) for vector in node.vectors]
    picks = [int(index) for index in node.indices]

    def run(frame: Frame) -> Any:
        elements: list[Any] = []
        for vector in vectors:
            value = vector(frame)
            elements.extend(value if isinstance(value, tuple) else (value,))
        chosen = tuple(elements[pick] for pick in picks)
        return chosen if len(chosen) > 1 else chosen[0]

    return run


@expression('Call')
def _call(compiler: Compiler, node: Any) -> Closure:
    """An operator of the language, by name."""
    name = str(node.op.name)
    builder = OPS.get(name)
    if builder is None:
        raise compiler.unsupported(f'operator {name}')
    return builder(compiler, node)
