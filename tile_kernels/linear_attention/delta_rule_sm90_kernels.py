"""Kernels of the delta rule for Hopper, one gate for a token and head. See `delta_rule` for the formula.

`delta_scores_sm90_kernel` is `delta_scores_kernel` with products by wgmma. It inverts the blocks of 16 rows on the
diagonal in float32, by columns. With D their inverses and N = D times the other blocks of A, the inverse of 1 + A is
D - N D + N^2 D - N^3 D, computed as Y <- D - N Y.

`delta_states_sm90_kernel` keeps the state transposed: values are rows. So the state, v - k S and u are first operands
from registers, and k, q, the scores and the inverse are second operands as they lie in memory. No thread waits for
another but once a chunk, for the copies of that chunk.
"""

from typing import Any

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.linear_attention.delta_rule_kernels import (
    LEAST_GATE,
    beta_of,
    fetch_rows,
    fetch_square,
    find_chunk,
    find_sequence,
    padded,
    state_shape,
    strided,
)

#: Every index is in bounds by what the kernels say themselves; barriers are by hand.
BY_HAND = {
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
}
WARPGROUP = 128
#: Extra columns of shared rows that threads read by columns, against bank conflicts.
PAD = 8


# Chunks -------------------------------------------------------------------------------------


@macro
def sum_gates(g, batch, first, head, rows, sum_shared):
    """Sums of the gates of a chunk since its start; the lanes of the first warp own consecutive rows."""
    lane, size = T.get_thread_binding(), sum_shared.shape[0]
    each = size // 32
    own = T.alloc_local((each,), T.float32)
    before = T.alloc_var(T.float32, init=0.0)
    other = T.alloc_var(T.float32, init=0.0)
    if lane < 32:
        for e in T.unroll(each):
            row = lane * each + e
            gate = g[batch, first + T.min(row, rows - 1), head]
            bounded = T.if_then_else(gate < LEAST_GATE, T.float32(LEAST_GATE), gate)
            own[e] = T.if_then_else(row < rows, bounded, T.float32(0.0))
        for e in T.unroll(each):
            if e > 0:
                own[e] = own[e] + own[e - 1]
        before = own[each - 1]
        for distance in (1, 2, 4, 8, 16):
            other = T.shfl_up(before, distance)
            if lane >= distance:
                before = before + other
        before = before - own[each - 1]
        for e in T.unroll(each):
            sum_shared[lane * each + e] = before + own[e]


@macro
def invert_blocks(lower_shared, inverse_shared):
    """Inverses of the blocks of 16 on the diagonal of 1 + A, where `lower_shared[j, i % 16]` is A[i, j]."""
    column = T.get_thread_binding()
    rows = T.alloc_local((16,), T.float32)
    if column < lower_shared.shape[0]:
        start = T.truncdiv(column, 16) * 16
        for i in T.unroll(16):
            rows[i] = T.if_then_else(start + i == column, T.float32(1.0), T.float32(0.0))
        for j in T.unroll(15):
            for i in T.unroll(16):
                if i > j:
                    rows[i] = rows[i] - lower_shared[start + j, i] * rows[j]
        for i in T.unroll(16):
            inverse_shared[start + i, column] = T.cast(rows[i], inverse_shared.dtype)


