"""Device code shared by the SwiGLU kernels: which rows exist, their weights, the halves of a row, the exact sigmoid.

A lane owns `LANE` neighbouring channels of a row, the same ones of the gate and of the up projection.

`1 / t` and `g / t` with t = 1 + exp(-g) are correctly rounded without a branch for each element. They take one
approximate reciprocal, one Newton step for 1 / t and one remainder for g / t. That is what the hardware's own division
does when no exponent is extreme, and none is while |g| <= `GATE_LIMIT`. A lane with a larger gate divides the long way.
The remainder is taken with its sign turned, so that a gate of -0 gives -0.
"""

from typing import Any

from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.device.reduce import lane_max, scatter_max
from tile_kernels.device.scales import amax_to_sf, clamp_amax, sf_register_dtype, store_sf
from tile_kernels.device.vectors import LANE, widen_lane

#: exp(80) is below 2^116, so the remainder of every division by 1 + exp(-g) is a normal number.
GATE_LIMIT = 80.0

INT_MAX = 2**31 - 1


# Rows ---------------------------------------------------------------------------------------


@macro
def find_real_rows(layout, pos_to_expert, psum, alignment, row, num_tokens, real):
    """`real[i]` = whether `row + i` exists and is no padding; `layout` is '', 'map' (pos_to_expert) or 'psum'."""
    for i in T.unroll(real.shape[0]):
        real[i] = T.Select(row + i < num_tokens, 1, 0)
    if layout == 'map':
        for i in T.unroll(real.shape[0]):
            if row + i < num_tokens:
                real[i] = T.Select(pos_to_expert[row + i] >= 0, 1, 0)
    elif layout == 'psum':
        find_owned_rows(psum, alignment, row, real)


@macro
def find_owned_rows(psum, alignment, row, real):
    """Clear `real[i]` unless `row + i` belongs to an expert: e owns [align(psum[e - 1]), psum[e]), psum ascends.

    The lanes of a warp count the experts that end before the first of its rows; then each walks on to its own rows.
    """
    num_experts = psum.shape[0]
    expert = T.alloc_var(T.int32)
    first = T.alloc_var(T.int32)  # row of the expert
    end = T.alloc_var(T.int32)
    warp_row = T.shfl_sync(row, 0)
    expert = 0
    for k in T.serial(T.ceildiv(num_experts, WARP)):
        other = k * WARP + T.get_thread_binding() % WARP
        before = T.if_then_else(other < num_experts, psum[other], INT_MAX) <= warp_row
        expert = expert + T.cast(T.popcount(T.ballot(before)), T.int32)
    first = first_row_after(T.if_then_else(expert > 0, psum[expert - 1], 0), alignment)
    end = T.if_then_else(expert < num_experts, psum[expert], INT_MAX)
    for i in T.unroll(real.shape[0]):
        while end <= row + i:
            expert = expert + 1
            first = first_row_after(end, alignment)
            end = T.if_then_else(expert < num_experts, psum[expert], INT_MAX)
        if expert == num_experts or row + i < first:
            real[i] = 0


@macro
def first_row_after(end, alignment):
    """The row at which the expert after `end` rows begins."""
    excess = T.truncmod(end, alignment)
    return end + T.Select(excess > 0, alignment - excess, 0)


@macro
def find_places(kind, pos_to_token_topk, row, num_tokens, place):
    """`place[i]` of the weight of `row + i`; `kind` is '', 'row' (one for each row) or 'map' (-1 if there is none)."""
    for i in T.unroll(place.shape[0]):
        place[i] = row + i
        if kind == 'map':
            place[i] = -1
            if row + i < num_tokens:
                place[i] = pos_to_token_topk[row + i]


@macro
def load_weights(kind, weights, weight_scale, place, real, weight):
    """`weight[i]` of every real row, 0 of the others and where there is none.

    They are scaled after all of them were asked for, so that none waits for another.
    """
    flat_weights = flat(weights) if kind == 'map' else weights
    for i in T.unroll(place.shape[0]):
        weight[i] = T.float32(0.0)
        if real[i] != 0 and (kind == 'row' or (place[i] >= 0 and place[i] < flat_weights.shape[0])):
            weight[i] = flat_weights[place[i]]
    for i in T.unroll(place.shape[0]):
        if kind == 'row' or (place[i] >= 0 and place[i] < flat_weights.shape[0]):
            weight[i] = weight[i] * weight_scale


