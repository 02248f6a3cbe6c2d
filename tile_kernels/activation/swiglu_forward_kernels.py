"""The kernel of the SwiGLU forward pass, with or without a per-token cast; see the ops for the maths.

A thread owns `vectors` vectors of 8 channels, gate and up, and loads all of them first. They lie in neighbouring rows,
where a group of channels that shares a scale factor is at most a warp and is reduced by shuffles. Where a whole row has
one factor and is wider than that, a block owns the row, and the vectors lie along it. Their activations stay in
registers until the factor is known. Rows too long for that are read and activated twice.
"""

import math

import torch
from torch import Tensor

from tile_kernels.activation._checks import check_clamp, check_counts, check_layout, check_weights
from tile_kernels.activation._macros import (
    activate_lanes,
    add_counts,
    clear_sf_of_padding,
    find_places,
    find_real_rows,
    load_weights,
    scale_groups,
    weight_tensor,
)
from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.jit import Kernel, kernel
from tile_kernels.core.lang import EARLY, WARP, T, begin_early, is_short, macro, resident_blocks
from tile_kernels.core.launch import launch
from tile_kernels.device.codes import code_registers, encode_and_store
from tile_kernels.device.reduce import lane_max, shuffle_steps
from tile_kernels.device.scales import amax_to_sf, clamp_amax, group_lanes, sf_register_dtype, sf_tensor, store_sf
from tile_kernels.device.vectors import LANE, load_lane, round_lane, store_lane

# Config -------------------------------------------------------------------------------------


def owns_row(hidden: int, out: torch.dtype | QuantFormat) -> bool:
    """Whether a thread block owns a row, because the channels that share a scale factor are more than a warp's."""
    return isinstance(out, QuantFormat) and group_lanes(hidden, out) > WARP


