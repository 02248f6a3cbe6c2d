"""Per-channel cast with a transposed result: each channel of a matrix in groups of rows, stored as one row of codes.

    y, sf      = per_channel_cast(x, fmt)                   see there
    y^T[h, t]  = y[t, h]                                    what is stored, rows of any number of bytes

A thread block owns a strip of rows of some adjacent channels and walks down it in tiles of 128 rows. It quantizes a
tile in registers, transposes it in squares of 8 x 8 and joins these in shared memory. Rows of the result begin at any
byte, but a block writes whole sectors of 32 bytes. A sector that is incomplete at the end of a tile is completed by the
next tile. Only the two ends of the strip are written byte by byte, a channel by a warp at a time. Memory bound: the
floor is reading x and writing y and sf once.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro, resident_blocks
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.device.bits import byte_perm
from tile_kernels.device.vectors import LANE
from tile_kernels.quant._checks import channel_format, check_channel_format, check_matrix
from tile_kernels.quant._macros import HEIGHTS, encode_row, load_rows, scale_channels, spread, turn_to_shared
from tile_kernels.quant.per_channel_cast import make_case

#: A lane turns 8 rows of 8 channels; a tile has 16 such rows of lanes.
ROWS = 8
TILE_ROWS = 128
TEAMS = TILE_ROWS // ROWS

#: What memory is written in, and what shared memory gives a thread at a time.
SECTOR = 32
UNIT = 8

#: More thread blocks than any matrix has tiles.
ONE_TILE = 1 << 20


# Config -------------------------------------------------------------------------------------


def choose(hidden: int, fmt: QuantFormat, x_dtype: torch.dtype, vector_bytes: int, num_tokens: int) -> dict:
    """Strips that all run together; rows that begin at sectors need none, so that blocks can take turns.

    A strip loads ahead, which takes registers. So do rows in pieces, float16 and float32 rows.
    """
    in_pieces = vector_bytes < LANE * x_dtype.itemsize or hidden % LANE > 0
    resident_threads = 512 if in_pieces or x_dtype is not torch.bfloat16 else 768
    if num_tokens <= TILE_ROWS:
        return dict(row_lanes=8, resident_threads=resident_threads, blocks=ONE_TILE, ahead=False)
    if num_tokens % SECTOR == 0:
        return dict(row_lanes=16, resident_threads=resident_threads, blocks=ONE_TILE, ahead=False)
    return dict(row_lanes=8, resident_threads=512, blocks=512, ahead=True)


# Kernel -------------------------------------------------------------------------------------


@macro
def store_sectors(y, tile_shared, col, top, length, step):
    """Write the sectors of a strip that end in its tile `step`, 8 bytes by each thread at a time.

    Those bytes are in two units of shared memory, where two tiles of a strip follow each other like a ring. What they
    are shifted by is the same for all channels of a thread.
    """
    y_units = T.Tensor((T.ceildiv(y.shape[0] * y.shape[1], UNIT), UNIT), T.uint8, y.data)
    channels, ring, _ = tile_shared.shape
    start = T.alloc_var(T.int64)
    shift = T.alloc_var(T.int32)
    offset = T.alloc_var(T.int32)
    both = T.alloc_local((2, 2), T.uint32)
    words = T.view(both, (4,), T.uint32)
    out_words = T.alloc_local((2,), T.uint32)
    out = T.view(out_words, (UNIT,), T.uint8)
    team, unit = T.get_thread_binding() // TEAMS, T.get_thread_binding() % TEAMS
    shift = T.cast((T.cast(col + team, T.int64) * y.shape[1] + top) % UNIT, T.int32)
    selector = T.uint32(0x3210) + T.uint32(0x1111) * T.cast(-shift & 3, T.uint32)
    for k in T.unroll(UNIT, unroll_factor=4):
        channel = k * (channels // UNIT) + team
        start = T.cast(col + channel, T.int64) * y.shape[1] + top
        offset = step * TILE_ROWS + unit * UNIT - T.cast(start % SECTOR, T.int32)
        for u in T.unroll(2):
            place = spread(tile_shared, channel, T.max(offset + u * (UNIT - 1), 0) // UNIT % ring)
            for w in T.vectorized(2):
                both[u, w] = tile_shared[channel, place, w]
        for w in T.unroll(3):
            words[w] = T.if_then_else(-shift & 4 != 0, words[w + 1], words[w])
        for w in T.unroll(2):
            out_words[w] = byte_perm(words[w], words[w + 1], selector)
        sector = offset - unit % (SECTOR // UNIT) * UNIT
        if sector >= 0 and sector + SECTOR <= length and col + channel < y.shape[0]:
            for e in T.vectorized(UNIT):
                y_units[start // SECTOR * (SECTOR // UNIT) + step * TEAMS + unit, e] = out[e]


@macro
def store_end(y, tile_shared, col, top, length, last):
    """Write the first sector of each channel of a strip if it begins before the strip, or the last if it ends behind.

    A warp writes a channel, a lane one byte.
    """
    y_bytes = T.Tensor((y.shape[0] * y.shape[1],), T.uint8, y.data)
    channels, ring, _ = tile_shared.shape
    num_warps = TEAMS * channels // LANE // WARP
    start = T.alloc_var(T.int64)
    shift = T.alloc_var(T.int32)
    offset = T.alloc_var(T.int32)
    warp, lane = T.get_thread_binding() // WARP, T.get_thread_binding() % WARP
    for k in T.unroll(channels // num_warps, unroll_factor=4):
        channel = k * num_warps + warp
        start = T.cast(col + channel, T.int64) * y.shape[1] + top
        shift = T.cast(start % SECTOR, T.int32)
        offset = (length + shift) // SECTOR * SECTOR - shift + lane if last else lane - shift
        read = T.max(T.min(offset, length - 1), 0)
        word = tile_shared[channel, spread(tile_shared, channel, read // UNIT % ring), read // 4 % 2]
        exists = offset >= lane if last else shift > 0 and offset >= 0
        if exists and offset < length and col + channel < y.shape[0]:
            y_bytes[start + offset] = T.cast(word >> T.cast(offset % 4 * 8, T.uint32), T.uint8)


@kernel(
    choose=choose,
    space=dict(row_lanes=(8, 16), resident_threads=(512, 768), blocks=(256, 512, 768, ONE_TILE), ahead=(False, True)),
    pass_configs={
        'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
        'TL_DISABLE_SHARED_MEMORY_REUSE': True,
        'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    },
)
def per_channel_cast_and_transpose_kernel(
    hidden: int,
    fmt: QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    *,
    row_lanes: int,
    resident_threads: int,
    blocks: int,
    ahead: bool,
):
    """One strip of `row_lanes` times 8 channels for each thread block; about `blocks` of them share all rows.

    `ahead`: the rows of the next tile are on their way while a tile is written.
    """
    num_threads = TEAMS * row_lanes
    tile_n = row_lanes * LANE
    tiles_n = -(-hidden // tile_n)
    strips = max(blocks // tiles_n, 1)
    piece = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden)
    num_tokens, sf_rows, x_pitch = T.dynamic('num_tokens'), T.dynamic('sf_rows'), T.dynamic('x_pitch')

    @T.prim_func
    def per_channel_cast_and_transpose(
        x: T.StridedTensor((num_tokens, hidden), (x_pitch, 1), T.dtype(x_dtype)),
        y: T.Tensor((hidden, num_tokens), T.dtype(fmt.data.torch)),
        y_sf: T.Tensor((sf_rows, hidden), T.dtype(fmt.sf_dtype)),
        amax_floor: T.float32,
    ):
        steps = T.ceildiv(T.ceildiv(num_tokens, TILE_ROWS), strips)
        with T.Kernel(T.ceildiv(num_tokens, steps * TILE_ROWS) * tiles_n, threads=num_threads) as pid:
            T.assume(x_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            top = T.alloc_var(T.int32)
            length = T.alloc_var(T.int32)
            row = T.alloc_var(T.int32)
            x_local = T.alloc_local((ROWS, LANE), T.dtype(x_dtype))
            amax = T.alloc_local((LANE,), T.float32)
            amax_shared = T.alloc_shared((num_threads // WARP, tile_n), T.float32)
            sf_inv = T.alloc_local((LANE,), T.float32)
            codes = T.alloc_local((ROWS, LANE), T.dtype(fmt.data.torch))
            row_codes = T.alloc_local((LANE,), T.dtype(fmt.data.torch))
            turned = T.alloc_local((LANE, 2), T.uint32)
            tile_shared = T.alloc_shared((tile_n, 2 * TEAMS, 2), T.uint32)
            thread = T.get_thread_binding()
            lane, team = thread % row_lanes, thread // row_lanes
            slot, col = pid % tiles_n * row_lanes + lane, pid % tiles_n * tile_n
            top = pid // tiles_n * (steps * TILE_ROWS)
            length = T.min(T.cast(num_tokens - top, T.int32), steps * TILE_ROWS)

            if ahead:
                load_rows(x, None, None, top + team * ROWS, x_dtype, slot, piece, hidden, x_local, None)
            for step in T.serial(T.ceildiv(length, TILE_ROWS)):
                row = top + step * TILE_ROWS
                if not ahead:
                    load_rows(x, None, None, row + team * ROWS, x_dtype, slot, piece, hidden, x_local, None)
                scale_channels(
                    x_local, amax, amax_shared, sf_inv, y_sf, fmt, num_tokens, row, col, amax_floor, row_lanes
                )
                for i in T.unroll(ROWS):
                    encode_row(x_local, i, sf_inv, row_codes)
                    for e in T.vectorized(LANE):
                        codes[i, e] = row_codes[e]
                if ahead:
                    next_row = row + TILE_ROWS + team * ROWS
                    load_rows(x, None, None, next_row, x_dtype, slot, piece, hidden, x_local, None)
                turn_to_shared(codes, turned, tile_shared, lane, step % 2 * TEAMS + team)
                T.sync_threads()

                store_sectors(y, tile_shared, col, top, length, step)
                if step == 0 and num_tokens % SECTOR != 0:
                    store_end(y, tile_shared, col, top, length, False)
            if num_tokens % SECTOR != 0:
                store_end(y, tile_shared, col, top, length, True)

    return per_channel_cast_and_transpose


# Op -----------------------------------------------------------------------------------------


@op(outputs='y y_sf')
def _per_channel_cast_and_transpose(x: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """Quantize each channel in groups of 32 or 128 rows and store the codes transposed."""
    num_tokens, hidden = check_matrix(x)
    check_channel_format(fmt)
    check.one_of(fmt.sf_block[0], HEIGHTS, 'fmt.sf_block[0]')
    y, y_sf = fmt.empty_data(hidden, num_tokens, x.device), fmt.empty_sf(num_tokens, hidden, x.device)
    static = (hidden, fmt, x.dtype, check.vector_bytes(x))
    launch(per_channel_cast_and_transpose_kernel, static, x, y, y_sf, fmt.amax_floor)
    return y, y_sf


@_per_channel_cast_and_transpose.public
def per_channel_cast_and_transpose(
    x: Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize each channel of `x` in groups of rows and store the codes transposed.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32 of any shape.
        fmt: 'e4m3' or 'e5m2'.
        num_per_tokens: rows that share a scale factor, 32 or 128.
        round_sf: scale factors are rounded up to powers of two.

    Returns:
        Codes (hidden, num_tokens), contiguous, and scale factors (ceil(num_tokens / num_per_tokens), hidden).
    """
    return per_channel_cast_and_transpose.call(x, channel_format(fmt, num_per_tokens, round_sf))


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, hidden: int, dtype: torch.dtype, fmt: str) -> dict:
    return {name: value for name, value in make_case(num_tokens, hidden, dtype, fmt).items() if name != 'pos_to_token'}


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
per_channel_cast_and_transpose.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1, 128, 135], hidden=[136], dtype=BF16, fmt=['e4m3_128x1_f32'])
    + grid(num_tokens=[144], hidden=[99], dtype=F32, fmt=['e4m3_32x1_ue8m0x4', 'e5m2_128x1_f32p2'])
    + grid(num_tokens=[40], hidden=[130], dtype=F16, fmt=['e4m3_32x1_f32'])
    + grid(num_tokens=[525], hidden=[24], dtype=BF16, fmt=['e4m3_128x1_f32']),
    full=grid(
        num_tokens=[4096, 4001, 4002, 4004, 4008],
        hidden=[7168, 1090],
        dtype=BF16 + F32,
        fmt=['e4m3_128x1_f32', 'e4m3_32x1_f32p2', 'e5m2_32x1_ue8m0x4'],
    )
    + grid(num_tokens=[300001], hidden=[7168], dtype=BF16, fmt=['e4m3_128x1_f32']),  # past 2^31 elements
    bench=grid(num_tokens=[64, 4096, 16384], hidden=[7168], dtype=BF16, fmt=['e4m3_128x1_f32'])
    + grid(num_tokens=[4096], hidden=[7168, 576], dtype=BF16, fmt=['e4m3_32x1_f32'])
    + grid(num_tokens=[4001, 16002], hidden=[7168], dtype=BF16, fmt=['e4m3_128x1_f32']),
)
