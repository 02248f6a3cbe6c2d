"""Models of CUDA functions that kernels call by `T.call_extern`.

`extern('name')` registers a Python function as the model of a CUDA function. It receives arguments as values (a scalar,
or an array over lanes) and pointers as `Pointer` objects, and returns the value of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, cluster_distance

_MODELS: dict[str, Callable[..., Any]] = {}


class Pointer:
    """The address of an element; `load(k)` and `store(k, value)` access the k-th element after it."""

    def __init__(self, frame: Frame, accesses: Callable[[int], Any], cluster_dims: tuple[int, ...] = (1, 1, 1)) -> None:
        self._frame = frame
        self._accesses = accesses
        self._cluster_dims = cluster_dims

    def load(self, offset: int = 0) -> Any:
        """Load the element at `offset`."""
        return self._accesses(offset).load(self._frame, self._frame.mask)

    def store(self, offset: int, value: Any) -> None:
        """Store to the element at `offset`, for the active lanes."""
        self._accesses(offset).store(self._frame, value, self._frame.mask)

    def send(self, offset: int, value: Any, rank: Any) -> None:
        """Store to the element at `offset` in the shared memory of block `rank` of the cluster (DSMEM)."""
        access = self._accesses(offset)
        away = cluster_distance(self._frame, self._cluster_dims, rank)
        access.row_shift = lambda frame: away
        access.atomic = True  # `send` of the marks checks it instead
        access.store(self._frame, value, self._frame.mask)
        marks = access.memory(self._frame).race
        if marks is not None:
            place = access.locate(self._frame, self._frame.mask)
            marks.send(self._frame, access, place, self._frame.mask, away)


class RemoteBarrier:
    """An mbarrier that counts bytes sent to it; `operand` refers to it."""

    def __init__(self, frame: Frame, operand: Any, cluster_dims: tuple[int, ...]) -> None:
        self._frame = frame
        self._operand = operand
        self._cluster_dims = cluster_dims

    def send(self, bytes_: int, rank: Any) -> None:
        """Count bytes of every active thread at this barrier of block `rank` of the cluster."""
        frame, operand = self._frame, self._operand
        away = cluster_distance(frame, self._cluster_dims, rank)
        frame.memory[operand.slot].send(frame, operand.index(frame), away, bytes_, operand.slot)


def _send_four(place: Pointer, a: Any, b: Any, c: Any, d: Any, barrier: RemoteBarrier, rank: Any) -> None:
    """Send four elements to another block, whose barrier counts their bytes."""
    for offset, value in enumerate((a, b, c, d)):
        place.send(offset, value, rank)
    barrier.send(16, rank)


def extern(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the model of an external function.

    Args:
        name: The function name as written in `T.call_extern`.

    Returns:
        A decorator that leaves the function unchanged.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _MODELS[name] = function
        return function

    return register


def model_of(name: str) -> Callable[..., Any] | None:
    """The registered model, or None."""
    return _MODELS.get(name)


def _bits(value: Any, kind: Any) -> Any:
    return np.asarray(value).view(kind)[()] if np.ndim(value) == 0 else np.ascontiguousarray(value).view(kind)


def _byte_perm(low: Any, high: Any, selector: Any) -> Any:
    """Four of the eight bytes of two words, each selected by a nibble of the selector."""
    both = np.asarray(low, np.uint64) | np.asarray(high, np.uint64) << np.uint64(32)
    nibbles = [np.asarray(selector, np.uint64) >> np.uint64(4 * k) & np.uint64(7) for k in range(4)]
    picked = [(both >> np.uint64(8) * n & np.uint64(255)) << np.uint64(8 * k) for k, n in enumerate(nibbles)]
    return np.bitwise_or.reduce(np.broadcast_arrays(*picked)).astype(np.uint32)[()]


def _funnel_left(low: Any, high: Any, shift: Any) -> Any:
    """The upper word of two, shifted left by `shift` modulo 32."""
    both = np.asarray(low, np.uint64) | np.asarray(high, np.uint64) << np.uint64(32)
    return (both << (np.asarray(shift, np.uint64) & np.uint64(31)) >> np.uint64(32)).astype(np.uint32)[()]


def _smaller_halves(x: Any, y: Any) -> Any:
    """The minimum of the lower halves and the minimum of the upper halves of two words."""
    x, y = np.asarray(x, np.uint32), np.asarray(y, np.uint32)
    low, high = np.uint32(0xFFFF), np.uint32(0xFFFF0000)
    return (np.minimum(x & low, y & low) | np.minimum(x & high, y & high))[()]


def _with_exponents(word: Any, other: Any) -> Any:
    """Signs and mantissas of the two bfloat16 of one word, with the exponents of another."""
    exponents = np.uint32(0x7F807F80)
    return (np.asarray(word, np.uint32) & ~exponents | np.asarray(other, np.uint32) & exponents)[()]


def _word(place: Pointer, first: int = 0) -> Any:
    """Four bytes starting at a pointer, as a little-endian word."""
    parts = [np.asarray(place.load(first + k)).astype(np.int64) & 0xFF for k in range(4)]
    return parts[0] | parts[1] << 8 | parts[2] << 16 | parts[3] << 24


def _dp4a(a: Pointer, b: Pointer, c: Pointer) -> None:
    """`*c += a[0..3] . b[0..3]` of bytes, like TileLang's DP4A."""
    total = np.asarray(c.load(0)).astype(np.int64)
    for k in range(4):
        total = total + np.asarray(a.load(k)).astype(np.int64) * np.asarray(b.load(k))
    c.store(0, total.astype(np.int32))