def flat(x: Any) -> Any:
    """A matrix as one row."""
    return T.view(x, (x.shape[0] * x.shape[1],), x.dtype)


def weight_tensor(kind: str, num_tokens: Any) -> Any:
    """Parameter type of the weights: one for each row, or those of (token, choice) slots."""
    if kind == 'map':
        return T.Tensor((T.dynamic('num_sources'), T.dynamic('num_topk')), T.float32)
    return T.Tensor((num_tokens,), T.float32)


# Channels -----------------------------------------------------------------------------------


# Arithmetic ---------------------------------------------------------------------------------


@macro
def inverse_of(t):
    """`1 / t`, correctly rounded if no exponent is extreme."""
    guess = T.fast_rcp(t)
    return T.ieee_fmaf(guess, T.ieee_fmaf(-t, guess, T.float32(1.0)), guess)


@macro
def quotient_of(gate, t, inverse):
    """`gate / t`, correctly rounded if no exponent is extreme and `inverse` is `1 / t`."""
    guess = gate * inverse
    return T.ieee_fmaf(-T.ieee_fmaf(t, guess, -gate), inverse, guess)


def clamp_gate(gate: Any, clamp_value: Any) -> Any:
    """At most `clamp_value`; a NaN stays one."""
    return T.Select(gate > clamp_value, clamp_value, gate)


def clamp_up(up: Any, clamp_value: Any) -> Any:
    """Within [-clamp_value, clamp_value]; a NaN stays one."""
    return T.Select(T.abs(up) > clamp_value, T.copysign(clamp_value, up), up)


@macro
def activate_lanes(gate_local, up_local, weight, real, row_step, skipping, clamped, clamp_value, counts, act_local):
    """`act = (silu(gate) * up) * weight` in float32 of every vector of a lane.

    `weight[i * row_step]` is that of vector i (None if there are none). `real[i * row_step]` says whether its row is
    real. With `skipping`, other rows are not computed and give 0. `counts` is None, or three numbers that count what
    was clamped in real rows. Few lanes have a gate that needs the long division: whether one has is asked once for all
    its vectors.
    """
    vectors = int(gate_local.shape[0])
    clamped_silu = T.alloc_var(T.float32)
    if clamped:
        clamped_silu = T.ieee_fdiv(clamp_value, T.float32(1.0) + T.exp(-clamp_value))
    clamp = (clamp_value, clamped_silu) if clamped else None
    of_row = (weight, real, row_step, skipping)
    if lane_max(gate_local, *range(vectors)) > T.float32(GATE_LIMIT):
        for i in T.unroll(vectors):
            activate_lane(gate_local, up_local, i, *of_row, clamp, counts, True, act_local)
    else:
        for i in T.unroll(vectors):
            activate_lane(gate_local, up_local, i, *of_row, clamp, counts, False, act_local)


@macro
def activate_lane(gate_local, up_local, i, weight, real, row_step, skipping, clamp, counts, extreme, act_local):
    """`act = (silu(gate) * up) * weight` of vector i, counting what is clamped if its row is real.

    A gate is clamped after its silu is known, to the silu of the limit. The quotient of a bfloat16 gate needs no exact
    inverse: all such gates were tried.
    """
    gate = T.alloc_local((LANE,), T.float32)
    up = T.alloc_local((LANE,), T.float32)
    silu = T.alloc_local((LANE,), T.float32)
    t = T.alloc_var(T.float32)
    if not skipping or real[i * row_step] != 0:
        widen_lane(gate_local, i, gate)
        widen_lane(up_local, i, up)
        for j in T.unroll(LANE):
            t = T.float32(1.0) + T.exp(-gate[j])
            if extreme:
                silu[j] = T.ieee_fdiv(gate[j], t)
            else:
                silu[j] = quotient_of(gate[j], t, T.fast_rcp(t) if gate_local.dtype == 'bfloat16' else inverse_of(t))
        if clamp is not None and T.max(lane_max(gate_local, i), lane_max(up_local, i)) > clamp[0]:
            if counts is not None and real[i * row_step] != 0:
                count_lane(gate, up, clamp[0], counts)
            for j in T.unroll(LANE):
                silu[j] = T.Select(gate[j] > clamp[0], clamp[1], silu[j])
                up[j] = clamp_up(up[j], clamp[0])
        for j in T.unroll(LANE):
            act_local[i, j] = silu[j] * up[j]
            if weight is not None:
                act_local[i, j] = act_local[i, j] * weight[i * row_step]
    else:
        for j in T.unroll(LANE):
            act_local[i, j] = T.float32(0.0)


