"""SwiGLU, per-channel cast and transpose in one pass.

    act[n, h] = bfloat16((l / (1 + exp(-l))) * r)           see `swiglu_forward`; rounded before it is quantized
    y, y_sf   = per_channel_cast(act, fmt)                  see `per_channel_cast`; y is stored as (H, N), or as (N, H)

A thread block activates some channels of some rows in registers: gate and up are read once, the activation is never
stored. Memory bound: the floor is reading x and writing y and its scale factors.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.activation._checks import (
    check_clamp,
    check_halves,
)
from tile_kernels.activation._samples import random_halves
from tile_kernels.activation.swiglu_forward_and_per_channel_cast_and_transpose_kernels import (
    FEW_ROWS,
    swiglu_forward_and_per_channel_cast_kernel,
    swiglu_forward_and_transposed_cast_kernel,
)
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.quant._checks import (
    channel_format,
    check_channel_format,
)
from tile_kernels.quant._macros import HEIGHTS, VECTOR_BYTES

# Op -----------------------------------------------------------------------------------------


@op(outputs='y y_sf')
def _swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor, fmt: QuantFormat, clamp_value: float | None = None, transpose: bool = True
) -> tuple[Tensor, Tensor]:
    """SwiGLU, rounded to bfloat16, then quantized for each channel in groups of 32 or 128 rows, stored transposed."""
    num_tokens, hidden = check_halves(x, None)
    check_channel_format(fmt)
    check.one_of(fmt.sf_block[0], HEIGHTS, 'fmt.sf_block[0]')
    clamp = check_clamp(clamp_value)
    shape = (hidden, num_tokens) if transpose else (num_tokens, hidden)
    y, y_sf = fmt.empty_data(*shape, x.device), fmt.empty_sf(num_tokens, hidden, x.device)
    known, clamped = type(num_tokens) is int, clamp_value is not None
    rows, store_bytes = (hidden, fmt, x.dtype, check.vector_bytes(x)), 0
    if transpose:
        store_bytes = math.gcd(VECTOR_BYTES, num_tokens) if known else VECTOR_BYTES
    if 0 < store_bytes < VECTOR_BYTES and num_tokens > FEW_ROWS:
        launch(swiglu_forward_and_transposed_cast_kernel, (*rows, clamped), x, y, y_sf, clamp, fmt.amax_floor)
    else:
        static = (*rows, store_bytes, clamped)
        launch(swiglu_forward_and_per_channel_cast_kernel, static, x, y, y_sf, clamp, fmt.amax_floor)
    return y, y_sf


@_swiglu_forward_and_per_channel_cast_and_transpose.public
def swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
) -> tuple[Tensor, Tensor]:
    """SwiGLU, rounded to bfloat16, then quantized for each channel in groups of rows and stored transposed.

    Args:
        x: (num_tokens, 2 * hidden) gate and up side by side, bfloat16, float16 or float32, any row stride.
        fmt: 'e4m3' or 'e5m2'.
        num_per_tokens: rows that share a scale factor: 32 or 128.
        round_sf: scale factors are rounded up to powers of two.
        without_transpose: codes are (num_tokens, hidden).
        swiglu_clamp_value: gate at most this, up within plus and minus this.

    Returns:
        Codes (hidden, num_tokens) and float32 scale factors (ceil(num_tokens / num_per_tokens), hidden).
    """
    layout = channel_format(fmt, num_per_tokens, round_sf)
    transpose = not without_transpose
    return swiglu_forward_and_per_channel_cast_and_transpose.call(x, layout, swiglu_clamp_value, transpose)


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, hidden: int, dtype: torch.dtype, fmt: str, **options: Any) -> dict:
    return dict(x=random_halves(num_tokens, 2 * hidden, dtype), fmt=QuantFormat.parse(fmt), **options)


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
swiglu_forward_and_per_channel_cast_and_transpose.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 134], hidden=[136], dtype=BF16, fmt=['e4m3_128x1_f32'])
    + grid(num_tokens=[48], hidden=[99], dtype=F32, fmt=['e4m3_32x1_ue8m0x4'], clamp_value=[1.0])
    + grid(num_tokens=[33], hidden=[130], dtype=F16, fmt=['e4m3_32x1_f32p2', 'e5m2_128x1_f32'], transpose=[False]),
    full=grid(
        num_tokens=[4096, 4001, 4002, 4004, 4008],
        hidden=[2048, 1090],
        dtype=BF16 + F32,
        fmt=['e4m3_128x1_f32', 'e4m3_32x1_f32p2'],
        clamp_value=[None, 10.0, 0.5],
        transpose=[True, False],
    ),
    bench=grid(num_tokens=[64, 4096, 8001, 16384], hidden=[2048], dtype=BF16, fmt=['e4m3_128x1_f32'])
    + grid(num_tokens=[8064], hidden=[3584], dtype=BF16, fmt=['e4m3_32x1_f32p2'], clamp_value=[10.0])
    + grid(num_tokens=[4096], hidden=[2048], dtype=BF16, fmt=['e4m3_128x1_f32'], transpose=[False]),
)
