"""Kernels of the delta rule for Hopper, one gate for a token and head. See `delta_rule` for the formula.

`delta_scores_sm90_kernel` is `delta_scores_kernel` with products by wgmma. It inverts the blocks of 16 rows on the
diagonal in float32, by columns. Let D be their inverses and N be D times the other blocks of A. Then the inverse of
1 + A is D - N D + N^2 D - N^3 D. It is computed as Y <- D - N Y.

`delta_states_sm90_kernel` keeps the state transposed: values are rows. So the state, v - k S and u are first operands
from registers. Second operands are k, q, the scores and the inverse, as they lie in memory. There is one barrier per
chunk, for the copies of that chunk.
"""

from typing import Any

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.linear_attention.delta_rule_kernels import (
    LEAST_GATE,
    Sequence,
    beta_of,
    fetch_rows,
    fetch_square,
    find_chunk,
    find_sequence,
    is_late,
    meets,
    padded,
    reference_row,
    state_shape,
    strided,
    sums_shape,
)

#: Every index is in bounds by what the kernels say themselves; barriers are by hand.
BY_HAND = {
    'TL_ENABLE_FAST_MATH': True,
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
}
WARPGROUP = 128
#: What `delta_states_sm90_kernel` does: all of a sequence, the maps of its pieces, or all of a piece.
WHOLE, MAPS, JOINED = 0, 1, 2
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
    size = x_shared.shape[0]
    vectors = size // 8
    for r in T.unroll(size * vectors // threads):
        at = r * threads + T.get_thread_binding()
        i, j = at // vectors, at % vectors * 8
        for e in T.vectorized(8):
            x[index, head, i, j + e] = x_shared[i, j + e]


@macro
def split_lower(products, lower_shared, off_shared, blocks_shared):
    """Spread A: blocks of 16 on the diagonal in float32, the others in the dtype of q, and zeros for inverses."""
    size, elem = products.shape[0], off_shared.dtype
    for i, j in T.Parallel(size, size):
        if T.truncdiv(i, 16) == T.truncdiv(j, 16):
            lower_shared[j, T.truncmod(i, 16)] = products[i, j]
    for i, j in T.Parallel(size, size):
        near = T.truncdiv(i, 16) == T.truncdiv(j, 16)
        off_shared[i, j] = T.if_then_else(near, T.cast(0.0, elem), T.cast(products[i, j], elem))
    for i, j in T.Parallel(size, size):
        blocks_shared[i, j] = T.cast(0.0, elem)


@macro
def refine(blocks_shared, products, next_shared):
    """Y <- D - N Y, where `products` is N Y; all threads see it afterwards."""
    for i, j in T.Parallel(next_shared.shape[0], next_shared.shape[1]):
        next_shared[i, j] = T.cast(T.cast(blocks_shared[i, j], T.float32) - products[i, j], next_shared.dtype)
    T.fence_proxy_async()
    T.sync_threads()


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
            scores_shared = T.alloc_shared((chunk, chunk + PAD), elem)
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
                split_lower(products, lower_shared, first_shared, blocks_shared)
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
                refine(blocks_shared, products, second_shared)
                T.wgmma_gemm(factor, second_shared, products, clear_accum=True)
                T.wait_wgmma(0)
                refine(blocks_shared, products, first_shared)
                T.wgmma_gemm(factor, first_shared, products, clear_accum=True)
                T.wait_wgmma(0)
                refine(blocks_shared, products, second_shared)
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


@macro
def sum_channels(g, batch, first, head, rows, g_sum, sum_shared, threads: int):
    """Sums of the gates of every channel since the start of a chunk, by two threads for a channel."""
    size, wide, dim = sum_shared.shape[0], sum_shared.shape[1], g.shape[3]
    half = size // 2
    part, column = T.get_thread_binding() // wide, T.get_thread_binding() % wide
    own = T.alloc_local((half,), T.float32)
    if part < 2:
        for e in T.unroll(half):
            row = part * half + e
            gate = g[batch, first + T.min(row, rows - 1), head, T.min(column, dim - 1)]
            bounded = T.if_then_else(gate < LEAST_GATE, T.float32(LEAST_GATE), gate)
            own[e] = T.if_then_else(T.And(row < rows, column < dim), bounded, T.float32(0.0))
        for e in T.unroll(half):
            if e > 0:
                own[e] = own[e] + own[e - 1]
        if part == 0:
            for e in T.unroll(half):
                sum_shared[e, column] = own[e]
    T.sync_threads()
    if part == 1:
        for e in T.unroll(half):
            own[e] = own[e] + sum_shared[half - 1, column]
            sum_shared[half + e, column] = own[e]
    if T.And(part < 2, column < dim):
        for e in T.unroll(half):
            if part * half + e < rows:
                g_sum[batch, first + part * half + e, head, column] = own[e]


def meeting_power(sum_shared: Any, i: Any, d: Any, level: Any) -> Any:
    """The logarithm of the decay between a row and the reference of its block; see `reference_row`."""
    power = sum_shared[i, d] - sum_shared[reference_row(i, level), d]
    return T.if_then_else(is_late(i, level), power, -power)


@kernel(pass_configs=BY_HAND, serves=serves_scores)
def delta_channel_scores_sm90_kernel(
    dim: int, value_dim: int, dtype: torch.dtype, chunk: int, packed: bool, form: int, again: bool
):
    """`delta_scores_sm90_kernel` for gates of every channel; see `delta_channel_scores_kernel`.

    In a product of pairs a row is either the later or the earlier of its pairs, so it has one decay. The kernel also
    stores q and k times the decay since the start of the chunk, and k times the decay until its end.
    """
    batch_size, num_tokens, heads, value_heads = (
        T.dynamic(n) for n in ('batch_size', 'num_tokens', 'heads', 'value_heads')
    )
    num_starts, num_chunks = T.dynamic('num_starts'), T.dynamic('num_chunks')
    elem, wide, threads = T.dtype(dtype), padded(dim), 2 * WARPGROUP
    levels = chunk.bit_length() - 1
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)
    decayed = (batch_size, num_tokens, value_heads, dim)

    @T.prim_func
    def delta_channel_scores_sm90(
        q: q_type,
        k: k_type,
        g: T.Tensor(decayed, T.float32),
        beta: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        g_sum: T.Tensor(decayed, T.float32),
        scores: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        inverse: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        o: T.Tensor((batch_size, num_tokens, value_heads, value_dim), elem),
        num_sequences: T.int32,
        bits: T.int32,
        q_since: T.Tensor(decayed, elem),
        k_since: T.Tensor(decayed, elem),
        k_until: T.Tensor(decayed, elem),
    ):
        with T.Kernel(num_chunks * value_heads, threads=threads) as block:
            index = T.alloc_var(T.int32)
            value_head = T.alloc_var(T.int32)
            index = T.truncdiv(block, value_heads)
            value_head = block - index * value_heads
            T.annotate_min_blocks_per_sm(2)
            for stride in q_strides + k_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((1, chunk, wide), elem)
            k_shared = T.alloc_shared((1, chunk, wide), elem)
            gates_shared = T.alloc_shared((chunk, wide), T.float32)
            lower_shared = T.alloc_shared((chunk, 16), T.float32)
            blocks_shared = T.alloc_shared((chunk, chunk), elem)
            first_shared = T.alloc_shared((chunk, chunk), elem)
            second_shared = T.alloc_shared((chunk, chunk), elem)
            factor_shared = T.alloc_shared((chunk, chunk), elem)
            beta_shared = T.alloc_shared((chunk,), T.float32)
            q_rows = T.alloc_fragment((chunk, wide), elem)
            k_rows = T.alloc_fragment((chunk, wide), elem)
            acc = T.alloc_fragment((chunk, chunk), T.float32)
            thread = T.get_thread_binding()
            own = find_chunk(cu_seqlens, index, num_sequences, bits, num_tokens, chunk, packed)
            head = T.alloc_var(T.int32)
            head = T.truncdiv(value_head, T.truncdiv(value_heads, heads))
            if T.And(own.rows > 0, own.sequence < num_sequences):
                fetch_rows(q, own.batch, own.first, head, own.rows, 0, q_shared, 0, threads)
                fetch_rows(k, own.batch, own.first, head, own.rows, 0, k_shared, 0, threads)
                T.ptx_commit_group()
                if thread < chunk:
                    given = beta[own.batch, own.first + T.min(thread, own.rows - 1), value_head]
                    beta_shared[thread] = T.if_then_else(thread < own.rows, beta_of(given, form), T.float32(0.0))
                sum_channels(g, own.batch, own.first, value_head, own.rows, g_sum, gates_shared, threads)
                T.ptx_wait_group(0)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(q_shared[0, :, :], k_shared[0, :, :], acc, transpose_B=True, clear_accum=True)
                for i, d in T.Parallel(chunk, wide):
                    q_rows[i, d] = q_shared[0, i, d]
                for i, d in T.Parallel(chunk, wide):
                    k_rows[i, d] = k_shared[0, i, d]
                T.wait_wgmma(0)
                for i, d in T.Parallel(chunk, wide):
                    if T.And(i < own.rows, T.truncdiv(d, 8) * 8 < dim):
                        q_since[own.batch, own.first + i, value_head, d] = T.cast(
                            T.cast(q_rows[i, d], T.float32) * T.__exp(gates_shared[i, d]), elem
                        )
                for i, d in T.Parallel(chunk, wide):
                    if T.And(i < own.rows, T.truncdiv(d, 8) * 8 < dim):
                        k_since[own.batch, own.first + i, value_head, d] = T.cast(
                            T.cast(k_rows[i, d], T.float32) * T.__exp(gates_shared[i, d]), elem
                        )
                for i, d in T.Parallel(chunk, wide):
                    if T.And(i < own.rows, T.truncdiv(d, 8) * 8 < dim):
                        k_until[own.batch, own.first + i, value_head, d] = T.cast(
                            T.cast(k_rows[i, d], T.float32) * T.__exp(gates_shared[chunk - 1, d] - gates_shared[i, d]),
                            elem,
                        )
                for i, j in T.Parallel(chunk, chunk):
                    second_shared[i, j] = T.cast(T.if_then_else(i == j, acc[i, j], T.float32(0.0)), elem)
                for i, j in T.Parallel(chunk, chunk):
                    first_shared[i, j] = T.cast(0.0, elem)
                for i, j in T.Parallel(chunk, chunk):
                    blocks_shared[i, j] = T.cast(0.0, elem)
                for level in T.serial(levels):
                    T.sync_threads()
                    for i, d in T.Parallel(chunk, wide):
                        q_shared[0, i, d] = T.cast(
                            T.cast(q_rows[i, d], T.float32) * T.__exp(meeting_power(gates_shared, i, d, level)), elem
                        )
                        k_shared[0, i, d] = T.cast(
                            T.cast(k_rows[i, d], T.float32) * T.__exp(meeting_power(gates_shared, i, d, level)), elem
                        )
                    T.fence_proxy_async()
                    T.sync_threads()
                    T.wgmma_gemm(q_shared[0, :, :], k_shared[0, :, :], acc, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    for i, j in T.Parallel(chunk, chunk):
                        if meets(i, j, level):
                            second_shared[i, j] = T.cast(acc[i, j], elem)
                    T.wgmma_gemm(k_shared[0, :, :], k_shared[0, :, :], acc, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    if level < 4:  # blocks of 16 on the diagonal of A
                        for i, j in T.Parallel(chunk, chunk):
                            if meets(i, j, level):
                                lower_shared[j, T.truncmod(i, 16)] = acc[i, j] * beta_shared[i]
                    else:
                        for i, j in T.Parallel(chunk, chunk):
                            if meets(i, j, level):
                                first_shared[i, j] = T.cast(acc[i, j] * beta_shared[i], elem)
                T.sync_threads()
                invert_blocks(lower_shared, blocks_shared)
                store_square(second_shared, scores, index, value_head, threads)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(blocks_shared, first_shared, acc, clear_accum=True)
                T.wait_wgmma(0)
                for i, j in T.Parallel(chunk, chunk):
                    factor_shared[i, j] = T.cast(acc[i, j], elem)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(factor_shared, blocks_shared, acc, clear_accum=True)
                T.wait_wgmma(0)
                refine(blocks_shared, acc, second_shared)
                T.wgmma_gemm(factor_shared, second_shared, acc, clear_accum=True)
                T.wait_wgmma(0)
                refine(blocks_shared, acc, first_shared)
                T.wgmma_gemm(factor_shared, first_shared, acc, clear_accum=True)
                T.wait_wgmma(0)
                refine(blocks_shared, acc, second_shared)
                store_square(second_shared, inverse, index, value_head, threads)
            else:
                for i, j in T.Parallel(chunk, chunk):
                    inverse[index, value_head, i, j] = T.cast(0.0, elem)
                for i, d in T.Parallel(chunk, wide):
                    if T.And(i < own.rows, d < dim):
                        g_sum[own.batch, own.first + i, value_head, d] = 0.0
                for i, d in T.Parallel(chunk, padded(value_dim)):
                    if T.And(i < own.rows, d < value_dim):
                        o[own.batch, own.first + i, value_head, d] = T.cast(0.0, elem)

    return delta_channel_scores_sm90


# Sequences ----------------------------------------------------------------------------------


@macro
def load_turned(state, sequence, head, column, acc, v_first: bool):
    """Load columns of a state as rows; 0 behind the last row and column."""
    dim, value_dim = (state.shape[3], state.shape[2]) if v_first else (state.shape[2], state.shape[3])
    T.clear(acc)
    for j, i in T.Parallel(acc.shape[0], acc.shape[1]):
        if T.And(i < dim, column + j < value_dim):
            if v_first:
                acc[j, i] = T.cast(state[sequence, head, column + j, i], T.float32)
            else:
                acc[j, i] = T.cast(state[sequence, head, i, column + j], T.float32)


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
def find_piece(cu_seqlens, sequence, num_tokens, piece, pieces, size: int, is_packed: bool):
    """The tokens of a piece of a sequence, which has whole chunks, and the number of its first chunk."""
    own = find_sequence(cu_seqlens, sequence, num_tokens, size, is_packed)
    start = T.alloc_var(T.int32)
    length = T.alloc_var(T.int32)
    index = T.alloc_var(T.int32)
    chunks = T.truncdiv(T.truncdiv(own.length + size - 1, size) + pieces - 1, pieces)
    start = own.start + piece * chunks * size
    length = T.max(T.min(own.length - piece * chunks * size, chunks * size), 0)
    index = own.index + piece * chunks
    return Sequence(own.batch, start, length, index)


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
    mode: int,
    size: int,
) -> dict:
    """`size` is the number of states. Two warpgroups share the copies; one leaves work for twice as many SMs."""
    many = dim > 64 if mode == MAPS else mode == WHOLE and size >= 96
    return dict(tile=128 if value_dim > 64 and many else 64)


def serves_states(static: Any, gpu: Any) -> bool:
    """States that fit into the registers of one thread for each value."""
    fits = static.chunk >= 32 and static.dim <= 128
    fits = fits and (static.chunk == 64 or not static.channels)  # their operands come from the kernel for 64 rows
    return gpu.has_wgmma and fits and not static.again


@kernel(choose_states, space=dict(tile=(64, 128)), pass_configs=BY_HAND, serves=serves_states)
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
    mode: int,
    *,
    tile: int,
):
    """Results of all chunks of a sequence, for `tile` values of a head.

    With gates of every channel q and k come with their decays since the start of a chunk.

    A long sequence is cut into pieces. The state behind a piece is M S + B for the state S before it. In mode MAPS the
    kernel computes B, the state that follows from 0, and M, that of all values 0 and S = 1. All are transposed. In mode
    JOINED a block first applies the maps of the pieces before its own.
    """
    batch_size, num_tokens = T.dynamic('batch_size'), T.dynamic('num_tokens')
    heads, value_heads = T.dynamic('heads'), T.dynamic('value_heads')
    num_starts, num_chunks, number = T.dynamic('num_starts'), T.dynamic('num_chunks'), T.dynamic('number')
    elem, wide, threads = T.dtype(dtype), padded(dim), 2 * tile
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)
    v_type, v_strides = strided('v', (batch_size, num_tokens, value_heads, value_dim), elem)
    states = state_shape(number, value_heads, dim, value_dim, v_first)
    stages = 2 if channels or tile == 128 or mode == JOINED else 3  # what fits into shared memory
    value_parts = -(-value_dim // tile)
    parts = value_parts + (-(-wide // tile) if mode == MAPS else 0)
    num_maps, skipped = T.dynamic('num_maps'), int(mode == MAPS)  # nothing follows the last piece
    rows_first = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def delta_states_sm90(
        q: q_type,
        k: k_type,
        v: v_type,
        g_sum: T.Tensor(sums_shape(batch_size, num_tokens, value_heads, dim, channels), T.float32),
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
        k_until: T.Tensor((batch_size, num_tokens, value_heads, dim), elem),
        maps: T.Tensor((num_maps, value_heads, wide, wide), elem),
        offsets: T.Tensor((num_maps, value_heads, value_dim, wide), T.float32),
        pieces: T.int32,
    ):
        with T.Kernel(parts, value_heads, num_sequences * (pieces - skipped), threads=threads) as (
            part,
            value_head,
            block,
        ):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            k_shared = T.alloc_shared((stages, chunk, wide), elem)
            inverse_shared = T.alloc_shared((stages, chunk, chunk), elem)
            v_shared = T.alloc_shared((stages, chunk, tile + PAD), elem)
            if mode != MAPS:
                q_shared = T.alloc_shared((stages, chunk, wide), elem)
                scores_shared = T.alloc_shared((stages, chunk, chunk), elem)
                o_shared = T.alloc_shared((2, chunk, tile + PAD), elem)
                out = T.alloc_fragment((tile, chunk), T.float32)
            if mode == JOINED:
                map_shared = T.alloc_shared((1, wide, wide), elem)
            factor_shared = T.alloc_shared((2, threads), T.float32)
            since_shared = T.alloc_shared((2, threads), T.float32)
            until_shared = T.alloc_shared((2, threads), T.float32)
            if channels:
                late_shared = T.alloc_shared((stages, chunk, wide), elem)
                whole_shared = T.alloc_shared((2, wide), T.float32)
            state = T.alloc_fragment((tile, wide), T.float32)
            state_half = T.alloc_fragment((tile, wide), elem)
            known = T.alloc_fragment((tile, chunk), T.float32)
            fresh = T.alloc_fragment((tile, chunk), T.float32)
            x_half = T.alloc_fragment((tile, chunk), elem)
            u_half = T.alloc_fragment((tile, chunk), elem)
            if not channels:
                late_half = T.alloc_fragment((tile, chunk), elem)
            next_beta = T.alloc_var(T.float32, init=0.0)
            next_sum = T.alloc_var(T.float32, init=0.0)
            next_last = T.alloc_var(T.float32, init=0.0)
            thread = T.get_thread_binding()

            sequence = T.alloc_var(T.int32)
            piece = T.alloc_var(T.int32)
            sequence = T.truncdiv(block, pieces - skipped)
            piece = block - sequence * (pieces - skipped)
            own = find_piece(cu_seqlens, sequence, num_tokens, piece, pieces, chunk, packed)
            head = T.alloc_var(T.int32)
            head = T.truncdiv(value_head, T.truncdiv(value_heads, heads))
            channel = T.min(T.truncmod(thread, wide), dim - 1)
            column = part * tile
            steps = T.truncdiv(own.length + chunk - 1, chunk)
            if mode == MAPS:
                for j, i in T.Parallel(tile, wide):
                    own_row = (part - value_parts) * tile + j
                    state[j, i] = T.if_then_else(own_row == i, T.float32(1.0), T.float32(0.0))
            elif initial is not None:
                load_turned(initial_state, sequence, value_head, column, state, v_first)
            else:
                T.clear(state)
            if mode == JOINED:
                for other in T.serial(piece):
                    number_of_map = sequence * (pieces - 1) + other
                    fetch_square(maps, number_of_map, value_head, map_shared, 0, threads)
                    T.ptx_commit_group()
                    T.copy(state, state_half)
                    T.ptx_wait_group(0)
                    T.fence_proxy_async()
                    T.sync_threads()
                    T.wgmma_gemm(state_half, map_shared[0, :, :], state, clear_accum=True, policy=rows_first)
                    T.wait_wgmma(0)
                    for j, i in T.Parallel(tile, wide):
                        inside = column + j < value_dim
                        state[j, i] = state[j, i] + T.if_then_else(
                            inside, offsets[number_of_map, value_head, column + j, i], T.float32(0.0)
                        )
                    T.sync_threads()
            for ahead in T.serial(stages - 1):
                if ahead < steps:
                    first, rows = own.start + ahead * chunk, own.length - ahead * chunk
                    fetch_rows(k, own.batch, first, head, rows, 0, k_shared, ahead, threads)
                    if mode != MAPS:
                        fetch_rows(q, own.batch, first, head, rows, 0, q_shared, ahead, threads)
                    if channels:
                        fetch_rows(k_until, own.batch, first, head, rows, 0, late_shared, ahead, threads)
                    fetch_rows(v, own.batch, first, value_head, rows, column, v_shared, ahead, threads, tile)
                    fetch_square(inverse, own.index + ahead, value_head, inverse_shared, ahead, threads)
                    if mode != MAPS:
                        fetch_square(scores, own.index + ahead, value_head, scores_shared, ahead, threads)
                T.ptx_commit_group()
            if steps > 0:
                for ahead in T.serial(2):
                    if ahead > 0:  # numbers of the first chunk, before those of the second are read
                        factor_shared[0, thread] = beta_of(next_beta, form)
                        if channels:
                            if thread < wide:
                                whole_shared[0, thread] = T.__exp(next_last)
                        else:
                            since_shared[0, thread] = T.__exp(next_sum)
                            until_shared[0, thread] = T.__exp(next_last - next_sum)
                    start = own.start + T.min(ahead, steps - 1) * chunk
                    length = T.min(own.start + own.length - start, chunk)
                    next_beta = beta[own.batch, start + T.min(thread, length - 1), value_head]
                    if channels:
                        next_last = g_sum[own.batch, start + length - 1, value_head, channel]
                    else:
                        next_sum = g_sum[own.batch, start + T.min(thread, length - 1), value_head]
                        next_last = g_sum[own.batch, start + length - 1, value_head]
            for step in T.serial(steps):
                slot, turn = T.truncmod(step, stages), T.truncmod(step, 2)
                T.ptx_wait_group(stages - 2)
                T.fence_proxy_async()
                T.sync_threads()
                T.copy(state, state_half)
                T.wgmma_gemm(
                    state_half, k_shared[slot, :, :], known, transpose_B=True, clear_accum=True, policy=rows_first
                )
                ahead = step + (stages - 1)
                later = T.truncmod(ahead, stages)
                first, rows = own.start + ahead * chunk, own.length - ahead * chunk
                index = own.index + T.min(ahead, steps - 1)
                fetch_rows(k, own.batch, first, head, rows, 0, k_shared, later, threads)
                if mode != MAPS:
                    fetch_rows(q, own.batch, first, head, rows, 0, q_shared, later, threads)
                if channels:
                    fetch_rows(k_until, own.batch, first, head, rows, 0, late_shared, later, threads)
                fetch_rows(v, own.batch, first, value_head, rows, column, v_shared, later, threads, tile)
                fetch_square(inverse, index, value_head, inverse_shared, later, threads)
                if mode != MAPS:
                    fetch_square(scores, index, value_head, scores_shared, later, threads)
                T.ptx_commit_group()
                if mode != MAPS:
                    done = own.start + (step - 1) * chunk
                    whole = T.if_then_else(step > 0, chunk, 0)
                    store_values(o_shared, 1 - turn, o, own.batch, done, value_head, whole, column, tile, threads)
                factor_shared[1 - turn, thread] = beta_of(next_beta, form)
                if channels:
                    if thread < wide:
                        whole_shared[1 - turn, thread] = T.__exp(next_last)
                else:
                    since_shared[1 - turn, thread] = T.__exp(next_sum)
                    until_shared[1 - turn, thread] = T.__exp(next_last - next_sum)
                start = own.start + T.min(step + 2, steps - 1) * chunk
                length = T.min(own.start + own.length - start, chunk)
                next_beta = beta[own.batch, start + T.min(thread, length - 1), value_head]
                if channels:
                    next_last = g_sum[own.batch, start + length - 1, value_head, channel]
                else:
                    next_sum = g_sum[own.batch, start + T.min(thread, length - 1), value_head]
                    next_last = g_sum[own.batch, start + length - 1, value_head]
                for j, i in T.Parallel(tile, wide):
                    state[j, i] = state[j, i] * (whole_shared[turn, i] if channels else since_shared[turn, chunk - 1])
                T.wait_wgmma(0)
                for j, i in T.Parallel(tile, chunk):
                    value = T.cast(v_shared[slot, i, j], T.float32)
                    decay = T.float32(1.0) if channels else since_shared[turn, i]
                    known[j, i] = factor_shared[turn, i] * (value - known[j, i] * decay)
                T.copy(known, x_half)
                T.wgmma_gemm(
                    x_half, inverse_shared[slot, :, :], fresh, transpose_B=True, clear_accum=True, policy=rows_first
                )
                if mode == MAPS:
                    T.wait_wgmma(0)
                else:
                    T.wgmma_gemm(
                        state_half, q_shared[slot, :, :], out, transpose_B=True, clear_accum=True, policy=rows_first
                    )
                    T.wait_wgmma(1)
                T.copy(fresh, u_half)
                if channels:
                    T.wgmma_gemm(u_half, late_shared[slot, :, :], state, policy=rows_first)
                else:
                    for j, i in T.Parallel(tile, chunk):
                        fresh[j, i] = fresh[j, i] * until_shared[turn, i]
                    T.copy(fresh, late_half)
                    T.wgmma_gemm(late_half, k_shared[slot, :, :], state, policy=rows_first)
                if mode == MAPS:
                    T.wait_wgmma(0)
                else:
                    T.wait_wgmma(1)
                    if not channels:
                        for j, i in T.Parallel(tile, chunk):
                            out[j, i] = out[j, i] * since_shared[turn, i]
                    T.wgmma_gemm(u_half, scores_shared[slot, :, :], out, transpose_B=True, policy=rows_first)
                    T.wait_wgmma(0)
                    for j, i in T.Parallel(tile, chunk):
                        o_shared[turn, i, j] = T.cast(out[j, i] * scale, elem)
            if mode == MAPS:
                if part < value_parts:  # outside of T.Parallel: TileLang loses conditions of stores that cast
                    for j, i in T.Parallel(tile, wide):
                        if column + j < value_dim:
                            offsets[block, value_head, column + j, i] = state[j, i]
                else:
                    for j, i in T.Parallel(tile, wide):
                        if (part - value_parts) * tile + j < wide:
                            maps[block, value_head, (part - value_parts) * tile + j, i] = T.cast(state[j, i], elem)
            else:
                T.sync_threads()
                if steps > 0:
                    done, rows = own.start + (steps - 1) * chunk, own.length - (steps - 1) * chunk
                    slot = T.truncmod(steps - 1, 2)
                    store_values(o_shared, slot, o, own.batch, done, value_head, rows, column, tile, threads)
                if final:  # noqa: SIM102 - known when the kernel is built
                    if piece == pieces - 1:
                        store_turned(state, final_state, sequence, value_head, column, v_first)

    return delta_states_sm90
