"""Functions of numbers: elementary functions, bit operations, fused multiply-add, reinterpretation.

torch computes elementary functions; its float32 results are within one unit in the last place of CUDA's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.meaning.expressions import elementwise, maximum, minimum, wrapping
from tile_kernels.interpreter.memory.dtypes import DType, bits_of, decoder, dtype_of


def through_torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    """Apply a torch function to values."""

    def run(value: Any) -> Any:
        array = np.asarray(value)
        if not array.flags.writeable or not array.flags.c_contiguous:
            array = array.copy()
        result = function(torch.from_numpy(array)).numpy()
        return result if isinstance(value, np.ndarray) else result[()]

    return run


def _fma32(a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` with a single rounding to float32."""
    product = np.multiply(a, b, dtype=np.float64)  # exact: 24 + 24 bits fit into 53
    addend = np.asarray(c, dtype=np.float64)
    total = product + addend
    # The rounding error of the sum (two-sum); a result rounded to odd can be rounded again to float32 safely.
    virtual = total - product
    lost = (product - (total - virtual)) + (addend - virtual)
    odd = np.atleast_1d(np.array(total, dtype=np.float64))
    lost = np.broadcast_to(np.atleast_1d(lost), odd.shape)
    bits = odd.view(np.int64)
    fix = (lost != 0) & np.isfinite(odd) & np.isfinite(lost) & ((bits & 1) == 0)
    toward = np.where((lost > 0) == (odd > 0), 1, -1)
    fixed = np.where(fix, bits + toward, bits).view(np.float64).astype(np.float32)
    return fixed.reshape(np.shape(total)) if isinstance(total, np.ndarray) else fixed[0]


def _fma(a: Any, b: Any, c: Any) -> Any:
    kinds = [np.asarray(part).dtype for part in (a, b, c)]
    return a * b + c if np.dtype(np.float64) in kinds else _fma32(a, b, c)


def _popcount(bits: int) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return (int(value) & ((1 << bits) - 1)).bit_count()
        return np.bitwise_count(value.astype(np.dtype(f'int{bits}')).view(np.dtype(f'uint{bits}'))).astype(np.int32)

    return run


def _clz(bits: int) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        wide = np.asarray(value).astype(np.dtype(f'int{bits}')).view(np.dtype(f'uint{bits}'))
        count = np.full(wide.shape, bits, np.int32)
        for position in range(bits):
            count = np.where(wide >> wide.dtype.type(position) != 0, bits - 1 - position, count)
        return count.astype(np.int32) if isinstance(value, np.ndarray) else int(count)

    return run


def _find_first_set(value: Any) -> Any:
    """One-based position of the lowest set bit, 0 if there is none."""
    if not isinstance(value, np.ndarray):
        return (int(value) & -int(value)).bit_length()
    unsigned = value.view(np.dtype(f'uint{value.dtype.itemsize * 8}'))
    lowest = unsigned & (~unsigned + unsigned.dtype.type(1))
    position = np.bitwise_count(lowest - unsigned.dtype.type(1)).astype(np.int32) + 1
    return np.where(unsigned == 0, 0, position).astype(np.int32)


def _find_nth_set(mask: Any, base: Any, offset: Any) -> Any:
    """Position of the n-th set bit at or after (n > 0) or before (n < 0) `base`, as CUDA's __fns."""
    mask, base, offset = np.broadcast_arrays(*(np.asarray(part).astype(np.int64) for part in (mask, base, offset)))
    result = np.full(mask.shape, 0xFFFFFFFF, np.int64)
    left = np.where(offset == 0, 1, np.abs(offset))
    down = offset < 0
    only = offset == 0
    for distance in range(32):
        position = np.where(down, base - distance, base + distance)
        inside = (position >= 0) & (position < 32) & ~(only & (distance > 0))
        hit = inside & ((mask >> np.clip(position, 0, 31)) & 1 == 1) & (result == 0xFFFFFFFF)
        left = left - hit
        result = np.where(hit & (left == 0), position, result)
    return result.astype(np.uint32) if result.ndim else int(result)


