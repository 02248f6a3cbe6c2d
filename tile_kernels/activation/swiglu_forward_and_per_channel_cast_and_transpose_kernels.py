"""The kernels of SwiGLU with a per-channel cast; see `swiglu_forward_and_per_channel_cast_and_transpose` for the maths.

A thread block owns a tile. Where its codes are transposed, the second half of its rows is loaded to shared memory, so
that all loads are in flight at once. If rows of a transposed result begin at any byte, a block walks down a strip of
rows of some adjacent channels, as `per_channel_cast_and_transpose` does. It copies the gates and ups of the next tile
to shared memory as soon as its registers hold this tile. Few rows are cut into small tiles.
"""

import math

import torch

from tile_kernels.activation._macros import activate_lanes
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro, resident_blocks
from tile_kernels.device.vectors import LANE, load_lane, store_lane
from tile_kernels.quant._macros import (
    VECTOR_BYTES,
    encode_row,
    scale_channels,
    store_vectors,
    tile_rows,
    turn_to_shared,
)
from tile_kernels.quant.per_channel_cast_and_transpose import ROWS, TEAMS, TILE_ROWS, store_end, store_sectors

#: Rows that a lane activates at a time; the rows before them are already rounded to bfloat16.
CHUNK_ROWS = 4

#: Transposed codes of so few rows are written in small tiles, because strips would leave most of the GPU idle.
FEW_ROWS = TILE_ROWS

PASS_CONFIGS = {
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,  # what a thread copies to shared memory it reads itself
}


@macro
def activate_chunk(gate_local, up_local, clamped, clamp_value, act_local, rounded, first):
    """Activate rows of a lane and round them to rows of `rounded` from `first` on."""
    activate_lanes(gate_local, up_local, None, None, 0, False, clamped, clamp_value, None, act_local)
    for i in T.unroll(gate_local.shape[0]):
        for e in T.vectorized(LANE):
            rounded[first + i, e] = T.cast(act_local[i, e], T.bfloat16)


@macro
def load_chunk(x, gate_local, up_local, first, slot, piece, hidden, full):
    """Read rows of a lane. If all lanes have channels, a row past the end repeats the last, which is in its group."""
    num_tokens = x.shape[0]
    if full:
        for i in T.unroll(gate_local.shape[0]):
            load_lane(x, gate_local, i, T.min(first + i, num_tokens - 1), slot, piece, None)
            load_lane(x, up_local, i, T.min(first + i, num_tokens - 1), slot, piece, None, first=hidden)
    else:
        T.clear(gate_local)
        T.clear(up_local)
        for i in T.unroll(gate_local.shape[0]):
            if first + i < num_tokens:
                load_lane(x, gate_local, i, first + i, slot, piece, hidden)
                load_lane(x, up_local, i, first + i, slot, piece, hidden, first=hidden)


# Strips -------------------------------------------------------------------------------------


def choose_strips(
    hidden: int,
    fmt: QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    clamped: bool,
    num_tokens: int,
) -> dict:
    """As many strips as fit on the GPU at a time; float32 rows take twice the shared memory."""
    return dict(row_lanes=8, resident_threads=512 if x_dtype.itemsize == 2 else 256, blocks=512)