@macro
def store_square(x_shared, x, index, head, threads: int):
    """Store what a chunk has for every pair of its rows, 16 bytes a thread."""
    size, vectors = x_shared.shape[0], x_shared.shape[1] // 8
    for r in T.unroll(size * vectors // threads):
        at = r * threads + T.get_thread_binding()
        i, j = at // vectors, at % vectors * 8
        for e in T.vectorized(8):
            x[index, head, i, j + e] = x_shared[i, j + e]


def serves_scores(static: Any, gpu: Any) -> bool:
    """Chunks of 64 rows, which are a warpgroup."""
    return gpu.has_wgmma and static.chunk == 64 and static.dim <= 128 and not static.again


@kernel(pass_configs=BY_HAND, serves=serves_scores)
def delta_scores_sm90_kernel(
    dim: int, value_dim: int, dtype: torch.dtype, chunk: int, packed: bool, form: int, again: bool
):
    """Gate sums, scores and inverse of a chunk."""
    batch_size, num_tokens, heads, value_heads = (
        T.dynamic(n) for n in ('batch_size', 'num_tokens', 'heads', 'v_heads')
    )
    num_starts, num_chunks = T.dynamic('num_starts'), T.dynamic('num_chunks')
    elem, wide, threads = T.dtype(dtype), padded(dim), WARPGROUP
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)

    @T.prim_func
    def delta_scores_sm90(
        q: q_type,
        k: k_type,
        g: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        beta: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        g_sum: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        scores: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        inverse: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        o: T.Tensor((batch_size, num_tokens, value_heads, value_dim), elem),
        num_sequences: T.int32,
        bits: T.int32,
    ):
        with T.Kernel(num_chunks * value_heads, threads=threads) as block:
            index = T.alloc_var(T.int32)
            value_head = T.alloc_var(T.int32)
            index = T.truncdiv(block, value_heads)
            value_head = block - index * value_heads
            T.annotate_min_blocks_per_sm(3)
            for stride in q_strides + k_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((1, chunk, wide), elem)
            k_shared = T.alloc_shared((1, chunk, wide), elem)
            lower_shared = T.alloc_shared((chunk, 16), T.float32)
            blocks_shared = T.alloc_shared((chunk, chunk), elem)
            first_shared = T.alloc_shared((chunk, chunk), elem)
            second_shared = T.alloc_shared((chunk, chunk), elem)
            scores_shared = T.alloc_shared((chunk, chunk), elem)
            sum_shared = T.alloc_shared((chunk,), T.float32)
            beta_shared = T.alloc_shared((chunk,), T.float32)
            pairs = T.alloc_fragment((chunk, chunk), T.float32)
            products = T.alloc_fragment((chunk, chunk), T.float32)
            factor = T.alloc_fragment((chunk, chunk), elem)
            thread = T.get_thread_binding()
            own = find_chunk(cu_seqlens, index, num_sequences, bits, num_tokens, chunk, packed)
            head = T.alloc_var(T.int32)
            head = T.truncdiv(value_head, T.truncdiv(value_heads, heads))
            if T.And(own.rows > 0, own.sequence < num_sequences):
                fetch_rows(k, own.batch, own.first, head, own.rows, 0, k_shared, 0, threads)
                fetch_rows(q, own.batch, own.first, head, own.rows, 0, q_shared, 0, threads)
                T.ptx_commit_group()
                sum_gates(g, own.batch, own.first, value_head, own.rows, sum_shared)
                if thread >= threads - chunk:
                    row = thread - (threads - chunk)
                    given = beta[own.batch, own.first + T.min(row, own.rows - 1), value_head]
                    beta_shared[row] = T.if_then_else(row < own.rows, beta_of(given, form), T.float32(0.0))
                T.ptx_wait_group(0)
                T.fence_proxy_async()
                T.sync_threads()
                if thread < own.rows:
                    g_sum[own.batch, own.first + thread, value_head] = sum_shared[thread]
                T.wgmma_gemm(k_shared[0, :, :], k_shared[0, :, :], products, transpose_B=True, clear_accum=True)
                T.wgmma_gemm(q_shared[0, :, :], k_shared[0, :, :], pairs, transpose_B=True, clear_accum=True)
                T.wait_wgmma(0)
                for i, j in T.Parallel(chunk, chunk):
                    decay = T.__exp(T.min(sum_shared[i] - sum_shared[j], T.float32(0.0)))
                    pairs[i, j] = T.if_then_else(j <= i, pairs[i, j] * decay, T.float32(0.0))
                    products[i, j] = T.if_then_else(j < i, products[i, j] * decay * beta_shared[i], T.float32(0.0))
                for i, j in T.Parallel(chunk, chunk):
                    scores_shared[i, j] = T.cast(pairs[i, j], elem)
                for i, j in T.Parallel(chunk, chunk):
                    if T.truncdiv(i, 16) == T.truncdiv(j, 16):
                        lower_shared[j, T.truncmod(i, 16)] = products[i, j]
                for i, j in T.Parallel(chunk, chunk):
                    near = T.truncdiv(i, 16) == T.truncdiv(j, 16)
                    first_shared[i, j] = T.if_then_else(near, T.cast(0.0, elem), T.cast(products[i, j], elem))
                for i, j in T.Parallel(chunk, chunk):
                    if T.truncdiv(i, 16) != T.truncdiv(j, 16):
                        blocks_shared[i, j] = T.cast(0.0, elem)
                T.sync_threads()
                invert_blocks(lower_shared, blocks_shared)
                store_square(scores_shared, scores, index, value_head, threads)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(blocks_shared, first_shared, products, clear_accum=True)
                T.wait_wgmma(0)
                T.copy(products, factor)
                T.wgmma_gemm(factor, blocks_shared, products, clear_accum=True)
                T.wait_wgmma(0)
                for i, j in T.Parallel(chunk, chunk):
                    second_shared[i, j] = T.cast(blocks_shared[i, j], T.float32) - products[i, j]
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(factor, second_shared, products, clear_accum=True)
                T.wait_wgmma(0)
                for i, j in T.Parallel(chunk, chunk):
                    first_shared[i, j] = T.cast(blocks_shared[i, j], T.float32) - products[i, j]
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(factor, first_shared, products, clear_accum=True)
                T.wait_wgmma(0)
                for i, j in T.Parallel(chunk, chunk):
                    second_shared[i, j] = T.cast(blocks_shared[i, j], T.float32) - products[i, j]
                T.sync_threads()
                store_square(second_shared, inverse, index, value_head, threads)
            else:
                for i, j in T.Parallel(chunk, chunk):
                    inverse[index, value_head, i, j] = T.cast(0.0, elem)
                for i in T.Parallel(chunk):
                    if i < own.rows:
                        g_sum[own.batch, own.first + i, value_head] = 0.0
                for i, d in T.Parallel(chunk, padded(value_dim)):
                    if T.And(i < own.rows, d < value_dim):
                        o[own.batch, own.first + i, value_head, d] = T.cast(0.0, elem)

    return delta_scores_sm90


