"""Lossless per-block cast: fp4 with small blocks becomes fp8 with larger ones, and no value changes.

    E[i, j]  = exponent of x.sf[i, j]                       x.sf are powers of two
    F[k, l]  = max(max E over the blocks in (k, l) - 6, 1)  biased exponents; 6 * 2^6 still fits e4m3
    y[t, h]  = x[t, h] * 2^(E[t, h] - F[t, h])              exact while the exponents of a block differ by at most 14
    sf[k, l] = 2^F[k, l]

The layout of work is that of `per_block_cast`, with exponents in place of magnitudes. Memory bound: the floor is
reading x and writing y once.
"""

import math

import torch

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.quant._blocks import (
    HEIGHTS,
    ROW_LANES,
    TILE_COLS,
    WARP,
    decode,
    load_codes,
    reduce_block,
    sf_exponent,
    tile_rows,
)
from tile_kernels.quant._macros import (
    LANE,
    float_of,
    sf_tensor,
    shuffle_steps,
    store_lane,
    store_sf,
)
from tile_kernels.quant.per_block_cast import check_sf

WIDTHS = (16, 32, 64, 128)

#: 6 * 2^6 is the largest power-of-two multiple of the largest e2m1 number in e4m3.
SPARE_EXPONENT = 6


# Config -------------------------------------------------------------------------------------


def choose(hidden: int, x_fmt: QuantFormat, fmt: QuantFormat, vector_bytes: int, num_tokens: int) -> dict:
    """Eight rows for each lane, so that many loads are in flight; flat blocks of a small problem get flat tiles."""
    if fmt.sf_block[0] <= 32 and num_tokens * hidden < 1 << 22:
        return dict(rows=4, num_threads=128)
    return dict(rows=8, num_threads=256)