def _round_half_away(value: Any) -> Any:
    return np.copysign(np.floor(np.abs(value) + np.asarray(value).dtype.type(0.5)), value)


def _clamp(value: Any, low: Any, high: Any) -> Any:
    if isinstance(value, (int, np.integer)) or (isinstance(value, np.ndarray) and value.dtype.kind in 'iu'):
        return np.minimum(np.maximum(value, low), high)
    return minimum(maximum(value, low), high)


def _pow(base: Any, exponent: Any) -> Any:
    return np.power(base, exponent)


# Operator name: its function on numbers. The result is rounded to the type of the call.
UNARY: dict[str, Callable[[Any], Any]] = {
    'exp': through_torch(torch.exp),
    'exp2': through_torch(torch.exp2),
    'exp10': lambda x: np.power(np.asarray(x).dtype.type(10), x),
    'log': through_torch(torch.log),
    'log2': through_torch(torch.log2),
    'log10': through_torch(torch.log10),
    'log1p': through_torch(torch.log1p),
    'sqrt': np.sqrt,
    'rsqrt': through_torch(torch.rsqrt),
    'sin': through_torch(torch.sin),
    'cos': through_torch(torch.cos),
    'tan': through_torch(torch.tan),
    'sinh': through_torch(torch.sinh),
    'cosh': through_torch(torch.cosh),
    'tanh': through_torch(torch.tanh),
    'asin': through_torch(torch.asin),
    'acos': through_torch(torch.acos),
    'atan': through_torch(torch.atan),
    'asinh': through_torch(torch.asinh),
    'acosh': through_torch(torch.acosh),
    'atanh': through_torch(torch.atanh),
    'erf': through_torch(torch.erf),
    'sigmoid': through_torch(torch.sigmoid),
    'floor': np.floor,
    'ceil': np.ceil,
    'trunc': np.trunc,
    'round': np.rint,
    'nearbyint': np.rint,
    'fabs': np.abs,
    'abs': np.abs,
    'isnan': np.isnan,
    'isinf': np.isinf,
    'isfinite': np.isfinite,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    'pow': _pow,
    'fmod': np.fmod,
    'atan2': np.arctan2,
    'copysign': np.copysign,
    'hypot': np.hypot,
    'nextafter': np.nextafter,
    'ldexp': lambda x, e: np.ldexp(x, e),
}
TILELANG: dict[str, Callable[..., Any]] = {
    'tl.__exp': UNARY['exp'],
    'tl.__exp10': UNARY['exp10'],
    'tl.__log': UNARY['log'],
    'tl.__log2': UNARY['log2'],
    'tl.__log10': UNARY['log10'],
    'tl.__sin': UNARY['sin'],
    'tl.__cos': UNARY['cos'],
    'tl.__tan': UNARY['tan'],
    'tl.__ffs': _find_first_set,
    'tl.__fns': _find_nth_set,
    'tl.clamp': _clamp,
    'tl.fma': _fma,
    'tl.fmul': operator.mul,
    'tl.fast_rcp': lambda x: np.divide(np.asarray(x).dtype.type(1), x),
    'tl.max_nan': np.maximum,
    'tl.min_nan': np.minimum,
    'tl.round_ties_away_from_zero': _round_half_away,
    'tl.pow_of_int': _pow,
    # packed pairs: component by component
    'tl.abs2': np.abs,
    'tl.add2': operator.add,
    'tl.sub2': operator.sub,
    'tl.mul2': operator.mul,
    'tl.max2': maximum,
    'tl.min2': minimum,
    'tl.max2_nan': np.maximum,
    'tl.min2_nan': np.minimum,
    'tl.fma2': _fma,
}


def _plain(function: Callable[..., Any]) -> Callable[[Compiler, Any], Closure]:
    def build(compiler: Compiler, call: Any) -> Closure:
        operands = [compiler.expr(argument) for argument in call.args]
        return elementwise(function, compiler.dtype(call), *operands)

    return build


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **{f'tirx.{name}': function for name, function in UNARY.items()},
    **{f'tirx.{name}': function for name, function in BINARY.items()},
    **TILELANG,
}
PURE = frozenset(_ELEMENTWISE)  # operators of numbers alone
for _name, _function in _ELEMENTWISE.items():
    op(_name)(_plain(_function))