# Sequences ----------------------------------------------------------------------------------


@macro
def load_turned(state, sequence, head, column, acc, v_first: bool):
    """Load columns of a state as rows; 0 behind the last row and column."""
    dim, value_dim = (state.shape[3], state.shape[2]) if v_first else (state.shape[2], state.shape[3])
    for j, i in T.Parallel(acc.shape[0], acc.shape[1]):
        inside = T.And(i < dim, column + j < value_dim)
        if v_first:
            acc[j, i] = T.if_then_else(inside, T.cast(state[sequence, head, column + j, i], T.float32), T.float32(0.0))
        else:
            acc[j, i] = T.if_then_else(inside, T.cast(state[sequence, head, i, column + j], T.float32), T.float32(0.0))


@macro
def store_turned(acc, state, sequence, head, column, v_first: bool):
    """Store rows as columns of a state."""
    dim, value_dim = (state.shape[3], state.shape[2]) if v_first else (state.shape[2], state.shape[3])
    for j, i in T.Parallel(acc.shape[0], acc.shape[1]):
        if T.And(i < dim, column + j < value_dim):
            if v_first:
                state[sequence, head, column + j, i] = T.cast(acc[j, i], state.dtype)
            else:
                state[sequence, head, i, column + j] = T.cast(acc[j, i], state.dtype)


