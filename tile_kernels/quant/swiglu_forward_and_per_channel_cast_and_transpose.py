"""SwiGLU, per-channel cast and transpose in one pass.

    act[n, h] = bfloat16((l / (1 + exp(-l))) * r)           see `swiglu_forward`; rounded before it is quantised
    y, y_sf   = per_channel_cast(act, fmt)                  see `per_channel_cast`; y is stored as (H, N), or as (N, H)

A thread block owns 128 channels of a tile of rows and activates them in registers: gate and up are read once, the
activation is never stored. Memory bound: the floor is reading x and writing y and its scale factors.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.quant._blocks import HEIGHTS, ROW_LANES, TILE_COLS, WARP, resident_blocks, tile_rows
from tile_kernels.quant._macros import LANE, amax_to_sf, clamp_amax, sf_register_dtype, store_lane
from tile_kernels.quant._swiglu_macros import activate_lane, load_half
from tile_kernels.quant._swiglu_rows import check_clamp, check_halves
from tile_kernels.quant._swiglu_samples import random_halves
from tile_kernels.quant.per_channel_cast import FP8
from tile_kernels.quant.per_channel_cast_device import (
    VECTOR_BYTES,
    channel_amax,
    encode_row,
    store_channel_sf,
    turn_and_store,
)

#: Rows that a lane loads at a time: eight loads of 16 bytes; the rows before them are already rounded to bfloat16.
CHUNK_ROWS = 4


# Config -------------------------------------------------------------------------------------


def choose(
    hidden: int,
    fmt: QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    store_bytes: int,
    clamped: bool,
    num_tokens: int,
) -> dict:
    """Eight rows for each lane; flat groups of a small problem that is not transposed get flat tiles."""
    resident_threads = 512 if x_dtype.itemsize == 4 else 768
    if not store_bytes and fmt.sf_block[0] == 32 and num_tokens * hidden < 1 << 22:
        return dict(rows=4, num_threads=128, resident_threads=resident_threads)
    return dict(rows=8, num_threads=256, resident_threads=resident_threads)


# Kernel -------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(rows=(4, 8), num_threads=(128, 256, 512), resident_threads=(512, 768)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def swiglu_forward_and_per_channel_cast_kernel(
    hidden: int,
    fmt: QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    store_bytes: int,
    clamped: bool,
    *,
    rows: int,
    num_threads: int,
    resident_threads: int,
):
    """One tile for each thread block; `store_bytes` is 0, or the bytes that stores to a transposed result may have."""
    height = fmt.sf_block[0]
    tile_m = tile_rows(rows, num_threads, height)
    groups, warps, tiles_n = tile_m // height, height // (2 * rows), -(-hidden // TILE_COLS)
    piece = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden)
    num_tokens, sf_rows, x_pitch = T.dynamic('num_tokens'), T.dynamic('sf_rows'), T.dynamic('x_pitch')

    @T.prim_func
    def swiglu_forward_and_per_channel_cast(
        x: T.StridedTensor((num_tokens, 2 * hidden), (x_pitch, 1), T.dtype(x_dtype)),
        y: T.Tensor((hidden, num_tokens) if store_bytes else (num_tokens, hidden), T.dtype(fmt.data.torch)),
        y_sf: T.Tensor((sf_rows, hidden), T.dtype(fmt.sf_dtype)),
        clamp_value: T.float32,
        amax_floor: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, tile_m) * tiles_n, threads=num_threads) as pid:
            T.assume(x_pitch % piece == 0)
            T.assume(num_tokens % max(store_bytes, 1) == 0)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            gate_local = T.alloc_local((CHUNK_ROWS, LANE), T.dtype(x_dtype))
            up_local = T.alloc_local((CHUNK_ROWS, LANE), T.dtype(x_dtype))
            act_local = T.alloc_local((CHUNK_ROWS, LANE), T.float32)
            rounded = T.alloc_local((rows, LANE), T.bfloat16)
            amax = T.alloc_local((LANE,), T.float32)
            group_amax = T.alloc_var(T.float32)
            amax_shared = T.alloc_shared((num_threads // WARP, TILE_COLS), T.float32)
            sf = T.alloc_local((1,), sf_register_dtype(fmt))
            own_inv = T.alloc_local((1,), T.float32)
            sf_inv = T.alloc_local((LANE,), T.float32)
            y_local = T.alloc_local((rows, LANE), T.dtype(fmt.data.torch))
            row_local = T.alloc_local((LANE,), T.dtype(fmt.data.torch))
            thread = T.get_thread_binding()
            lane, team, warp = thread % ROW_LANES, thread // ROW_LANES, thread // WARP
            row, col = pid // tiles_n * tile_m, pid % tiles_n * TILE_COLS
            slot = pid % tiles_n * ROW_LANES + lane

            for c in T.unroll(rows // CHUNK_ROWS):
                first = row + team * rows + c * CHUNK_ROWS
                T.clear(gate_local)
                T.clear(up_local)
                for i in T.unroll(CHUNK_ROWS):
                    if first + i < num_tokens:
                        load_half(x, gate_local, i, first + i, 0, slot, piece, hidden)
                        load_half(x, up_local, i, first + i, hidden, slot, piece, hidden)
                for i in T.unroll(CHUNK_ROWS):
                    activate_lane(gate_local, up_local, i, None, clamped, clamp_value, None, act_local)
                    for e in T.vectorized(LANE):
                        rounded[c * CHUNK_ROWS + i, e] = T.cast(act_local[i, e], T.bfloat16)

            channel_amax(rounded, amax)
            if thread % WARP < ROW_LANES:
                for e in T.vectorized(LANE):
                    amax_shared[warp, lane * LANE + e] = amax[e]
            T.sync_threads()
            for k in T.unroll(-(-groups * TILE_COLS // num_threads)):
                index = k * num_threads + thread
                group, channel = index // TILE_COLS, index % TILE_COLS
                if index < groups * TILE_COLS:
                    group_amax = T.float32(0.0)
                    for w in T.unroll(warps):
                        group_amax = T.max(group_amax, amax_shared[group * warps + w, channel])
                    amax_to_sf(clamp_amax(group_amax, amax_floor), fmt, sf, own_inv, 0)
                    amax_shared[group * warps, channel] = own_inv[0]  # whose amax only this thread reads
                    if col + channel < hidden and row + group * height < num_tokens:
                        num_groups = T.ceildiv(num_tokens, height)
                        store_channel_sf(y_sf, fmt, num_groups, row // height + group, col + channel, sf[0])
            T.sync_threads()

            for e in T.vectorized(LANE):
                sf_inv[e] = amax_shared[team * rows // height * warps, lane * LANE + e]
            if store_bytes > 0:
                tile_shared = T.alloc_shared((TILE_COLS, 16, 2), T.uint32)
                for i in T.unroll(rows):
                    encode_row(rounded, i, sf_inv, row_local)
                    for e in T.vectorized(LANE):
                        y_local[i, e] = row_local[e]
                turn_and_store(y, y_local, team, lane, tile_shared, pid // tiles_n, pid % tiles_n, store_bytes)
            else:
                for i in T.unroll(rows):
                    encode_row(rounded, i, sf_inv, row_local)
                    if row + team * rows + i < num_tokens:
                        store_lane(y, row_local, row + team * rows + i, slot, math.gcd(LANE, hidden), hidden, LANE)

    return swiglu_forward_and_per_channel_cast


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
    store_bytes = 0
    if transpose:
        store_bytes = math.gcd(VECTOR_BYTES, num_tokens) if type(num_tokens) is int else VECTOR_BYTES
    static = (hidden, fmt, x.dtype, check.vector_bytes(x), store_bytes, clamp_value is not None)
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
    bench=grid(num_tokens=[64, 4096, 16384], hidden=[2048], dtype=BF16, fmt=['e4m3_128x1_f32'])
    + grid(num_tokens=[8064], hidden=[3584], dtype=BF16, fmt=['e4m3_32x1_f32p2'], clamp_value=[10.0])
    + grid(num_tokens=[4096], hidden=[2048], dtype=BF16, fmt=['e4m3_128x1_f32'], transpose=[False]),
)