@op('tirx.clz')
def _count_leading_zeros(compiler: Compiler, call: Any) -> Closure:
    """Number of zero bits above the highest set bit."""
    bits = max(32, compiler.dtype(call.args[0]).bits)
    return elementwise(_clz(bits), compiler.dtype(call), compiler.expr(call.args[0]))


@op('tirx.popcount')
def _count_set_bits(compiler: Compiler, call: Any) -> Closure:
    """Number of set bits."""
    return elementwise(_popcount(compiler.dtype(call.args[0]).bits), compiler.dtype(call), compiler.expr(call.args[0]))


BITWISE: dict[str, Callable[[Any, Any], Any]] = {
    'tirx.bitwise_and': operator.and_,
    'tirx.bitwise_or': operator.or_,
    'tirx.bitwise_xor': operator.xor,
    'tirx.shift_left': operator.lshift,
    'tirx.shift_right': operator.rshift,
}


@op(*BITWISE)
def _bitwise(compiler: Compiler, call: Any) -> Closure:
    """Bit operations and shifts on integers, at least 32 bits wide as in C."""
    dtype = compiler.dtype(call)
    function = wrapping(_typed_shift(BITWISE[str(call.op.name)], dtype), dtype)
    return elementwise(function, dtype, *[compiler.expr(argument) for argument in call.args])


def _typed_shift(function: Callable[[Any, Any], Any], dtype: DType) -> Callable[[Any, Any], Any]:
    if function not in (operator.lshift, operator.rshift):
        return function

    def run(value: Any, amount: Any) -> Any:
        if not isinstance(value, np.ndarray) and not isinstance(amount, np.ndarray):
            return function(value, min(int(amount), 64))
        if isinstance(amount, np.ndarray):  # the types may differ: the value decides the width
            amount = amount.astype(dtype.value, copy=False)
        return function(np.asarray(value, dtype=dtype.value), amount)

    return run