def choose(
    hidden: int,
    out: torch.dtype | QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    split: bool,
    weights: str,
    layout: str,
    clamped: bool,
    num_counts: int,
    num_tokens: int,
) -> dict:
    """Two vectors of each half for a thread, four loads of 16 bytes, unless that would leave the GPU half empty.

    Where there is work for many waves, four rows share the cost of finding scale factors; float32 rows are too wide.
    A long row that a block owns needs more vectors to fit.
    """
    lanes = -(-hidden // LANE)
    few = num_tokens * lanes < 2 << 17
    early = is_short(3 * num_tokens * hidden * x_dtype.itemsize)
    if owns_row(hidden, out):
        vectors = 1 if few and lanes <= 1024 else 2 if lanes <= 2048 else 4
        return dict(vectors=vectors, num_threads=512 if vectors == 4 else 1024, resident_threads=1024, early=early)
    if num_tokens * lanes >= 16 << 17 and x_dtype.itemsize == 2:
        return dict(vectors=4, num_threads=64, resident_threads=768, early=early)
    return dict(vectors=1 if few else 2, num_threads=128, resident_threads=1024, early=early)


# Kernel -------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(vectors=(1, 2, 4), num_threads=(64, 128, 256, 512, 1024), resident_threads=(768, 1024), early=EARLY),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def swiglu_forward_kernel(
    hidden: int,
    out: torch.dtype | QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    split: bool,
    weights: str,
    layout: str,
    clamped: bool,
    num_counts: int,
    *,
    vectors: int,
    num_threads: int,
    resident_threads: int,
    early: bool = False,
):
    """`out` is a dtype or a format; `split`: gate and up are two tensors. A block has at most `num_threads` threads."""
    quantized, weighted, counting = isinstance(out, QuantFormat), weights != '', num_counts > 0
    whole_row = owns_row(hidden, out)
    row_lanes = -(-hidden // LANE)
    if whole_row:
        num_threads = min(num_threads, -(-row_lanes // (vectors * WARP)) * WARP)
        lanes, num_groups, num_passes = row_lanes, 1, -(-row_lanes // (vectors * num_threads))
        row_step, slot_step = 0, num_threads
    else:
        lanes = group_lanes(hidden, out) if quantized else 1
        num_groups, num_passes = -(-row_lanes // lanes), 1
        row_lanes = num_groups * lanes
        row_step, slot_step = 1, 0
    rows = 1 if whole_row else vectors
    # every lane has channels, and a row past the end may repeat the last one, because it is neither stored nor counted
    full = layout == '' and hidden == row_lanes * LANE
    full = full and (not whole_row or row_lanes % (vectors * num_threads) == 0)
    out_dtype = out.data.torch if quantized else out
    piece, up_offset = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden), 0 if split else hidden
    num_tokens, x_pitch, up_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch'), T.dynamic('up_pitch')

    @macro
    def load(x, up, row, slot, real, gate_local, up_local):
        if full:
            for i in T.unroll(vectors):
                at, source = slot + i * slot_step, T.min(row + i * row_step, num_tokens - 1)
                load_lane(x, gate_local, i, source, at, piece, None)
                load_lane(up if split else x, up_local, i, source, at, piece, None, first=up_offset)
        else:
            T.clear(gate_local)
            T.clear(up_local)
            for i in T.unroll(vectors):
                if real[i * row_step] != 0:
                    at, source = slot + i * slot_step, row + i * row_step
                    load_lane(x, gate_local, i, source, at, piece, hidden)
                    load_lane(up if split else x, up_local, i, source, at, piece, hidden, first=up_offset)

    @macro
    def activate(gate_local, up_local, weight, real, clamp_value, counts, act_local):
        row_weights, skipping = weight if weighted else None, layout != ''
        activate_lanes(
            gate_local, up_local, row_weights, real, row_step, skipping, clamped, clamp_value, counts, act_local
        )

    @T.prim_func
    def swiglu_forward(
        x: T.StridedTensor((num_tokens, hidden if split else 2 * hidden), (x_pitch, 1), T.dtype(x_dtype)),
        up: T.StridedTensor((num_tokens, hidden), (up_pitch, 1), T.dtype(x_dtype)),
        y: T.Tensor((num_tokens, out.data.stored(hidden) if quantized else hidden), T.dtype(out_dtype)),
        y_sf: sf_tensor(out, num_tokens, num_groups) if quantized else T.Tensor((num_tokens, 1), T.float32),
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
        with T.Kernel(
            num_tokens if whole_row else T.ceildiv(T.ceildiv(num_tokens, rows) * row_lanes, num_threads),
            threads=num_threads,
        ) as pid:
            if early:
                begin_early()
            T.assume(x_pitch % piece == 0)
            if split:
                T.assume(up_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            thread = T.get_thread_binding()
            row = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            real = T.alloc_local((rows,), T.int32)
            place = T.alloc_local((rows,), T.int32)
            weight = T.alloc_local((rows,), T.float32)
            counts = T.alloc_local((4,), T.float32)
            gate_local = T.alloc_local((vectors, LANE), T.dtype(x_dtype))
            up_local = T.alloc_local((vectors, LANE), T.dtype(x_dtype))
            act_local = T.alloc_local((vectors, LANE), T.float32)
            row = pid if whole_row else (pid * num_threads + thread) // row_lanes * rows
            slot = thread if whole_row else (pid * num_threads + thread) % row_lanes

            find_real_rows(layout, pos_to_expert, psum, alignment, row, num_tokens, real)
            if weighted:
                find_places(weights, pos_to_token_topk, row, num_tokens, place)
            if counting:
                T.clear(counts)
                if num_counts == 4:
                    for i in T.unroll(rows):
                        counts[3] += T.Select(slot == 0, T.cast(real[i], T.float32), T.float32(0.0))  # rows

            row_amax = T.alloc_local((1,), T.float32)
            row_amax[0] = T.float32(0.0)
            for turn in T.serial(num_passes):
                load(x, up, row, slot + turn * vectors * num_threads, real, gate_local, up_local)
                if weighted and turn == 0:
                    load_weights(weights, row_weights, weight_scale, place, real, weight)
                activate(gate_local, up_local, weight, real, clamp_value, counts if counting else None, act_local)
                if whole_row:
                    for i in T.unroll(vectors):
                        row_amax[0] = T.max(row_amax[0], lane_max(act_local, i))

            if quantized:
                sf_inv = T.alloc_local((rows,), T.float32)
                v_local = T.alloc_local((LANE,), T.float32)
                y_local = T.alloc_local(*code_registers(out))
                padded = real if layout != '' else None
                if whole_row:
                    scale_row(row_amax, out, num_threads, row, padded, amax_floor, y_sf, sf_inv)
                else:
                    scale_groups(
                        act_local,
                        out,
                        lanes,
                        num_groups,
                        row,
                        row_step,
                        slot // lanes,
                        0,
                        num_tokens,
                        padded,
                        amax_floor,
                        y_sf,
                        sf_inv,
                    )
                for turn in T.serial(num_passes):
                    start = slot + turn * vectors * num_threads
                    if num_passes > 1:
                        load(x, up, row, start, real, gate_local, up_local)
                        activate(gate_local, up_local, weight, real, clamp_value, None, act_local)
                    for i in T.unroll(vectors):
                        at, inverse = start + i * slot_step, sf_inv[i * row_step]
                        encode_and_store(
                            act_local, i, out, 'cast', inverse, v_local, y_local, y, row + i * row_step, at, hidden
                        )
            else:
                rounded = T.alloc_local((LANE,), T.dtype(out_dtype))
                y_piece = math.gcd(LANE, 16 // out_dtype.itemsize, hidden)
                for i in T.unroll(vectors):
                    round_lane(act_local, i, rounded)
                    if row + i < num_tokens:
                        store_lane(y, rounded, row + i, slot, y_piece, hidden, LANE)
            if counting:
                counts_shared = T.alloc_shared((num_threads // WARP, num_counts), T.int32)
                add_counts(counts, num_counts, counts_shared, clamped_count, num_threads, hidden)

    return swiglu_forward


@macro
def scale_row(row_amax, fmt, num_threads, row, real, amax_floor, y_sf, sf_inv):
    """Scale factor of a row that a block owns, from the amax of each thread; `sf_inv[0]` is its multiplier."""
    thread, num_warps = T.get_thread_binding(), num_threads // WARP
    sf = T.alloc_local((1,), sf_register_dtype(fmt))
    for step in T.unroll(shuffle_steps(WARP)):
        row_amax[0] = T.max(row_amax[0], T.shfl_xor(row_amax[0], 1 << step))
    if num_warps > 1:
        warp_amax = T.alloc_shared((num_warps,), T.float32)
        if thread % WARP == 0:
            warp_amax[thread // WARP] = row_amax[0]
        T.sync_threads()
        for warp in T.unroll(num_warps):
            row_amax[0] = T.max(row_amax[0], warp_amax[warp])
    amax_to_sf(clamp_amax(row_amax[0], amax_floor), fmt, sf, sf_inv, 0)
    if real is not None:
        clear_sf_of_padding(real[0], sf, 0)
    if thread == 0:
        store_sf(y_sf, fmt, 1, row, 0, sf[0])


# Launch -------------------------------------------------------------------------------------


def launch_forward(
    x: Tensor,
    up: Tensor | None,
    hidden: int,
    out: torch.dtype | QuantFormat,
    y: Tensor,
    y_sf: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    pos_to_expert: Tensor | None,
    psum: Tensor | None,
    weight_scale: float,
    clamp_value: float | None,
    clamped_count: Tensor | None,
    alignment: int,
    amax_floor: float,
    builder: Kernel = swiglu_forward_kernel,
) -> None:
    """Check what describes the rows and launch the kernel, which fills y and y_sf.

    `builder` has the static arguments and the parameters of `swiglu_forward_kernel`.
    """
    num_tokens, clamp = x.shape[0], check_clamp(clamp_value)
    static = (
        *(hidden, out, x.dtype, check.vector_bytes(x, up), up is not None),
        check_weights(x, num_tokens, topk_weights, pos_to_token_topk),
        check_layout(x, num_tokens, pos_to_expert, psum, alignment),
        clamp_value is not None,
        check_counts(x, clamp_value, clamped_count),
    )
    rows = (topk_weights, pos_to_token_topk, pos_to_expert, psum, clamped_count)
    launch(builder, static, x, up, y, y_sf, *rows, weight_scale, clamp, alignment, amax_floor)