@macro
def count_lane(gate, up, clamp_value, counts):
    """Count what is to be clamped; few vectors have any of it, and counting costs more than to ask for it.

    The counts are float32, which takes one instruction to compare and one to add.
    """
    for j in T.unroll(LANE):
        counts[0] += T.Select(gate[j] > clamp_value, T.float32(1.0), T.float32(0.0))
        counts[1] += T.Select(up[j] > clamp_value, T.float32(1.0), T.float32(0.0))
        counts[2] += T.Select(up[j] < -clamp_value, T.float32(1.0), T.float32(0.0))


@macro
def add_counts(counts, num_counts, counts_shared, clamped_count, num_threads, hidden):
    """Add the counts of all threads of a block to the global ones, an atomic addition for each; the last is of rows."""
    thread = T.get_thread_binding()
    total = T.alloc_var(T.int32)
    for k in T.unroll(num_counts):
        total = T.warp_reduce_sum(T.cast(counts[k], T.int32))
        if thread % 32 == 0:
            counts_shared[thread // 32, k] = total
    T.sync_threads()
    if thread < num_counts:
        total = 0
        for w in T.unroll(num_threads // 32):
            total = total + counts_shared[w, thread]
        if total > 0:
            T.atomic_add(clamped_count[thread], T.cast(total, T.int64) * T.Select(thread == 3, hidden, 1))


# Scale factors ------------------------------------------------------------------------------


@macro
def clear_sf_of_padding(is_real, sf, k):
    """The scale factor of a padding row is 0."""
    if is_real == 0:
        sf[k] = T.cast(0, sf.dtype)


@macro
def scale_groups(
    v_local, fmt, lanes, num_groups, row, row_step, group, group_step, num_tokens, real, amax_floor, y_sf, sf_inv
):
    """Scale factors of groups of `lanes` lanes: write them, and give each lane the multiplier of each of its vectors.

    Vector i of a lane is in row `row + i * row_step` and in group `group + i * group_step`. Rows that are padding
    (`real[i * row_step]` = 0; None if there are none) get 0. A lane finds the factors of some of the vectors of its
    group only and passes the multipliers on.
    """
    vectors = int(v_local.shape[0])
    owned = -(-vectors // lanes)
    lane = T.get_thread_binding() % lanes
    amax = T.alloc_local((vectors,), T.float32)
    is_real = T.alloc_var(T.int32)
    sf = T.alloc_local((owned,), sf_register_dtype(fmt))
    own_inv = T.alloc_local((owned,), T.float32)
    for i in T.unroll(vectors):
        amax[i] = lane_max(v_local, i)
    scatter_max(amax, vectors, lane, 1, lanes)
    for k in T.unroll(owned):
        own = k * lanes + lane
        amax_to_sf(clamp_amax(amax[k], amax_floor), fmt, sf, own_inv, k)
        if real is not None:
            is_real = real[0]
            if row_step:
                for i in T.unroll(vectors - 1):
                    is_real = T.Select(own == i + 1, real[i + 1], is_real)
            clear_sf_of_padding(is_real, sf, k)
        if own < vectors and row + own * row_step < num_tokens and group < num_groups:
            store_sf(y_sf, fmt, num_groups, row + own * row_step, group + own * group_step, sf[k])
    for i in T.unroll(vectors):
        sf_inv[i] = T.shfl_sync(own_inv[i // lanes], i % lanes, width=lanes)
