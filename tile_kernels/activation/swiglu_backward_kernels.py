"""The kernel of the SwiGLU gradients; see `swiglu_backward` for the maths.

A group of threads owns `rows` adjacent rows at a time and walks over their channels, 8 per lane. So the sum for a
weight stays in one block and is the same in every run. Where gradients are quantized, a scale group in one half is
reduced by shuffles. A scale group may also hold the end of one half and the beginning of the other. Then the amaxes are
merged in shared memory.
"""

import functools
import math

import torch
from torch import Tensor

from tile_kernels.activation._checks import DTYPES, check_clamp, check_layout, check_weights
from tile_kernels.activation._macros import (
    GATE_LIMIT,
    clamp_gate,
    clamp_up,
    clear_sf_of_padding,
    find_places,
    find_real_rows,
    flat,
    inverse_of,
    load_weights,
    quotient_of,
    scale_groups,
)
from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro, resident_blocks
from tile_kernels.core.launch import launch
from tile_kernels.device.reduce import lane_max, shuffle_steps
from tile_kernels.device.scales import amax_to_sf, clamp_amax, sf_register_dtype, sf_tensor, sf_value, store_sf
from tile_kernels.device.vectors import LANE, clear_lane, load_lane, round_lane, store_lane, widen_lane

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
    """Two rows at a time, six loads for each lane, where there are rows enough and two fit into the registers.

    A cast needs more of these. What is neither weighted nor cast computes little: it takes more rows to gain by two.
    """
    lanes = num_tokens * -(-hidden // LANE)
    fits = isinstance(source, QuantFormat) or source.itemsize == 2
    many = lanes >= (2 << 17 if weights or fmt is not None else 16 << 17)
    return dict(rows=2 if many and fits else 1, block_threads=128, resident_threads=1024 if fmt is None else 896)


# Kernel -------------------------------------------------------------------------------------


@macro
def widen_source(codes, i, factor, v_local):
    """Channels of a lane as float32, times the scale factor of a quantized row (None if there is none)."""
    widen_lane(codes, i, v_local)
    if factor is not None:
        for j in T.unroll(LANE):
            v_local[j] = v_local[j] * factor[i]


@macro
def gradients_lane(gate, up, dy, weight, clamped, clamp_value, grad, y_local, dot, i):
    """`grad` = gradients of gate and up of a lane, y its activation; adds to `dot[i]`, the gradient of the weight.

    Few lanes have a number to clamp, fewer a gate that needs the long division; they are computed apart.
    """
    peak, up_peak = (functools.reduce(T.max, (T.abs(half[j]) for j in range(LANE))) for half in (gate, up))
    if peak > T.float32(GATE_LIMIT):
        _gradients(gate, up, dy, weight, clamped, clamp_value, True, grad, y_local, dot, i)
    elif clamped and T.max(peak, up_peak) > clamp_value:
        _gradients(gate, up, dy, weight, True, clamp_value, False, grad, y_local, dot, i)
    else:
        _gradients(gate, up, dy, weight, False, clamp_value, False, grad, y_local, dot, i)


@macro
def _gradients(gate, up, dy, weight, clamped, clamp_value, extreme, grad, y_local, dot, i):
    clamped_gate = T.alloc_var(T.float32)
    clamped_up = T.alloc_var(T.float32)
    t = T.alloc_var(T.float32)
    sigmoid = T.alloc_var(T.float32)
    silu = T.alloc_var(T.float32)
    g = T.alloc_var(T.float32)
    for j in T.unroll(LANE):
        clamped_gate = clamp_gate(gate[j], clamp_value) if clamped else gate[j]
        clamped_up = clamp_up(up[j], clamp_value) if clamped else up[j]
        t = T.float32(1.0) + T.exp(-clamped_gate)
        if extreme:
            sigmoid = T.ieee_fdiv(T.float32(1.0), t)
            silu = T.ieee_fdiv(clamped_gate, t)
        else:
            sigmoid = inverse_of(t)
            silu = quotient_of(clamped_gate, t, sigmoid)
        y_local[0, j] = silu * clamped_up
        dot[i] = T.ieee_fmaf(dy[j], y_local[0, j], dot[i])
        g = dy[j]
        if weight is not None:
            y_local[0, j] = y_local[0, j] * weight
            g = g * weight
        g = g * sigmoid
        grad[0, j] = (g * clamped_up) * T.ieee_fmaf(clamped_gate, T.float32(1.0) - sigmoid, T.float32(1.0))
        grad[1, j] = g * clamped_gate
        if clamped:
            grad[0, j] = T.Select(gate[j] > clamp_value, T.float32(0.0), grad[0, j])
            grad[1, j] = T.Select(T.abs(up[j]) > clamp_value, T.float32(0.0), grad[1, j])


@macro
def scale_merged(grad, fmt, row, slot, hidden, num_tokens, is_real, amax_floor, segments, owner, y_sf, sf_inv):
    """Scale factors where a group may hold the end of one half of a row and the beginning of the other.

    A segment divides both halves and groups, and its lanes are adjacent. The lanes of a group exchange values in shared
    memory, in row `owner` of `segments`.
    """
    group = fmt.sf_block[1]
    width = math.gcd(group, hidden)
    num_segments, num_groups = 2 * hidden // width, -(-2 * hidden // group)
    amax = T.alloc_local((2,), T.float32)
    group_amax = T.alloc_var(T.float32)
    sf = T.alloc_local((2,), sf_register_dtype(fmt))
    for half in T.unroll(2):
        amax[half] = lane_max(grad, half)
        for step in T.unroll(shuffle_steps(width // LANE)):
            amax[half] = T.max(amax[half], T.shfl_xor(amax[half], 1 << step))
        if slot * LANE < hidden and slot * LANE % width == 0:
            segments[owner, (half * hidden + slot * LANE) // width] = amax[half]
    T.sync_threads()
    for half in T.unroll(2):
        column = half * hidden + slot * LANE
        group_amax = T.float32(0.0)
        for k in T.unroll(group // width):
            segment = column // group * (group // width) + k
            if segment < num_segments:
                group_amax = T.max(group_amax, segments[owner, segment])
        amax_to_sf(clamp_amax(group_amax, amax_floor), fmt, sf, sf_inv, half)
        if is_real is not None:
            clear_sf_of_padding(is_real, sf, half)
        if slot * LANE < hidden and column % group == 0 and row < num_tokens:
            store_sf(y_sf, fmt, num_groups, row, column // group, sf[half])


@macro
def store_codes(grad, half, sf_inv, codes, row, slot, hidden):
    """Quantize the gradients of one half of a lane with their multiplier and write the codes."""
    scaled = T.alloc_local((LANE,), T.float32)
    code_local = T.alloc_local((LANE,), codes.dtype)
    for j in T.unroll(LANE):
        scaled[j] = grad[half, j] * sf_inv[half]
    for e in T.vectorized(LANE):
        code_local[e] = T.cast(scaled[e], codes.dtype)
    store_lane(codes, code_local, row, slot, math.gcd(LANE, hidden), hidden, LANE, first=half * hidden)


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
    slot = T.alloc_var(T.int32)
    slot = pid * num_threads + T.get_thread_binding()
    while slot < dweights.shape[0] * dweights.shape[1]:
        unused = flat(token_topk_to_pos)[slot] < 0
        if unused:
            flat(dweights)[slot] = T.float32(0.0)
        slot = slot + num_blocks * num_threads


@kernel(
    choose=choose,
    space=dict(rows=(1, 2), block_threads=(128, 256), resident_threads=(512, 768, 896, 1024)),
    pass_configs={
        'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
        'TL_DISABLE_SHARED_MEMORY_REUSE': True,  # amaxes and sums never meet in shared memory,
        'TL_DISABLE_THREAD_STORAGE_SYNC': True,  # so that it takes one barrier for each
    },
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
    """`source` is what x holds, `fmt` the format of the quantized gradient, if it is wanted."""
    x_fmt = source if isinstance(source, QuantFormat) else None
    dequantizing, quantizing, weighted = x_fmt is not None, fmt is not None, weights != ''
    x_dtype = x_fmt.data.torch if x_fmt else source
    group = fmt.sf_block[1] if fmt else LANE
    num_groups, lanes, merged = -(-2 * hidden // group), group // LANE, quantizing and hidden % group != 0
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
    # every lane has channels, and a row past the end may repeat the last one, because nothing of it is stored
    full = layout == '' and hidden % (LANE * team_threads) == 0

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
            place = T.alloc_local((rows,), T.int32)
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
            grad = T.alloc_local((2, LANE), T.float32)
            sf_inv = T.alloc_local((2,), T.float32)
            y_local = T.alloc_local((1, LANE), T.float32)
            rounded = T.alloc_local((LANE,), T.dtype(dx_dtype))
            thread = T.get_thread_binding()
            team, lane = thread // team_threads, thread % team_threads
            row = pid * block_rows + team * rows

            T.clear(dot)
            find_real_rows(layout, pos_to_expert, psum, alignment, row, num_tokens, real)
            if weighted:
                find_places(weights, pos_to_token_topk, row, num_tokens, place)

            for turn in T.serial(turns):
                slot = turn * team_threads + lane
                if not full:
                    clear_lane(gate_local)
                    clear_lane(up_local)
                    clear_lane(dy_local)
                    T.clear(gate_factor)
                    T.clear(up_factor)
                for i in T.unroll(rows):
                    if full or (real[i] != 0 and slot * LANE < hidden):
                        source_row = T.min(row + i, num_tokens - 1) if full else row + i
                        load_lane(x, gate_local, i, source_row, slot, x_piece, None if full else hidden)
                        load_lane(x, up_local, i, source_row, slot, x_piece, None if full else hidden, first=hidden)
                        load_lane(dy, dy_local, i, source_row, slot, dy_piece, None if full else hidden)
                        if dequantizing:
                            gate_factor[i] = sf_value(x_sf, x_fmt, source_row, slot * LANE // x_fmt.sf_block[1])
                            up_factor[i] = sf_value(
                                x_sf, x_fmt, source_row, (hidden + slot * LANE) // x_fmt.sf_block[1]
                            )
                if weighted and turn == 0:
                    load_weights(weights, row_weights, weight_scale, place, real, weight)

                for i in T.unroll(rows):
                    if layout == '' or real[i] != 0:
                        widen_source(gate_local, i, gate_factor if dequantizing else None, gate)
                        widen_source(up_local, i, up_factor if dequantizing else None, up)
                        widen_lane(dy_local, i, upstream)
                        row_weight = weight[i] if weighted else None
                        gradients_lane(gate, up, upstream, row_weight, clamped, clamp_value, grad, y_local, dot, i)
                    else:
                        T.clear(grad)
                        T.clear(y_local)
                    if row + i < num_tokens:
                        for half in T.unroll(2):
                            round_lane(grad, half, rounded)
                            store_lane(dx, rounded, row + i, slot, dx_piece, hidden, LANE, first=half * hidden)
                        if recompute:
                            round_lane(y_local, 0, rounded)
                            store_lane(y, rounded, row + i, slot, dx_piece, hidden, LANE)
                    if quantizing:
                        is_real = real[i] if layout != '' else None
                        if merged:
                            segments = T.alloc_shared((block_rows, 2 * hidden // math.gcd(group, hidden)), T.float32)
                            scale_merged(
                                grad,
                                fmt,
                                row + i,
                                slot,
                                hidden,
                                num_tokens,
                                is_real,
                                amax_floor,
                                segments,
                                team * rows + i,
                                dx_sf,
                                sf_inv,
                            )
                        else:
                            own_group = T.if_then_else(slot * LANE < hidden, slot // lanes, num_groups)
                            scale_groups(
                                grad,
                                fmt,
                                lanes,
                                num_groups,
                                row + i,
                                0,
                                own_group,
                                hidden // group,
                                num_tokens,
                                [is_real] if layout != '' else None,
                                amax_floor,
                                dx_sf,
                                sf_inv,
                            )
                        if row + i < num_tokens:
                            for half in T.unroll(2):
                                store_codes(grad, half, sf_inv, dx_codes, row + i, slot, hidden)

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


# Launch -------------------------------------------------------------------------------------


def launch_backward(
    dy: Tensor,
    x: Tensor,
    x_sf: Tensor | None,
    source: torch.dtype | QuantFormat,
    topk_weights: Tensor | None,
    pos_to_token_topk: Tensor | None,
    token_topk_to_pos: Tensor | None,
    pos_to_expert: Tensor | None,
    psum: Tensor | None,
    weight_scale: float,
    clamp_value: float | None,
    alignment: int,
    dx_dtype: torch.dtype,
    recompute: bool,
    dx_quant: QuantTensor | None,
    amax_floor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check what both backward ops share, allocate and launch; returns dx, dtopk_weights and y."""
    num_tokens, hidden = x.shape[0], x.shape[1] // 2
    check.shape(dy, 'gradient', 'num_rows hidden', dtype=DTYPES, num_rows=num_tokens, hidden=hidden)
    check.unit_stride(dy, 'gradient')
    check.one_of(dx_dtype, DTYPES, 'dx_dtype')
    check.same_device(x=x, gradient=dy)
    kind = check_weights(x, num_tokens, topk_weights, pos_to_token_topk)
    layout = check_layout(x, num_tokens, pos_to_expert, psum, alignment)
    clamp = check_clamp(clamp_value)
    dx = torch.empty((num_tokens, 2 * hidden), dtype=dx_dtype, device=x.device)
    y = torch.empty((num_tokens if recompute else 0, hidden), dtype=dx_dtype, device=x.device)
    dtopk_weights = _weight_gradient(x, topk_weights, pos_to_token_topk, token_topk_to_pos)
    fmt, codes, dx_sf = (dx_quant.fmt, *dx_quant) if dx_quant is not None else (None, None, None)
    zero_slots = token_topk_to_pos is not None
    numbers = (source, dy.dtype, dx_dtype, fmt, check.vector_bytes(x, dy))
    static = (hidden, *numbers, kind, layout, clamp_value is not None, recompute, zero_slots)
    num_slots = topk_weights.shape[0] if zero_slots and topk_weights is not None else 0
    launch(
        swiglu_backward_kernel,
        static,
        dy,
        x,
        x_sf,
        topk_weights,
        pos_to_token_topk,
        token_topk_to_pos,
        pos_to_expert,
        psum,
        dx,
        codes,
        dx_sf,
        dtopk_weights if topk_weights is not None else None,
        y if recompute else None,
        weight_scale,
        clamp,
        alignment,
        amax_floor,
        size=num_tokens + num_slots,  # slots are cleared without any row, too
    )
    return dx, dtopk_weights, y


def _weight_gradient(
    x: Tensor, topk_weights: Tensor | None, pos_to_token_topk: Tensor | None, token_topk_to_pos: Tensor | None
) -> Tensor:
    """Memory for the gradient of the weights: zeros where the kernel is not told which slots have no row."""
    if token_topk_to_pos is not None:
        if pos_to_token_topk is None or topk_weights is None:
            check.fail('token_topk_to_pos', 'must come with topk_weights and pos_to_token_topk', 'it alone')
        num_sources, num_topk = topk_weights.shape
        known = dict(num_tokens=num_sources, num_topk=num_topk)
        check.shape(token_topk_to_pos, 'token_topk_to_pos', 'num_tokens num_topk', dtype=torch.int32, **known)
        check.contiguous(token_topk_to_pos, 'token_topk_to_pos')
        check.same_device(x=x, token_topk_to_pos=token_topk_to_pos)
        return torch.empty_like(topk_weights)
    if topk_weights is None:
        return torch.empty((0,), dtype=torch.float32, device=x.device)
    return torch.empty_like(topk_weights) if pos_to_token_topk is None else torch.zeros_like(topk_weights)