@macro
def ask_for_chunk(x, stage_shared, c, first, slot, hidden, copied):
    """Start to copy rows of a lane, gates and ups, to places that only this thread uses."""
    for i in T.unroll(CHUNK_ROWS):
        source = T.min(first + i, x.shape[0] - 1)
        for half in T.unroll(2):
            for p in T.unroll(LANE // copied):
                T.ptx_cp_async(
                    T.access_ptr(
                        stage_shared[c * CHUNK_ROWS + i, half, T.get_thread_binding(), p * copied], 'w', copied
                    ),
                    T.access_ptr(x[source, half * hidden + slot * LANE + p * copied], 'r', copied),
                    copied,
                )


@macro
def take_chunk(stage_shared, c, gate_local, up_local):
    """Rows that were asked for."""
    for i in T.unroll(CHUNK_ROWS):
        for e in T.vectorized(LANE):
            gate_local[i, e] = stage_shared[c * CHUNK_ROWS + i, 0, T.get_thread_binding(), e]
        for e in T.vectorized(LANE):
            up_local[i, e] = stage_shared[c * CHUNK_ROWS + i, 1, T.get_thread_binding(), e]


@kernel(
    choose=choose_strips,
    space=dict(row_lanes=(8, 16), resident_threads=(256, 512, 640), blocks=(256, 512, 1024, 2048)),
    pass_configs=PASS_CONFIGS,
)
def swiglu_forward_and_transposed_cast_kernel(
    hidden: int,
    fmt: QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    clamped: bool,
    *,
    row_lanes: int,
    resident_threads: int,
    blocks: int,
):
    """One strip of `row_lanes` times 8 channels for each thread block; about `blocks` of them share all rows."""
    num_threads = TEAMS * row_lanes
    tile_n = row_lanes * LANE
    tiles_n = -(-hidden // tile_n)
    strips = max(blocks // tiles_n, 1)
    piece = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden)
    full, copied, chunks = hidden % tile_n == 0, 16 // x_dtype.itemsize, ROWS // CHUNK_ROWS
    staged = full and piece >= copied
    num_tokens, sf_rows, x_pitch = T.dynamic('num_tokens'), T.dynamic('sf_rows'), T.dynamic('x_pitch')

    @T.prim_func
    def swiglu_forward_and_transposed_cast(
        x: T.StridedTensor((num_tokens, 2 * hidden), (x_pitch, 1), T.dtype(x_dtype)),
        y: T.Tensor((hidden, num_tokens), T.dtype(fmt.data.torch)),
        y_sf: T.Tensor((sf_rows, hidden), T.dtype(fmt.sf_dtype)),
        clamp_value: T.float32,
        amax_floor: T.float32,
    ):
        steps = T.ceildiv(T.ceildiv(num_tokens, TILE_ROWS), strips)
        with T.Kernel(T.ceildiv(num_tokens, steps * TILE_ROWS) * tiles_n, threads=num_threads) as pid:
            T.assume(x_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            top = T.alloc_var(T.int32)
            length = T.alloc_var(T.int32)
            row = T.alloc_var(T.int32)
            gate_local = T.alloc_local((CHUNK_ROWS, LANE), T.dtype(x_dtype))
            up_local = T.alloc_local((CHUNK_ROWS, LANE), T.dtype(x_dtype))
            act_local = T.alloc_local((CHUNK_ROWS, LANE), T.float32)
            rounded = T.alloc_local((ROWS, LANE), T.bfloat16)
            amax = T.alloc_local((LANE,), T.float32)
            sf_inv = T.alloc_local((LANE,), T.float32)
            codes = T.alloc_local((ROWS, LANE), T.dtype(fmt.data.torch))
            row_codes = T.alloc_local((LANE,), T.dtype(fmt.data.torch))
            turned = T.alloc_local((LANE, 2), T.uint32)
            amax_shared = T.alloc_shared((num_threads // WARP, tile_n), T.float32)
            tile_shared = T.alloc_shared((tile_n, 2 * TEAMS, 2), T.uint32)
            stage_shared = T.alloc_shared((ROWS if staged else 1, 2, num_threads, LANE), T.dtype(x_dtype))
            thread = T.get_thread_binding()
            lane, team = thread % row_lanes, thread // row_lanes
            slot, col = pid % tiles_n * row_lanes + lane, pid % tiles_n * tile_n
            top = pid // tiles_n * (steps * TILE_ROWS)
            length = T.min(T.cast(num_tokens - top, T.int32), steps * TILE_ROWS)

            for c in T.unroll(chunks if staged else 0):
                ask_for_chunk(x, stage_shared, c, top + team * ROWS + c * CHUNK_ROWS, slot, hidden, copied)
                T.ptx_commit_group()
            for step in T.serial(T.ceildiv(length, TILE_ROWS)):
                row = top + step * TILE_ROWS
                for c in T.unroll(chunks):
                    if staged:
                        T.ptx_wait_group(chunks - 1)
                        take_chunk(stage_shared, c, gate_local, up_local)
                        if step * TILE_ROWS + TILE_ROWS < length:
                            below = row + TILE_ROWS + team * ROWS + c * CHUNK_ROWS
                            ask_for_chunk(x, stage_shared, c, below, slot, hidden, copied)
                        T.ptx_commit_group()
                    else:
                        load_chunk(
                            x, gate_local, up_local, row + team * ROWS + c * CHUNK_ROWS, slot, piece, hidden, full
                        )
                    activate_chunk(gate_local, up_local, clamped, clamp_value, act_local, rounded, c * CHUNK_ROWS)

                scale_channels(
                    rounded, amax, amax_shared, sf_inv, y_sf, fmt, num_tokens, row, col, amax_floor, row_lanes
                )
                for i in T.unroll(ROWS):
                    encode_row(rounded, i, sf_inv, row_codes)
                    for e in T.vectorized(LANE):
                        codes[i, e] = row_codes[e]
                turn_to_shared(codes, turned, tile_shared, lane, step % 2 * TEAMS + team)
                T.sync_threads()
                store_sectors(y, tile_shared, col, top, length, step)
                if step == 0:
                    store_end(y, tile_shared, col, top, length, False)
            store_end(y, tile_shared, col, top, length, True)

    return swiglu_forward_and_transposed_cast


# Tiles --------------------------------------------------------------------------------------


def choose(
    hidden: int,
    fmt: QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    store_bytes: int,
    clamped: bool,
    num_tokens: int,
) -> dict:
    """Eight rows for each lane that turns codes or reads float32; flat groups of few rows get flat tiles."""
    resident_threads = 512 if x_dtype.itemsize == 4 else 768
    if store_bytes and num_tokens <= FEW_ROWS:
        return dict(rows=2, num_threads=128, resident_threads=resident_threads, row_lanes=2)
    if store_bytes:
        return dict(rows=8, num_threads=128, resident_threads=640 if x_dtype.itemsize == 2 else 512, row_lanes=8)
    if fmt.sf_block[0] == 32 and num_tokens * hidden < 1 << 22:
        return dict(rows=4, num_threads=128, resident_threads=resident_threads, row_lanes=16)
    if x_dtype.itemsize == 4:
        return dict(rows=8, num_threads=256, resident_threads=resident_threads, row_lanes=16)
    return dict(rows=4, num_threads=256, resident_threads=1024, row_lanes=8)


@macro
def store_turned(y, codes, team, lane, tile_shared, row, col, store_bytes, num_threads):
    """Write a tile of codes transposed, of which a lane has a few rows; they meet in shared memory as bytes."""
    rows, (tile_n, tile_m) = int(codes.shape[0]), tile_shared.shape
    pieces = tile_m // store_bytes
    column = T.alloc_local((rows,), codes.dtype)
    out = T.alloc_local((store_bytes,), codes.dtype)
    for e in T.unroll(LANE):
        for i in T.unroll(rows):
            column[i] = codes[i, e]
        for i in T.vectorized(rows):
            tile_shared[lane * LANE + e, team * rows + i] = column[i]
    T.sync_threads()
    for k in T.unroll(-(-tile_n * pieces // num_threads)):
        index = k * num_threads + T.get_thread_binding()
        channel, place = index // pieces, index % pieces * store_bytes
        if channel < tile_n and col + channel < y.shape[0] and row + place < y.shape[1]:
            for e in T.vectorized(store_bytes):
                out[e] = tile_shared[channel, place + e]
            for e in T.vectorized(store_bytes):
                y[col + channel, row + place + e] = out[e]


@kernel(
    choose=choose,
    space=dict(
        rows=(2, 4, 8), num_threads=(128, 256, 512), resident_threads=(512, 640, 768, 1024), row_lanes=(2, 4, 8, 16)
    ),
    pass_configs=PASS_CONFIGS,
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
    row_lanes: int,
):
    """One tile for each thread block; `store_bytes` is 0, or the bytes that stores to a transposed result may have."""
    height = fmt.sf_block[0]
    if height * row_lanes < rows * WARP:
        raise ArgumentError(f'a warp of {rows * WARP // row_lanes} rows holds several groups of {height}')
    tile_m, tile_n = tile_rows(rows, num_threads, height, row_lanes), row_lanes * LANE
    tiles_n = -(-hidden // tile_n)
    piece = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden)
    chunk, copied = min(CHUNK_ROWS, rows), 16 // x_dtype.itemsize
    full, turning = hidden % tile_n == 0, store_bytes == VECTOR_BYTES and rows == ROWS
    staged = turning and full and piece >= copied  # all rows are asked for at once, the later ones to shared memory
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
            gate_local = T.alloc_local((chunk, LANE), T.dtype(x_dtype))
            up_local = T.alloc_local((chunk, LANE), T.dtype(x_dtype))
            act_local = T.alloc_local((chunk, LANE), T.float32)
            rounded = T.alloc_local((rows, LANE), T.bfloat16)
            amax = T.alloc_local((LANE,), T.float32)
            amax_shared = T.alloc_shared((num_threads // WARP, tile_n), T.float32)
            sf_inv = T.alloc_local((LANE,), T.float32)
            codes = T.alloc_local((rows, LANE), T.dtype(fmt.data.torch))
            row_codes = T.alloc_local((LANE,), T.dtype(fmt.data.torch))
            thread = T.get_thread_binding()
            lane, team = thread % row_lanes, thread // row_lanes
            row, col = pid // tiles_n * tile_m, pid % tiles_n * tile_n
            slot = pid % tiles_n * row_lanes + lane

            stage_shared = T.alloc_shared((rows - chunk if staged else 1, 2, num_threads, LANE), T.dtype(x_dtype))
            for c in T.unroll(rows // chunk - 1 if staged else 0):
                ask_for_chunk(x, stage_shared, c, row + team * rows + (c + 1) * chunk, slot, hidden, copied)
                T.ptx_commit_group()
            for c in T.unroll(rows // chunk):
                first = row + team * rows + c * chunk
                if staged and c > 0:
                    T.ptx_wait_group(0)
                    take_chunk(stage_shared, c - 1, gate_local, up_local)
                else:
                    load_chunk(x, gate_local, up_local, first, slot, piece, hidden, full)
                activate_chunk(gate_local, up_local, clamped, clamp_value, act_local, rounded, c * chunk)

            scale_channels(rounded, amax, amax_shared, sf_inv, y_sf, fmt, num_tokens, row, col, amax_floor, row_lanes)
            for i in T.unroll(rows):
                encode_row(rounded, i, sf_inv, row_codes)
                if store_bytes > 0:
                    for e in T.vectorized(LANE):
                        codes[i, e] = row_codes[e]
                elif row + team * rows + i < num_tokens:
                    store_lane(y, row_codes, row + team * rows + i, slot, math.gcd(LANE, hidden), hidden, LANE)
            if turning:
                turned = T.alloc_local((LANE, 2), T.uint32)
                units_shared = T.alloc_shared((tile_n, tile_m // 8, 2), T.uint32)
                turn_to_shared(codes, turned, units_shared, lane, team)
                T.sync_threads()
                store_vectors(y, units_shared, pid // tiles_n, pid % tiles_n)
            elif store_bytes > 0:
                tile_shared = T.alloc_shared((tile_n, tile_m), T.dtype(fmt.data.torch))
                store_turned(y, codes, team, lane, tile_shared, row, col, store_bytes, num_threads)

    return swiglu_forward_and_per_channel_cast
