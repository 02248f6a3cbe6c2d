"""Kernels of the per-channel cast; see `per_channel_cast` for the maths.

A thread block owns a tile of 128 channels in registers (256 of codes), so a row is read once. Warps meet in shared
memory twice: for the amax of a channel, and for the multiplier that one thread computes from it for all. One group of
all rows needs two passes unless a tile holds them all. Strips of rows find their maxima, then the tiles are scaled. The
last tiles come first, because the L2 cache still holds them. Gathered rows are read as often as the map names them. The
tiles of a panel of channels run in sequence, so that all reads but the first hit the L2 cache.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, resident_blocks
from tile_kernels.core.launch import launch
from tile_kernels.device.scales import sf_tensor
from tile_kernels.device.vectors import LANE, store_lane
from tile_kernels.quant._macros import (
    ROW_LANES,
    TILE_COLS,
    channel_amax,
    channel_factors,
    encode_row,
    load_rows,
    tile_rows,
)

#: One group of all rows takes one pass if it has no more rows than the smallest tile that is chosen for it.
TILE_ROWS = 128

#: Thread blocks that find maxima of all rows: about as many as an H200 runs together.
AMAX_BLOCKS = 512


# Config -------------------------------------------------------------------------------------


def choose(
    hidden: int,
    fmt: QuantFormat,
    source: torch.dtype | QuantFormat,
    vector_bytes: int,
    gathered: bool,
    task: str,
    num_tokens: int,
) -> dict:
    """Eight rows for each lane, so that many loads are in flight; flat groups of a small problem get flat tiles.

    Rows in pieces, float16 and float32 rows need more registers than 1024 threads leave.
    """
    x_dtype = source.data.torch if isinstance(source, QuantFormat) else source
    in_pieces = vector_bytes < LANE * x_dtype.itemsize or hidden % LANE > 0
    kept_as_float32 = x_dtype in (torch.float16, torch.float32)
    resident_threads = 512 if kept_as_float32 else 768 if in_pieces else 1024
    flat = fmt.sf_block[0] == 32 and num_tokens * hidden < 1 << 22
    rows, num_threads, row_lanes = (4, 128, 16) if flat else (8, 128, 8) if gathered else (8, 256, 16)
    lane, panel = LANE, 8 if gathered else 0
    if gathered and isinstance(source, QuantFormat):  # longer pieces of rows cost more registers
        lane, resident_threads = 2 * LANE, 768
    return dict(
        rows=rows,
        num_threads=num_threads,
        resident_threads=resident_threads,
        row_lanes=row_lanes,
        lane=lane,
        panel=panel,
    )


def _strips(hidden: int) -> int:
    """Most strips of rows that find their maxima at a time: about as many thread blocks as run together."""
    return min(max(AMAX_BLOCKS // -(-hidden // TILE_COLS), 1), 32)


def _strip_rows(num_rows: Any, hidden: int) -> Any:
    """Rows of a strip: whole tiles."""
    return T.ceildiv(T.ceildiv(num_rows, TILE_ROWS), _strips(hidden)) * TILE_ROWS


# Kernels ------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(
        rows=(4, 8),
        num_threads=(128, 256, 512),
        resident_threads=(512, 768, 1024),
        row_lanes=(8, 16),
        lane=(8, 16),
        panel=(0, 8),
    ),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_DISABLE_SHARED_MEMORY_REUSE': True},
)
def per_channel_cast_kernel(
    hidden: int,
    fmt: QuantFormat,
    source: torch.dtype | QuantFormat,
    vector_bytes: int,
    gathered: bool,
    task: str,
    *,
    rows: int,
    num_threads: int,
    resident_threads: int,
    row_lanes: int,
    lane: int,
    panel: int,
):
    """One tile for each thread block, those of `panel` neighbouring tiles of channels (0: all) before the next ones.

    `source` is what x holds. `task`: 'cast', or 'scale' with the maxima of all rows.
    """
    if fmt.sf_block[0] and fmt.sf_block[0] * row_lanes < rows * WARP:
        raise ArgumentError(f'a warp of {rows * WARP // row_lanes} rows holds several groups of {fmt.sf_block[0]}')
    quantized = isinstance(source, QuantFormat)
    x_dtype = source.data.torch if quantized else source
    tile_m = tile_rows(rows, num_threads, fmt.sf_block[0] or (TILE_ROWS if task == 'cast' else 1), row_lanes)
    if task == 'scale' and tile_m != TILE_ROWS:
        raise ArgumentError(f'strips are made of tiles of {TILE_ROWS} rows, not of {tile_m}')
    height = fmt.sf_block[0] or tile_m
    tile_n = row_lanes * lane
    warps, tiles_n = height * row_lanes // (rows * WARP), -(-hidden // tile_n)
    piece = math.gcd(lane, vector_bytes // x_dtype.itemsize, hidden)
    num_tokens, sf_rows, x_pitch = T.dynamic('num_tokens'), T.dynamic('sf_rows'), T.dynamic('x_pitch')
    num_rows = T.dynamic('num_rows') if gathered else num_tokens
    source_groups = -(-hidden // source.sf_block[1]) if quantized else 1
    x_sf_type = sf_tensor(source, num_tokens, source_groups) if quantized else T.Tensor((num_tokens, 1), T.float32)

    @T.prim_func
    def per_channel_cast(
        x: T.StridedTensor((num_tokens, hidden), (x_pitch, 1), T.dtype(x_dtype)),
        x_sf: x_sf_type,
        pos_to_token: T.Tensor((num_rows,), T.int32),
        y: T.Tensor((num_rows, hidden), T.dtype(fmt.data.torch)),
        y_sf: T.Tensor((sf_rows, hidden), T.dtype(fmt.sf_dtype)),
        parts: T.Tensor((_strips(hidden), hidden), T.float32),
        amax_floor: T.float32,
    ):
        # what is scaled is counted in strips of tiles, which may end behind the last row
        counted = T.ceildiv(num_rows, _strip_rows(num_rows, hidden)) * _strip_rows(num_rows, hidden)
        with T.Kernel(
            T.ceildiv(counted if task == 'scale' else num_rows, tile_m) * tiles_n, threads=num_threads
        ) as pid:
            T.assume(x_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            pid_m = T.alloc_var(T.int32)
            pid_n = T.alloc_var(T.int32)
            x_local = T.alloc_local((rows, lane), T.dtype(x_dtype))
            factor = T.alloc_local((rows,), T.float32)
            amax = T.alloc_local((lane,), T.float32)
            amax_shared = T.alloc_shared((num_threads // WARP, tile_n), T.float32)
            sf_inv = T.alloc_local((lane,), T.float32)
            row_local = T.alloc_local((lane,), T.dtype(fmt.data.torch))
            thread = T.get_thread_binding()
            place, team, warp = thread % row_lanes, thread // row_lanes, thread // WARP
            if task == 'cast' and 0 < panel < tiles_n:
                per_panel = T.ceildiv(num_rows, tile_m) * panel
                pid_n = pid // per_panel * panel
                width = T.min(tiles_n - pid_n, panel)
                pid_m = pid % per_panel // width
                pid_n += pid % per_panel % width
            elif task == 'scale':  # last tiles of all strips first
                strip_tiles = _strip_rows(num_rows, hidden) // tile_m
                num_strips = T.ceildiv(num_rows, _strip_rows(num_rows, hidden))
                pid_m = pid // tiles_n % num_strips * strip_tiles + strip_tiles - 1 - pid // (num_strips * tiles_n)
                pid_n = pid % tiles_n
            else:
                pid_m = pid // tiles_n
                pid_n = pid % tiles_n
            row, col = pid_m * tile_m, pid_n * tile_n
            slot = pid_n * row_lanes + place

            positions = pos_to_token if gathered else None
            load_rows(x, x_sf, positions, row + team * rows, source, slot, piece, hidden, x_local, factor)

            if task == 'cast':
                channel_amax(x_local, amax, factor if quantized else None, row_lanes)
                if thread % WARP < row_lanes:
                    for e in T.vectorized(lane):
                        amax_shared[warp, place * lane + e] = amax[e]
                T.sync_threads()
                channel_factors(amax_shared, warps, None, 0, y_sf, fmt, height, num_rows, row, col, amax_floor)
            else:
                T.pdl_sync()
                num_parts = T.ceildiv(num_rows, _strip_rows(num_rows, hidden))
                channel_factors(amax_shared, warps, parts, num_parts, y_sf, fmt, height, height, row, col, amax_floor)
            T.sync_threads()
            for e in T.vectorized(lane):
                sf_inv[e] = amax_shared[team * rows // height * warps, place * lane + e]
            for i in T.unroll(rows):
                encode_row(x_local, i, sf_inv, row_local, factor if quantized else None)
                if row + team * rows + i < num_rows:
                    store_lane(y, row_local, row + team * rows + i, slot, math.gcd(lane, hidden), hidden, lane)

    return per_channel_cast


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def channel_amax_of_strips_kernel(hidden: int, source: torch.dtype | QuantFormat, vector_bytes: int, gathered: bool):
    """The largest magnitude of each channel in each strip of rows, one strip of a tile of channels a thread block."""
    quantized = isinstance(source, QuantFormat)
    x_dtype = source.data.torch if quantized else source
    rows, num_threads, tiles_n = 8, 256, -(-hidden // TILE_COLS)
    piece = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden)
    num_tokens, x_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch')
    num_rows = T.dynamic('num_rows') if gathered else num_tokens
    source_groups = -(-hidden // source.sf_block[1]) if quantized else 1
    x_sf_type = sf_tensor(source, num_tokens, source_groups) if quantized else T.Tensor((num_tokens, 1), T.float32)

    @T.prim_func
    def channel_amax_of_strips(
        x: T.StridedTensor((num_tokens, hidden), (x_pitch, 1), T.dtype(x_dtype)),
        x_sf: x_sf_type,
        pos_to_token: T.Tensor((num_rows,), T.int32),
        parts: T.Tensor((_strips(hidden), hidden), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_rows, _strip_rows(num_rows, hidden)) * tiles_n, threads=num_threads) as pid:
            T.assume(x_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(resident_blocks(1024 if x_dtype is torch.bfloat16 else 512, num_threads))
            x_local = T.alloc_local((rows, LANE), T.dtype(x_dtype))
            factor = T.alloc_local((rows,), T.float32)
            amax = T.alloc_local((LANE,), T.float32)
            strip_amax = T.alloc_local((LANE,), T.float32)
            amax_shared = T.alloc_shared((num_threads // WARP, TILE_COLS), T.float32)
            total = T.alloc_var(T.float32)
            first = T.alloc_var(T.int32)
            thread = T.get_thread_binding()
            place, team = thread % ROW_LANES, thread // ROW_LANES
            slot, col = pid % tiles_n * ROW_LANES + place, pid % tiles_n * TILE_COLS
            first = pid // tiles_n * _strip_rows(num_rows, hidden)
            T.pdl_trigger()
            T.clear(strip_amax)
            for step in T.serial(T.ceildiv(T.min(num_rows - first, _strip_rows(num_rows, hidden)), TILE_ROWS)):
                positions = pos_to_token if gathered else None
                row = first + step * TILE_ROWS + team * rows
                load_rows(x, x_sf, positions, row, source, slot, piece, hidden, x_local, factor)
                channel_amax(x_local, amax, factor if quantized else None)
                for e in T.unroll(LANE):
                    strip_amax[e] = T.max(strip_amax[e], amax[e])
            if thread % WARP < ROW_LANES:
                for e in T.vectorized(LANE):
                    amax_shared[thread // WARP, place * LANE + e] = strip_amax[e]
            T.sync_threads()
            if thread < TILE_COLS and col + thread < hidden:
                total = T.float32(0.0)
                for w in T.unroll(num_threads // WARP):
                    total = T.max(total, amax_shared[w, thread])
                parts[pid // tiles_n, col + thread] = total

    return channel_amax_of_strips


# Launch -------------------------------------------------------------------------------------


def _check_map(pos_to_token: Tensor | None, x: Tensor) -> int:
    """Rows of the result: those of the map, if there is one."""
    if pos_to_token is None:
        return x.shape[0]
    (num_rows,) = check.shape(pos_to_token, 'pos_to_token', 'num_rows', dtype=torch.int32)
    check.contiguous(pos_to_token, 'pos_to_token')
    check.same_device(x=x, pos_to_token=pos_to_token)
    return num_rows


def launch_channel_cast(
    x: Tensor, x_sf: Tensor | None, source: torch.dtype | QuantFormat, pos_to_token: Tensor | None, fmt: QuantFormat
) -> QuantTensor:
    """Allocate the result and launch the one pass, or the two of a group of all rows."""
    hidden, num_rows = x.shape[1], _check_map(pos_to_token, x)
    y = fmt.empty(num_rows, hidden, x.device)
    static = (hidden, fmt, source, check.vector_bytes(x), pos_to_token is not None)
    rows, floor = (x, x_sf, pos_to_token), fmt.amax_floor
    if fmt.sf_block[0] or (type(num_rows) is int and num_rows <= TILE_ROWS):
        launch(per_channel_cast_kernel, (*static, 'cast'), *rows, *y, None, floor, size=num_rows)
    else:
        parts = torch.empty((_strips(hidden), hidden), dtype=torch.float32, device=x.device)
        launch(channel_amax_of_strips_kernel, (hidden, source, *static[3:]), *rows, parts, size=num_rows)
        launch(per_channel_cast_kernel, (*static, 'scale'), *rows, *y, parts, floor, size=num_rows)
    return y
