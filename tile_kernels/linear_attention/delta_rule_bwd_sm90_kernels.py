"""Kernels of the gradient of the delta rule for Hopper, for one gate per token. See `delta_rule_bwd_kernels`.

With T = (1 + A)^-1 and x = beta (v - e^G k S), two brackets of a chunk need no state:

    writes = T^T e^{G_C - G} k,      reads = scale P T
    S'  = e^{G_C} S + writes^T x,      u = T x
    dx  = writes dS' + reads^T do
    dS  = e^{G_C} dS' + scale (e^G q)^T do - (beta e^G k)^T dx

`delta_brackets_sm90_kernel` computes both. `delta_chains_sm90_kernel` follows S forwards and dS backwards: neither
needs the other, so half of the thread blocks do this and half that. States have values as rows. A state and what
belongs to tokens are first operands from registers. A chunk has one barrier for its copies and one for its results.

`delta_gradients_sm90_kernel` owns a chunk of a head and goes over its value heads. Two blocks share an SM, so shared
memory is used twice. Gradients of pairs take the place of do, and the gradient of the state that of the state.
"""

from typing import Any

import torch

from tile_kernels.core.gpus import SUM_SMS
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.linear_attention.delta_rule_bwd_kernels import clear_rows, slope_of, store_rows
from tile_kernels.linear_attention.delta_rule_kernels import (
    beta_of,
    fetch_rows,
    fetch_square,
    find_chunk,
    find_sequence,
    load_sums,
    padded,
    state_shape,
    strided,
)
from tile_kernels.linear_attention.delta_rule_sm90_kernels import (
    BY_HAND,
    PAD,
    WARPGROUP,
    load_turned,
    store_square,
    store_turned,
    store_values,
)

#: Rows of the numbers of tokens that `delta_gradients_sm90_kernel` keeps in shared memory.
SUM, BETA, LATER, DSUM = 0, 1, 2, 3


def serves_gradient(static: Any, gpu: Any) -> bool:
    """Chunks of 64 rows, which are a warpgroup, and tiles that leave room for two blocks on an SM."""
    return gpu.has_wgmma and static.chunk == 64 and static.dim <= 128 and static.value_dim <= 128


