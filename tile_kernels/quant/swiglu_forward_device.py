"""The kernels of the SwiGLU forward pass, with or without a per-token cast; see the ops for the maths.

A lane owns 8 channels of `rows` neighbouring rows, gate and up, and loads all of them first. A group of channels that
shares a scale factor is at most a warp, so it is reduced by shuffles; a whole row is owned by a block, which keeps its
activations in registers (rows too long for that are read and activated twice).
"""

import math

import torch

from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.quant._blocks import resident_blocks
from tile_kernels.quant._macros import (
    LANE,
    amax_to_sf,
    clamp_amax,
    lane_amax,
    sf_register_dtype,
    sf_tensor,
    shuffle_steps,
    store_sf,
)
from tile_kernels.quant._swiglu_macros import (
    activate_lane,
    add_counts,
    clear_sf_of_padding,
    group_lanes,
    load_half,
    load_weight,
    mark_owned_rows,
    round_lane,
    row_is_real,
    scale_groups,
    store_half,
    weight_tensor,
)
from tile_kernels.quant.per_token_cast import _code_registers, encode_and_store

WARP = 32


# Config -------------------------------------------------------------------------------------


def choose_grouped(
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
    """Two rows for each lane, four loads of 16 bytes, unless that would leave the GPU half empty.

    Where there is work for many waves, four rows share the cost of finding scale factors; float32 rows are too wide.
    """
    lanes = num_tokens * -(-hidden // LANE)
    if lanes >= 16 << 17 and x_dtype.itemsize == 2:
        return dict(rows=4, num_threads=128, resident_threads=768)
    rows = 2 if lanes >= 2 << 17 else 1
    return dict(rows=rows, num_threads=256 if rows == 2 else 128, resident_threads=1024)


def choose_row(
    hidden: int,
    fmt: QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    split: bool,
    weights: str,
    layout: str,
    clamped: bool,
    num_counts: int,
    num_tokens: int,
) -> dict:
    """Two vectors of each half for each thread, four loads of 16 bytes; one where rows are few, more for long rows."""
    lanes = -(-hidden // LANE)
    if num_tokens * lanes < 2 << 17 and lanes <= 1024:
        return dict(vectors=1)
    return dict(vectors=2 if lanes <= 2048 else 4)


# Kernels ------------------------------------------------------------------------------------


@kernel(
    choose=choose_grouped,
    space=dict(rows=(1, 2, 4), num_threads=(128, 256, 512), resident_threads=(768, 1024)),
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
    rows: int,
    num_threads: int,
    resident_threads: int,
):
    """`out` is a dtype, or a format with groups of at most a warp; `split` says that gate and up are two tensors."""
    quantised, weighted, counting = isinstance(out, QuantFormat), weights != '', num_counts > 0
    lanes = group_lanes(hidden, out) if quantised else 1
    num_groups = -(-hidden // (lanes * LANE))
    row_lanes = num_groups * lanes
    window = ((num_threads - 1) // row_lanes + 2) * rows
    width = out.data.stored(hidden) if quantised else hidden
    out_dtype = out.data.torch if quantised else out
    piece = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden)
    out_piece = math.gcd(LANE, 16 // out_dtype.itemsize, hidden)
    num_tokens, x_pitch, up_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch'), T.dynamic('up_pitch')
    columns = hidden if split else 2 * hidden

    @T.prim_func
    def swiglu_forward(
        x: T.StridedTensor((num_tokens, columns), (x_pitch, 1), T.dtype(x_dtype)),
        up: T.StridedTensor((num_tokens, hidden), (up_pitch, 1), T.dtype(x_dtype)),
        y: T.Tensor((num_tokens, width), T.dtype(out_dtype)),
        y_sf: sf_tensor(out, num_tokens, num_groups) if quantised else T.Tensor((num_tokens, 1), T.float32),
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
        with T.Kernel(T.ceildiv(T.ceildiv(num_tokens, rows) * row_lanes, num_threads), threads=num_threads) as pid:
            T.assume(x_pitch % piece == 0)
            if split:
                T.assume(up_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            first = T.alloc_var(T.int32)
            row = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            real = T.alloc_local((rows,), T.int32)
            weight = T.alloc_local((rows,), T.float32)
            gate_local = T.alloc_local((rows, LANE), T.dtype(x_dtype))
            up_local = T.alloc_local((rows, LANE), T.dtype(x_dtype))
            act_local = T.alloc_local((rows, LANE), T.float32)
            index = pid * num_threads + T.get_thread_binding()
            first = pid * num_threads // row_lanes * rows
            row = index // row_lanes * rows
            slot = index % row_lanes

            owned_shared = T.alloc_shared((window,), T.int32)
            if layout == 'psum':
                mark_owned_rows(psum, alignment, first, owned_shared, num_threads)
            T.clear(gate_local)
            T.clear(up_local)
            for i in T.unroll(rows):
                row_is_real(layout, pos_to_expert, owned_shared, first, row + i, num_tokens, real, i)
            for i in T.unroll(rows):
                if real[i] != 0:
                    load_half(x, gate_local, i, row + i, 0, slot, piece, hidden)
                    load_half(up if split else x, up_local, i, row + i, 0 if split else hidden, slot, piece, hidden)
            if weighted:
                for i in T.unroll(rows):
                    weight[i] = T.float32(0.0)
                    if real[i] != 0:
                        load_weight(row_weights, pos_to_token_topk, weights, row + i, weight_scale, weight, i)

            counts = T.alloc_local((4,), T.int32)
            if counting:
                T.clear(counts)
            for i in T.unroll(rows):
                row_weight = weight[i] if weighted else None
                counted = counts if counting else None
                activate_lane(gate_local, up_local, i, row_weight, clamped, clamp_value, counted, act_local)
                if num_counts == 4:
                    counts[3] += T.if_then_else(slot == 0, real[i] * hidden, 0)
            if counting:
                counts_shared = T.alloc_shared((num_threads // WARP, num_counts), T.int32)
                add_counts(counts, num_counts, counts_shared, clamped_count, num_threads)

            if quantised:
                sf_inv = T.alloc_local((rows,), T.float32)
                v_local = T.alloc_local((LANE,), T.float32)
                y_local = T.alloc_local(*_code_registers(out))
                padded = real if layout != '' else None
                scale_groups(
                    act_local,
                    out,
                    lanes,
                    num_groups,
                    row,
                    slot,
                    slot // lanes,
                    num_tokens,
                    padded,
                    amax_floor,
                    y_sf,
                    sf_inv,
                )
                for i in T.unroll(rows):
                    encode_and_store(act_local, i, out, 'cast', sf_inv[i], v_local, y_local, y, row + i, slot, hidden)
            else:
                rounded = T.alloc_local((LANE,), T.dtype(out_dtype))
                for i in T.unroll(rows):
                    round_lane(act_local, i, rounded)
                    if row + i < num_tokens:
                        store_half(y, rounded, row + i, 0, slot, out_piece, hidden)

    return swiglu_forward


@kernel(choose=choose_row, space=dict(vectors=(1, 2, 4)), pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def swiglu_forward_and_row_cast_kernel(
    hidden: int,
    fmt: QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    split: bool,
    weights: str,
    layout: str,
    clamped: bool,
    num_counts: int,
    *,
    vectors: int,
):
    """Whole rows, one block each: `vectors` times 8 channels for every thread and pass."""
    lanes, weighted, counting = -(-hidden // LANE), weights != '', num_counts > 0
    num_threads = min(512 if vectors > 2 else 1024, -(-lanes // (vectors * WARP)) * WARP)
    num_passes = -(-lanes // (vectors * num_threads))
    num_warps = num_threads // WARP
    piece = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden)
    num_tokens, x_pitch, up_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch'), T.dynamic('up_pitch')
    columns = hidden if split else 2 * hidden

    @macro
    def load_row(x, up, gate_local, up_local, row, turn, is_real):
        T.clear(gate_local)
        T.clear(up_local)
        if is_real != 0:
            for i in T.unroll(vectors):
                slot = (turn * vectors + i) * num_threads + T.get_thread_binding()
                load_half(x, gate_local, i, row, 0, slot, piece, hidden)
                load_half(up if split else x, up_local, i, row, 0 if split else hidden, slot, piece, hidden)

    @T.prim_func
    def swiglu_forward_and_row_cast(
        x: T.StridedTensor((num_tokens, columns), (x_pitch, 1), T.dtype(x_dtype)),
        up: T.StridedTensor((num_tokens, hidden), (up_pitch, 1), T.dtype(x_dtype)),
        y: T.Tensor((num_tokens, fmt.data.stored(hidden)), T.dtype(fmt.data.torch)),
        y_sf: sf_tensor(fmt, num_tokens, 1),
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
        with T.Kernel(num_tokens, threads=num_threads) as row:
            T.assume(x_pitch % piece == 0)
            if split:
                T.assume(up_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(max(1, 1024 // num_threads))
            thread = T.get_thread_binding()
            real = T.alloc_local((1,), T.int32)
            weight = T.alloc_local((1,), T.float32)
            counts = T.alloc_local((4,), T.int32)
            gate_local = T.alloc_local((vectors, LANE), T.dtype(x_dtype))
            up_local = T.alloc_local((vectors, LANE), T.dtype(x_dtype))
            act_local = T.alloc_local((vectors, LANE), T.float32)
            amax = T.alloc_local((vectors,), T.float32)
            row_amax = T.alloc_var(T.float32)
            warp_amax = T.alloc_shared((num_warps,), T.float32)
            owned_shared = T.alloc_shared((1,), T.int32)
            sf = T.alloc_local((1,), sf_register_dtype(fmt))
            sf_inv = T.alloc_local((1,), T.float32)
            v_local = T.alloc_local((LANE,), T.float32)
            y_local = T.alloc_local(*_code_registers(fmt))

            if layout == 'psum':
                mark_owned_rows(psum, alignment, row, owned_shared, num_threads)
            row_is_real(layout, pos_to_expert, owned_shared, row, row, num_tokens, real, 0)
            if weighted:
                load_weight(row_weights, pos_to_token_topk, weights, row, weight_scale, weight, 0)
            row_weight = weight[0] if weighted else None
            if counting:
                T.clear(counts)
                if num_counts == 4:
                    counts[3] = T.if_then_else(thread == 0, real[0] * hidden, 0)

            T.clear(amax)
            for turn in T.serial(num_passes):
                load_row(x, up, gate_local, up_local, row, turn, real[0])
                for i in T.unroll(vectors):
                    counted = counts if counting else None
                    activate_lane(gate_local, up_local, i, row_weight, clamped, clamp_value, counted, act_local)
                    lane_amax(act_local, i, amax)
            row_amax = amax[0]
            for i in T.unroll(vectors - 1):
                row_amax = T.max(row_amax, amax[i + 1])
            for step in T.unroll(shuffle_steps(WARP)):
                row_amax = T.max(row_amax, T.shfl_xor(row_amax, 1 << step))
            if num_warps > 1:
                if thread % WARP == 0:
                    warp_amax[thread // WARP] = row_amax
                T.sync_threads()
                for warp in T.unroll(num_warps):
                    row_amax = T.max(row_amax, warp_amax[warp])
            amax_to_sf(clamp_amax(row_amax, amax_floor), fmt, sf, sf_inv, 0)
            if layout != '':
                clear_sf_of_padding(real[0], sf, 0)
            if thread == 0:
                store_sf(y_sf, fmt, 1, row, 0, sf[0])

            for turn in T.serial(num_passes):
                if num_passes > 1:
                    load_row(x, up, gate_local, up_local, row, turn, real[0])
                    for i in T.unroll(vectors):
                        activate_lane(gate_local, up_local, i, row_weight, clamped, clamp_value, None, act_local)
                for i in T.unroll(vectors):
                    slot = (turn * vectors + i) * num_threads + thread
                    encode_and_store(act_local, i, fmt, 'cast', sf_inv[0], v_local, y_local, y, row, slot, hidden)
            if counting:
                counts_shared = T.alloc_shared((num_warps, num_counts), T.int32)
                add_counts(counts, num_counts, counts_shared, clamped_count, num_threads)

    return swiglu_forward_and_row_cast
