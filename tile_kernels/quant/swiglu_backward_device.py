"""The kernel of the SwiGLU gradients; see `swiglu_backward` for the maths.

A team of threads owns `rows` neighbouring rows at a time and goes through their channels, 8 to a lane, so the sum for a
weight never leaves a block and is the same in every run. Where gradients are quantised, a group of a row lies in one
half and is reduced by shuffles, or it may hold the end of one half and the beginning of the other: then amaxes are
merged in shared memory.
"""

import math

import torch

from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.quant._blocks import resident_blocks, sf_value
from tile_kernels.quant._macros import LANE, amax_to_sf, clamp_amax, lane_amax, sf_register_dtype, sf_tensor, store_sf
from tile_kernels.quant._swiglu_macros import (
    clamp_gate,
    clamp_up,
    clear_sf_of_padding,
    flat,
    load_half,
    load_weight,
    mark_owned_rows,
    round_lane,
    row_is_real,
    scale_groups,
    sigmoid_lane,
    store_half,
    widen_lane,
)

WARP = 32
MAX_ROW_THREADS = 1024
TURN_THREADS = 256


# Config -------------------------------------------------------------------------------------


def row_threads(hidden: int, merged: bool) -> int:
    """Threads that own a row: whole warps, one lane for each 8 channels, or several turns of as many.

    Groups merged in shared memory (`merged`) are complete after one turn only.
    """
    lanes = -(-hidden // LANE)
    turns = -(-lanes // (MAX_ROW_THREADS if merged else TURN_THREADS))
    return -(-lanes // (turns * WARP)) * WARP


def choose(
    hidden: int,
    source: torch.dtype | QuantFormat,
    dy_dtype: torch.dtype,
    dx_dtype: torch.dtype,
    fmt: QuantFormat | None,
    vector_bytes: int,
    weights: str,
    layout: str,
    clamped: bool,
    recompute: bool,
    zero_slots: bool,
    num_tokens: int,
) -> dict:
    """Two rows at a time, six loads for each lane, where there are rows enough; short rows share a block.

    Quantised gradients stay in registers until their group is known, and clamps need what was there before: 768
    threads do not leave enough registers for two rows of either.
    """
    many = num_tokens * -(-hidden // LANE) >= 2 << 17
    crowded = many and (fmt is not None or clamped)
    return dict(rows=2 if many else 1, block_threads=128, resident_threads=512 if crowded else 768)


# Kernel -------------------------------------------------------------------------------------


@macro
def widen_source(codes, i, factor, v_local):
    """Channels of a lane as float32, times the scale factor of a quantised row (None if there is none)."""
    widen_lane(codes, i, v_local)
    if factor is not None:
        for j in T.unroll(LANE):
            v_local[j] = v_local[j] * factor[i]


@macro
def gradients_lane(gate, up, dy, i, weighted, weight, clamped, clamp_value, dgate, dup, y_local, dot):
    """Gradients of one lane of row i, its activation, and what it adds to the gradient of the weight."""
    peak = T.alloc_var(T.float32)
    clamped_gate = T.alloc_local((LANE,), T.float32)
    clamped_up = T.alloc_local((LANE,), T.float32)
    sigmoid = T.alloc_local((LANE,), T.float32)
    silu = T.alloc_local((LANE,), T.float32)
    g = T.alloc_var(T.float32)
    peak = T.float32(0.0)
    for j in T.unroll(LANE):
        clamped_gate[j] = clamp_gate(gate[j], clamp_value) if clamped else gate[j]
        clamped_up[j] = clamp_up(up[j], clamp_value) if clamped else up[j]
        peak = T.max(peak, T.abs(clamped_gate[j]))
    sigmoid_lane(clamped_gate, peak, sigmoid, silu)
    for j in T.unroll(LANE):
        y_local[i, j] = silu[j] * clamped_up[j]
        dot[i] = T.ieee_fmaf(dy[j], y_local[i, j], dot[i])
        g = dy[j]
        if weighted:
            y_local[i, j] = y_local[i, j] * weight[i]
            g = g * weight[i]
        g = g * sigmoid[j]
        dgate[i, j] = (g * clamped_up[j]) * T.ieee_fmaf(clamped_gate[j], T.float32(1.0) - sigmoid[j], T.float32(1.0))
        dup[i, j] = g * clamped_gate[j]
        if clamped:
            dgate[i, j] = T.if_then_else(gate[j] > clamp_value, T.float32(0.0), dgate[i, j])
            dup[i, j] = T.if_then_else(T.abs(up[j]) > clamp_value, T.float32(0.0), dup[i, j])


@macro
def merge_amax(v_local, slot, first, group, hidden, team_row, amax_shared):
    """Merge the amax of a lane of each row into that of its group; positive floats order like their bits."""
    rows = int(v_local.shape[0])
    amax = T.alloc_local((rows,), T.float32)
    T.clear(amax)
    for i in T.unroll(rows):
        lane_amax(v_local, i, amax)
        if slot * LANE < hidden:
            T.atomic_max(amax_shared[team_row + i, (first + slot * LANE) // group], T.reinterpret(amax[i], T.int32))


@macro
def scale_merged(
    rows, fmt, num_groups, row, slot, first, hidden, num_tokens, real, amax_floor, team_row, amax_shared, y_sf, sf_inv
):
    """Multipliers of a lane from merged amaxes; the lane in which a group starts writes its scale factor."""
    sf = T.alloc_local((rows,), sf_register_dtype(fmt))
    column, group = first + slot * LANE, fmt.sf_block[1]
    for i in T.unroll(rows):
        sf_inv[i] = T.float32(0.0)
        if slot * LANE < hidden:
            amax = T.reinterpret(amax_shared[team_row + i, column // group], T.float32)
            amax_to_sf(clamp_amax(amax, amax_floor), fmt, sf, sf_inv, i)
            if real is not None:
                clear_sf_of_padding(real[i], sf, i)
            if column % group == 0 and row + i < num_tokens:
                store_sf(y_sf, fmt, num_groups, row + i, column // group, sf[i])


@macro
def store_codes(v_local, i, sf_inv, codes, row, offset, slot, hidden):
    """Quantise the channels of a lane of row i with its multiplier and write the codes."""
    scaled = T.alloc_local((LANE,), T.float32)
    code_local = T.alloc_local((LANE,), codes.dtype)
    for j in T.unroll(LANE):
        scaled[j] = v_local[i, j] * sf_inv[i]
    for e in T.vectorized(LANE):
        code_local[e] = T.cast(scaled[e], codes.dtype)
    store_half(codes, code_local, row, offset, slot, math.gcd(LANE, hidden), hidden)


@macro
def store_weight_gradient(kind, dweights, pos_to_token_topk, row, value):
    """Write the gradient of the weight of a row that exists."""
    if kind == 'row':
        dweights[row] = value
    else:
        slot = pos_to_token_topk[row]
        if slot >= 0 and slot < dweights.shape[0] * dweights.shape[1]:
            flat(dweights)[slot] = value


@macro
def clear_unused_slots(token_topk_to_pos, dweights, pid, num_blocks, num_threads):
    """Weights of slots that no row has: their gradient is 0."""
    num_slots = dweights.shape[0] * dweights.shape[1]
    for k in T.serial(T.ceildiv(num_slots, num_blocks * num_threads)):
        slot = (k * num_blocks + pid) * num_threads + T.get_thread_binding()
        if slot < num_slots:
            unused = flat(token_topk_to_pos)[slot] < 0
            if unused:
                flat(dweights)[slot] = T.float32(0.0)


@kernel(
    choose=choose,
    space=dict(rows=(1, 2), block_threads=(128, 256), resident_threads=(512, 768, 1024)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def swiglu_backward_kernel(
    hidden: int,
    source: torch.dtype | QuantFormat,
    dy_dtype: torch.dtype,
    dx_dtype: torch.dtype,
    fmt: QuantFormat | None,
    vector_bytes: int,
    weights: str,
    layout: str,
    clamped: bool,
    recompute: bool,
    zero_slots: bool,
    *,
    rows: int,
    block_threads: int,
    resident_threads: int,
):
    """`source` is what x holds, `fmt` the format of the quantised gradient, if it is wanted."""
    x_fmt = source if isinstance(source, QuantFormat) else None
    dequantising, quantising, weighted = x_fmt is not None, fmt is not None, weights != ''
    x_dtype = x_fmt.data.torch if x_fmt else source
    group = fmt.sf_block[1] if fmt else LANE
    num_groups, lanes, merged = -(-2 * hidden // group), group // LANE, quantising and hidden % group != 0
    team_threads = row_threads(hidden, merged)
    turns = -(-hidden // (LANE * team_threads))
    teams = max(1, block_threads // team_threads)
    num_threads, team_warps, block_rows = teams * team_threads, team_threads // WARP, teams * rows
    x_groups = -(-2 * hidden // x_fmt.sf_block[1]) if x_fmt else 1
    x_piece = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden)
    dy_piece = math.gcd(LANE, vector_bytes // dy_dtype.itemsize, hidden)
    dx_piece = math.gcd(LANE, 16 // dx_dtype.itemsize, hidden)
    num_tokens, x_pitch, dy_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch'), T.dynamic('dy_pitch')
    slots_shape = (T.dynamic('num_sources'), T.dynamic('num_topk'))
    weights_shape = slots_shape if weights == 'map' else (num_tokens,)
    num_blocks = T.ceildiv(num_tokens, block_rows)

    @T.prim_func
    def swiglu_backward(
        dy: T.StridedTensor((num_tokens, hidden), (dy_pitch, 1), T.dtype(dy_dtype)),
        x: T.StridedTensor((num_tokens, 2 * hidden), (x_pitch, 1), T.dtype(x_dtype)),
        x_sf: sf_tensor(x_fmt, num_tokens, x_groups) if x_fmt else T.Tensor((num_tokens, 1), T.float32),
        row_weights: T.Tensor(weights_shape, T.float32),
        pos_to_token_topk: T.Tensor((num_tokens,), T.int32),
        token_topk_to_pos: T.Tensor(slots_shape, T.int32),
        pos_to_expert: T.Tensor((num_tokens,), T.int32),
        psum: T.Tensor((T.dynamic('num_experts'),), T.int32),
        dx: T.Tensor((num_tokens, 2 * hidden), T.dtype(dx_dtype)),
        dx_codes: T.Tensor((num_tokens, 2 * hidden), T.dtype(fmt.data.torch if fmt else dx_dtype)),
        dx_sf: sf_tensor(fmt, num_tokens, num_groups) if fmt else T.Tensor((num_tokens, 1), T.float32),
        dweights: T.Tensor(weights_shape, T.float32),
        y: T.Tensor((num_tokens, hidden), T.dtype(dx_dtype)),
        weight_scale: T.float32,
        clamp_value: T.float32,
        alignment: T.int32,
        amax_floor: T.float32,
    ):
        with T.Kernel(T.max(num_blocks, 1) if zero_slots else num_blocks, threads=num_threads) as pid:
            T.assume(x_pitch % x_piece == 0)
            T.assume(dy_pitch % dy_piece == 0)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            row = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            real = T.alloc_local((rows,), T.int32)
            weight = T.alloc_local((rows,), T.float32)
            dot = T.alloc_local((rows,), T.float32)
            gate_local = T.alloc_local((rows, LANE), T.dtype(x_dtype))
            up_local = T.alloc_local((rows, LANE), T.dtype(x_dtype))
            dy_local = T.alloc_local((rows, LANE), T.dtype(dy_dtype))
            gate_factor = T.alloc_local((rows,), T.float32)
            up_factor = T.alloc_local((rows,), T.float32)
            gate = T.alloc_local((LANE,), T.float32)
            up = T.alloc_local((LANE,), T.float32)
            upstream = T.alloc_local((LANE,), T.float32)
            dgate = T.alloc_local((rows, LANE), T.float32)
            dup = T.alloc_local((rows, LANE), T.float32)
            y_local = T.alloc_local((rows, LANE), T.float32)
            rounded = T.alloc_local((LANE,), T.dtype(dx_dtype))
            owned_shared = T.alloc_shared((block_rows,), T.int32)
            thread = T.get_thread_binding()
            team, lane = thread // team_threads, thread % team_threads
            row = pid * block_rows + team * rows

            if layout == 'psum':
                mark_owned_rows(psum, alignment, pid * block_rows, owned_shared, num_threads)
            T.clear(dot)
            for i in T.unroll(rows):
                row_is_real(layout, pos_to_expert, owned_shared, pid * block_rows, row + i, num_tokens, real, i)
                if weighted:
                    weight[i] = T.float32(0.0)
                    if real[i] != 0:
                        load_weight(row_weights, pos_to_token_topk, weights, row + i, weight_scale, weight, i)

            for turn in T.serial(turns):
                slot = turn * team_threads + lane
                T.clear(gate_local)
                T.clear(up_local)
                T.clear(dy_local)
                for i in T.unroll(rows):
                    if real[i] != 0:
                        load_half(x, gate_local, i, row + i, 0, slot, x_piece, hidden)
                        load_half(x, up_local, i, row + i, hidden, slot, x_piece, hidden)
                        load_half(dy, dy_local, i, row + i, 0, slot, dy_piece, hidden)
                if dequantising:
                    T.clear(gate_factor)
                    T.clear(up_factor)
                    for i in T.unroll(rows):
                        if real[i] != 0 and slot * LANE < hidden:
                            gate_factor[i] = sf_value(x_sf, x_fmt, row + i, slot * LANE // x_fmt.sf_block[1])
                            up_factor[i] = sf_value(x_sf, x_fmt, row + i, (hidden + slot * LANE) // x_fmt.sf_block[1])

                for i in T.unroll(rows):
                    widen_source(gate_local, i, gate_factor if dequantising else None, gate)
                    widen_source(up_local, i, up_factor if dequantising else None, up)
                    widen_lane(dy_local, i, upstream)
                    gradients_lane(
                        gate, up, upstream, i, weighted, weight, clamped, clamp_value, dgate, dup, y_local, dot
                    )
                    if row + i < num_tokens:
                        round_lane(dgate, i, rounded)
                        store_half(dx, rounded, row + i, 0, slot, dx_piece, hidden)
                        round_lane(dup, i, rounded)
                        store_half(dx, rounded, row + i, hidden, slot, dx_piece, hidden)
                        if recompute:
                            round_lane(y_local, i, rounded)
                            store_half(y, rounded, row + i, 0, slot, dx_piece, hidden)
                if quantising:
                    gate_inv = T.alloc_local((rows,), T.float32)
                    up_inv = T.alloc_local((rows,), T.float32)
                    padded = real if layout != '' else None
                    if merged:
                        amax_shared = T.alloc_shared((block_rows, num_groups), T.int32)
                        for k in T.unroll(-(-block_rows * num_groups // num_threads)):
                            cell = k * num_threads + thread
                            if cell < block_rows * num_groups:
                                amax_shared[cell // num_groups, cell % num_groups] = 0
                        T.sync_threads()
                        merge_amax(dgate, slot, 0, group, hidden, team * rows, amax_shared)
                        merge_amax(dup, slot, hidden, group, hidden, team * rows, amax_shared)
                        T.sync_threads()
                        scale_merged(
                            rows, fmt, num_groups, row, slot, 0, hidden, num_tokens, padded, amax_floor,
                            team * rows, amax_shared, dx_sf, gate_inv,
                        )  # fmt: skip
                        scale_merged(
                            rows, fmt, num_groups, row, slot, hidden, hidden, num_tokens, padded, amax_floor,
                            team * rows, amax_shared, dx_sf, up_inv,
                        )  # fmt: skip
                    else:
                        own_group = T.if_then_else(slot * LANE < hidden, slot // lanes, num_groups)
                        scale_groups(
                            dgate, fmt, lanes, num_groups, row, slot, own_group, num_tokens, padded, amax_floor,
                            dx_sf, gate_inv,
                        )  # fmt: skip
                        scale_groups(
                            dup, fmt, lanes, num_groups, row, slot, own_group + hidden // group, num_tokens, padded,
                            amax_floor, dx_sf, up_inv,
                        )  # fmt: skip
                    for i in T.unroll(rows):
                        if row + i < num_tokens:
                            store_codes(dgate, i, gate_inv, dx_codes, row + i, 0, slot, hidden)
                            store_codes(dup, i, up_inv, dx_codes, row + i, hidden, slot, hidden)

            if weighted:
                for i in T.unroll(rows):
                    dot[i] = T.warp_reduce_sum(dot[i])
                if team_warps > 1:
                    dot_shared = T.alloc_shared((num_threads // WARP, rows), T.float32)
                    for i in T.unroll(rows):
                        if thread % WARP == 0:
                            dot_shared[thread // WARP, i] = dot[i]
                    T.sync_threads()
                    for i in T.unroll(rows):
                        dot[i] = T.float32(0.0)
                        for w in T.unroll(team_warps):
                            dot[i] = dot[i] + dot_shared[team * team_warps + w, i]
                for i in T.unroll(rows):
                    if lane == i and row + i < num_tokens:
                        store_weight_gradient(weights, dweights, pos_to_token_topk, row + i, dot[i] * weight_scale)
                if zero_slots:
                    clear_unused_slots(token_topk_to_pos, dweights, pid, T.max(num_blocks, 1), num_threads)

    return swiglu_backward
