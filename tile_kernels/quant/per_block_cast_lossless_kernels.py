"""Kernels of the lossless per-block cast; see `per_block_cast_lossless` for the maths.

The work is divided as in `per_block_cast`, with exponents in place of magnitudes and wider lanes, because fp4 is small.
Blocks of one row have the layout of `per_token_cast`, which writes scale factors as whole sectors. Arithmetic would
cost more than memory. So a lane computes the eight magnitudes that its codes can become, and looks up its codes, four
at a time.
"""

import math
from typing import Any

from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro, resident_blocks
from tile_kernels.device.bits import byte_perm, float_of
from tile_kernels.device.reduce import scatter_max
from tile_kernels.device.scales import sf_exponent, sf_tensor, store_sf
from tile_kernels.device.vectors import load_lane, store_lane
from tile_kernels.quant._macros import ROW_LANES, reduce_block, tile_rows

VECTOR_BYTES = 16

#: Channels of a lane whose blocks have one row: 16 bytes of the result.
ROW_LANE = 16

#: What the codes 0 to 7 of e2m1 stand for.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

#: 6 * 2^6 is the largest power-of-two multiple of the largest e2m1 number in e4m3.
SPARE_EXPONENT = 6


# Config -------------------------------------------------------------------------------------


def choose(hidden: int, x_fmt: QuantFormat, fmt: QuantFormat, vector_bytes: int, num_tokens: int) -> dict:
    """Eight rows of 8 bytes for each lane are in flight; flat blocks of a small problem get flat tiles."""
    if fmt.sf_block[0] == 32 and num_tokens * hidden < 1 << 23:
        return dict(rows=4, num_threads=128, lane=16, resident_threads=1024)
    return dict(rows=8, num_threads=256, lane=16, resident_threads=1024)


def choose_row(hidden: int, x_fmt: QuantFormat, fmt: QuantFormat, vector_bytes: int, num_tokens: int) -> dict:
    """Eight vectors of 8 bytes for each lane are in flight; a small problem needs all multiprocessors instead."""
    return dict(vectors=8 if num_tokens * hidden >= 1 << 23 else 2, num_threads=128)


# Kernels ------------------------------------------------------------------------------------


def _x_sf_tensor(x_fmt: QuantFormat, hidden: int):
    """Parameter type of the scale factors of `x`."""
    shape = (T.dynamic('x_sf_rows'), x_fmt.sf_shape(1, hidden)[1])
    strides = (1, T.dynamic('x_sf_pitch')) if x_fmt.col else (shape[1], 1)
    return T.StridedTensor(shape, strides, T.dtype(x_fmt.sf_dtype))


@macro
def raise_exponent(top, k):
    """The biased exponent of the scale factor of a block, from the largest exponent in it."""
    top[k] = T.max(top[k], T.uint32(SPARE_EXPONENT + 1)) - T.uint32(SPARE_EXPONENT)


def stored_sf(exponent: Any, fmt: QuantFormat) -> Any:
    """A scale factor as the format stores it."""
    return T.cast(exponent, T.uint8) if fmt.sf == 'ue8m0x4' else float_of(exponent << T.uint32(23))


def power_of_two(exponent: Any, top: Any) -> Any:
    """2^(exponent - top) as float32, 0 if it is smaller than any."""
    shift = T.cast(exponent, T.int32) - T.cast(top, T.int32)
    return float_of(T.cast(T.max(shift + 127, 0), T.uint32) << T.uint32(23))


