"""Number formats: the storage of an element, and its representation in computations.

A *stored* element is raw bits (`storage`); a *value* is what expressions compute with (`value`). A value of a float
format with 16 bits or fewer is a float32 number that is exactly representable in that format. A value of an integer
type narrower than 32 bits is an int32, because C promotes it. It is narrowed when it is stored, bound or cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

Value = Any  # a Python/NumPy scalar (the same for every lane), an ndarray over lanes, or a tuple of those (a vector)

_SMALL_FLOATS: dict[str, tuple[int, Any, torch.dtype]] = {
    # name: (storage bits, largest finite value, torch dtype used to round)
    'float16': (16, None, torch.float16),
    'float8_e4m3fn': (8, 448.0, torch.float8_e4m3fn),
    'float8_e4m3': (8, 448.0, torch.float8_e4m3fn),
    'float8_e5m2': (8, 57344.0, torch.float8_e5m2),
}
_E2M1 = ('float4_e2m1fn', 'float4_e2m1_unpacked')
_E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
# Midpoints between adjacent values; a tie goes to the even code, so every second threshold is exclusive.
_E2M1_MIDPOINTS = (_E2M1_VALUES[1:] + _E2M1_VALUES[:-1]) / 2


@dataclass(frozen=True)
class DType:
    """One scalar element type; `lanes` > 1 makes it a vector of that type."""

    name: str
    kind: str  # 'float', 'int', 'uint', 'bool' or 'handle'
    bits: int
    storage: np.dtype
    value: np.dtype
    lanes: int = 1

    @property
    def is_float(self) -> bool:
        """A floating-point number of any width."""
        return self.kind == 'float'

    @property
    def is_small_float(self) -> bool:
        """A float of 16 bits or fewer, held as float32."""
        return self.kind == 'float' and self.bits < 32

    @property
    def is_int(self) -> bool:
        """A signed or unsigned integer."""
        return self.kind in ('int', 'uint')

    @property
    def packed(self) -> bool:
        """Two elements are in one byte."""
        return self.bits == 4


@cache
def dtype_of(name: str) -> DType:
    """The `DType` of a TVM type name such as 'bfloat16', 'uint8' or 'float32x4'."""
    lanes = 1
    base = name
    if 'x' in name and name.rsplit('x', 1)[1].isdigit():
        base, lanes = name.rsplit('x', 1)[0], int(name.rsplit('x', 1)[1])
    if base in ('handle', 'void', ''):
        return DType(base, 'handle', 64, np.dtype(np.uint64), np.dtype(np.uint64), lanes)
    if base == 'bool':
        return DType(base, 'bool', 8, np.dtype(np.uint8), np.dtype(np.bool_), lanes)
    if base in ('float32', 'float64'):
        plain = np.dtype(base)
        return DType(base, 'float', plain.itemsize * 8, plain, plain, lanes)
    if base in ('tfloat32', 'custom[tfloat32]'):
        return DType('tfloat32', 'float', 32, np.dtype(np.float32), np.dtype(np.float32), lanes)
    if base == 'bfloat16':
        return DType(base, 'float', 16, np.dtype(np.uint16), np.dtype(np.float32), lanes)
    if base in _SMALL_FLOATS:
        bits = _SMALL_FLOATS[base][0]
        return DType(base, 'float', bits, np.dtype(f'uint{bits}'), np.dtype(np.float32), lanes)
    if base == 'float8_e8m0fnu':
        return DType(base, 'float', 8, np.dtype(np.uint8), np.dtype(np.float32), lanes)
    if base == 'float4_e2m1fn':
        return DType(base, 'float', 4, np.dtype(np.uint8), np.dtype(np.float32), lanes)
    if base in ('float4_e2m1_unpacked', 'custom[float4_e2m1_unpacked]'):  # in shared memory, one byte each
        return DType('float4_e2m1_unpacked', 'float', 8, np.dtype(np.uint8), np.dtype(np.float32), lanes)
    if base in ('int4', 'uint4'):
        return DType(base, base[:-1], 4, np.dtype(np.uint8), np.dtype(np.int32), lanes)
    for kind in ('uint', 'int'):
        width = base.removeprefix(kind)
        if base.startswith(kind) and width in ('8', '16', '32', '64'):
            storage = np.dtype(base)
            value = storage if storage.itemsize >= 4 else np.dtype(np.int32)
            return DType(base, kind, storage.itemsize * 8, storage, value, lanes)
    raise KeyError(name)


# Two fp4 numbers in a byte of memory (`float4_e2m1fnx2`); its value is the byte.
FP4_PAIR = DType('float4_e2m1fnx2', 'pair', 8, np.dtype(np.uint8), np.dtype(np.uint8))


def pair_of_numbers(byte: Value) -> tuple[Value, Value]:
    """The two numbers of an `FP4_PAIR`."""
    table = _decode_table(dtype_of('float4_e2m1fn'))
    return table.take(np.asarray(byte) & 15), table.take(np.asarray(byte) >> 4)


def pair_of_bits(numbers: Value) -> np.ndarray:
    """The byte of two numbers (or of one number twice)."""
    low, high = numbers if isinstance(numbers, tuple) else (numbers, numbers)
    return _encode_e2m1(low) | (_encode_e2m1(high) << np.uint8(4))


@cache
def decoder(dtype: DType) -> Callable[[np.ndarray], np.ndarray]:
    """Convert stored bits to values."""
    if dtype.name == 'bfloat16':
        return lambda raw: (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype.name == 'float16':
        return lambda raw: _through_torch(raw.view(np.float16), torch.float32)
    if dtype.is_small_float:
        table = _decode_table(dtype)
        return lambda raw: table.take(raw)
    if dtype.kind == 'bool':
        return lambda raw: raw != 0
    if dtype.name == 'int4':
        return lambda raw: (raw.astype(np.int32) ^ 8) - 8
    if dtype.value != dtype.storage:
        return lambda raw: raw.astype(dtype.value)
    return lambda raw: raw


@cache
def encoder(dtype: DType) -> Callable[[Value], np.ndarray]:
    """Convert values (already of this type) to stored bits."""
    if dtype.name == 'bfloat16':
        return lambda value: (_float32(value).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.name == 'float16':
        return lambda value: _through_torch(_float32(value), torch.float16).view(np.uint16)
    if dtype.name in _SMALL_FLOATS:
        target = _SMALL_FLOATS[dtype.name][2]
        return lambda value: torch.from_numpy(_float32(value)).to(target).view(torch.uint8).numpy()
    if dtype.name == 'float8_e8m0fnu':
        return _encode_e8m0
    if dtype.name in _E2M1:
        return _encode_e2m1
    if dtype.kind == 'bool':
        return lambda value: np.asarray(value).astype(np.bool_).view(np.uint8)
    if dtype.is_int and dtype.packed:
        return lambda value: (np.asarray(value).astype(np.int64) & 15).astype(np.uint8)
    if dtype.is_int:
        return lambda value: _wrap_array(value, dtype.storage)
    return lambda value: np.asarray(value, dtype=dtype.storage)


@cache
def rounder(dtype: DType) -> Callable[[Value], Value] | None:
    """Round a float32 (or float64) result to `dtype`; None if values need no rounding."""
    if dtype.name == 'bfloat16':
        return _round_bfloat16
    if dtype.name == 'tfloat32':
        return _round_tfloat32
    if dtype.name == 'float16':
        return _round_float16
    if dtype.name in _SMALL_FLOATS:
        _, limit, target = _SMALL_FLOATS[dtype.name]

        def round_float8(value: Value) -> Value:
            source = _float32(value)
            clipped = np.clip(source, -limit, limit)  # saturate: an overflow gives the largest finite value
            clipped = np.where(np.isnan(source), np.float32(np.nan), clipped)  # one NaN for both signs
            return _like(value, torch.from_numpy(clipped).to(target).to(torch.float32).numpy())

        return round_float8
    if dtype.name == 'float8_e8m0fnu':
        table = _decode_table(dtype)
        return lambda value: _like(value, table.take(_encode_e8m0(value)))
    if dtype.name in _E2M1:
        table = _decode_table(dtype)
        return lambda value: _like(value, table.take(_encode_e2m1(value)))
    return None


@cache
def caster(source: DType, target: DType) -> Callable[[Value], Value]:
    """Convert values of `source` to values of `target` like the CUDA code."""
    if source.name == target.name:
        return narrower(target) or (lambda value: value)
    if target.kind == 'bool':
        return lambda value: value != 0
    if target.is_float:
        rounding = rounder(target)
        wide = target.value
        if rounding is None:
            return lambda value: _astype(value, wide)
        return lambda value: rounding(_astype(value, np.dtype(np.float32)))
    if target.is_int and source.is_float:
        return lambda value: _float_to_int(value, target)
    if target.is_int:
        return lambda value: _wrap(value, target)
    return lambda value: value


def narrower(dtype: DType) -> Callable[[Value], Value] | None:
    """Wrap a promoted integer back into its type (at a bind, a cast or a store); None if nothing is promoted."""
    if dtype.is_int and dtype.bits < 32:
        return lambda value: _wrap(value, dtype)
    return None


def wrap_int(value: int, dtype: DType) -> int:
    """Two's complement wrap of a Python integer, at the width of arithmetic in this type."""
    bits = max(dtype.bits, 32)
    signed = dtype.kind == 'int' or dtype.bits < 32
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1))) if signed else (0, 1 << bits)
    if low <= value < high:
        return value
    return ((value - low) & ((1 << bits) - 1)) + low