@kernel(pass_configs=BY_HAND, serves=serves_gradient)
def delta_brackets_sm90_kernel(dim: int, value_dim: int, dtype: torch.dtype, chunk: int, packed: bool):
    """`reads` and `writes` of a chunk and value head."""
    batch_size, num_tokens, heads, value_heads = (
        T.dynamic(n) for n in ('batch_size', 'num_tokens', 'heads', 'v_heads')
    )
    num_starts, num_chunks = T.dynamic('num_starts'), T.dynamic('num_chunks')
    elem, wide, threads = T.dtype(dtype), padded(dim), WARPGROUP
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)

    @T.prim_func
    def delta_brackets_sm90(
        q: q_type,
        k: k_type,
        g_sum: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        inverse: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        reads: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        writes: T.Tensor((batch_size, num_tokens, value_heads, dim), elem),
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
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
            inverse_shared = T.alloc_shared((1, chunk, chunk), elem)
            high_shared = T.alloc_shared((chunk, chunk), elem)
            low_shared = T.alloc_shared((chunk, chunk), elem)
            sum_shared = T.alloc_shared((chunk,), T.float32)
            pairs = T.alloc_fragment((chunk, chunk), T.float32)
            scores = T.alloc_fragment((chunk, chunk), elem)
            late = T.alloc_fragment((chunk, wide), T.float32)
            own = find_chunk(cu_seqlens, index, num_sequences, bits, num_tokens, chunk, packed)
            head = T.alloc_var(T.int32)
            head = T.truncdiv(value_head, T.truncdiv(value_heads, heads))
            if T.And(own.rows > 0, own.sequence < num_sequences):
                fetch_rows(k, own.batch, own.first, head, own.rows, 0, k_shared, 0, threads)
                fetch_rows(q, own.batch, own.first, head, own.rows, 0, q_shared, 0, threads)
                fetch_square(inverse, index, value_head, inverse_shared, 0, threads)
                T.ptx_commit_group()
                load_sums(g_sum, own.batch, own.first, value_head, own.rows, sum_shared)
                T.ptx_wait_group(0)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(q_shared[0, :, :], k_shared[0, :, :], pairs, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    decay = T.exp(sum_shared[chunk - 1] - sum_shared[i])
                    high_shared[i, j] = T.cast(T.cast(inverse_shared[0, i, j], T.float32) * decay, elem)
                for i, j in T.Parallel(chunk, chunk):
                    exact = T.cast(inverse_shared[0, i, j], T.float32) * T.exp(sum_shared[chunk - 1] - sum_shared[i])
                    low_shared[i, j] = T.cast(exact - T.cast(T.cast(exact, elem), T.float32), elem)
                T.wait_wgmma(0)
                for i, j in T.Parallel(chunk, chunk):
                    decay = scale * T.exp(T.min(sum_shared[i] - sum_shared[j], T.float32(0.0)))
                    pairs[i, j] = T.if_then_else(j <= i, pairs[i, j] * decay, T.float32(0.0))
                T.copy(pairs, scores)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(scores, inverse_shared[0, :, :], pairs, clear_accum=True)
                T.wgmma_gemm(high_shared, k_shared[0, :, :], late, transpose_A=True, clear_accum=True)
                T.wgmma_gemm(low_shared, k_shared[0, :, :], late, transpose_A=True)
                T.wait_wgmma(0)
                T.sync_threads()  # products of other warps may still read
                for i, j in T.Parallel(chunk, chunk):
                    high_shared[i, j] = T.cast(pairs[i, j], elem)
                for i, d in T.Parallel(chunk, wide):
                    q_shared[0, i, d] = T.cast(late[i, d], elem)
                T.sync_threads()
                store_square(high_shared, reads, index, value_head, threads)
                store_values(q_shared, 0, writes, own.batch, own.first, value_head, own.rows, 0, wide, threads)

    return delta_brackets_sm90


# Sequences ----------------------------------------------------------------------------------


@macro
def store_scaled(x_shared, factor_shared, slot, x, batch, first, head, rows, column, tile: int, threads: int):
    """Store rows of a head times a factor of each row, 16 bytes a thread."""
    size, vectors = x_shared.shape[1], tile // 8
    scaled = T.alloc_local((8,), x.dtype)
    for r in T.unroll(size * vectors // threads):
        at = r * threads + T.get_thread_binding()
        i, d = at // vectors, at % vectors * 8
        if T.And(i < rows, column + d < x.shape[3]):
            for e in T.vectorized(8):
                scaled[e] = T.cast(T.cast(x_shared[0, i, d + e], T.float32) * factor_shared[slot, i], x.dtype)
            for e in T.vectorized(8):
                x[batch, first + i, head, column + d + e] = scaled[e]


@macro
def store_turned_state(x_shared, x, index, head, column, threads: int):
    """Store rows, which are values, of the state of a chunk, 16 bytes a thread."""
    tile, vectors = x_shared.shape[0], (x_shared.shape[1] - PAD) // 8
    for r in T.unroll(tile * vectors // threads):
        at = r * threads + T.get_thread_binding()
        j, d = at // vectors, at % vectors * 8
        if T.And(column + j < x.shape[2], d < x.shape[3]):
            for e in T.vectorized(8):
                x[index, head, column + j, d + e] = x_shared[j, d + e]


@macro
def stage_state(state, x_shared):
    """Write a state to shared memory, from where the next step stores it."""
    for j, d in T.Parallel(state.shape[0], state.shape[1]):
        x_shared[j, d] = T.cast(state[j, d], x_shared.dtype)


@macro
def stage_turned(x, x_shared):
    """Write what has values as rows to shared memory with tokens as rows."""
    for j, i in T.Parallel(x.shape[0], x.shape[1]):
        x_shared[0, i, j] = T.cast(x[j, i], x_shared.dtype)


def choose_chains(
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    chunk: int,
    packed: bool,
    form: int,
    initial: torch.dtype | None,
    v_first: bool,
    final: bool,
    size: int,
) -> dict:
    """`size` is the number of states. Two warpgroups share the copies; one leaves work for twice as many SMs."""
    return dict(tile=128 if value_dim > 64 and 4 * size > SUM_SMS else 64)


@kernel(choose_chains, space=dict(tile=(64, 128)), pass_configs=BY_HAND, serves=serves_gradient)
def delta_chains_sm90_kernel(
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    chunk: int,
    packed: bool,
    form: int,
    initial: torch.dtype | None,
    v_first: bool,
    final: bool,
    *,
    tile: int,
):
    """The state before every chunk and u, or the gradient of the state behind every chunk, dx and dv.

    States have values as rows.
    """
    batch_size, num_tokens = T.dynamic('batch_size'), T.dynamic('num_tokens')
    heads, value_heads = T.dynamic('heads'), T.dynamic('value_heads')
    num_starts, num_chunks, number = T.dynamic('num_starts'), T.dynamic('num_chunks'), T.dynamic('number')
    elem, wide, threads = T.dtype(dtype), padded(dim), 2 * tile
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)
    v_type, v_strides = strided('v', (batch_size, num_tokens, value_heads, value_dim), elem)
    values = (batch_size, num_tokens, value_heads, value_dim)
    squares = (num_chunks, value_heads, chunk, chunk)
    turned = (num_chunks, value_heads, value_dim, dim)
    states = state_shape(number, value_heads, dim, value_dim, v_first)
    parts = -(-value_dim // tile)
    rows_first = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def delta_chains_sm90(
        do: T.Tensor(values, elem),
        q: q_type,
        k: k_type,
        v: v_type,
        g_sum: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        beta: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        inverse: T.Tensor(squares, elem),
        reads: T.Tensor(squares, elem),
        writes: T.Tensor((batch_size, num_tokens, value_heads, dim), elem),
        initial_state: T.Tensor(states, T.dtype(initial or torch.float32)),
        dfinal_state: T.Tensor(states, T.float32),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        h: T.Tensor(turned, elem),
        u: T.Tensor(values, elem),
        dh: T.Tensor(turned, elem),
        dx: T.Tensor(values, elem),
        dv: T.Tensor(values, elem),
        dinitial_state: T.Tensor(states, T.dtype(initial or torch.float32)),
        num_sequences: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(2 * parts, value_heads, num_sequences, threads=threads) as (part, value_head, sequence):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            k_shared = T.alloc_shared((2, chunk, wide), elem)
            q_shared = T.alloc_shared((2, chunk, wide), elem)
            writes_shared = T.alloc_shared((2, chunk, wide), elem)
            values_shared = T.alloc_shared((2, chunk, tile), elem)
            square_shared = T.alloc_shared((2, chunk, chunk), elem)
            out_shared = T.alloc_shared((1, chunk, tile + PAD), elem)
            state_shared = T.alloc_shared((tile, wide + PAD), elem)
            factor_shared = T.alloc_shared((2, threads), T.float32)
            since_shared = T.alloc_shared((2, threads), T.float32)
            state = T.alloc_fragment((tile, wide), T.float32)
            state_half = T.alloc_fragment((tile, wide), elem)
            known = T.alloc_fragment((tile, chunk), T.float32)
            out = T.alloc_fragment((tile, chunk), T.float32)
            x_half = T.alloc_fragment((tile, chunk), elem)
            y_half = T.alloc_fragment((tile, chunk), elem)
            next_beta = T.alloc_var(T.float32, init=0.0)
            next_sum = T.alloc_var(T.float32, init=0.0)
            thread = T.get_thread_binding()
            own = find_sequence(cu_seqlens, sequence, num_tokens, chunk, packed)
            head = T.alloc_var(T.int32)
            head = T.truncdiv(value_head, T.truncdiv(value_heads, heads))
            steps = T.truncdiv(own.length + chunk - 1, chunk)

            if part < parts:
                column = part * tile
                if initial is not None:
                    load_turned(initial_state, sequence, value_head, column, state, v_first)
                else:
                    T.clear(state)
                if steps > 0:
                    fetch_rows(k, own.batch, own.start, head, own.length, 0, k_shared, 0, threads)
                    fetch_rows(writes, own.batch, own.start, value_head, own.length, 0, writes_shared, 0, threads)
                    fetch_rows(v, own.batch, own.start, value_head, own.length, column, values_shared, 0, threads)
                    fetch_square(inverse, own.index, value_head, square_shared, 0, threads)
                    T.ptx_commit_group()
                    row = own.start + T.min(thread, T.min(own.length, chunk) - 1)
                    factor_shared[0, thread] = beta_of(beta[own.batch, row, value_head], form)
                    since_shared[0, thread] = T.exp(g_sum[own.batch, row, value_head])
                    stage_state(state, state_shared)
                for step in T.serial(steps):
                    slot, other = T.truncmod(step, 2), 1 - T.truncmod(step, 2)
                    T.ptx_wait_group(0)
                    T.fence_proxy_async()
                    T.sync_threads()
                    T.copy(state, state_half)
                    T.wgmma_gemm(
                        state_half, k_shared[slot, :, :], known, transpose_B=True, clear_accum=True, policy=rows_first
                    )
                    # Nothing but these copies writes shared memory until the last product: a fence would wait for them.
                    first, rows = own.start + (step + 1) * chunk, own.length - (step + 1) * chunk
                    index = own.index + T.min(step + 1, steps - 1)
                    fetch_rows(k, own.batch, first, head, rows, 0, k_shared, other, threads, access='r')
                    fetch_rows(writes, own.batch, first, value_head, rows, 0, writes_shared, other, threads, access='r')
                    fetch_rows(v, own.batch, first, value_head, rows, column, values_shared, other, threads, access='r')
                    fetch_square(inverse, index, value_head, square_shared, other, threads, access='r')
                    T.ptx_commit_group()
                    start = own.start + T.min(step + 1, steps - 1) * chunk
                    row = start + T.min(thread, T.min(own.start + own.length - start, chunk) - 1)
                    next_beta = beta[own.batch, row, value_head]
                    next_sum = g_sum[own.batch, row, value_head]
                    store_turned_state(state_shared, h, own.index + step, value_head, column, threads)
                    done, whole = own.start + (step - 1) * chunk, T.if_then_else(step > 0, chunk, 0)
                    store_values(out_shared, 0, u, own.batch, done, value_head, whole, column, tile, threads)
                    for j, d in T.Parallel(tile, wide):
                        state[j, d] = state[j, d] * since_shared[slot, chunk - 1]
                    T.wait_wgmma(0)
                    for j, i in T.Parallel(tile, chunk):
                        value = T.cast(values_shared[slot, i, j], T.float32)
                        known[j, i] = factor_shared[slot, i] * (value - known[j, i] * since_shared[slot, i])
                    T.copy(known, x_half)
                    T.wgmma_gemm(x_half, writes_shared[slot, :, :], state, policy=rows_first)
                    T.wgmma_gemm(
                        x_half, square_shared[slot, :, :], out, transpose_B=True, clear_accum=True, policy=rows_first
                    )
                    T.wait_wgmma(0)
                    T.sync_threads()  # the results of the last step are stored
                    factor_shared[other, thread] = beta_of(next_beta, form)
                    since_shared[other, thread] = T.exp(next_sum)
                    stage_turned(out, out_shared)
                    stage_state(state, state_shared)
                if steps > 0:
                    T.sync_threads()
                    done, rows = own.start + (steps - 1) * chunk, own.length - (steps - 1) * chunk
                    store_values(out_shared, 0, u, own.batch, done, value_head, rows, column, tile, threads)
            else:
                column = (part - parts) * tile
                if final:
                    load_turned(dfinal_state, sequence, value_head, column, state, v_first)
                else:
                    T.clear(state)
                if steps > 0:
                    last = own.start + (steps - 1) * chunk
                    rows = own.length - (steps - 1) * chunk
                    fetch_rows(k, own.batch, last, head, rows, 0, k_shared, 0, threads)
                    fetch_rows(q, own.batch, last, head, rows, 0, q_shared, 0, threads)
                    fetch_rows(writes, own.batch, last, value_head, rows, 0, writes_shared, 0, threads)
                    fetch_rows(do, own.batch, last, value_head, rows, column, values_shared, 0, threads)
                    fetch_square(reads, own.index + steps - 1, value_head, square_shared, 0, threads)
                    T.ptx_commit_group()
                    row = last + T.min(thread, rows - 1)
                    factor_shared[0, thread] = beta_of(beta[own.batch, row, value_head], form)
                    since_shared[0, thread] = T.exp(g_sum[own.batch, row, value_head])
                    stage_state(state, state_shared)
                for step in T.serial(steps):
                    slot, other = T.truncmod(step, 2), 1 - T.truncmod(step, 2)
                    at = steps - 1 - step
                    T.ptx_wait_group(0)
                    T.fence_proxy_async()
                    T.sync_threads()
                    T.wgmma_gemm(
                        values_shared[slot, :, :],
                        square_shared[slot, :, :],
                        known,
                        transpose_A=True,
                        clear_accum=True,
                        policy=rows_first,
                    )
                    T.copy(state, state_half)
                    T.wgmma_gemm(state_half, writes_shared[slot, :, :], known, transpose_B=True, policy=rows_first)
                    before = T.max(at - 1, 0)
                    first, rows = own.start + before * chunk, T.if_then_else(at > 0, chunk, 0)
                    index = own.index + before
                    fetch_rows(k, own.batch, first, head, rows, 0, k_shared, other, threads, access='r')
                    fetch_rows(q, own.batch, first, head, rows, 0, q_shared, other, threads, access='r')
                    fetch_rows(writes, own.batch, first, value_head, rows, 0, writes_shared, other, threads, access='r')
                    fetch_rows(
                        do, own.batch, first, value_head, rows, column, values_shared, other, threads, access='r'
                    )
                    fetch_square(reads, index, value_head, square_shared, other, threads, access='r')
                    T.ptx_commit_group()
                    row = first + T.min(thread, T.min(own.length - before * chunk, chunk) - 1)
                    next_beta = beta[own.batch, row, value_head]
                    next_sum = g_sum[own.batch, row, value_head]
                    store_turned_state(state_shared, dh, own.index + at, value_head, column, threads)
                    done = own.start + (at + 1) * chunk
                    whole = T.if_then_else(step > 0, own.length - (at + 1) * chunk, 0)
                    store_values(out_shared, 0, dx, own.batch, done, value_head, whole, column, tile, threads)
                    store_scaled(
                        out_shared, factor_shared, other, dv, own.batch, done, value_head, whole, column, tile, threads
                    )
                    for j, d in T.Parallel(tile, wide):
                        state[j, d] = state[j, d] * since_shared[slot, chunk - 1]
                    for j, i in T.Parallel(tile, chunk):
                        value = T.cast(values_shared[slot, i, j], T.float32)
                        y_half[j, i] = T.cast(value * (scale * since_shared[slot, i]), elem)
                    T.wait_wgmma(0)
                    for j, i in T.Parallel(tile, chunk):
                        x_half[j, i] = T.cast(-known[j, i] * (factor_shared[slot, i] * since_shared[slot, i]), elem)
                    T.wgmma_gemm(y_half, q_shared[slot, :, :], state, policy=rows_first)
                    T.wgmma_gemm(x_half, k_shared[slot, :, :], state, policy=rows_first)
                    T.wait_wgmma(0)
                    T.sync_threads()  # the results of the last step are stored
                    factor_shared[other, thread] = beta_of(next_beta, form)
                    since_shared[other, thread] = T.exp(next_sum)
                    stage_turned(known, out_shared)
                    stage_state(state, state_shared)
                if steps > 0:
                    T.sync_threads()
                    slot, rows = T.truncmod(steps - 1, 2), T.min(own.length, chunk)
                    store_values(out_shared, 0, dx, own.batch, own.start, value_head, rows, column, tile, threads)
                    store_scaled(
                        out_shared,
                        factor_shared,
                        slot,
                        dv,
                        own.batch,
                        own.start,
                        value_head,
                        rows,
                        column,
                        tile,
                        threads,
                    )
                if initial is not None:
                    store_turned(state, dinitial_state, sequence, value_head, column, v_first)

    return delta_chains_sm90


# Chunks -------------------------------------------------------------------------------------


@macro
def fetch_turned_state(x, index, head, x_shared, threads: int, access: str = 'w'):
    """Start to copy the state of a chunk, which has values as rows; 0 behind its last row and column."""
    depth, vectors = x_shared.shape[1], x_shared.shape[2] // 8
    for r in T.unroll(x_shared.shape[0] * depth * vectors // threads):
        at = r * threads + T.get_thread_binding()
        j, d = at // vectors, at % vectors * 8
        T.ptx_cp_async(
            T.access_ptr(x_shared[j // depth, j % depth, d], access, 8),
            T.access_ptr(x[index, head, T.min(j, x.shape[2] - 1), T.min(d, x.shape[3] - 8)], 'r', 8),
            8,
            T.And(j < x.shape[2], d < x.shape[3]),
        )


@macro
def load_own_rows(x, batch, first, head, rows, numbers, threads: int):
    """Load the vectors of rows that a thread multiplies in `multiply_rows`; all loads are in flight at once."""
    size, lane = int(numbers.shape[0]) // 8, T.truncmod(T.get_thread_binding(), 16)
    for r in T.unroll(size):
        i = T.min(r * (threads // 16) + T.truncdiv(T.get_thread_binding(), 16), rows - 1)
        for e in T.vectorized(8):
            numbers[r * 8 + e] = x[batch, first + i, head, T.min(lane * 8, x.shape[3] - 8) + e]


@macro
def multiply_rows(x_shared, numbers, numbers_shared, place: int, threads: int):
    """Sums of products of every row in shared memory with the row that 16 lanes hold; what is outside is 0 there."""
    size, lane = int(numbers.shape[0]) // 8, T.truncmod(T.get_thread_binding(), 16)
    column = T.min(lane * 8, x_shared.shape[2] - 8)
    others = T.alloc_local((8,), x_shared.dtype)
    total = T.alloc_var(T.float32, init=0.0)
    for r in T.unroll(size):
        i = r * (threads // 16) + T.truncdiv(T.get_thread_binding(), 16)
        total = 0.0
        for e in T.vectorized(8):
            others[e] = x_shared[0, i, column + e]
        for e in T.unroll(8):
            total = total + T.cast(numbers[r * 8 + e], T.float32) * T.cast(others[e], T.float32)
        total = T.if_then_else(lane * 8 < x_shared.shape[2], total, T.float32(0.0))
        for distance in (8, 4, 2, 1):
            total = total + T.shfl_xor(total, distance)
        if lane == 0:
            numbers_shared[place, i] = total


@macro
def multiply_states(x_shared, y, index, head, threads: int):
    """The share of a warp in the sum of products of two states; the second one is in memory."""
    depth, vectors = x_shared.shape[1], x_shared.shape[2] // 8
    loads = int(x_shared.shape[0] * depth * vectors) // threads
    batch = max(number for number in range(1, 5) if loads % number == 0)
    numbers = T.alloc_local((8 * batch,), y.dtype)
    others = T.alloc_local((8,), x_shared.dtype)
    total = T.alloc_var(T.float32, init=0.0)
    total = 0.0
    for part in T.unroll(loads // batch):
        for r in T.unroll(batch):  # these loads are in flight at once
            at = (part * batch + r) * threads + T.get_thread_binding()
            j, d = T.min(at // vectors, y.shape[2] - 1), T.min(at % vectors * 8, y.shape[3] - 8)
            for e in T.vectorized(8):
                numbers[r * 8 + e] = y[index, head, j, d + e]
        for r in T.unroll(batch):
            at = (part * batch + r) * threads + T.get_thread_binding()
            for e in T.vectorized(8):
                others[e] = x_shared[at // vectors // depth, at // vectors % depth, at % vectors * 8 + e]
            for e in T.unroll(8):
                total = total + T.cast(numbers[r * 8 + e], T.float32) * T.cast(others[e], T.float32)
    for distance in (16, 8, 4, 2, 1):
        total = total + T.shfl_xor(total, distance)
    return total


@macro
def store_gate_gradient(numbers_shared, dg, batch, first, head, rows):
    """The gradient of a gate is the sum over the later rows; the first warp owns two rows a lane."""
    lane, size = T.get_thread_binding(), numbers_shared.shape[1]
    below = T.alloc_var(T.float32, init=0.0)
    after = T.alloc_var(T.float32, init=0.0)
    other = T.alloc_var(T.float32, init=0.0)
    if lane < 32:
        after = numbers_shared[LATER, lane] + numbers_shared[LATER, lane + size // 2]
        for distance in (16, 8, 4, 2, 1):
            after = after + T.shfl_xor(after, distance)
        below = numbers_shared[DSUM, 2 * lane] + numbers_shared[DSUM, 2 * lane + 1]
        for distance in (1, 2, 4, 8, 16):
            other = T.shfl_down(below, distance)
            if lane + distance < 32:
                below = below + other
        below = below + after
        if 2 * lane < rows:
            dg[batch, first + 2 * lane, head] = below
        if 2 * lane + 1 < rows:
            dg[batch, first + 2 * lane + 1, head] = below - numbers_shared[DSUM, 2 * lane]


@macro
def add_member(acc, wide_sum, batch, first, head, rows, member):
    """Add the gradient of the value heads before this one."""
    if member > 0:
        for i, d in T.Parallel(acc.shape[0], acc.shape[1]):
            if T.And(i < rows, d < wide_sum.shape[3]):
                acc[i, d] = acc[i, d] + wide_sum[batch, first + i, head, d]


@kernel(pass_configs=BY_HAND, serves=serves_gradient)
def delta_gradients_sm90_kernel(
    dim: int, value_dim: int, dtype: torch.dtype, chunk: int, packed: bool, form: int, grouped: bool
):
    """dq, dk, dg and dbeta of a chunk; with `grouped` heads, sums over value heads wait in `q_sum` and `k_sum`."""
    batch_size, num_tokens, heads, value_heads = (
        T.dynamic(n) for n in ('batch_size', 'num_tokens', 'heads', 'v_heads')
    )
    num_starts, num_chunks = T.dynamic('num_starts'), T.dynamic('num_chunks')
    elem, wide, wide_v, threads = T.dtype(dtype), padded(dim), padded(value_dim), WARPGROUP
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)
    v_type, v_strides = strided('v', (batch_size, num_tokens, value_heads, value_dim), elem)
    values = (batch_size, num_tokens, value_heads, value_dim)
    keys = (batch_size, num_tokens, heads, dim)
    turned = (num_chunks, value_heads, value_dim, dim)
    parts = (0, 1) if wide_v == 2 * chunk else (0,)
    depth = wide_v // len(parts)

    @T.prim_func
    def delta_gradients_sm90(
        do: T.Tensor(values, elem),
        q: q_type,
        k: k_type,
        v: v_type,
        g_sum: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        beta: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        u: T.Tensor(values, elem),
        dx: T.Tensor(values, elem),
        h: T.Tensor(turned, elem),
        dh: T.Tensor(turned, elem),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        q_sum: T.Tensor(keys, T.float32),
        k_sum: T.Tensor(keys, T.float32),
        dq: T.Tensor(keys, elem),
        dk: T.Tensor(keys, elem),
        dv: T.Tensor(values, elem),
        dg: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        dbeta: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
        group: T.int32,
    ):
        with T.Kernel(num_chunks * heads, threads=threads) as block:
            index = T.alloc_var(T.int32)
            head = T.alloc_var(T.int32)
            index = T.truncdiv(block, heads)
            head = block - index * heads
            T.annotate_min_blocks_per_sm(2)
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((1, chunk, wide), elem)
            k_shared = T.alloc_shared((1, chunk, wide), elem)
            do_shared = T.alloc_shared((1, chunk, wide_v), elem)
            u_shared = T.alloc_shared((1, chunk, wide_v), elem)
            dx_shared = T.alloc_shared((1, chunk, wide_v), elem)
            state_shared = T.alloc_shared((len(parts), depth, wide), elem)
            pairs_shared = do_shared if wide_v >= 2 * chunk else T.alloc_shared((1, chunk, 2 * chunk), elem)
            own_out = None if wide_v == wide >= chunk else T.alloc_shared((1, chunk, max(wide, chunk)), elem)
            out_shared = dx_shared if own_out is None else own_out
            numbers = T.alloc_shared((4, chunk), T.float32)  # one buffer: each is aligned to 1024 bytes
            dq_acc = T.alloc_fragment((chunk, wide), T.float32)
            r_acc = T.alloc_fragment((chunk, wide), T.float32)
            c_acc = T.alloc_fragment((chunk, wide), T.float32)
            terms = T.alloc_fragment((chunk, wide), T.float32)
            dp = T.alloc_fragment((chunk, chunk), T.float32)
            da = T.alloc_fragment((chunk, chunk), T.float32)
            dp_half = T.alloc_fragment((chunk, chunk), elem)
            rest_half = T.alloc_fragment((chunk, chunk), elem)
            da_half = T.alloc_fragment((chunk, chunk), elem)
            own_values = T.alloc_local((chunk * 128 // threads,), elem)
            row_sum = T.alloc_fragment((chunk,), T.float32)
            later_sum = T.alloc_fragment((chunk,), T.float32)
            thread = T.get_thread_binding()
            own = find_chunk(cu_seqlens, index, num_sequences, bits, num_tokens, chunk, packed)
            first, rows, batch = T.alloc_var(T.int32), T.alloc_var(T.int32), T.alloc_var(T.int32)
            again = T.alloc_var(T.int32)
            first, rows, batch = own.first, own.rows, own.batch
            again = T.truncdiv(num_sequences, 1 << 30)  # 0: else descriptors of the state wait in registers
            if T.And(own.rows > 0, own.sequence < num_sequences):
                for member in T.serial(group if grouped else 1):
                    low = member - (1 << 30)  # negative: else what depends on these waits in registers
                    index, head = T.max(index, low), T.max(head, low)
                    first, rows, again = T.max(first, low), T.max(rows, low), T.max(again, low)
                    if not packed:
                        batch = T.max(batch, low)
                    value_head = head * group + member
                    fetch_rows(do, batch, first, value_head, rows, 0, do_shared, 0, threads)
                    fetch_rows(u, batch, first, value_head, rows, 0, u_shared, 0, threads)
                    fetch_rows(dx, batch, first, value_head, rows, 0, dx_shared, 0, threads)
                    T.ptx_commit_group()
                    fetch_turned_state(h, index, value_head, state_shared, threads)
                    if member == 0:
                        fetch_rows(q, batch, first, head, rows, 0, q_shared, 0, threads)
                        fetch_rows(k, batch, first, head, rows, 0, k_shared, 0, threads)
                    T.ptx_commit_group()
                    load_own_rows(v, batch, first, value_head, rows, own_values, threads)
                    if thread < chunk:
                        row = first + T.min(thread, rows - 1)
                        factor = beta_of(beta[batch, row, value_head], form)
                        numbers[SUM, thread] = g_sum[batch, row, value_head]
                        numbers[BETA, thread] = T.if_then_else(thread < rows, factor, T.float32(0.0))
                    T.ptx_wait_group(1)
                    T.fence_proxy_async()
                    T.sync_threads()
                    T.wgmma_gemm(do_shared[0, :, :], u_shared[0, :, :], dp, transpose_B=True, clear_accum=True)
                    T.wgmma_gemm(dx_shared[0, :, :], u_shared[0, :, :], da, transpose_B=True, clear_accum=True)
                    multiply_rows(dx_shared, own_values, numbers, LATER, threads)
                    T.wait_wgmma(0)
                    for i, j in T.Parallel(chunk, chunk):
                        decay = T.exp(T.min(numbers[SUM, i] - numbers[SUM, j], T.float32(0.0)))
                        dp[i, j] = T.if_then_else(j <= i, dp[i, j] * (scale * decay), T.float32(0.0))
                        da[i, j] = T.if_then_else(j < i, -da[i, j] * decay, T.float32(0.0))
                    T.copy(dp, dp_half)
                    T.copy(da, da_half)
                    for i, j in T.Parallel(chunk, chunk):
                        rest_half[i, j] = T.cast(dp[i, j] - T.cast(dp_half[i, j], T.float32), elem)
                    T.ptx_wait_group(0)
                    T.fence_proxy_async()
                    T.sync_threads()

                    # What passes through the state before the chunk.
                    for part in parts:
                        T.wgmma_gemm(
                            do_shared[0, :, part * depth : (part + 1) * depth],
                            state_shared[part, :, :],
                            dq_acc,
                            clear_accum=part == 0,
                        )
                    T.wait_wgmma(0)  # spares registers
                    for part in parts:
                        T.wgmma_gemm(
                            dx_shared[0, :, part * depth : (part + 1) * depth],
                            state_shared[part, :, :],
                            r_acc,
                            clear_accum=part == 0,
                        )
                    T.wait_wgmma(0)
                    T.sync_threads()  # products of other warps may still read
                    for i, j in T.Parallel(chunk, chunk):
                        pairs_shared[0, i, j] = dp_half[i, j]
                    for i, j in T.Parallel(chunk, chunk):
                        out_shared[0, i, j] = rest_half[i, j]
                    for i, j in T.Parallel(chunk, chunk):
                        pairs_shared[0, i, chunk + j] = T.cast(
                            T.cast(da_half[i, j], T.float32) * numbers[BETA, i], elem
                        )
                    T.fence_proxy_async()
                    T.sync_threads()
                    fetch_turned_state(dh, index, value_head, state_shared, threads, access='r')
                    T.ptx_commit_group()
                    for i, d in T.Parallel(chunk, wide):
                        dq_acc[i, d] = dq_acc[i, d] * (scale * T.exp(numbers[SUM, i]))
                        r_acc[i, d] = -r_acc[i, d] * T.exp(numbers[SUM, i])
                    T.wgmma_gemm(pairs_shared[0, :, 0:chunk], k_shared[0, :, :], dq_acc)
                    T.wgmma_gemm(da_half, k_shared[0, :, :], r_acc)
                    T.wait_wgmma(0)
                    for i, d in T.Parallel(chunk, wide):
                        terms[i, d] = r_acc[i, d] * T.cast(k_shared[0, i, d], T.float32)
                    T.reduce_sum(terms, row_sum, dim=1)
                    for i in T.Parallel(chunk):
                        if i < rows:
                            slope = slope_of(beta[batch, first + i, value_head], form)
                            dbeta[batch, first + i, value_head] = (row_sum[i] + numbers[LATER, i]) * slope
                    for i in T.Parallel(chunk):
                        later_sum[i] = row_sum[i] * numbers[BETA, i]
                    for i, d in T.Parallel(chunk, wide):
                        terms[i, d] = dq_acc[i, d] * T.cast(q_shared[0, i, d], T.float32)
                    T.reduce_sum(terms, row_sum, dim=1)
                    for i in T.Parallel(chunk):
                        row_sum[i] = row_sum[i] + later_sum[i]
                    # With equal keys dq is a telescoping sum. dg needs dq without this: its pairs cancel.
                    T.wgmma_gemm(out_shared[0, :, 0:chunk], k_shared[0, :, :], dq_acc)
                    T.wait_wgmma(0)
                    T.sync_threads()  # products of other warps may still read
                    if grouped:
                        add_member(dq_acc, q_sum, batch, first, head, rows, member)
                        if member < group - 1:
                            store_rows(q_sum, batch, first, head, rows, dq_acc)
                    if member == group - 1:
                        for i, d in T.Parallel(chunk, wide):
                            out_shared[0, i, d] = T.cast(dq_acc[i, d], elem)

                    # What passes through the state behind the chunk, and what belongs to earlier rows of pairs.
                    T.ptx_wait_group(0)
                    T.fence_proxy_async()
                    T.sync_threads()
                    for part in parts:
                        T.wgmma_gemm(
                            u_shared[0, :, part * depth : (part + 1) * depth],
                            state_shared[again + part, :, :],
                            c_acc,
                            clear_accum=part == 0,
                        )
                    whole = multiply_states(state_shared, h, index, value_head, threads)
                    if member == group - 1:
                        store_values(out_shared, 0, dq, batch, first, head, rows, 0, wide, threads)
                    T.wait_wgmma(0)
                    for i, d in T.Parallel(chunk, wide):
                        c_acc[i, d] = c_acc[i, d] * T.exp(numbers[SUM, chunk - 1] - numbers[SUM, i])
                    for i, d in T.Parallel(chunk, wide):
                        terms[i, d] = c_acc[i, d] * T.cast(k_shared[0, i, d], T.float32)
                    T.reduce_sum(terms, later_sum, dim=1)
                    T.wgmma_gemm(pairs_shared[0, :, 0:chunk], q_shared[0, :, :], c_acc, transpose_A=True)
                    T.wgmma_gemm(pairs_shared[0, :, chunk : 2 * chunk], k_shared[0, :, :], c_acc, transpose_A=True)
                    for i in T.Parallel(chunk):
                        numbers[LATER, i] = later_sum[i]
                    T.wait_wgmma(0)
                    for i, d in T.Parallel(chunk, wide):
                        terms[i, d] = c_acc[i, d] * T.cast(k_shared[0, i, d], T.float32)
                    T.reduce_sum(terms, later_sum, dim=1)
                    for i in T.Parallel(chunk):
                        row_sum[i] = row_sum[i] - later_sum[i]
                    for i in T.Parallel(chunk):
                        numbers[DSUM, i] = row_sum[i]
                    for i, d in T.Parallel(chunk, wide):
                        c_acc[i, d] = c_acc[i, d] + r_acc[i, d] * numbers[BETA, i]
                    if grouped:
                        add_member(c_acc, k_sum, batch, first, head, rows, member)
                        if member < group - 1:
                            store_rows(k_sum, batch, first, head, rows, c_acc)
                    T.sync_threads()
                    if T.truncmod(thread, 32) == 0:
                        at = T.truncdiv(thread, 2)  # sums are all that is wanted of these numbers
                        numbers[LATER, at] = numbers[LATER, at] + whole * T.exp(numbers[SUM, chunk - 1])
                    if member == group - 1:
                        for i, d in T.Parallel(chunk, wide):
                            out_shared[0, i, d] = T.cast(c_acc[i, d], elem)
                    T.sync_threads()
                    store_gate_gradient(numbers, dg, batch, first, value_head, rows)
                    if member == group - 1:
                        store_values(out_shared, 0, dk, batch, first, head, rows, 0, wide, threads)
                    else:
                        T.sync_threads()
            elif own.rows > 0:
                clear_rows(dq, own.batch, own.first, head, own.rows, chunk)
                clear_rows(dk, own.batch, own.first, head, own.rows, chunk)
                for member in T.serial(group):
                    clear_rows(dv, own.batch, own.first, head * group + member, own.rows, chunk)
                    for i in T.Parallel(chunk):
                        if i < own.rows:
                            dg[own.batch, own.first + i, head * group + member] = 0.0
                            dbeta[own.batch, own.first + i, head * group + member] = 0.0

    return delta_gradients_sm90
