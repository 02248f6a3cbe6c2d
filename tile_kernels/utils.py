"""Small integer and dtype helpers."""

from __future__ import annotations

import torch

from tile_kernels.core.errors import ArgumentError

_DTYPE_NAMES = {
    torch.float32: 'fp32',
    torch.bfloat16: 'bf16',
    torch.float8_e4m3fn: 'e4m3',
    torch.int8: 'e2m1',  # two fp4 codes to a byte
}


def ceil_div(x: int, y: int) -> int:
    """`x / y`, rounded up."""
    return (x + y - 1) // y


def align(x: int, y: int) -> int:
    """`x`, rounded up to a multiple of `y`."""
    return ceil_div(x, y) * y


def is_power_of_two(x: int) -> bool:
    """Whether `x` is a positive power of two."""
    return x > 0 and x & (x - 1) == 0


def next_power_of_two(x: int) -> int:
    """The smallest power of two that is not smaller than `x`."""
    return 1 << (x - 1).bit_length()


def dtype_to_str(dtype: torch.dtype) -> str:
    """`fp32`, `bf16`, `e4m3` or `e2m1`."""
    if dtype not in _DTYPE_NAMES:
        raise ArgumentError(
            f'utils.dtype_to_str: dtype must be one of {", ".join(map(str, _DTYPE_NAMES))}, got {dtype}'
        )
    return _DTYPE_NAMES[dtype]


def str_to_dtype(name: str) -> torch.dtype:
    """The dtype `dtype_to_str` names."""
    for dtype, known in _DTYPE_NAMES.items():
        if known == name:
            return dtype
    raise ArgumentError(f'utils.str_to_dtype: name must be one of {", ".join(_DTYPE_NAMES.values())}, got {name!r}')