def bits_of(value: Value, dtype: DType) -> np.ndarray:
    """The stored bits of values, as an array of unsigned integers."""
    raw = encoder(dtype)(value)
    return raw if raw.dtype.kind == 'u' else raw.view(np.dtype(f'uint{raw.dtype.itemsize * 8}'))


def constant(value: Any, dtype: DType) -> Value:
    """A literal of the kernel as a value."""
    if dtype.kind == 'bool':
        return bool(value)
    if dtype.is_int:
        return _wrap(int(value), dtype)
    if dtype.is_float:
        rounding = rounder(dtype)
        held = dtype.value.type(value)
        return held if rounding is None else rounding(held)
    return value


def _float32(value: Value) -> np.ndarray:
    array = np.asarray(value, dtype=np.float32)
    if not array.flags.c_contiguous or not array.flags.writeable:
        array = array.copy()
    return array


def _like(value: Value, result: np.ndarray) -> Value:
    """Return scalars as scalars, so that uniform values stay uniform."""
    return result if isinstance(value, np.ndarray) else result[()]


def _through_torch(array: np.ndarray, target: torch.dtype) -> np.ndarray:
    # Torch converts half precision with vector instructions, NumPy element by element.
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()
    return torch.from_numpy(array).to(target).numpy()


def _astype(value: Value, target: np.dtype) -> Value:
    return value.astype(target) if isinstance(value, np.ndarray) else target.type(value)


