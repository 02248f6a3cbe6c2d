"""Device code of the per-token cast: loads of plain or quantized rows, codes, and the kernels.

A lane owns vectors of 8 channels. A group of channels with one scale factor is a group of lanes, or all of a block.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, WARP, T, begin_early, is_short, macro
from tile_kernels.core.launch import launch
from tile_kernels.device.codes import code_registers, decode_halves, encode_and_store
from tile_kernels.device.reduce import lane_max, scatter_max, shuffle_steps
from tile_kernels.device.scales import (
    FLOAT_MAX,
    amax_to_sf,
    clamp_amax,
    group_lanes,
    load_sf_inv,
    sf_register_dtype,
    sf_tensor,
    sf_value,
    store_sf,
)
from tile_kernels.device.stochastic import MANTISSA
from tile_kernels.device.vectors import LANE, load_lane

# Config -------------------------------------------------------------------------------------


def num_lanes(hidden: int) -> int:
    """Lanes that hold a row."""
    return -(-hidden // LANE)


def _storage(source: torch.dtype | QuantFormat, channels: int) -> tuple[torch.dtype, int]:
    """What holds so many channels of `x`, and how many of it."""
    return (source, channels) if isinstance(source, torch.dtype) else (source.data.torch, source.data.stored(channels))


def _piece(hidden: int, source: torch.dtype | QuantFormat, vector_bytes: int) -> int:
    """Elements of a lane that alignment lets it load at a time."""
    dtype, width = _storage(source, LANE)
    return math.gcd(width, vector_bytes // dtype.itemsize, _storage(source, hidden)[1])


def _along_row(hidden: int, fmt: QuantFormat, vectors: int) -> int:
    """How many of a lane's vectors lie along its row, a warp apart; the others are in neighbouring rows.

    As many as divide the row: then the scale factors of a warp are neighbours in memory, unless they are column-major.
    """
    lanes = group_lanes(hidden, fmt)
    row_lanes = -(-num_lanes(hidden) // lanes) * lanes
    return 1 if fmt.col or row_lanes % WARP else math.gcd(vectors, row_lanes // WARP)


def _moved_bytes(num_tokens: int, hidden: int, source: torch.dtype | QuantFormat) -> int:
    """Bytes of a matrix and of its codes."""
    dtype, stored = _storage(source, hidden)
    return num_tokens * (stored * dtype.itemsize + hidden)


def choose_grouped(
    hidden: int, fmt: QuantFormat, source: torch.dtype | QuantFormat, vector_bytes: int, task: str, num_tokens: int
) -> dict:
    """Many loads in flight where rows are many, as registers allow; casts to fp4 compute more than they load."""
    early = is_short(_moved_bytes(num_tokens, hidden, source))
    all_lanes = num_tokens * num_lanes(hidden)
    if all_lanes < 4 << 17:
        return dict(vectors=1 if early and all_lanes <= 1 << 17 and not fmt.col else 2, num_threads=128, early=early)
    if task == 'stochastic':
        return dict(vectors=4 if fmt.data.name == 'e2m1' else 8, num_threads=128, early=early)
    if fmt.data.name == 'e2m1' and not fmt.col and isinstance(source, torch.dtype):
        return dict(vectors=2, num_threads=128, early=early)
    whole = _piece(hidden, source, vector_bytes) == _storage(source, LANE)[1]
    small = isinstance(source, QuantFormat) or source is torch.bfloat16
    vectors, num_threads = (8, 128) if whole and small else (4, 256)
    return dict(vectors=vectors, num_threads=num_threads, early=early)


def choose_row(
    hidden: int, fmt: QuantFormat, source: torch.dtype | QuantFormat, vector_bytes: int, task: str, num_tokens: int
) -> dict:
    """Four vectors for each thread, half as many where rows are few, twice as many where a long row then fits."""
    lanes, early = num_lanes(hidden), is_short(_moved_bytes(num_tokens, hidden, source))
    if num_tokens * lanes < 4 << 17 and lanes <= 2048:
        return dict(vectors=2, early=early)
    if isinstance(source, QuantFormat):  # small
        return dict(vectors=8, early=early)
    if source is torch.float32:
        return dict(vectors=4 if lanes <= 2048 else 2, early=early)
    return dict(vectors=4 if lanes <= 4096 else 8, early=early)


# Kernels ------------------------------------------------------------------------------------


def _x_sf_tensor(source: torch.dtype | QuantFormat, hidden: int):
    """Parameter type of the scale factors of `x`, of which a plain one has none."""
    if isinstance(source, torch.dtype):
        return T.Tensor((1, 1), T.float32)
    return sf_tensor(source, T.dynamic('x_sf_rows'), source.blocks(1, hidden)[1])


@macro
def load_vector(x, x_sf, source, x_local, x_codes, x_factor, i, row, slot, piece, hidden):
    """Read the channels of lane `slot` of a row, or their codes and the scale factor that they share."""
    if isinstance(source, QuantFormat):
        height, width = source.sf_block
        load_lane(x, x_codes, i, row, slot, piece, x.shape[1])
        if slot * LANE < hidden:
            sf_row, sf_col = row // height if height else 0, slot * LANE // width if width else 0
            x_factor[i] = sf_value(x_sf, source, sf_row, sf_col)
    else:
        load_lane(x, x_local, i, row, slot, piece, hidden)


@macro
def vector_max(x_local, x_factor, source, amax, i):
    """`amax[i]` = largest magnitude of the channels of vector `i`."""
    amax[i] = lane_max(x_local, i) * x_factor[i] if isinstance(source, QuantFormat) else lane_max(x_local, i)


def multiplier(x_factor, source, i, sf_inv):
    """What the channels, or codes, of vector `i` are multiplied by; a block of zeros may have any scale factor."""
    if not isinstance(source, QuantFormat):
        return sf_inv
    product = T.ieee_mul(x_factor[i], sf_inv)
    return T.Select(product > T.float32(FLOAT_MAX), T.float32(FLOAT_MAX), product)


@kernel(
    choose=choose_grouped,
    space=dict(vectors=(1, 2, 4, 8), num_threads=(64, 128, 256), early=EARLY),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def per_token_cast_kernel(
    hidden: int,
    fmt: QuantFormat,
    source: torch.dtype | QuantFormat,
    vector_bytes: int,
    task: str,
    *,
    vectors: int,
    num_threads: int,
    early: bool = False,
):
    """Groups of at most a warp.

    `source` is what x holds. `task`: 'cast', 'stochastic' (a cast rounded so), 'sf' (scale factors only) or 'data'
    (scale factors are given).
    """
    lanes = group_lanes(hidden, fmt)
    num_groups = -(-num_lanes(hidden) // lanes)
    row_lanes = num_groups * lanes
    owned = -(-vectors // lanes)
    quantized = isinstance(source, QuantFormat)
    piece, (x_dtype, width) = _piece(hidden, source, vector_bytes), _storage(source, LANE)
    along = _along_row(hidden, fmt, vectors)
    band_rows, band_lanes = vectors // along, row_lanes // along
    num_tokens, x_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch')

    @T.prim_func
    def per_token_cast(
        x: T.StridedTensor((num_tokens, _storage(source, hidden)[1]), (x_pitch, 1), T.dtype(x_dtype)),
        x_sf: _x_sf_tensor(source, hidden),
        y: T.Tensor((num_tokens, fmt.data.stored(hidden)), T.dtype(fmt.data.torch)),
        y_sf: sf_tensor(fmt, num_tokens, num_groups),
        amax_floor: T.float32,
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(num_tokens, band_rows) * band_lanes, num_threads), threads=num_threads
        ) as pid:
            if early:
                begin_early()
            T.assume(x_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(1024 // num_threads)
            thread = T.get_thread_binding()
            row = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            x_local = T.alloc_local((vectors, LANE), T.float16 if quantized else T.dtype(x_dtype))
            x_codes = T.alloc_local((vectors, width), T.dtype(x_dtype))
            x_factor = T.alloc_local((vectors,), T.float32)
            amax = T.alloc_local((vectors,), T.float32)
            sf = T.alloc_local((owned,), sf_register_dtype(fmt))
            own_inv = T.alloc_local((owned,), T.float32)
            sf_inv = T.alloc_local((vectors,), T.float32)
            v_local = T.alloc_local((LANE,), T.float32)
            y_local = T.alloc_local(*code_registers(fmt))
            index = pid * num_threads + thread
            lane = index % band_lanes
            row = index // band_lanes * band_rows
            slot = lane // WARP * (WARP * along) + lane % WARP if along > 1 else lane

            if hidden % (lanes * LANE) != 0:
                T.clear(x_codes if quantized else x_local)
                T.clear(x_factor)
            for i in T.unroll(vectors):  # rows past the end repeat the last one and are not stored
                at = slot + i % along * WARP
                T.assume(at < row_lanes)
                token = T.min(row + i // along, num_tokens - 1)
                load_vector(x, x_sf, source, x_local, x_codes, x_factor, i, token, at, piece, hidden)
            if quantized:
                decode_halves(x_codes, source.data.name, x_local)

            if task == 'data':
                for i in T.unroll(vectors):
                    group = (slot + i % along * WARP) // lanes
                    load_sf_inv(y_sf, fmt, T.min(row + i // along, num_tokens - 1), group, sf_inv, i)
            else:
                for i in T.unroll(vectors):
                    vector_max(x_local, x_factor, source, amax, i)
                scatter_max(amax, vectors, thread, 1, lanes)
                for k in T.unroll(owned):
                    own = k * lanes + thread % lanes
                    amax_to_sf(clamp_amax(amax[k], amax_floor), fmt, sf, own_inv, k)
                    if own < vectors and row + own // along < num_tokens:
                        group = (slot + own % along * WARP) // lanes
                        store_sf(y_sf, fmt, num_groups, row + own // along, group, sf[k])
                for i in T.unroll(vectors):
                    sf_inv[i] = T.shfl_sync(own_inv[i // lanes], i % lanes, width=lanes)

            if task != 'sf':
                for i in T.unroll(vectors):
                    at = slot + i % along * WARP
                    T.assume(at < row_lanes)
                    factor = multiplier(x_factor, source, i, sf_inv[i])
                    encode_and_store(x_local, i, fmt, task, factor, v_local, y_local, y, row + i // along, at, hidden)

    return per_token_cast


@kernel(
    choose=choose_row,
    space=dict(vectors=(1, 2, 4, 8), early=EARLY),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def per_token_cast_row_kernel(
    hidden: int,
    fmt: QuantFormat,
    source: torch.dtype | QuantFormat,
    vector_bytes: int,
    task: str,
    *,
    vectors: int,
    early: bool = False,
):
    """Whole rows, one block each: `vectors` times 8 channels for every thread and pass; arguments as above."""
    num_threads = min(1024, -(-num_lanes(hidden) // (vectors * WARP)) * WARP)
    num_passes = -(-num_lanes(hidden) // (vectors * num_threads))
    num_warps = num_threads // WARP
    quantized = isinstance(source, QuantFormat)
    piece, (x_dtype, width) = _piece(hidden, source, vector_bytes), _storage(source, LANE)
    num_tokens, x_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch')

    @macro
    def load_row(x, x_sf, x_local, x_codes, x_factor, row, turn, thread):
        T.clear(x_codes if quantized else x_local)
        T.clear(x_factor)
        for i in T.unroll(vectors):
            slot = (turn * vectors + i) * num_threads + thread
            load_vector(x, x_sf, source, x_local, x_codes, x_factor, i, row, slot, piece, hidden)
        if quantized:
            decode_halves(x_codes, source.data.name, x_local)

    @T.prim_func
    def per_token_cast_row(
        x: T.StridedTensor((num_tokens, _storage(source, hidden)[1]), (x_pitch, 1), T.dtype(x_dtype)),
        x_sf: _x_sf_tensor(source, hidden),
        y: T.Tensor((num_tokens, fmt.data.stored(hidden)), T.dtype(fmt.data.torch)),
        y_sf: sf_tensor(fmt, num_tokens, 1),
        amax_floor: T.float32,
    ):
        with T.Kernel(num_tokens, threads=num_threads) as row:
            if early:
                begin_early()
            T.assume(x_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(1024 // num_threads)
            thread = T.get_thread_binding()
            x_local = T.alloc_local((vectors, LANE), T.float16 if quantized else T.dtype(x_dtype))
            x_codes = T.alloc_local((vectors, width), T.dtype(x_dtype))
            x_factor = T.alloc_local((vectors,), T.float32)
            amax = T.alloc_local((vectors,), T.float32)
            row_amax = T.alloc_var(T.float32)
            warp_amax = T.alloc_shared((num_warps,), T.float32)
            sf = T.alloc_local((1,), sf_register_dtype(fmt))
            sf_inv = T.alloc_local((1,), T.float32)
            v_local = T.alloc_local((LANE,), T.float32)
            y_local = T.alloc_local(*code_registers(fmt))

            if task == 'data':
                load_sf_inv(y_sf, fmt, row, 0, sf_inv, 0)
                if num_passes == 1:
                    load_row(x, x_sf, x_local, x_codes, x_factor, row, 0, thread)
            else:
                row_amax = T.float32(0.0)
                for turn in T.serial(num_passes):
                    load_row(x, x_sf, x_local, x_codes, x_factor, row, turn, thread)
                    for i in T.unroll(vectors):
                        vector_max(x_local, x_factor, source, amax, i)
                        row_amax = T.max(row_amax, amax[i])
                for step in T.unroll(shuffle_steps(WARP)):
                    row_amax = T.max(row_amax, T.shfl_xor(row_amax, 1 << step))
                if num_warps > 1:
                    if thread % WARP == 0:
                        warp_amax[thread // WARP] = row_amax
                    T.sync_threads()
                    for warp in T.unroll(num_warps):
                        row_amax = T.max(row_amax, warp_amax[warp])
                amax_to_sf(clamp_amax(row_amax, amax_floor), fmt, sf, sf_inv, 0)
                if thread == 0:
                    store_sf(y_sf, fmt, 1, row, 0, sf[0])

            if task != 'sf':
                for turn in T.serial(num_passes):
                    if num_passes > 1:
                        load_row(x, x_sf, x_local, x_codes, x_factor, row, turn, thread)
                    for i in T.unroll(vectors):
                        slot = (turn * vectors + i) * num_threads + thread
                        factor = multiplier(x_factor, source, i, sf_inv[0])
                        encode_and_store(x_local, i, fmt, task, factor, v_local, y_local, y, row, slot, hidden)

    return per_token_cast_row


# Launch -------------------------------------------------------------------------------------


def cast_task(fmt: QuantFormat, stochastic: bool) -> str:
    """The task of a cast: stochastic rounding needs a format that has it."""
    if stochastic and fmt.data.name not in MANTISSA:
        check.fail('stochastic', f'must be False for {fmt.data.name}', 'True')
    return 'stochastic' if stochastic else 'cast'


def launch_cast(
    x: Tensor,
    x_sf: Tensor | None,
    source: torch.dtype | QuantFormat,
    hidden: int,
    y: Tensor | None,
    y_sf: Tensor,
    fmt: QuantFormat,
    amax_floor: float,
    task: str,
) -> None:
    """Launch the kernel that owns groups of this width."""
    wide = fmt.sf_block[1] == 0 and num_lanes(hidden) > WARP
    static = (hidden, fmt, source, check.vector_bytes(x), task)
    launch(per_token_cast_row_kernel if wide else per_token_cast_kernel, static, x, x_sf, y, y_sf, amax_floor)