@macro
def store_values(x_shared, slot, x, batch, first, head, rows, column, tile: int, threads: int):
    """Store rows of a head from `column` on, 16 bytes a thread."""
    size, vectors = x_shared.shape[1], tile // 8
    for r in T.unroll(-(-size * vectors // threads)):
        at = r * threads + T.get_thread_binding()
        i, d = at // vectors, at % vectors * 8
        if at < size * vectors:  # noqa: SIM102
            if T.And(i < rows, column + d < x.shape[3]):
                for e in T.vectorized(8):
                    x[batch, first + i, head, column + d + e] = x_shared[slot, i, d + e]


def choose_states(
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    chunk: int,
    packed: bool,
    form: int,
    channels: bool,
    initial: torch.dtype | None,
    v_first: bool,
    final: bool,
    again: bool,
    size: int,
) -> dict:
    """`size` is the number of states. Two warpgroups share the copies; one leaves work for twice as many SMs."""
    return dict(tile=128 if value_dim > 64 and size >= 96 else 64, stages=3)


def serves_states(static: Any, gpu: Any) -> bool:
    """States that fit into the registers of one thread for each value."""
    fits = static.chunk >= 32 and static.dim <= 128
    return gpu.has_wgmma and fits and not static.channels and not static.again


@kernel(choose_states, space=dict(tile=(64, 128), stages=(2, 3)), pass_configs=BY_HAND, serves=serves_states)
def delta_states_sm90_kernel(
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    chunk: int,
    packed: bool,
    form: int,
    channels: bool,
    initial: torch.dtype | None,
    v_first: bool,
    final: bool,
    again: bool,
    *,
    tile: int,
    stages: int,
):
    """Results of all chunks of a sequence, for `tile` values of a head."""
    batch_size, num_tokens = T.dynamic('batch_size'), T.dynamic('num_tokens')
    heads, value_heads = T.dynamic('heads'), T.dynamic('value_heads')
    num_starts, num_chunks, number = T.dynamic('num_starts'), T.dynamic('num_chunks'), T.dynamic('number')
    elem, wide, threads = T.dtype(dtype), padded(dim), 2 * tile
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)
    v_type, v_strides = strided('v', (batch_size, num_tokens, value_heads, value_dim), elem)
    states = state_shape(number, value_heads, dim, value_dim, v_first)

    @T.prim_func
    def delta_states_sm90(
        q: q_type,
        k: k_type,
        v: v_type,
        g_sum: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        beta: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        scores: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        inverse: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        initial_state: T.Tensor(states, T.dtype(initial or torch.float32)),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        o: T.Tensor((batch_size, num_tokens, value_heads, value_dim), elem),
        final_state: T.Tensor(states, T.float32),
        h: T.Tensor((num_chunks, value_heads, dim, value_dim), elem),
        u: T.Tensor((batch_size, num_tokens, value_heads, value_dim), elem),
        num_sequences: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(-(-value_dim // tile), value_heads, num_sequences, threads=threads) as (
            part,
            value_head,
            sequence,
        ):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((stages, chunk, wide), elem)
            k_shared = T.alloc_shared((stages, chunk, wide), elem)
            scores_shared = T.alloc_shared((stages, chunk, chunk), elem)
            inverse_shared = T.alloc_shared((stages, chunk, chunk), elem)
            v_shared = T.alloc_shared((stages, chunk, tile + PAD), elem)
            o_shared = T.alloc_shared((2, chunk, tile + PAD), elem)
            factor_shared = T.alloc_shared((2, threads), T.float32)
            since_shared = T.alloc_shared((2, threads), T.float32)
            until_shared = T.alloc_shared((2, threads), T.float32)
            state = T.alloc_fragment((tile, wide), T.float32)
            state_half = T.alloc_fragment((tile, wide), elem)
            known = T.alloc_fragment((tile, chunk), T.float32)
            fresh = T.alloc_fragment((tile, chunk), T.float32)
            out = T.alloc_fragment((tile, chunk), T.float32)
            x_half = T.alloc_fragment((tile, chunk), elem)
            u_half = T.alloc_fragment((tile, chunk), elem)
            late_half = T.alloc_fragment((tile, chunk), elem)
            next_beta = T.alloc_var(T.float32, init=0.0)
            next_sum = T.alloc_var(T.float32, init=0.0)
            next_last = T.alloc_var(T.float32, init=0.0)
            thread = T.get_thread_binding()

            own = find_sequence(cu_seqlens, sequence, num_tokens, chunk, packed)
            head = T.alloc_var(T.int32)
            head = T.truncdiv(value_head, T.truncdiv(value_heads, heads))
            column = part * tile
            steps = T.truncdiv(own.length + chunk - 1, chunk)
            if initial is not None:
                load_turned(initial_state, sequence, value_head, column, state, v_first)
            else:
                T.clear(state)
            for ahead in T.serial(stages - 1):
                if ahead < steps:
                    first, rows = own.start + ahead * chunk, own.length - ahead * chunk
                    fetch_rows(k, own.batch, first, head, rows, 0, k_shared, ahead, threads)
                    fetch_rows(q, own.batch, first, head, rows, 0, q_shared, ahead, threads)
                    fetch_rows(v, own.batch, first, value_head, rows, column, v_shared, ahead, threads, tile)
                    fetch_square(inverse, own.index + ahead, value_head, inverse_shared, ahead, threads)
                    fetch_square(scores, own.index + ahead, value_head, scores_shared, ahead, threads)
                T.ptx_commit_group()
            if steps > 0:
                for ahead in T.serial(2):
                    if ahead > 0:  # numbers of the first chunk, before those of the second are read
                        factor_shared[0, thread] = beta_of(next_beta, form)
                        since_shared[0, thread] = T.__exp(next_sum)
                        until_shared[0, thread] = T.__exp(next_last - next_sum)
                    start = own.start + T.min(ahead, steps - 1) * chunk
                    length = T.min(own.start + own.length - start, chunk)
                    next_beta = beta[own.batch, start + T.min(thread, length - 1), value_head]
                    next_sum = g_sum[own.batch, start + T.min(thread, length - 1), value_head]
                    next_last = g_sum[own.batch, start + length - 1, value_head]
            for step in T.serial(steps):
                slot, turn = T.truncmod(step, stages), T.truncmod(step, 2)
                T.ptx_wait_group(stages - 2)
                T.fence_proxy_async()
                T.sync_threads()
                T.copy(state, state_half)
                T.wgmma_gemm(state_half, k_shared[slot, :, :], known, transpose_B=True, clear_accum=True)
                ahead = step + (stages - 1)
                later = T.truncmod(ahead, stages)
                first, rows = own.start + ahead * chunk, own.length - ahead * chunk
                index = own.index + T.min(ahead, steps - 1)
                fetch_rows(k, own.batch, first, head, rows, 0, k_shared, later, threads)
                fetch_rows(q, own.batch, first, head, rows, 0, q_shared, later, threads)
                fetch_rows(v, own.batch, first, value_head, rows, column, v_shared, later, threads, tile)
                fetch_square(inverse, index, value_head, inverse_shared, later, threads)
                fetch_square(scores, index, value_head, scores_shared, later, threads)
                T.ptx_commit_group()
                done = own.start + (step - 1) * chunk
                whole = T.if_then_else(step > 0, chunk, 0)
                store_values(o_shared, 1 - turn, o, own.batch, done, value_head, whole, column, tile, threads)
                factor_shared[1 - turn, thread] = beta_of(next_beta, form)
                since_shared[1 - turn, thread] = T.__exp(next_sum)
                until_shared[1 - turn, thread] = T.__exp(next_last - next_sum)
                start = own.start + T.min(step + 2, steps - 1) * chunk
                length = T.min(own.start + own.length - start, chunk)
                next_beta = beta[own.batch, start + T.min(thread, length - 1), value_head]
                next_sum = g_sum[own.batch, start + T.min(thread, length - 1), value_head]
                next_last = g_sum[own.batch, start + length - 1, value_head]
                for j, i in T.Parallel(tile, wide):
                    state[j, i] = state[j, i] * since_shared[turn, chunk - 1]
                T.wait_wgmma(0)
                for j, i in T.Parallel(tile, chunk):
                    value = T.cast(v_shared[slot, i, j], T.float32)
                    known[j, i] = factor_shared[turn, i] * (value - known[j, i] * since_shared[turn, i])
                T.copy(known, x_half)
                T.wgmma_gemm(x_half, inverse_shared[slot, :, :], fresh, transpose_B=True, clear_accum=True)
                T.wgmma_gemm(state_half, q_shared[slot, :, :], out, transpose_B=True, clear_accum=True)
                T.wait_wgmma(1)
                T.copy(fresh, u_half)
                for j, i in T.Parallel(tile, chunk):
                    fresh[j, i] = fresh[j, i] * until_shared[turn, i]
                T.copy(fresh, late_half)
                T.wgmma_gemm(late_half, k_shared[slot, :, :], state)
                T.wait_wgmma(1)
                for j, i in T.Parallel(tile, chunk):
                    out[j, i] = out[j, i] * since_shared[turn, i]
                T.wgmma_gemm(u_half, scores_shared[slot, :, :], out, transpose_B=True)
                T.wait_wgmma(0)
                for j, i in T.Parallel(tile, chunk):
                    o_shared[turn, i, j] = T.cast(out[j, i] * scale, elem)
            T.sync_threads()
            if steps > 0:
                done, rows = own.start + (steps - 1) * chunk, own.length - (steps - 1) * chunk
                slot = T.truncmod(steps - 1, 2)
                store_values(o_shared, slot, o, own.batch, done, value_head, rows, column, tile, threads)
            if final:
                store_turned(state, final_state, sequence, value_head, column, v_first)

    return delta_states_sm90