def _round_bfloat16(value: Value) -> Value:
    source = _float32(value)
    bits = source.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded &= 0xFFFF0000
    nan = np.isnan(source)
    if nan.any():
        rounded = np.where(nan, np.uint32(0x7FFF0000), rounded)
    return _like(value, rounded.view(np.float32))


def _round_tfloat32(value: Value) -> Value:
    """Ten bits of mantissa, ties away from zero, as the tensor cores receive them."""
    source = _float32(value)
    rounded = ((source.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return _like(value, np.where(np.isfinite(source), rounded, source))


def _round_float16(value: Value) -> Value:
    source = _float32(value)
    rounded = _through_torch(_through_torch(source, torch.float16), torch.float32)
    nan = np.isnan(source)
    if nan.any():
        rounded = np.where(nan, np.uint32(0x7FFFE000).view(np.float32), rounded)  # stored as 0x7FFF, like the GPU
    return _like(value, np.asarray(rounded))


def _encode_e8m0(value: Value) -> np.ndarray:
    """Power of two, rounded up; saturates at 2**127, and NaN is code 255."""
    source = _float32(value)
    mantissa, exponent = np.frexp(np.abs(source))
    code = exponent + 126 + (mantissa > 0.5)
    code = np.where(np.isinf(source), 254, np.clip(code, 0, 254))
    code = np.where(source == 0, 0, code)
    return np.where(np.isnan(source), 255, code).astype(np.uint8)


def _encode_e2m1(value: Value) -> np.ndarray:
    """Round to nearest even, saturating at 6; NaN becomes the largest value."""
    source = _float32(value)
    magnitude = np.abs(source)
    code = np.zeros(source.shape, dtype=np.uint8)
    for position, midpoint in enumerate(_E2M1_MIDPOINTS):
        code += magnitude >= midpoint if position % 2 else magnitude > midpoint
    nan = np.isnan(source)
    return np.where(nan, np.uint8(7), code | (np.signbit(source).astype(np.uint8) << 3))


@cache
def _decode_table(dtype: DType) -> np.ndarray:
    codes = np.arange(16 if dtype.packed else 256, dtype=np.uint8)
    if dtype.name in _E2M1:
        return np.where(codes & 8, -_E2M1_VALUES[codes & 7], _E2M1_VALUES[codes & 7]).astype(np.float32)
    if dtype.name == 'float8_e8m0fnu':
        table = np.ldexp(1.0, np.minimum(codes, 254).astype(np.int32) - 127).astype(np.float32)
        table[255] = np.nan
        return table
    return torch.from_numpy(codes).view(_SMALL_FLOATS[dtype.name][2]).to(torch.float32).numpy()


def _wrap_array(value: Value, storage: np.dtype) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value.astype(storage, copy=False)
    width = storage.itemsize * 8
    unsigned = np.dtype(f'uint{width}').type(int(value) & ((1 << width) - 1))
    return np.asarray(unsigned).view(storage)


def _wrap(value: Value, dtype: DType) -> Value:
    if isinstance(value, np.ndarray) and dtype.packed:
        return decoder(dtype)(encoder(dtype)(value))
    if isinstance(value, np.ndarray):
        return value.astype(dtype.storage).astype(dtype.value, copy=False)
    value = int(value)
    low, high = (-(1 << (dtype.bits - 1)), 1 << (dtype.bits - 1)) if dtype.kind == 'int' else (0, 1 << dtype.bits)
    return value if low <= value < high else ((value - low) & ((1 << dtype.bits) - 1)) + low


def _float_to_int(value: Value, target: DType) -> Value:
    """Round toward zero and saturate; NaN becomes 0 (as `cvt.rzi` does)."""
    wide = target if target.bits >= 32 else dtype_of('int32')
    info = np.iinfo(wide.storage)
    array = np.asarray(value, dtype=np.float64)
    whole = np.trunc(np.where(np.isnan(array), 0.0, array))
    low, high = float(info.min), float(info.max)
    inside = np.clip(whole, low, high)
    with np.errstate(invalid='ignore'):
        result = np.where(whole >= high, info.max, np.where(whole <= low, info.min, inside.astype(wide.storage)))
    result = result.astype(wide.storage)
    if wide is not target:
        result = _wrap(result, target)
    return result if isinstance(value, np.ndarray) else int(result[()])
