"""SwiGLU, per-channel cast and transpose in one pass.

    act[n, h] = bfloat16((l / (1 + exp(-l))) * r)           see `swiglu_forward`; rounded before it is quantised
    y, y_sf   = per_channel_cast(act, fmt)                  see `per_channel_cast`; y is stored as (H, N), or as (N, H)

A thread block activates some channels of some rows in registers: gate and up are read once, the activation is never
stored. Memory bound: the floor is reading x and writing y and its scale factors.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.quant._blocks import HEIGHTS
from tile_kernels.quant._swiglu_rows import check_clamp, check_halves
from tile_kernels.quant._swiglu_samples import random_halves
from tile_kernels.quant.per_channel_cast import FP8
from tile_kernels.quant.per_channel_cast_kernels import VECTOR_BYTES
from tile_kernels.quant.swiglu_per_channel_kernels import (
    FEW_ROWS,
    swiglu_forward_and_per_channel_cast_kernel,
    swiglu_forward_and_transposed_cast_kernel,
)

# Op -----------------------------------------------------------------------------------------


@op(outputs='y y_sf')
def swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor, fmt: QuantFormat, clamp_value: float | None = None, transpose: bool = True
) -> tuple[Tensor, Tensor]:
    """SwiGLU, rounded to bfloat16, then quantised for each channel in groups of rows and stored transposed.

    Args:
        x: (num_tokens, 2 * hidden) bfloat16, float16 or float32, gate and up side by side, rows dense, any row stride.
        fmt: what to store, e.g. ``QuantFormat.parse('e4m3_128x1_f32')``: data e4m3 or e5m2, groups of 32 or 128 rows.
        clamp_value: gate at most this, up within plus and minus this.
        transpose: whether codes are stored transposed.

    Returns:
        Codes (hidden, num_tokens), or (num_tokens, hidden) if not transposed, and sf (ceil(num_tokens / group), hidden)
        as of `per_channel_cast`.
    """
    num_tokens, hidden = check_halves(x, None)
    check.one_of(fmt.data.name, FP8, 'fmt.data')
    check.one_of(fmt.sf_block[0], HEIGHTS, 'fmt.sf_block[0]')
    check.equal(fmt.sf_block[1], 1, 'fmt.sf_block[1]')
    check.equal(fmt.col, False, 'fmt.col')
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


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, hidden: int, dtype: torch.dtype, fmt: str, **options) -> dict:
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