@macro
def encode_codes(codes, i, factor, y_local):
    """fp8 codes of `factor` times the numbers of a row of fp4 codes, which is what selects bytes of the table."""
    words = T.view(codes, (codes.shape[0], codes.shape[1] // 4), T.uint32)
    y_words = T.view(y_local, (y_local.shape[0] // 4,), T.uint32)
    numbers = T.alloc_local((len(MAGNITUDES),), T.float32)
    table = T.alloc_local((len(MAGNITUDES),), y_local.dtype)
    table_words = T.view(table, (2,), T.uint32)
    for code, magnitude in enumerate(MAGNITUDES):
        numbers[code] = T.float32(magnitude) * factor
    for code in T.vectorized(len(MAGNITUDES)):
        table[code] = T.cast(numbers[code], y_local.dtype)
    for w in T.unroll(codes.shape[1] // 4):
        for half in T.unroll(2):
            quad = words[i, w] >> T.cast(16 * half, T.uint32)
            signs = (quad >> T.uint32(3)) & T.uint32(0x1111)
            y_words[2 * w + half] = byte_perm(table_words[0], table_words[1], quad) | byte_perm(
                T.uint32(0x8000), T.uint32(0), signs
            )


@kernel(
    choose=choose,
    space=dict(rows=(4, 8), num_threads=(128, 256, 512), lane=(16, 32), resident_threads=(768, 1024)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def per_block_cast_lossless_kernel(
    hidden: int,
    x_fmt: QuantFormat,
    fmt: QuantFormat,
    vector_bytes: int,
    *,
    rows: int,
    num_threads: int,
    lane: int,
    resident_threads: int,
):
    """Blocks of several rows: one tile for each thread block, of which a lane owns `lane` channels of each row.

    `zero` is 0, which the compiler must not know.
    """
    if x_fmt.sf_block[1] % lane:
        raise ArgumentError(f'a lane of {lane} channels would have several scale factors of {x_fmt}')
    x_height, x_width = x_fmt.sf_block
    height, width = fmt.sf_block
    lanes, num_groups, tiles_n = width // lane, -(-hidden // width), -(-hidden // (ROW_LANES * lane))
    tile_m = tile_rows(rows, num_threads, height)
    codes_width = x_fmt.data.stored(lane)
    piece = math.gcd(codes_width, vector_bytes, x_fmt.data.stored(hidden))
    num_tokens, x_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch')
    sf_rows = T.dynamic('sf_rows')

    @T.prim_func
    def per_block_cast_lossless(
        x: T.StridedTensor((num_tokens, x_fmt.data.stored(hidden)), (x_pitch, 1), T.int8),
        x_sf: _x_sf_tensor(x_fmt, hidden),
        y: T.Tensor((num_tokens, hidden), T.dtype(fmt.data.torch)),
        y_sf: sf_tensor(fmt, sf_rows, num_groups),
        zero: T.uint32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, tile_m) * tiles_n, threads=num_threads) as pid:
            T.assume(x_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            row = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            codes = T.alloc_local((rows, codes_width), T.int8)
            code_words = T.view(codes, (rows, codes_width // 4), T.uint32)
            read_row = T.alloc_local((rows,), T.int32)
            exponent = T.alloc_local((rows,), T.uint32)
            top = T.alloc_local((1,), T.uint32)
            top_shared = T.alloc_shared((num_threads // WARP, ROW_LANES // lanes), T.uint32)
            y_local = T.alloc_local((lane,), T.dtype(fmt.data.torch))
            thread = T.get_thread_binding()
            place = thread % ROW_LANES
            slot = pid % tiles_n * ROW_LANES + place
            row = pid // tiles_n * tile_m + thread // ROW_LANES * rows

            if hidden % lane:
                T.clear(codes)
            # past the edges the last row or lane is read again, which changes no maximum and costs no branch
            read_slot = T.min(slot, -(-hidden // lane) - 1)
            for i in T.unroll(rows):
                read_row[i] = T.min(row + i, num_tokens - 1)
                load_lane(x, codes, i, read_row[i], read_slot, piece, x.shape[1])
            for i in T.unroll(rows):
                exponent[i] = sf_exponent(x_sf, x_fmt, read_row[i] // x_height, read_slot * lane // x_width)
            # the maxima below wait for the codes, too: else ptxas loads the codes only when the maxima are known
            for i in T.unroll(rows):
                exponent[i] = exponent[i] | (code_words[i, 0] & zero)

            top[0] = T.uint32(0)
            for i in T.unroll(rows):
                top[0] = T.max(top[0], exponent[i])
            reduce_block(top, height, lanes, rows, place, thread // WARP, top_shared)
            raise_exponent(top, 0)
            if row % height == 0 and place % lanes == 0 and row < num_tokens and slot * lane < hidden:
                store_sf(y_sf, fmt, num_groups, row // height, slot // lanes, stored_sf(top[0], fmt))

            for i in T.unroll(rows):
                encode_codes(codes, i, power_of_two(exponent[i], top[0]), y_local)
                if row + i < num_tokens:
                    store_lane(y, y_local, row + i, slot, math.gcd(VECTOR_BYTES, hidden), hidden, lane)

    return per_block_cast_lossless


@kernel(
    choose=choose_row,
    space=dict(vectors=(1, 2, 4, 8), num_threads=(128, 256)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def per_block_cast_lossless_row_kernel(
    hidden: int, x_fmt: QuantFormat, fmt: QuantFormat, vector_bytes: int, *, vectors: int, num_threads: int
):
    """Blocks of one row: a lane owns vectors of 16 channels, a warp apart in its row as far as rows divide so."""
    (x_height, x_width), width = x_fmt.sf_block, fmt.sf_block[1]
    lanes, num_groups = width // ROW_LANE, -(-hidden // width)
    row_lanes = num_groups * lanes
    along = 1 if fmt.col or row_lanes % WARP else math.gcd(vectors, row_lanes // WARP)
    band_rows, band_lanes, owned = vectors // along, row_lanes // along, -(-vectors // lanes)
    codes_width = x_fmt.data.stored(ROW_LANE)
    piece = math.gcd(codes_width, vector_bytes, x_fmt.data.stored(hidden))
    num_tokens, x_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch')

    @T.prim_func
    def per_block_cast_lossless_row(
        x: T.StridedTensor((num_tokens, x_fmt.data.stored(hidden)), (x_pitch, 1), T.int8),
        x_sf: _x_sf_tensor(x_fmt, hidden),
        y: T.Tensor((num_tokens, hidden), T.dtype(fmt.data.torch)),
        y_sf: sf_tensor(fmt, num_tokens, num_groups),
        zero: T.uint32,
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(num_tokens, band_rows) * band_lanes, num_threads), threads=num_threads
        ) as pid:
            T.assume(x_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(1024 // num_threads)
            row = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            codes = T.alloc_local((vectors, codes_width), T.int8)
            code_words = T.view(codes, (vectors, codes_width // 4), T.uint32)
            exponent = T.alloc_local((vectors,), T.uint32)
            top = T.alloc_local((vectors,), T.uint32)
            y_local = T.alloc_local((ROW_LANE,), T.dtype(fmt.data.torch))
            thread = T.get_thread_binding()
            index = pid * num_threads + thread
            lane = index % band_lanes
            row = index // band_lanes * band_rows
            slot = lane // WARP * (WARP * along) + lane % WARP if along > 1 else lane

            if hidden % ROW_LANE:
                T.clear(codes)
            for i in T.unroll(vectors):  # rows past the end repeat the last one, lanes past it the last lane
                token = T.min(row + i // along, num_tokens - 1)
                at = T.min(slot + i % along * WARP, -(-hidden // ROW_LANE) - 1)
                T.assume(at < -(-hidden // ROW_LANE))
                load_lane(x, codes, i, token, at, piece, x.shape[1])
                exponent[i] = sf_exponent(x_sf, x_fmt, token // x_height, at * ROW_LANE // x_width)

            for i in T.unroll(vectors):  # as above, the maxima wait for the codes
                exponent[i] = exponent[i] | (code_words[i, 0] & zero)
                top[i] = exponent[i]
            scatter_max(top, vectors, thread, 1, lanes)
            for k in T.unroll(owned):
                own = k * lanes + thread % lanes
                raise_exponent(top, k)
                if own < vectors and row + own // along < num_tokens:
                    group = (slot + own % along * WARP) // lanes
                    store_sf(y_sf, fmt, num_groups, row + own // along, group, stored_sf(top[k], fmt))

            for i in T.unroll(vectors):
                block_top = T.shfl_sync(top[i // lanes], i % lanes, width=lanes)
                encode_codes(codes, i, power_of_two(exponent[i], block_top), y_local)
                if row + i // along < num_tokens:
                    at = slot + i % along * WARP
                    store_lane(y, y_local, row + i // along, at, math.gcd(VECTOR_BYTES, hidden), hidden, ROW_LANE)

    return per_block_cast_lossless_row
