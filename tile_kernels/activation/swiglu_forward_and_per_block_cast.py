"""SwiGLU and per-block cast in one pass: the float32 activation is quantized without ever being stored.

    act[n, h] = ((l / (1 + exp(-l))) * r) * w[n]            see `swiglu_forward`; 0 in padding rows
    y, y_sf   = per_block_cast(act, fmt)                    see `per_block_cast`; the factor of padding blocks is 0

A thread block owns a tile of 128 channels, as in `per_block_cast`. A lane loads `rows` vectors of gate and up before it
activates one; the activations take the registers of what they are computed from. One launch, one read of x. Memory
bound: the floor is reading x and writing y. It has not been timed on a GPU. Blocks of one row are those of
`swiglu_forward_and_per_token_cast`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.activation._checks import check_halves, check_place, counted_clamp, weight_scale_of
from tile_kernels.activation._macros import (
    activate_lanes,
    add_counts,
    clear_sf_of_padding,
    find_places,
    find_real_rows,
    load_weights,
    weight_tensor,
)
from tile_kernels.activation._samples import random_halves, random_rows, row_arguments
from tile_kernels.activation.swiglu_forward_kernels import launch_forward, swiglu_forward_kernel
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.jit import kernel
from tile_kernels.core.knobs import knobs
from tile_kernels.core.lang import EARLY, WARP, T, begin_early, is_short, resident_blocks
from tile_kernels.core.op import Mut, op
from tile_kernels.device.codes import code_registers, encode_and_store
from tile_kernels.device.reduce import lane_max
from tile_kernels.device.scales import amax_to_sf, clamp_amax, sf_register_dtype, sf_tensor, store_sf
from tile_kernels.device.vectors import LANE, load_lane
from tile_kernels.quant._checks import BLOCKS, Block, block_format, check_floor
from tile_kernels.quant._macros import ROW_LANES, TILE_COLS, reduce_block, tile_rows

#: Rows and channels of the blocks that share a scale factor.
SWIGLU_BLOCKS = (*BLOCKS, (1, 128))

# Config -------------------------------------------------------------------------------------


def choose(
    hidden: int,
    out: QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    split: bool,
    weights: str,
    layout: str,
    clamped: bool,
    num_counts: int,
    num_tokens: int,
) -> dict:
    """Eight rows for each lane, 16 loads of 16 bytes. Small problems need more threads, float32 more registers: four.

    With positions or clamps, eight rows spill a little. They are still faster: two blocks of an SM overlap.
    """
    few = num_tokens * hidden < 1 << 22
    rows = 8 if x_dtype.itemsize == 2 and not few else 4
    num_threads = 128 if out.sf_block[0] == 32 else 2048 // rows
    return dict(
        rows=rows,
        num_threads=num_threads,
        resident_threads=512,
        early=is_short(3 * num_tokens * hidden * x_dtype.itemsize),
    )


# Kernel -------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(rows=(4, 8), num_threads=(128, 256, 512), resident_threads=(512, 768), early=EARLY),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def swiglu_forward_and_per_block_cast_kernel(
    hidden: int,
    out: QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    split: bool,
    weights: str,
    layout: str,
    clamped: bool,
    num_counts: int,
    *,
    rows: int,
    num_threads: int,
    resident_threads: int,
    early: bool,
):
    """One tile for each thread block; static arguments and parameters as of `swiglu_forward_kernel`."""
    height, width = out.sf_block
    lanes, num_groups, tiles_n = width // LANE, -(-hidden // width), -(-hidden // TILE_COLS)
    tile_m, last_slot = tile_rows(rows, num_threads, height), -(-hidden // LANE) - 1
    weighted, padded, counting = weights != '', layout != '', num_counts > 0
    piece, up_offset = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden), 0 if split else hidden
    num_tokens, x_pitch, up_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch'), T.dynamic('up_pitch')

    @T.prim_func
    def swiglu_forward_and_per_block_cast(
        x: T.StridedTensor((num_tokens, hidden if split else 2 * hidden), (x_pitch, 1), T.dtype(x_dtype)),
        up: T.StridedTensor((num_tokens, hidden), (up_pitch, 1), T.dtype(x_dtype)),
        y: T.Tensor((num_tokens, out.data.stored(hidden)), T.dtype(out.data.torch)),
        y_sf: sf_tensor(out, T.dynamic('sf_rows'), num_groups),
        row_weights: weight_tensor(weights, num_tokens),
        pos_to_token_topk: T.Tensor((num_tokens,), T.int32),
        pos_to_expert: T.Tensor((num_tokens,), T.int32),
        psum: T.Tensor((T.dynamic('num_experts'),), T.int32),
        clamped_count: T.Tensor((max(num_counts, 1),), T.int64),
        weight_scale: T.float32,
        clamp_value: T.float32,
        alignment: T.int32,
        amax_floor: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, tile_m) * tiles_n, threads=num_threads) as pid:
            if early:
                begin_early()
            T.assume(x_pitch % piece == 0)
            if split:
                T.assume(up_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            row = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            real = T.alloc_local((rows,), T.int32)
            place = T.alloc_local((rows,), T.int32)
            weight = T.alloc_local((rows,), T.float32)
            counts = T.alloc_local((4,), T.float32)
            gate_local = T.alloc_local((rows, LANE), T.dtype(x_dtype))
            up_local = T.alloc_local((rows, LANE), T.dtype(x_dtype))
            act_local = T.alloc_local((rows, LANE), T.float32)
            amax = T.alloc_local((1,), T.float32)
            amax_shared = T.alloc_shared((num_threads // WARP, ROW_LANES // lanes), T.float32)
            sf = T.alloc_local((1,), sf_register_dtype(out))
            sf_inv = T.alloc_local((1,), T.float32)
            v_local = T.alloc_local((LANE,), T.float32)
            y_local = T.alloc_local(*code_registers(out))
            thread = T.get_thread_binding()
            lane = thread % ROW_LANES
            slot = pid % tiles_n * ROW_LANES + lane
            row = pid // tiles_n * tile_m + thread // ROW_LANES * rows

            find_real_rows(layout, pos_to_expert, psum, alignment, row, num_tokens, real)
            if weighted:
                find_places(weights, pos_to_token_topk, row, num_tokens, place)
            if counting:
                T.clear(counts)
                for i in T.unroll(rows):
                    if num_counts == 4:
                        counts[3] += T.Select(slot == 0, T.cast(real[i], T.float32), T.float32(0.0))  # rows
                    real[i] = T.Select(slot > last_slot, 0, real[i])  # a lane past the edge counts nothing

            # past the edges the last row or lane is read again, which changes no maximum; padding rows are not read
            read_slot = T.min(slot, last_slot)
            T.assume(read_slot <= last_slot)
            if padded or hidden % LANE > 0:
                T.clear(gate_local)
                T.clear(up_local)
            for i in T.unroll(rows):
                if not padded or real[i] != 0:
                    source = T.min(row + i, num_tokens - 1)
                    load_lane(x, gate_local, i, source, read_slot, piece, hidden)
                    load_lane(up if split else x, up_local, i, source, read_slot, piece, hidden, first=up_offset)
            if weighted:
                load_weights(weights, row_weights, weight_scale, place, real, weight)
            activate_lanes(
                gate_local,
                up_local,
                weight if weighted else None,
                real,
                1,
                padded,
                clamped,
                clamp_value,
                counts if counting else None,
                act_local,
            )

            amax[0] = T.float32(0.0)
            if padded:  # the maximum of a block stays negative if no lane has a real row
                amax[0] = T.float32(-1.0)
                for i in T.unroll(rows):
                    amax[0] = T.Select(real[i] != 0, T.float32(0.0), amax[0])
            for i in T.unroll(rows):
                if not padded or real[i] != 0:
                    amax[0] = T.max(amax[0], lane_max(act_local, i))
            reduce_block(amax, height, lanes, rows, lane, thread // WARP, amax_shared)
            amax_to_sf(clamp_amax(amax[0], amax_floor), out, sf, sf_inv, 0)
            if padded:
                clear_sf_of_padding(T.Select(amax[0] < T.float32(0.0), 0, 1), sf, 0)
            first = thread // ROW_LANES * rows % height == 0 and lane % lanes == 0
            if first and row < num_tokens and slot * LANE < hidden:
                store_sf(y_sf, out, num_groups, row // height, slot // lanes, sf[0])
            for i in T.unroll(rows):
                encode_and_store(act_local, i, out, 'cast', sf_inv[0], v_local, y_local, y, row + i, slot, hidden)
            if counting:
                counts_shared = T.alloc_shared((num_threads // WARP, num_counts), T.int32)
                T.sync_threads()  # the maxima may be in the same memory
                add_counts(counts, num_counts, counts_shared, clamped_count, num_threads, hidden)

    return swiglu_forward_and_per_block_cast


# Op -----------------------------------------------------------------------------------------


@op(outputs='y y_sf')
def _swiglu_forward_and_per_block_cast(
    x: Tensor,
    fmt: QuantFormat,
    up: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    psum: Tensor | None = None,
    weight_scale: float = 1.0,
    clamp_value: float | None = None,
    clamped_count: Mut | None = None,
    alignment: int = 128,
    amax_floor: float | None = None,
) -> QuantTensor:
    """SwiGLU, quantized in blocks from its float32 result; arguments as of `swiglu_forward_and_per_token_cast.call`.

    The codes of padding rows are 0; they do not change the scale factor of their block. A block without a real row has
    the factor 0.
    """
    num_tokens, hidden = check_halves(x, up)
    check.one_of(fmt.data.name, ('e4m3', 'e5m2', 'e2m1'), 'fmt.data')
    check.one_of(fmt.sf_block, SWIGLU_BLOCKS, 'fmt.sf_block')
    check.multiple(hidden, fmt.data.pack, 'hidden')
    floor = check_floor(amax_floor, fmt)
    y = fmt.empty(num_tokens, hidden, x.device)
    rows = (topk_weights, pos_to_token_topk, pos_to_expert, psum)
    builder = swiglu_forward_kernel if fmt.sf_block[0] == 1 else swiglu_forward_and_per_block_cast_kernel
    clamp = clamp_value, clamped_count
    launch_forward(x, up, hidden, fmt, y.data, y.sf, *rows, weight_scale, *clamp, alignment, floor, builder)
    return y


@_swiglu_forward_and_per_block_cast.public
def swiglu_forward_and_per_block_cast(
    x: Tensor,
    fmt: str | QuantFormat,
    block_size: Block | None = None,
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    sf_clamp_min: float | None = None,
    *,
    psum_num_tokens_per_expert: Tensor | None = None,
    routed_scaling_factor: float | None = None,
) -> QuantTensor:
    """SwiGLU, quantized in blocks of rows and channels from its float32 result.

    Args:
        x: (num_rows, 2 * hidden) gate and up side by side, bfloat16, float16 or float32, any row stride, any hidden.
        fmt: 'e4m3', 'e5m2' or 'e2m1' with the arguments below, or a whole format such as 'e4m3_128x128_f32' without
            them.
        block_size: rows and channels that share a scale factor: each 32 or 128, or (1, 128); None for (128, 128).
        pos_to_token_topk: (num_rows,) int32, place of each row's weight in the flat `topk_weights`; -1: weight 0. Says
            nothing without weights.
        topk_weights: float32, (num_tokens, num_topk) with a map, else (num_rows,).
        pos_to_expert: (num_rows,) int32, negative for padding rows.
        use_tma_aligned_col_major_sf: column-major scale factors with 16-byte aligned columns.
        round_sf: scale factors are rounded up to powers of two.
        use_packed_ue8m0: four exponent bytes in an int32; needs `round_sf`.
        swiglu_clamp_value: gate at most this, up within plus and minus this.
        clamped_count: (3,) or (4,) int64, added to: gate > c, up > c, up < -c (nothing without a clamp) and elements
            outside padding rows.
        sf_clamp_min: smallest amax a block is scaled by.
        psum_num_tokens_per_expert: (num_experts,) int32, where the rows of each expert end; other rows are padding.
        routed_scaling_factor: factor of the weights.

    Returns:
        `QuantTensor`, which unpacks as (data, sf). Data is 0 in padding rows, and sf is 0 for blocks of padding rows.
        Codes have no gradient; `swiglu_backward` takes x and the gradient of the activation.
    """
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0
    num_rows, _ = check.shape(x, 'x', 'num_rows 2*hidden')
    if block_size is None and isinstance(fmt, str) and '_' not in fmt:
        block_size = (128, 128)
    return swiglu_forward_and_per_block_cast.call(
        x,
        block_format(fmt, block_size, *flags, blocks=SWIGLU_BLOCKS),
        None,
        topk_weights,
        check_place(pos_to_token_topk, topk_weights, num_rows),
        pos_to_expert,
        psum_num_tokens_per_expert,
        weight_scale_of(routed_scaling_factor, topk_weights),
        counted_clamp(swiglu_clamp_value, clamped_count),
        clamped_count,
        knobs.token_alignment,
        sf_clamp_min,
    )


# Cases --------------------------------------------------------------------------------------


def _make(
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    fmt: str,
    rows: str = '',
    num_counts: int = 0,
    clamp_value: float | None = None,
    split: bool = False,
    pitch: int | None = None,
) -> dict:
    """With `split`, gate and up are two tensors, strided if a pitch is given."""
    counts = torch.arange(num_counts) if num_counts else None
    made: dict[str, Any] = dict(fmt=QuantFormat.parse(fmt), clamp_value=clamp_value, clamped_count=counts)
    if not split:
        return made | random_rows(num_tokens, hidden, dtype, rows)
    x, up = (random_halves(num_tokens, hidden, dtype, pitch) for _ in range(2))
    return made | dict(x=x, up=up) | row_arguments(num_tokens, rows)


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
SF_NAMES = ('f32', 'f32_col', 'f32p2', 'f32p2_col', 'ue8m0x4', 'ue8m0x4_col', 'e4m3', 'e4m3_col')
FULL_FORMATS = [f'{d}_{m}x{n}_{sf}' for d in ('e4m3', 'e5m2', 'e2m1') for m, n in SWIGLU_BLOCKS for sf in SF_NAMES]
FULL_ROWS = (
    dict(num_tokens=4001, hidden=2048, dtype=torch.bfloat16, rows='map', num_counts=3, clamp_value=0.5),
    dict(num_tokens=2049, hidden=1090, dtype=torch.float32, rows='psum', num_counts=4, clamp_value=10.0),
    dict(num_tokens=257, hidden=3584, dtype=torch.float16, split=True, pitch=3600, rows='row'),
)
swiglu_forward_and_per_block_cast.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1, 133], hidden=[128], dtype=BF16, fmt=['e4m3_128x128_f32'])
    + grid(num_tokens=[133], hidden=[272], dtype=BF16, fmt=['e4m3_32x32_ue8m0x4_col'], rows=['map'])
    + grid(num_tokens=[9], hidden=[272], dtype=BF16, fmt=['e4m3_1x128_f32'], rows=['psum'])  # the kernel of tokens
    + grid(
        num_tokens=[70],
        hidden=[98],
        dtype=F32,
        fmt=['e2m1_32x32_f32'],
        rows=['psum'],
        num_counts=[4],
        clamp_value=[1.0],
    )
    + grid(num_tokens=[33], hidden=[99], dtype=F16, fmt=['e5m2_32x128_f32p2_col'], split=[True], pitch=[101])
    + grid(
        num_tokens=[130],
        hidden=[136],
        dtype=BF16,
        fmt=['e4m3_128x32_e4m3'],
        rows=['row'],
        num_counts=[3],
        clamp_value=[1.0],
        split=[True],
    ),
    full=[dict(FULL_ROWS[index % len(FULL_ROWS)], fmt=fmt) for index, fmt in enumerate(FULL_FORMATS)]
    + grid(num_tokens=[600001], hidden=[2048], dtype=BF16, fmt=['e4m3_128x128_f32']),  # past 2^31 elements
    bench=grid(num_tokens=[64, 4096, 16384], hidden=[2048], dtype=BF16, fmt=['e4m3_128x128_f32'])
    + grid(num_tokens=[4096], hidden=[2048], dtype=BF16, fmt=['e4m3_32x32_f32', 'e4m3_1x128_f32'])
    + grid(num_tokens=[4096], hidden=[2048], dtype=BF16, fmt=['e4m3_128x128_f32'], split=[True])
    + grid(
        num_tokens=[8001],
        hidden=[3584],
        dtype=BF16,
        fmt=['e4m3_128x128_f32'],
        rows=['map', 'psum'],
        num_counts=[3],
        clamp_value=[10.0],
    )
    + grid(num_tokens=[32001], hidden=[576, 1344], dtype=BF16, fmt=['e4m3_128x128_f32']),
)
