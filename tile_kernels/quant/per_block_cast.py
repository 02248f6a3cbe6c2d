"""Per-block cast: quantize a matrix in blocks of rows and channels.

    amax[i, j] = max |x[iM : (i+1)M, jN : (j+1)N]|          M, N = fmt.sf_block, blocks at the edges may be smaller
    a[i, j]    = min(max(amax[i, j], amax_floor), FLT_MAX)
    sf[i, j]   = a / max(fmt)                               rounded as the format stores it
    y[t, h]    = round(x[t, h] * sf_inv[t // M, h // N])    to nearest even, saturating

A thread block owns a tile of 128 channels and keeps it in registers, so `x` is read once. Only one amax per warp and
scale block passes through shared memory. Memory bound: the floor is reading x and writing y. Numbers that are not
finite are treated as by `per_token_cast`.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, resident_blocks
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.device.codes import code_registers, encode_and_store
from tile_kernels.device.reduce import lane_amax
from tile_kernels.device.scales import amax_to_sf, clamp_amax, load_sf_inv, sf_register_dtype, sf_tensor, store_sf
from tile_kernels.device.vectors import LANE
from tile_kernels.quant._checks import Block, Pair, block_format, check_floor, check_matrix, pair_into
from tile_kernels.quant._macros import HEIGHTS, ROW_LANES, TILE_COLS, load_rows, reduce_block, tile_rows
from tile_kernels.quant._samples import random_matrix

WIDTHS = (32, 128)


# Config -------------------------------------------------------------------------------------


def choose(hidden: int, fmt: QuantFormat, x_dtype: torch.dtype, vector_bytes: int, task: str, num_tokens: int) -> dict:
    """Eight rows for each lane, so that many loads are in flight; flat blocks of a small problem get flat tiles.

    Float32 rows and the encoding of fp4, above all of rows in pieces, need more registers than 1024 threads leave.
    """
    in_pieces = vector_bytes < 16 or hidden % LANE > 0
    resident_threads = 1024 if fmt.data.name != 'e2m1' else 512 if in_pieces else 768
    resident_threads = min(resident_threads, 512 if x_dtype.itemsize == 4 else 1024)
    if fmt.sf_block[0] == 32 and num_tokens * hidden < 1 << 22:
        return dict(rows=4, num_threads=128, resident_threads=resident_threads)
    num_threads = 128 if fmt.sf_block[0] == 32 else 256
    return dict(rows=8, num_threads=num_threads, resident_threads=resident_threads)


# Kernel -------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(rows=(4, 8), num_threads=(128, 256, 512), resident_threads=(512, 768, 1024)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def per_block_cast_kernel(
    hidden: int,
    fmt: QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    task: str,
    *,
    rows: int,
    num_threads: int,
    resident_threads: int,
):
    """One tile for each thread block. `task`: 'cast', 'sf' (scale factors only) or 'data' (scale factors are given)."""
    height, width = fmt.sf_block
    lanes, num_groups, tiles_n = width // LANE, -(-hidden // width), -(-hidden // TILE_COLS)
    tile_m = tile_rows(rows, num_threads, height)
    piece = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden)
    num_tokens, sf_rows, x_pitch = T.dynamic('num_tokens'), T.dynamic('sf_rows'), T.dynamic('x_pitch')

    @T.prim_func
    def per_block_cast(
        x: T.StridedTensor((num_tokens, hidden), (x_pitch, 1), T.dtype(x_dtype)),
        y: T.Tensor((num_tokens, fmt.data.stored(hidden)), T.dtype(fmt.data.torch)),
        y_sf: sf_tensor(fmt, sf_rows, num_groups),
        amax_floor: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, tile_m) * tiles_n, threads=num_threads) as pid:
            T.assume(x_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            row = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            x_local = T.alloc_local((rows, LANE), T.dtype(x_dtype))
            row_amax = T.alloc_local((rows,), T.float32)
            amax = T.alloc_local((1,), T.float32)
            amax_shared = T.alloc_shared((num_threads // WARP, ROW_LANES // lanes), T.float32)
            sf = T.alloc_local((1,), sf_register_dtype(fmt))
            sf_inv = T.alloc_local((1,), T.float32)
            v_local = T.alloc_local((LANE,), T.float32)
            y_local = T.alloc_local(*code_registers(fmt))
            thread = T.get_thread_binding()
            lane = thread % ROW_LANES
            slot = pid % tiles_n * ROW_LANES + lane
            row = pid // tiles_n * tile_m + thread // ROW_LANES * rows

            load_rows(x, None, None, row, x_dtype, slot, piece, hidden, x_local, None)

            if task == 'data':
                sf_inv[0] = T.float32(0.0)
                if row < num_tokens and slot * LANE < hidden:
                    load_sf_inv(y_sf, fmt, row // height, slot // lanes, sf_inv, 0)
            else:
                T.clear(row_amax)
                amax[0] = T.float32(0.0)
                for i in T.unroll(rows):
                    lane_amax(x_local, i, row_amax)
                    amax[0] = T.max(amax[0], row_amax[i])
                reduce_block(amax, height, lanes, rows, lane, thread // WARP, amax_shared)
                amax_to_sf(clamp_amax(amax[0], amax_floor), fmt, sf, sf_inv, 0)
                first = thread // ROW_LANES * rows % height == 0 and lane % lanes == 0
                if first and row < num_tokens and slot * LANE < hidden:
                    store_sf(y_sf, fmt, num_groups, row // height, slot // lanes, sf[0])

            if task != 'sf':
                for i in T.unroll(rows):
                    encode_and_store(x_local, i, fmt, task, sf_inv[0], v_local, y_local, y, row + i, slot, hidden)

    return per_block_cast


# Op -----------------------------------------------------------------------------------------


def launch_block_cast(
    x: Tensor, y: Tensor | None, y_sf: Tensor, fmt: QuantFormat, amax_floor: float, task: str
) -> None:
    """Launch the kernel; `task` as there."""
    static = (x.shape[1], fmt, x.dtype, check.vector_bytes(x), task)
    launch(per_block_cast_kernel, static, x, y, y_sf, amax_floor)


def check_block_cast(x: Tensor, fmt: QuantFormat) -> tuple[int, int]:
    """Shape of `x`, once it is something a per-block format can hold."""
    check.one_of(fmt.data.name, ('e4m3', 'e5m2', 'e2m1'), 'fmt.data')
    check.one_of(fmt.sf_block[0], HEIGHTS, 'fmt.sf_block[0]')
    check.one_of(fmt.sf_block[1], WIDTHS, 'fmt.sf_block[1]')
    return check_matrix(x, fmt.data.pack)


@op(outputs='y y_sf')
def _per_block_cast(x: Tensor, fmt: QuantFormat, amax_floor: float | None = None) -> QuantTensor:
    """Quantize `x` in blocks of `fmt.sf_block` rows and channels; no scale uses an amax below `amax_floor`.

    Blocks at the edges use their own elements only. No rows give empty results.
    """
    num_tokens, hidden = check_block_cast(x, fmt)
    floor = check_floor(amax_floor, fmt)
    y = fmt.empty(num_tokens, hidden, x.device)
    launch_block_cast(x, y.data, y.sf, fmt, floor, 'cast')
    return y


@_per_block_cast.public
def per_block_cast(
    x: Tensor,
    fmt: str | QuantFormat,
    block_size: Block | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Pair | None = None,
) -> QuantTensor:
    """Quantize `x` in blocks of rows and channels.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense, any shape and row stride (hidden even for
            e2m1).
        fmt: 'e4m3', 'e5m2' or 'e2m1' with the arguments below, or a whole format such as 'e4m3_128x128_f32' without
            them.
        block_size: rows and channels that share a scale factor, each 32 or 128.
        use_tma_aligned_col_major_sf: column-major scale factors with 16-byte aligned columns.
        round_sf: scale factors are rounded up to powers of two.
        use_packed_ue8m0: four exponent bytes in an int32; needs `round_sf`.
        out: data and scale factors to write the result to.

    Returns:
        `QuantTensor`, which unpacks as (data, sf) with x ~= data * sf.
    """
    layout = block_format(fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return pair_into(out, per_block_cast.call(x, layout))


# Cases --------------------------------------------------------------------------------------


def make_case(num_tokens: int, hidden: int, dtype: torch.dtype, fmt: str, pitch: int | None = None) -> dict:
    """Arguments of a case."""
    return dict(x=random_matrix(num_tokens, hidden, dtype, pitch), fmt=QuantFormat.parse(fmt))


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
SMOKE = (
    grid(num_tokens=[0, 1], hidden=[128], dtype=BF16, fmt=['e4m3_128x128_f32'])
    + grid(num_tokens=[133], hidden=[272], dtype=BF16, fmt=['e4m3_128x128_f32', 'e2m1_32x32_ue8m0x4_col'])  # tails
    + grid(num_tokens=[40], hidden=[102], dtype=F32, fmt=['e2m1_32x128_f32p2_col', 'e5m2_128x32_e4m3'])
    + grid(num_tokens=[33], hidden=[99], dtype=F16, fmt=['e4m3_32x32_ue8m0x4'], pitch=[101])  # odd rows, odd stride
)
FULL_FORMATS = [
    f'{data}_{height}x{width}_{sf}'
    for data in ('e4m3', 'e5m2', 'e2m1')
    for height in HEIGHTS
    for width in WIDTHS
    for sf in ('f32', 'f32_col', 'f32p2', 'f32p2_col', 'ue8m0x4', 'ue8m0x4_col', 'e4m3', 'e4m3_col')
]
FULL_SHAPES = (
    dict(num_tokens=4001, hidden=7168, dtype=torch.bfloat16),
    dict(num_tokens=257, hidden=1344, dtype=torch.float32),
    dict(num_tokens=2049, hidden=1090, dtype=torch.float16, pitch=2180),
)
FULL = [dict(FULL_SHAPES[index % len(FULL_SHAPES)], fmt=fmt) for index, fmt in enumerate(FULL_FORMATS)] + grid(
    num_tokens=[300001],
    hidden=[7168],
    dtype=BF16,
    fmt=['e4m3_128x128_f32'],  # past 2^31 elements
)
BENCH = (
    grid(num_tokens=[64, 4096, 16384], hidden=[7168], dtype=BF16, fmt=['e4m3_128x128_f32', 'e2m1_32x32_ue8m0x4_col'])
    + grid(num_tokens=[4096], hidden=[7168], dtype=BF16, fmt=['e4m3_128x128_ue8m0x4_col', 'e4m3_32x32_f32'])
    + grid(num_tokens=[32001], hidden=[1344, 576], dtype=BF16, fmt=['e4m3_128x128_f32'])
    + grid(num_tokens=[8001], hidden=[4096], dtype=F32, fmt=['e4m3_128x128_f32'])
)
per_block_cast.cases(make=make_case, match='bitwise', smoke=SMOKE, full=FULL, bench=BENCH)
