"""Bit tricks: the bits of numbers, and bytes picked out of words."""

import struct
from typing import Any

from tile_kernels.core.lang import T


def float_bits(value: float) -> int:
    """The bits of a float32, on the host."""
    return struct.unpack('<I', struct.pack('<f', value))[0]


def bits_of(value: Any) -> Any:
    """The bits of a float32 as uint32."""
    return T.reinterpret(value, T.uint32)


def float_of(bits: Any) -> Any:
    """The float32 with these bits."""
    return T.reinterpret(bits, T.float32)


def byte_perm(low: Any, high: Any, selector: Any) -> Any:
    """The word of four bytes out of two words, each named by the lower three bits of a nibble of the selector."""
    return T.call_extern(T.uint32, '__byte_perm', low, high, selector)


def pick_bytes(low: Any, high: Any, *numbers: int) -> Any:
    """The word of four bytes out of two words; bytes are numbered from the lowest of `low` on."""
    return byte_perm(low, high, T.uint32(sum(number << 4 * place for place, number in enumerate(numbers))))


def bytes_of(words: Any, number: int) -> Any:
    """The word of byte `number` of each of four words."""
    two = (pick_bytes(words[e], words[e + 1], number, number + 4) for e in (0, 2))
    return pick_bytes(*two, 0, 1, 4, 5)


def choose_bits(mask: int, ones: Any, zeros: Any) -> Any:
    """Bits of `ones` where the mask is set, of `zeros` elsewhere; one instruction."""
    return ones & T.uint32(mask) | zeros & T.uint32(0xFFFFFFFF ^ mask)


def widened(pair: Any, half: int) -> Any:
    """One of two bfloat16 of a word as float32, or a single bfloat16.

    An instruction for each; of the upper half the compiler would make a number of its own first.
    """
    if pair.dtype != 'uint32':
        return T.cast(pair, T.float32)
    return T.reinterpret(pair & T.uint32(0xFFFF0000) if half else pair << 16, T.float32)
