"""Device code shared by the SwiGLU kernels: which rows exist, their weights, the halves of a row, the exact sigmoid.

A lane owns `LANE` neighbouring channels of a row, the same ones of the gate and of the up projection.

`1 / t` and `g / t` with t = 1 + exp(-g) are correctly rounded without a branch for each element: one approximate
reciprocal, one Newton step for 1 / t, one remainder for g / t. That is what the hardware's own division does when no
exponent is extreme, and none is while |g| <= `GATE_LIMIT`. A lane with a larger gate divides again, the long way. The
remainder is taken with its sign turned, so that a gate of -0 gives -0.
"""

from typing import Any

from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.lang import T, macro
from tile_kernels.quant._macros import (
    LANE,
    amax_to_sf,
    clamp_amax,
    float_of,
    lane_amax,
    lane_pairs,
    sf_register_dtype,
    shuffle_steps,
    store_sf,
)

#: exp(80) is below 2^116, so the remainder of every division by 1 + exp(-g) is a normal number.
GATE_LIMIT = 80.0


# Rows ---------------------------------------------------------------------------------------


@macro
def mark_owned_rows(psum, alignment, first, owned_shared, num_threads):
    """`owned_shared[r]` = 1 if row `first + r` belongs to an expert: e owns [align(psum[e - 1]), psum[e])."""
    window, num_experts = owned_shared.shape[0], psum.shape[0]
    thread = T.get_thread_binding()
    start = T.alloc_var(T.int32)
    for k in T.unroll(-(-int(window) // num_threads)):
        if k * num_threads + thread < window:
            owned_shared[k * num_threads + thread] = 0
    T.sync_threads()
    for k in T.serial(T.ceildiv(num_experts, num_threads)):
        expert = k * num_threads + thread
        if expert < num_experts:
            start = 0
            if expert > 0:
                start = T.truncdiv(psum[expert - 1] + alignment - 1, alignment) * alignment
            for r in T.serial(window):
                if start <= first + r and first + r < psum[expert]:
                    owned_shared[r] = 1
    T.sync_threads()


@macro
def row_is_real(layout, pos_to_expert, owned_shared, first, row, num_tokens, real, i):
    """`real[i]` = whether `row` exists and is no padding; `layout` is '', 'map' (pos_to_expert) or 'psum'."""
    real[i] = 0
    if row < num_tokens:
        if layout == 'map':
            real[i] = T.if_then_else(pos_to_expert[row] >= 0, 1, 0)
        elif layout == 'psum':
            real[i] = owned_shared[row - first]
        else:
            real[i] = 1


@macro
def load_weight(weights, pos_to_token_topk, kind, row, weight_scale, weight, i):
    """`weight[i]` of a row that exists; `kind` is '', 'row' (one for each row) or 'map' (0 where there is no slot)."""
    weight[i] = T.float32(0.0)
    if kind == 'row':
        weight[i] = weights[row] * weight_scale
    elif kind == 'map':
        slot = pos_to_token_topk[row]
        if slot >= 0 and slot < weights.shape[0] * weights.shape[1]:
            weight[i] = flat(weights)[slot] * weight_scale


def flat(x: Any) -> Any:
    """A matrix as one row."""
    return T.view(x, (x.shape[0] * x.shape[1],), x.dtype)


def weight_tensor(kind: str, num_tokens: Any) -> Any:
    """Parameter type of the weights: one for each row, or those of (token, choice) slots."""
    if kind == 'map':
        return T.Tensor((T.dynamic('num_sources'), T.dynamic('num_topk')), T.float32)
    return T.Tensor((num_tokens,), T.float32)


# Channels -----------------------------------------------------------------------------------


@macro
def load_half(x, x_local, i, row, offset, slot, piece, hidden):
    """Read the channels of lane `slot` of the half of a row that starts at column `offset`."""
    for p in T.unroll(LANE // piece):
        if slot * LANE + p * piece < hidden:
            for e in T.vectorized(piece):
                x_local[i, p * piece + e] = x[row, offset + slot * LANE + p * piece + e]


@macro
def store_half(y, y_local, row, offset, slot, piece, hidden):
    """Write the channels of lane `slot` to the half of a row that starts at column `offset`."""
    for p in T.unroll(LANE // piece):
        if slot * LANE + p * piece < hidden:
            for e in T.vectorized(piece):
                y[row, offset + slot * LANE + p * piece + e] = y_local[p * piece + e]


@macro
def round_lane(v_local, i, y_local):
    """Channels of a lane in the dtype of `y_local`."""
    for e in T.vectorized(LANE):
        y_local[e] = T.cast(v_local[i, e], y_local.dtype)


@macro
def widen_lane(x_local, i, v_local):
    """Channels of a lane as float32; a bf16 is the upper half of its float32, so it needs no conversion."""
    if x_local.dtype == 'bfloat16':
        pairs = lane_pairs(x_local)
        for j in T.unroll(LANE // 2):
            v_local[2 * j] = float_of(pairs[i, j] << T.uint32(16))
            v_local[2 * j + 1] = float_of(pairs[i, j] & T.uint32(0xFFFF0000))
    else:
        for e in T.vectorized(LANE):
            v_local[e] = T.cast(x_local[i, e], T.float32)


# Arithmetic ---------------------------------------------------------------------------------


@macro
def sigmoid_lane(gate, peak, sigmoid, silu):
    """`sigmoid = 1 / t` and `silu = gate / t` with t = 1 + exp(-gate), as IEEE divisions; `peak` bounds |gate|."""
    t = T.alloc_local((LANE,), T.float32)
    approximate = T.alloc_local((LANE,), T.float32)
    for j in T.unroll(LANE):
        t[j] = T.float32(1.0) + T.exp(-gate[j])
        approximate[j] = T.fast_rcp(t[j])
        sigmoid[j] = T.ieee_fmaf(approximate[j], T.ieee_fmaf(-t[j], approximate[j], T.float32(1.0)), approximate[j])
        silu[j] = gate[j] * sigmoid[j]
        silu[j] = T.ieee_fmaf(-T.ieee_fmaf(t[j], silu[j], -gate[j]), sigmoid[j], silu[j])
    if peak > T.float32(GATE_LIMIT):
        for j in T.unroll(LANE):
            sigmoid[j] = T.ieee_fdiv(T.float32(1.0), t[j])
            silu[j] = T.ieee_fdiv(gate[j], t[j])


def clamp_gate(gate: Any, clamp_value: Any) -> Any:
    """At most `clamp_value`; a NaN stays one."""
    return T.if_then_else(gate > clamp_value, clamp_value, gate)


def clamp_up(up: Any, clamp_value: Any) -> Any:
    """Within [-clamp_value, clamp_value]; a NaN stays one."""
    return T.if_then_else(up > clamp_value, clamp_value, T.if_then_else(up < -clamp_value, -clamp_value, up))


@macro
def activate_lane(gate_local, up_local, i, weight, clamped, clamp_value, counts, act_local):
    """`act[i] = (silu(gate) * up) * weight` in float32.

    `weight` may be None; `counts` is None, or three numbers that count what was clamped.
    """
    gate = T.alloc_local((LANE,), T.float32)
    up = T.alloc_local((LANE,), T.float32)
    peak = T.alloc_local((1,), T.float32)
    sigmoid = T.alloc_local((LANE,), T.float32)
    silu = T.alloc_local((LANE,), T.float32)
    widen_lane(gate_local, i, gate)
    widen_lane(up_local, i, up)
    if counts is not None:
        for j in T.unroll(LANE):
            counts[0] += T.if_then_else(gate[j] > clamp_value, 1, 0)
            counts[1] += T.if_then_else(up[j] > clamp_value, 1, 0)
            counts[2] += T.if_then_else(up[j] < -clamp_value, 1, 0)
    if clamped:
        for j in T.unroll(LANE):
            gate[j] = clamp_gate(gate[j], clamp_value)
            up[j] = clamp_up(up[j], clamp_value)
    lane_peak(gate_local, i, peak)
    sigmoid_lane(gate, peak[0], sigmoid, silu)
    for j in T.unroll(LANE):
        act_local[i, j] = silu[j] * up[j]
        if weight is not None:
            act_local[i, j] = act_local[i, j] * weight


@macro
def lane_peak(x_local, i, peak):
    """`peak[0]` = largest magnitude of the channels of a lane in row i."""
    amax = T.alloc_local((x_local.shape[0],), T.float32)
    amax[i] = T.float32(0.0)
    lane_amax(x_local, i, amax)
    peak[0] = amax[i]


@macro
def add_counts(counts, num_counts, counts_shared, clamped_count, num_threads):
    """Add the counts of all threads of a block to the global ones, one atomic addition for each."""
    thread = T.get_thread_binding()
    total = T.alloc_var(T.int32)
    for k in T.unroll(num_counts):
        total = T.warp_reduce_sum(counts[k])
        if thread % 32 == 0:
            counts_shared[thread // 32, k] = total
    T.sync_threads()
    if thread < num_counts:
        total = 0
        for w in T.unroll(num_threads // 32):
            total = total + counts_shared[w, thread]
        if total > 0:
            T.atomic_add(clamped_count[thread], T.cast(total, T.int64))


# Scale factors ------------------------------------------------------------------------------


@macro
def clear_sf_of_padding(is_real, sf, k):
    """The scale factor of a padding row is 0."""
    if is_real == 0:
        sf[k] = T.cast(0, sf.dtype)


@macro
def scale_groups(v_local, fmt, lanes, num_groups, row, slot, group, num_tokens, real, amax_floor, y_sf, sf_inv):
    """Scale factors of a group of `lanes` lanes in every row: write them, and give each lane its multipliers.

    Padding rows (`real[i]` = 0; None if there are none) get 0. A lane of a group finds the factors of its own rows
    only and passes the multipliers on.
    """
    rows = int(v_local.shape[0])
    owned = -(-rows // lanes)
    amax = T.alloc_local((rows,), T.float32)
    own_amax = T.alloc_var(T.float32)
    own_real = T.alloc_var(T.int32)
    sf = T.alloc_local((owned,), sf_register_dtype(fmt))
    own_inv = T.alloc_local((owned,), T.float32)
    T.clear(amax)
    for i in T.unroll(rows):
        lane_amax(v_local, i, amax)
    for step in T.unroll(shuffle_steps(lanes)):
        for i in T.unroll(rows):
            amax[i] = T.max(amax[i], T.shfl_xor(amax[i], 1 << step))
    for k in T.unroll(owned):
        own = k * lanes + slot % lanes
        own_amax = amax[0]
        own_real = 1 if real is None else real[0]
        for i in T.unroll(rows - 1):
            if own == i + 1:
                own_amax = amax[i + 1]
                own_real = 1 if real is None else real[i + 1]
        amax_to_sf(clamp_amax(own_amax, amax_floor), fmt, sf, own_inv, k)
        if real is not None:
            clear_sf_of_padding(own_real, sf, k)
        if own < rows and row + own < num_tokens and group < num_groups:
            store_sf(y_sf, fmt, num_groups, row + own, group, sf[k])
    for i in T.unroll(rows):
        sf_inv[i] = T.shfl_sync(own_inv[i // lanes], i % lanes, width=lanes)


def group_lanes(width: int, fmt: QuantFormat) -> int:
    """Lanes that share a scale factor of a row of `width` channels; a whole row counts as its next power of two."""
    group = fmt.sf_block[1]
    return group // LANE if group else 1 << (-(-width // LANE) - 1).bit_length()