@op('tirx.bitwise_not')
def _bitwise_not(compiler: Compiler, call: Any) -> Closure:
    """Flip all bits."""
    dtype = compiler.dtype(call)
    unsigned = dtype.kind == 'uint' and dtype.bits >= 32
    full = (1 << dtype.bits) - 1

    def flip(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return ~value
        return ~value & full if unsigned else ~value

    return elementwise(flip, dtype, compiler.expr(call.args[0]))


@op('tl.ieee_add', 'tl.ieee_sub', 'tl.ieee_mul', 'tl.ieee_fdiv', 'tl.ieee_fmaf')
def _ieee(compiler: Compiler, call: Any) -> Closure:
    """Arithmetic with an explicit rounding mode; only round to nearest even is modelled."""
    functions: dict[str, Callable[..., Any]] = {
        'add': operator.add,
        'sub': operator.sub,
        'mul': operator.mul,
        'fdiv': np.divide,
        'fmaf': _fma,
    }
    _require_nearest(compiler, call)
    function = functions[str(call.op.name).removeprefix('tl.ieee_')]
    count = 3 if function is _fma else 2
    return elementwise(function, compiler.dtype(call), *[compiler.expr(part) for part in call.args[:count]])


@op('tl.ieee_frcp', 'tl.ieee_fsqrt', 'tl.ieee_frsqrt')
def _ieee_unary(compiler: Compiler, call: Any) -> Closure:
    """Correctly rounded reciprocal, square root and reciprocal square root."""
    _require_nearest(compiler, call)
    name = str(call.op.name).removeprefix('tl.ieee_')
    functions: dict[str, Callable[[Any], Any]] = {
        'frcp': lambda x: np.divide(np.asarray(x).dtype.type(1), x),
        'fsqrt': np.sqrt,
        # float64 has more than twice the bits, so rounding its result again is safe
        'frsqrt': lambda x: (1.0 / np.sqrt(np.asarray(x, np.float64))).astype(np.asarray(x).dtype)[()],
    }
    return elementwise(functions[name], compiler.dtype(call), compiler.expr(call.args[0]))


def _require_nearest(compiler: Compiler, call: Any) -> None:
    modes = [str(part.value) for part in call.args if type(part).__name__ == 'StringImm']
    if any(mode != 'rn' for mode in modes):
        raise compiler.unsupported(f'rounding mode {modes[0]!r} of {call.op.name}')


@op('tl.infinity')
def _infinity(compiler: Compiler, call: Any) -> Closure:
    """The infinity of a float type."""
    dtype = compiler.dtype(call)
    if dtype.bits < 16 and dtype.name != 'float8_e5m2':
        raise compiler.unsupported(f'T.infinity of {dtype.name}, which has none,')
    value = dtype.value.type(np.inf)
    return lambda frame: value


@op('tirx.reinterpret')
def _reinterpret(compiler: Compiler, call: Any) -> Closure:
    """The same bits read as another type of the same total width."""
    source, target = compiler.dtype(call.args[0]), compiler.dtype(call)
    operand = compiler.expr(call.args[0])
    if source.bits * source.lanes != target.bits * target.lanes:
        raise compiler.unsupported(f'reinterpret of {source.name} as {target.name}')
    return lambda frame: reinterpret(operand(frame), source, target)


def reinterpret(value: Any, source: DType, target: DType) -> Any:
    """Read the bits of a value of `source` as `target`."""
    if source.lanes == 1 and target.lanes == 1:
        if source.kind == 'handle' or target.kind == 'handle':
            return value
        raw = bits_of(value, source)
        result = decoder(_scalar_type(target))(np.atleast_1d(raw).view(target.storage).reshape(raw.shape))
        return _uniform(result, target) if not isinstance(value, np.ndarray) else result
    parts = value if isinstance(value, tuple) else (value,)
    columns = np.broadcast_arrays(*[bits_of(part, _scalar_type(source)) for part in parts])
    together = np.ascontiguousarray(np.stack(columns, axis=-1))
    raw = together.view(target.storage)
    decode = decoder(_scalar_type(target))
    pieces = tuple(decode(np.ascontiguousarray(raw[..., lane])) for lane in range(raw.shape[-1]))
    if not any(isinstance(part, np.ndarray) for part in parts):
        pieces = tuple(_uniform(piece, target) for piece in pieces)
    return pieces if target.lanes > 1 else pieces[0]


def _scalar_type(dtype: DType) -> DType:
    return dtype_of(dtype.name)


def _uniform(result: np.ndarray, target: DType) -> Any:
    scalar = result.reshape(())[()]
    if target.kind == 'bool':
        return bool(scalar)
    return int(scalar) if target.is_int else scalar


@op('tl.pack_b16')
def _pack_b16(compiler: Compiler, call: Any) -> Closure:
    """Two 16-bit values in one 32-bit word, the first in the low half."""
    dtypes = [compiler.dtype(part) for part in call.args]
    low, high = [compiler.expr(part) for part in call.args]

    def run(frame: Frame) -> Any:
        first, second = bits_of(low(frame), dtypes[0]), bits_of(high(frame), dtypes[1])
        packed = first.astype(np.uint32) | second.astype(np.uint32) << np.uint32(16)
        return packed if packed.ndim else int(packed)

    return run


@op('tl.pack_b8x4')
def _pack_b8x4(compiler: Compiler, call: Any) -> Closure:
    """Four bytes in one 32-bit word, the first lowest."""
    dtypes = [compiler.dtype(part) for part in call.args]
    parts = [compiler.expr(part) for part in call.args]

    def run(frame: Frame) -> Any:
        packed: Any = np.uint32(0)
        for position, (part, dtype) in enumerate(zip(parts, dtypes, strict=True)):
            packed = packed | bits_of(part(frame), dtype).astype(np.uint32) << np.uint32(8 * position)
        return packed if packed.ndim else int(packed)

    return run


@op('tirx.likely')
def _likely(compiler: Compiler, call: Any) -> Closure:
    """A hint; returns its argument."""
    return compiler.expr(call.args[0])
