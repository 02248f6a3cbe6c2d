"""Kernels of linear attention with a decay for Hopper, forward in time. See `chunk_simple_gla`.

A thread block owns a segment of one sequence, one head and a tile of values, and goes over chunks of 64 tokens. The
state is transposed: its rows are values. One warpgroup loads, computes the scores of a chunk and stores results. Every
other owns 64 values: its state and v are first operands of wgmma from registers.

A proxy fence waits for all copies of a thread in flight. So only the warpgroup that loads has any.
"""

from typing import Any

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.linear_attention.chunk_simple_gla_kernels import (
    CHUNK,
    KEYS,
    LOG2E,
    NOTHING,
    UNWEIGHTED,
    find_segment,
    padded,
    strided,
)
from tile_kernels.linear_attention.delta_rule_sm90_kernels import BY_HAND, PAD, WARPGROUP

#: Values of a multiplying warpgroup.
ROWS = 64
#: Registers of the threads that load and multiply; a block of three warpgroups has 504.
LOADING_REGISTERS, MULTIPLYING_REGISTERS = 104, 200


@macro
def begin_state(begin, place, head, column, state):
    """Load columns of a state as rows; 0 behind the last row and column."""
    for j, i in T.Parallel(state.shape[0], state.shape[1]):
        if T.And(i < begin.shape[2], column + j < begin.shape[3]):
            state[j, i] = T.cast(begin[place, head, i, column + j], T.float32)


@macro
def end_state(state, end, place, head, column):
    """Store rows as columns of a state in float32."""
    for j, i in T.Parallel(state.shape[0], state.shape[1]):
        if T.And(i < end.shape[2], column + j < end.shape[3]):
            end[place, head, i, column + j] = state[j, i]