# Kernel -------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(rows=(4, 8), num_threads=(128, 256, 512)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def per_block_cast_lossless_kernel(
    hidden: int, x_fmt: QuantFormat, fmt: QuantFormat, vector_bytes: int, *, rows: int, num_threads: int
):
    """One tile for each thread block; blocks of one row need no shared memory."""
    x_height, x_width = x_fmt.sf_block
    height, width = fmt.sf_block
    lanes, num_groups, tiles_n = width // LANE, -(-hidden // width), -(-hidden // TILE_COLS)
    tile_m = tile_rows(rows, num_threads, height)
    own = rows if height == 1 else 1
    codes_width = x_fmt.data.stored(LANE)
    piece = math.gcd(codes_width, vector_bytes, x_fmt.data.stored(hidden))
    num_tokens, x_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch')
    x_sf_rows, sf_rows, x_sf_pitch = T.dynamic('x_sf_rows'), T.dynamic('sf_rows'), T.dynamic('x_sf_pitch')
    x_sf_cols = x_fmt.sf_shape(1, hidden)[1]

    @T.prim_func
    def per_block_cast_lossless(
        x: T.StridedTensor((num_tokens, x_fmt.data.stored(hidden)), (x_pitch, 1), T.int8),
        x_sf: T.StridedTensor(
            (x_sf_rows, x_sf_cols), (1, x_sf_pitch) if x_fmt.col else (x_sf_cols, 1), T.dtype(x_fmt.sf_dtype)
        ),
        y: T.Tensor((num_tokens, hidden), T.dtype(fmt.data.torch)),
        y_sf: sf_tensor(fmt, sf_rows, num_groups),
    ):
        with T.Kernel(T.ceildiv(num_tokens, tile_m) * tiles_n, threads=num_threads) as pid:
            T.assume(x_pitch % piece == 0)
            row = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            codes = T.alloc_local((rows, codes_width), T.int8)
            exponent = T.alloc_local((rows,), T.uint32)
            top = T.alloc_local((own,), T.uint32)
            top_shared = T.alloc_shared((num_threads // WARP, ROW_LANES // lanes), T.uint32)
            shift = T.alloc_var(T.int32)
            v_local = T.alloc_local((LANE,), T.float32)
            y_local = T.alloc_local((LANE,), T.dtype(fmt.data.torch))
            thread = T.get_thread_binding()
            lane = thread % ROW_LANES
            slot = pid % tiles_n * ROW_LANES + lane
            row = pid // tiles_n * tile_m + thread // ROW_LANES * rows

            T.clear(codes)
            T.clear(exponent)
            for i in T.unroll(rows):
                if row + i < num_tokens and slot * LANE < hidden:
                    load_codes(x, codes, i, row + i, slot, piece)
                    exponent[i] = sf_exponent(x_sf, x_fmt, (row + i) // x_height, slot * LANE // x_width)

            T.clear(top)
            for i in T.unroll(rows):
                top[i % own] = T.max(top[i % own], exponent[i])
            if height == 1:
                for step in T.unroll(shuffle_steps(lanes)):
                    for i in T.unroll(rows):
                        top[i] = T.max(top[i], T.shfl_xor(top[i], 1 << step))
            else:
                reduce_block(top, height, lanes, rows, lane, thread // WARP, top_shared)
            for k in T.unroll(own):
                top[k] = T.max(top[k], T.uint32(SPARE_EXPONENT + 1)) - T.uint32(SPARE_EXPONENT)
                first = (row + k) % height == 0 and lane % lanes == 0
                if first and row + k < num_tokens and slot * LANE < hidden:
                    sf = T.cast(top[k], T.uint8) if fmt.sf == 'ue8m0x4' else float_of(top[k] << T.uint32(23))
                    store_sf(y_sf, fmt, num_groups, (row + k) // height, slot // lanes, sf)

            for i in T.unroll(rows):
                decode(codes, i, x_fmt.data.name, v_local)
                shift = T.cast(exponent[i], T.int32) - T.cast(top[i % own], T.int32)
                factor = float_of(T.cast(T.max(shift + 127, 0), T.uint32) << T.uint32(23))
                for e in T.unroll(LANE):
                    v_local[e] = v_local[e] * factor
                for e in T.vectorized(LANE):
                    y_local[e] = T.cast(v_local[e], T.dtype(fmt.data.torch))
                if row + i < num_tokens:
                    store_lane(y, y_local, row + i, slot, math.gcd(LANE, hidden), hidden, LANE)

    return per_block_cast_lossless


# Op -----------------------------------------------------------------------------------------


@op(outputs='y y_sf')
def per_block_cast_lossless(x: QuantTensor, fmt: QuantFormat) -> QuantTensor:
    """Turn fp4 into fp8 with larger scale blocks without changing a value.

    Args:
        x: (num_tokens, hidden) e2m1 with power-of-two scale factors, float32 (of which the exponent counts) or packed,
            any layout; blocks of 16, 32, 64 or 128 channels.
        fmt: e4m3 with float32 or packed scale factors, blocks of 1, 32 or 128 rows by 16, 32, 64 or 128 channels,
            multiples of those of `x`.

    Returns:
        ``QuantTensor`` with the values of `x`, if the scale factors within a block of `fmt` differ by at most 2^14;
        values that are smaller than that allows are rounded to nearest even. Scale factors are never below 2^-126.
    """
    num_tokens, stored = check.shape(x.data, 'x', 'num_tokens stored', dtype=torch.int8)
    check.unit_stride(x.data, 'x')
    check.equal(x.fmt.data.name, 'e2m1', 'x.fmt.data')
    check.one_of(x.fmt.sf, ('f32', 'f32p2', 'ue8m0x4'), 'x.fmt.sf')
    check.one_of(x.fmt.sf_block[1], WIDTHS, 'x.fmt.sf_block[1]')
    check.equal(fmt.data.name, 'e4m3', 'fmt.data')
    check.one_of(fmt.sf, ('f32', 'f32p2', 'ue8m0x4'), 'fmt.sf')
    check.one_of(fmt.sf_block[0], (1, *HEIGHTS), 'fmt.sf_block[0]')
    check.one_of(fmt.sf_block[1], WIDTHS, 'fmt.sf_block[1]')
    check.at_least(x.fmt.sf_block[0], 1, 'x.fmt.sf_block[0]')
    check.multiple(fmt.sf_block[0], x.fmt.sf_block[0], 'fmt.sf_block[0]')
    check.multiple(fmt.sf_block[1], x.fmt.sf_block[1], 'fmt.sf_block[1]')
    hidden = 2 * stored
    check.at_least(hidden, 1, 'hidden')
    check_sf(x.sf, 'x.sf', x.fmt, num_tokens, hidden)
    check.same_device(x=x.data, x_sf=x.sf)
    y = fmt.empty(num_tokens, hidden, x.device)
    launch(per_block_cast_lossless_kernel, (hidden, x.fmt, fmt, check.vector_bytes(x.data)), x.data, x.sf, *y)
    return y


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, hidden: int, source: str, fmt: str, base: int = 100) -> dict:
    """Random codes, and scale factors whose exponents spread over 12 from `base` on."""
    x_fmt = QuantFormat.parse(source)
    codes = torch.randint(-128, 128, (num_tokens, hidden // 2), dtype=torch.int8)
    sf = x_fmt.empty_sf(num_tokens, hidden, codes.device)
    exponents = torch.randint(base, base + 12, (*sf.shape, x_fmt.sf_pack), dtype=torch.uint8)
    if x_fmt.sf == 'ue8m0x4':
        sf.copy_(exponents.view(torch.int32).squeeze(-1))
    else:
        sf.copy_((exponents.int() << 23).view(torch.float32).squeeze(-1))
    return dict(x=QuantTensor(codes, sf, x_fmt), fmt=QuantFormat.parse(fmt))


TARGETS = ['e4m3_1x128_f32p2', 'e4m3_32x32_ue8m0x4_col', 'e4m3_128x128_ue8m0x4']
per_block_cast_lossless.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1], hidden=[128], source=['e2m1_1x32_f32p2'], fmt=TARGETS[:1])
    + grid(num_tokens=[37], hidden=[272], source=['e2m1_1x32_f32p2', 'e2m1_1x32_ue8m0x4_col'], fmt=TARGETS)
    + grid(num_tokens=[130], hidden=[98], source=['e2m1_32x16_ue8m0x4'], fmt=['e4m3_128x64_f32'], base=[1]),
    full=grid(
        num_tokens=[4001],
        hidden=[7168, 1090],
        source=['e2m1_1x32_f32p2', 'e2m1_1x32_f32p2_col', 'e2m1_1x32_ue8m0x4', 'e2m1_1x32_ue8m0x4_col'],
        fmt=TARGETS,
        base=[1, 120, 240],
    ),
    bench=grid(num_tokens=[4096, 16384], hidden=[7168], source=['e2m1_1x32_f32p2'], fmt=TARGETS[:1] + TARGETS[2:])
    + grid(num_tokens=[4096], hidden=[7168], source=['e2m1_1x32_ue8m0x4_col'], fmt=TARGETS[1:2]),
)
