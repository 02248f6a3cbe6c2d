"""Scores as int32 keys in the order of the floats, with -0 = +0 and NaN below -inf."""

from __future__ import annotations

from typing import Any

from tile_kernels.core.lang import T

#: Below every key: a slot without an expert, or one that may not be chosen (any more).
LOWEST = -(1 << 31)
NAN_KEY = LOWEST + 1


def order_key(x: Any) -> Any:
    """An int32 in the order of the float `x`, NaN aside; the mapping is its own inverse on the bits."""
    bits = T.reinterpret(x, 'int32')
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def from_order_key(key: Any) -> Any:
    """The float of an `order_key`."""
    return T.reinterpret(key ^ ((key >> 31) & 0x7FFFFFFF), 'float32')


def rank_key(x: Any) -> Any:
    """`order_key` with NaN last and both zeros equal."""
    return T.Select(T.isnan(x), NAN_KEY, T.Select(x == T.float32(0), 0, order_key(x)))