def _dp4a_words(a: Any, b: Any, c: Any) -> Any:
    """`__dp4a`: the same for signed bytes packed in words."""
    total = np.asarray(c).astype(np.int64)
    for k in range(4):
        first, second = ((np.asarray(word).astype(np.int64) >> (8 * k)).astype(np.int8) for word in (a, b))
        total = total + first.astype(np.int64) * second
    return total.astype(np.int32)[()]


def _decode_int4(bias: int) -> Callable[..., None]:
    """Convert eight 4-bit numbers to halves; nibbles k and k + 4 of a word become adjacent, as with `lop3`."""

    def decode(source: Pointer, target: Pointer, count: Any = 8) -> None:
        word = _word(source)
        for k in range(int(count) // 2):
            for half in range(2):
                target.store(2 * k + half, ((word >> (4 * k + 16 * half) & 15) - bias).astype(np.float32))

    return decode


def _decode_int2(bias: int) -> Callable[..., None]:
    """Convert sixteen 2-bit numbers to bytes: number k of each of the four bytes of a word, then number k + 1."""

    def decode(source: Pointer, target: Pointer, count: Any = 16) -> None:
        word = _word(source)
        for k in range(int(count) // 4):
            for byte in range(4):
                target.store(4 * k + byte, ((word >> (2 * k + 8 * byte) & 3) - bias).astype(np.int32))

    return decode


def _decode_fp4(source: Pointer, target: Pointer, count: Any = 8) -> None:
    """Convert words of eight FP4 numbers, with bits permuted for fast unpacking, to bfloat16."""
    for group in range(int(count)):
        first, second, third, fourth = (
            np.asarray(source.load(4 * group + k)).astype(np.int64) & 0xFF for k in range(4)
        )
        for half, pair in enumerate((first << 8 | second, third << 8 | fourth)):
            last = pair << 1 & 0x8000 | pair >> 3 & 0x0180 | pair >> 7 & 0x0040
            for k, bits in enumerate((pair & 0x81C0, pair << 3 & 0x81C0, pair << 6 & 0x81C0, last)):
                small = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
                target.store(8 * group + 4 * half + k, small * np.float32(2.0**126))


def _nothing(*_: Any) -> None:
    """A function without an effect on results."""


_CUDA_FUNCTIONS: dict[str, Callable[..., Any]] = {
    '__float_as_uint': lambda x: _bits(np.float32(x) if np.ndim(x) == 0 else x, np.uint32),
    '__float_as_int': lambda x: _bits(np.float32(x) if np.ndim(x) == 0 else x, np.int32),
    '__uint_as_float': lambda x: _bits(np.uint32(x) if np.ndim(x) == 0 else x, np.float32),
    '__int_as_float': lambda x: _bits(np.int32(x) if np.ndim(x) == 0 else x, np.float32),
    '__byte_perm': _byte_perm,
    '__funnelshift_l': _funnel_left,
    '__vminu2': _smaller_halves,
    '__fadd_rn': lambda x, y: x + y,
    '__fsub_rn': lambda x, y: x - y,
    '__fmul_rn': lambda x, y: x * y,
    '__fdiv_rn': np.divide,
    '__frcp_rn': lambda x: np.divide(np.float32(1), x),
    '__fsqrt_rn': np.sqrt,
    'fmaxf': np.fmax,
    'fminf': np.fmin,
    'fabsf': np.abs,
    'sqrtf': np.sqrt,
    'floorf': np.floor,
    'ceilf': np.ceil,
    'truncf': np.trunc,
    'rintf': np.rint,
    # `asm` with these names: hardware functions, modelled without their error
    'ex2_approx': np.exp2,
    'sqrt_approx': np.sqrt,
    'tanh_approx': np.tanh,
    'send_four': _send_four,
    'DP4A': _dp4a,
    '__dp4a': _dp4a_words,
    '__nanosleep': _nothing,
    'nanosleep': _nothing,
    'prefetch_lines': _nothing,
    'TL_IKET_EVENT': _nothing,
    'TL_IKET_EVENT_PAYLOAD_U32': _nothing,
    'TL_IKET_EVENT_PAYLOAD_F32': _nothing,
    '__threadfence': _nothing,
    '__threadfence_block': _nothing,
    'decode_i4u_to_f16': _decode_int4(0),
    'decode_i4s_to_f16': _decode_int4(8),
    'decode_i2u_to_i8s': _decode_int2(0),
    'decode_i2s_to_i8s': _decode_int2(2),
    'decode_fp4_to_bf16_twiddling': _decode_fp4,
    'expf': np.exp,
    'exp2f': np.exp2,
    'logf': np.log,
    'log2f': np.log2,
    'tanhf': np.tanh,
    'rsqrtf': lambda x: np.divide(np.float32(1), np.sqrt(x)),
    'fmaf': lambda x, y, z: np.float32(np.asarray(x, np.float64) * y + z),
    '__expf': np.exp,
    '__logf': np.log,
    '__fdividef': np.divide,
    'with_exponents': _with_exponents,
}
for _name, _function in _CUDA_FUNCTIONS.items():
    extern(_name)(_function)