@macro
def bring_rows(x, batch, first, head, rows, column, x_shared, slot, columns: int, thread):
    """Start to copy rows of a head from `column` on, by a warpgroup; 0 behind the last row and the last column."""
    vectors = columns // 8
    for r in T.unroll(CHUNK * vectors // WARPGROUP):
        at = r * WARPGROUP + thread
        i, d = at // vectors, at % vectors * 8
        T.ptx_cp_async(
            T.access_ptr(x_shared[slot, i, d], 'w', 8),
            T.access_ptr(x[batch, first + i, head, column + d], 'r', 8),
            8,
            T.And(i < rows, column + d < x.shape[3]),
        )


@macro
def give_rows(x_shared, x, batch, first, head, rows, column, columns: int, thread):
    """Store rows of a head from `column` on, by a warpgroup, 16 bytes a thread."""
    vectors = columns // 8
    for r in T.unroll(CHUNK * vectors // WARPGROUP):
        at = r * WARPGROUP + thread
        i, d = at // vectors, at % vectors * 8
        if T.And(i < rows, column + d < x.shape[3]):
            for e in T.vectorized(8):
                x[batch, first + i, head, column + d + e] = x_shared[0, i, d + e]


@macro
def load_numbers(x, batch, first, head, rows, own, lane):
    """Two numbers of consecutive tokens for every lane of a warp; 0 behind the last."""
    if lane < 32:
        for e in T.unroll(2):
            token = lane * 2 + e
            number = x[batch, first + T.max(T.min(token, rows - 1), 0), head]
            own[e] = T.if_then_else(token < rows, number, T.float32(0.0))


@macro
def spread_gates(
    gates, weights, scale, slot, sums_shared, since_shared, until_shared, weight_shared, weighted: bool, lane
):
    """Sums of gates of a chunk, and factors of its tokens, from what `load_numbers` has loaded."""
    before = T.alloc_var(T.float32, init=0.0)
    other = T.alloc_var(T.float32, init=0.0)
    if lane < 32:
        for e in T.unroll(2):
            gates[e] = T.max(gates[e] * LOG2E, T.float32(NOTHING))
        gates[1] = gates[0] + gates[1]
        before = gates[1]
        for distance in (1, 2, 4, 8, 16):
            other = T.shfl_up(before, distance)
            if lane >= distance:
                before = before + other
        other = T.shfl_sync(before, 31)
        before = before - gates[1]
        for e in T.unroll(2):
            gates[e] = before + gates[e]
            sums_shared[slot, lane * 2 + e] = gates[e]
            since_shared[slot, lane * 2 + e] = T.exp2(gates[e]) * scale
            weight = weights[e] if weighted else T.float32(1.0)
            until_shared[slot, lane * 2 + e] = T.exp2(other - gates[e]) * weight
            if weighted:
                weight_shared[slot, lane * 2 + e] = weight


def choose_tile(dim: int, out_dim: int) -> int:
    """Values of a block: two warpgroups share the copies and the scores if there are enough values."""
    return 128 if out_dim > 64 else 64


def choose_simple(
    dim: int,
    out_dim: int,
    dtype: torch.dtype,
    gated: bool,
    weights: str,
    packed: bool,
    backwards: bool,
    begin_dtype: torch.dtype | None,
    by_slot: bool,
    states_only: bool,
    end_dtype: torch.dtype | None,
    with_dots: bool,
    size: int,
) -> dict:
    """`size` is the number of segments and heads."""
    return dict(tile=choose_tile(dim, out_dim))


def serves_simple(static: Any, gpu: Any) -> bool:
    """The forward pass, with states that fit into the registers of one thread for each value."""
    forward = not static.backwards and not static.with_dots and static.weights in (UNWEIGHTED, KEYS)
    return gpu.has_wgmma and forward and padded(static.dim) <= 128


@kernel(choose_simple, space=dict(tile=(64, 128)), pass_configs=BY_HAND, serves=serves_simple)
def simple_gla_sm90_kernel(
    dim: int,
    out_dim: int,
    dtype: torch.dtype,
    gated: bool,
    weights: str,
    packed: bool,
    backwards: bool,
    begin_dtype: torch.dtype | None,
    by_slot: bool,
    states_only: bool,
    end_dtype: torch.dtype | None,
    with_dots: bool,
    *,
    tile: int,
):
    """`simple_gla_kernel` forward in time, without `dots`."""
    batches, num_tokens, num_heads = T.dynamic('batches'), T.dynamic('num_tokens'), T.dynamic('num_heads')
    q_heads, k_heads, v_heads = T.dynamic('q_heads'), T.dynamic('k_heads'), T.dynamic('v_heads')
    other_heads, num_cuts, num_begin, num_end = (T.dynamic(n) for n in ('other_heads', 'num_cuts', 'n_begin', 'n_end'))
    num_slots, num_dots, all_tokens = T.dynamic('num_slots'), T.dynamic('num_dots'), T.dynamic('all_tokens')
    elem, wide, members = T.dtype(dtype), padded(dim), tile // ROWS
    q_type, q_strides = strided('q', (batches, num_tokens, q_heads, dim), elem)
    k_type, k_strides = strided('k', (batches, num_tokens, k_heads, dim), elem)
    v_type, v_strides = strided('v', (batches, num_tokens, v_heads, out_dim), elem)
    other_type, _ = strided('other', (batches, num_tokens, other_heads, out_dim), elem)
    g_type, _ = strided('g', (batches, num_tokens, num_heads), T.float32, dense=0)
    w_type, _ = strided('w', (batches, num_tokens, num_heads), T.float32, dense=0)
    begin_type, _ = strided('begin', (num_begin, num_heads, dim, out_dim), T.dtype(begin_dtype or torch.float32), 0)
    end_type, _ = strided('end', (num_end, num_heads, dim, out_dim), T.dtype(end_dtype or torch.float32), 0)
    weighted, multiplying = weights != UNWEIGHTED, tuple(range(members))

    @T.prim_func
    def simple_gla_sm90(
        q: q_type,
        k: k_type,
        v: v_type,
        g: g_type,
        weight: w_type,
        cu_seqlens: T.Tensor((num_cuts,), T.int32),
        begin: begin_type,
        end: end_type,
        factors: T.Tensor((num_slots, num_heads), T.float32),
        other: other_type,
        o: T.Tensor((batches, num_tokens, num_heads, out_dim), elem),
        dots: T.Tensor((num_dots, num_heads, all_tokens), T.float32),
        slots: T.int32,
        heads: T.int32,
        num_sequences: T.int32,
        bits: T.int32,
        size: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(slots, -(-out_dim // tile), heads, threads=(members + 1) * WARPGROUP) as (slot, part, head):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            k_shared = T.alloc_shared((2, CHUNK, wide), elem)
            v_shared = T.alloc_shared((2, CHUNK, tile + PAD), elem)
            sums_shared = T.alloc_shared((2, CHUNK), T.float32)
            since_shared = T.alloc_shared((2, CHUNK), T.float32)
            until_shared = T.alloc_shared((2, CHUNK), T.float32)
            weight_shared = T.alloc_shared((2, CHUNK), T.float32)
            loaded, done = T.alloc_barrier([WARPGROUP] * 2), T.alloc_barrier([members * WARPGROUP] * 2)
            if not states_only:
                q_shared = T.alloc_shared((2, CHUNK, wide), elem)
                scores_shared = T.alloc_shared((2, CHUNK, CHUNK), elem)
                o_shared = T.alloc_shared((1, CHUNK, tile + PAD), elem)
                scored, stored = T.alloc_barrier([WARPGROUP] * 2), T.alloc_barrier([WARPGROUP])
                scores = T.alloc_fragment((CHUNK, CHUNK), T.float32)
            found = T.alloc_local((5,), T.int32)
            find_segment(cu_seqlens, slot, num_sequences, bits, num_tokens, size, packed, found)
            sequence, batch, length, row = found[0], found[1], found[3], found[4]
            column = part * tile
            tokens = T.alloc_var(T.int32, init=0)  # of the segment
            used = T.alloc_var(T.int32, init=0)  # that belong to a sequence
            chunks = T.alloc_var(T.int32, init=0)
            needed = T.alloc_var(T.bool, init=False)
            needed = T.Or(row < length, row == 0)
            if states_only:  # no other segment needs the state behind the last one
                needed = T.And(row < length, row + size < length)
            if needed:
                tokens = T.min(length - row, size)
                if sequence < num_sequences:
                    used = tokens
                chunks = T.truncdiv(tokens + CHUNK - 1, CHUNK)
            first = found[2] + row  # first token of the segment

            with T.ws(members):
                T.dec_max_nreg(LOADING_REGISTERS)
                thread = T.get_thread_binding() - members * WARPGROUP
                gates = T.alloc_local((2,), T.float32)
                token_weights = T.alloc_local((2,), T.float32)
                q_head, k_head, v_head = T.alloc_var(T.int32), T.alloc_var(T.int32), T.alloc_var(T.int32)
                q_head = T.truncdiv(head * q_heads, num_heads)
                k_head = T.truncdiv(head * k_heads, num_heads)
                v_head = T.truncdiv(head * v_heads, num_heads)
                for step in T.serial(chunks):
                    stage = T.truncmod(step, 2)
                    here, left = first + step * CHUNK, used - step * CHUNK
                    T.mbarrier_wait_parity(done[stage], (T.truncdiv(step, 2) + 1) & 1)
                    bring_rows(k, batch, here, k_head, left, 0, k_shared, stage, wide, thread)
                    if not states_only:
                        bring_rows(q, batch, here, q_head, left, 0, q_shared, stage, wide, thread)
                    bring_rows(v, batch, here, v_head, left, column, v_shared, stage, tile, thread)
                    T.ptx_commit_group()
                    if gated:
                        load_numbers(g, batch, here, head, left, gates, thread)
                        if weighted:
                            load_numbers(weight, batch, here, head, left, token_weights, thread)
                        factors_of_tokens = (sums_shared, since_shared, until_shared, weight_shared)
                        spread_gates(gates, token_weights, scale, stage, *factors_of_tokens, weighted, thread)
                    if not states_only:  # noqa: SIM102 - known when the kernel is built
                        if step > 1:
                            give_rows(o_shared, o, batch, here - 2 * CHUNK, head, CHUNK, column, tile, thread)
                            T.barrier_arrive(stored[0])
                    T.ptx_wait_group(0)
                    T.fence_proxy_async()
                    T.barrier_arrive(loaded[stage])
                    if not states_only:
                        T.mbarrier_wait_parity(loaded[stage], T.truncdiv(step, 2) & 1)
                        T.wgmma_gemm(
                            q_shared[stage, :, :], k_shared[stage, :, :], scores, transpose_B=True, clear_accum=True
                        )
                        T.wait_wgmma(0)
                        for i, j in T.Parallel(CHUNK, CHUNK):
                            power = sums_shared[stage, i] - sums_shared[stage, j] if gated else T.float32(0.0)
                            factor = T.exp2(T.min(power, T.float32(0.0))) * scale if gated else scale
                            if weighted:
                                factor = factor * weight_shared[stage, j]
                            scores[i, j] = T.if_then_else(j <= i, scores[i, j] * factor, T.float32(0.0))
                        for i, j in T.Parallel(CHUNK, CHUNK):
                            scores_shared[stage, i, j] = T.cast(scores[i, j], elem)
                        T.fence_proxy_async()
                        T.barrier_arrive(scored[stage])
                if not states_only:
                    for step in T.serial(T.max(chunks - 2, 0), chunks):
                        T.mbarrier_wait_parity(done[T.truncmod(step, 2)], T.truncdiv(step, 2) & 1)
                        begun = step * CHUNK
                        give_rows(o_shared, o, batch, first + begun, head, tokens - begun, column, tile, thread)
                        T.barrier_arrive(stored[0])
            for member in multiplying:
                with T.ws(member):
                    T.inc_max_nreg(MULTIPLYING_REGISTERS)
                    state = T.alloc_fragment((ROWS, wide), T.float32)
                    x_half = T.alloc_fragment((ROWS, CHUNK), elem)
                    if not states_only:
                        state_half = T.alloc_fragment((ROWS, wide), elem)
                        v_half = T.alloc_fragment((ROWS, CHUNK), elem)
                        out = T.alloc_fragment((ROWS, CHUNK), T.float32)
                    whole = T.alloc_var(T.float32, init=1.0)
                    total_gate = T.alloc_var(T.float32, init=0.0)
                    own = member * ROWS  # the first value of the warpgroup
                    T.clear(state)
                    if begin_dtype is not None:  # noqa: SIM102
                        if T.And(needed, sequence < num_sequences):
                            begin_state(begin, slot if by_slot else sequence, head, column + own, state)
                    for step in T.serial(chunks):
                        stage = T.truncmod(step, 2)
                        T.mbarrier_wait_parity(loaded[stage], T.truncdiv(step, 2) & 1)
                        if not states_only:
                            T.copy(state, state_half)
                            T.wgmma_gemm(state_half, q_shared[stage, :, :], out, transpose_B=True, clear_accum=True)
                            for j, i in T.Parallel(ROWS, CHUNK):
                                v_half[j, i] = v_shared[stage, i, own + j]
                        for j, i in T.Parallel(ROWS, CHUNK):
                            until = until_shared[stage, i] if gated else T.float32(1.0)
                            x_half[j, i] = T.cast(T.cast(v_shared[stage, i, own + j], T.float32) * until, elem)
                        if gated:
                            if states_only:
                                total_gate = total_gate + sums_shared[stage, CHUNK - 1]
                            whole = T.exp2(sums_shared[stage, CHUNK - 1])
                            for j, i in T.Parallel(ROWS, wide):
                                state[j, i] = state[j, i] * whole
                        T.wgmma_gemm(x_half, k_shared[stage, :, :], state)
                        if not states_only:
                            T.mbarrier_wait_parity(scored[stage], T.truncdiv(step, 2) & 1)
                            T.wait_wgmma(1)
                            for j, i in T.Parallel(ROWS, CHUNK):
                                out[j, i] = out[j, i] * (since_shared[stage, i] if gated else scale)
                            T.wgmma_gemm(v_half, scores_shared[stage, :, :], out, transpose_B=True)
                        T.wait_wgmma(0)
                        if not states_only:
                            T.mbarrier_wait_parity(stored[0], (step + 1) & 1)
                            for j, i in T.Parallel(ROWS, CHUNK):
                                o_shared[0, i, own + j] = T.cast(out[j, i], elem)
                        T.barrier_arrive(done[stage])
                    if states_only:
                        if T.And(needed, sequence < num_sequences):
                            end_state(state, end, slot, head, column + own)
                            if member == 0:  # noqa: SIM102 - known when the kernel is built
                                if T.And(part == 0, T.get_thread_binding() == 0):
                                    factors[slot, head] = T.exp2(total_gate)
                    elif end_dtype is not None:  # noqa: SIM102
                        if T.And(needed, T.And(sequence < num_sequences, row + size >= length)):
                            end_state(state, end, sequence, head, column + own)

    return simple_gla_sm90
