"""Kernels of the delta rule for Hopper. See `delta_rule` for the formula.

With x = beta (v - e^G k S) and T = (1 + A)^-1, two brackets of a chunk need no state:

    o = scale (e^G q S + (P T) x),      S' = e^{G_C} S + (T^T e^{G_C - G} k)^T x

`delta_scores_sm90_kernel` computes both, `reads` and `writes`, and T. So u = T x is never rounded: with equal keys o
is a telescoping sum of it. The kernel inverts the blocks of 16 rows on the diagonal in float32, by columns. Let D be
their inverses and N be D times the other blocks of A. Then T = D - N T. Both D and T are sums of two numbers in half
precision. For Y = T - D_high the kernel computes Y <- D_low - N D_high - N Y.

`delta_states_sm90_kernel` keeps the state transposed: values are rows. So the state and x are first operands from
registers. Second operands are k, q, `reads` and `writes`, as they lie in memory. There is one barrier per chunk, for
the copies of that chunk.
"""

import math
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
    finite,
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
def invert_blocks(lower_shared, inverse_shared, rest_shared):
    """Inverses of the blocks of 16 on the diagonal of 1 + A, where `lower_shared[j, i % 16]` is A[i, j].

    They are sums of two numbers in half precision: with equal keys errors of the inverse have the same sign.
    """
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
        for i in T.unroll(16):
            rounded = T.cast(T.cast(rows[i], rest_shared.dtype), T.float32)
            rest_shared[start + i, column] = T.cast(rows[i] - rounded, rest_shared.dtype)


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


@macro
def split_lower(products, lower_shared, off_shared, blocks_shared, rest_shared):
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
    for i, j in T.Parallel(size, size):
        rest_shared[i, j] = T.cast(0.0, elem)


@macro
def begin_rest(rest_shared, products, terms_shared):
    """The first terms D_low - N D_high of T - D_high, where `products` is N D_high; all threads see them afterwards."""
    for i, j in T.Parallel(terms_shared.shape[0], terms_shared.shape[1]):
        terms_shared[i, j] = T.cast(T.cast(rest_shared[i, j], T.float32) - products[i, j], terms_shared.dtype)
    T.fence_proxy_async()
    T.sync_threads()


@macro
def refine_rest(terms_shared, products, next_shared):
    """More terms of T - D_high, where `products` is N times those so far; all threads see them afterwards."""
    for i, j in T.Parallel(next_shared.shape[0], next_shared.shape[1]):
        next_shared[i, j] = T.cast(T.cast(terms_shared[i, j], T.float32) - products[i, j], next_shared.dtype)
    T.fence_proxy_async()
    T.sync_threads()


@macro
def split_inverse(blocks_shared, products, terms_shared, low_shared):
    """T as the sum of two numbers in half precision, the first in place of the first terms of T - D_high.

    `products` is N times the terms so far, and T afterwards.
    """
    for i, j in T.Parallel(low_shared.shape[0], low_shared.shape[1]):
        known = T.cast(blocks_shared[i, j], T.float32) + T.cast(terms_shared[i, j], T.float32)
        products[i, j] = known - products[i, j]
    for i, j in T.Parallel(low_shared.shape[0], low_shared.shape[1]):
        terms_shared[i, j] = T.cast(products[i, j], low_shared.dtype)
    for i, j in T.Parallel(low_shared.shape[0], low_shared.shape[1]):
        rounded = T.cast(T.cast(products[i, j], low_shared.dtype), T.float32)
        low_shared[i, j] = T.cast(products[i, j] - rounded, low_shared.dtype)
    T.fence_proxy_async()
    T.sync_threads()


@macro
def store_inverse(high_shared, low_shared, inverse, index, head, threads: int):
    """Store the inverse in half precision. A rounding error is added to the next row, as `invert` does."""
    size, elem = high_shared.shape[0], high_shared.dtype
    rows = size * size // threads
    thread = T.get_thread_binding()
    column, first = thread % size, thread // size * rows
    exact = T.alloc_var(T.float32, init=0.0)
    error = T.alloc_var(T.float32, init=0.0)
    for e in T.unroll(rows, unroll_factor=2):  # registers are spared
        exact = (
            T.cast(high_shared[first + e, column], T.float32) + T.cast(low_shared[first + e, column], T.float32) + error
        )
        inverse[index, head, first + e, column] = T.cast(exact, elem)
        error = exact - T.cast(T.cast(exact, elem), T.float32)


def serves_scores(static: Any, gpu: Any) -> bool:
    """Chunks of 64 rows, which are a warpgroup."""
    return gpu.has_wgmma and static.chunk == 64 and static.dim <= 128 and not static.again


@kernel(pass_configs=BY_HAND, serves=serves_scores)
def delta_scores_sm90_kernel(
    dim: int, value_dim: int, dtype: torch.dtype, chunk: int, packed: bool, form: int, again: bool
):
    """Gate sums, `reads`, `writes` and inverse of a chunk."""
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
        reads: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        inverse: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        o: T.Tensor((batch_size, num_tokens, value_heads, value_dim), elem),
        num_sequences: T.int32,
        bits: T.int32,
        writes: T.Tensor((batch_size, num_tokens, value_heads, dim), elem),
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
            rest_shared = T.alloc_shared((chunk, chunk), elem)
            sum_shared = T.alloc_shared((chunk,), T.float32)
            beta_shared = T.alloc_shared((chunk,), T.float32)
            pairs = T.alloc_fragment((chunk, chunk), T.float32)
            products = T.alloc_fragment((chunk, chunk), T.float32)
            factor = T.alloc_fragment((chunk, chunk), elem)
            scores = T.alloc_fragment((chunk, chunk), elem)
            late = T.alloc_fragment((chunk, wide), T.float32)
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
                    products[i, j] = T.if_then_else(
                        j < i, finite(products[i, j] * decay * beta_shared[i]), T.float32(0.0)
                    )
                T.copy(pairs, scores)
                split_lower(products, lower_shared, first_shared, blocks_shared, rest_shared)
                T.sync_threads()
                invert_blocks(lower_shared, blocks_shared, rest_shared)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(blocks_shared, first_shared, products, clear_accum=True)
                T.wgmma_gemm(rest_shared, first_shared, products)
                T.wait_wgmma(0)
                T.copy(products, factor)
                T.wgmma_gemm(factor, blocks_shared, products, clear_accum=True)
                T.wait_wgmma(0)
                begin_rest(rest_shared, products, second_shared)
                T.wgmma_gemm(factor, second_shared, products, clear_accum=True)
                T.wait_wgmma(0)
                refine_rest(second_shared, products, first_shared)
                T.wgmma_gemm(factor, first_shared, products, clear_accum=True)
                T.wait_wgmma(0)
                split_inverse(blocks_shared, products, second_shared, rest_shared)
                T.wgmma_gemm(scores, second_shared, pairs, clear_accum=True)
                T.wgmma_gemm(scores, rest_shared, pairs)
                for i, j in T.Parallel(chunk, chunk):
                    products[i, j] = products[i, j] * T.exp(sum_shared[chunk - 1] - sum_shared[i])
                for i, j in T.Parallel(chunk, chunk):
                    blocks_shared[i, j] = T.cast(products[i, j], elem)
                for i, j in T.Parallel(chunk, chunk):
                    rounded = T.cast(T.cast(products[i, j], elem), T.float32)
                    first_shared[i, j] = T.cast(products[i, j] - rounded, elem)
                store_inverse(second_shared, rest_shared, inverse, index, value_head, threads)
                T.wait_wgmma(0)
                T.fence_proxy_async()
                T.sync_threads()
                for i, j in T.Parallel(chunk, chunk):
                    second_shared[i, j] = T.cast(pairs[i, j], elem)
                T.wgmma_gemm(blocks_shared, k_shared[0, :, :], late, transpose_A=True, clear_accum=True)
                T.wgmma_gemm(first_shared, k_shared[0, :, :], late, transpose_A=True)
                T.wait_wgmma(0)
                for i, d in T.Parallel(chunk, wide):
                    q_shared[0, i, d] = T.cast(late[i, d], elem)
                T.sync_threads()
                store_square(second_shared, reads, index, value_head, threads)
                store_values(q_shared, 0, writes, own.batch, own.first, value_head, own.rows, 0, wide, threads)
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


def late_sign(i: Any, level: Any) -> Any:
    """1 for rows in the second half of their block, -1 for others; see `is_late`."""
    return T.cast(2 * ((i >> level) & 1) - 1, T.float32)


@macro
def load_vectors(x_shared, x, threads: int):
    """Keep the vectors of a thread."""
    size, vectors = x_shared.shape[1], x_shared.shape[2] // 8
    for r in T.unroll(size * vectors // threads):
        at = r * threads + T.get_thread_binding()
        for e in T.vectorized(8):
            x[r * 8 + e] = x_shared[0, at // vectors, at % vectors * 8 + e]


@macro
def scale_vector(x, r: int, decay, scaled):
    """Scale a vector of a thread."""
    for e in T.vectorized(8):
        scaled[e] = T.cast(T.cast(x[r * 8 + e], T.float32) * decay[e], scaled.dtype)


@macro
def decay_since(q, k, sum_shared, q_shared, k_shared, threads: int):
    """Write q and k times the decay since the start of the chunk."""
    size, vectors = sum_shared.shape[0], sum_shared.shape[1] // 8
    decay = T.alloc_local((8,), T.float32)
    scaled = T.alloc_local((8,), q_shared.dtype)
    for r in T.unroll(size * vectors // threads):
        at = r * threads + T.get_thread_binding()
        i, d = at // vectors, at % vectors * 8
        for e in T.vectorized(8):
            decay[e] = sum_shared[i, d + e]
        for e in T.unroll(8):
            decay[e] = T.__exp(decay[e])
        scale_vector(q, r, decay, scaled)
        for e in T.vectorized(8):
            q_shared[0, i, d + e] = scaled[e]
        scale_vector(k, r, decay, scaled)
        for e in T.vectorized(8):
            k_shared[0, i, d + e] = scaled[e]


@macro
def load_decays(sum_shared, row, other_row, d, decay, other):
    """Sums of log decays of two rows, eight channels from `d` on."""
    for e in T.vectorized(8):
        decay[e] = sum_shared[row, d + e]
    for e in T.vectorized(8):
        other[e] = sum_shared[other_row, d + e]


@macro
def meet(q, k, sum_shared, level, q_shared, k_shared, threads: int):
    """Write q and k times the decay between their row and the reference of its block; see `reference_row`."""
    size, vectors = sum_shared.shape[0], sum_shared.shape[1] // 8
    decay = T.alloc_local((8,), T.float32)
    other = T.alloc_local((8,), T.float32)
    scaled = T.alloc_local((8,), q_shared.dtype)
    for r in T.unroll(size * vectors // threads):
        at = r * threads + T.get_thread_binding()
        i, d = at // vectors, at % vectors * 8
        load_decays(sum_shared, i, reference_row(i, level), d, decay, other)
        for e in T.unroll(8):
            decay[e] = T.__exp((decay[e] - other[e]) * late_sign(i, level))
        scale_vector(q, r, decay, scaled)
        for e in T.vectorized(8):
            q_shared[0, i, d + e] = scaled[e]
        scale_vector(k, r, decay, scaled)
        for e in T.vectorized(8):
            k_shared[0, i, d + e] = scaled[e]


@macro
def decay_until(k, sum_shared, k_shared, threads: int):
    """Write k times the decay until the end of the chunk."""
    size, vectors = sum_shared.shape[0], sum_shared.shape[1] // 8
    decay = T.alloc_local((8,), T.float32)
    other = T.alloc_local((8,), T.float32)
    scaled = T.alloc_local((8,), k_shared.dtype)
    for r in T.unroll(size * vectors // threads):
        at = r * threads + T.get_thread_binding()
        i, d = at // vectors, at % vectors * 8
        load_decays(sum_shared, i, size - 1, d, decay, other)
        for e in T.unroll(8):
            decay[e] = T.__exp(other[e] - decay[e])
        scale_vector(k, r, decay, scaled)
        for e in T.vectorized(8):
            k_shared[0, i, d + e] = scaled[e]


@kernel(pass_configs=BY_HAND, serves=serves_scores)
def delta_channel_scores_sm90_kernel(
    dim: int, value_dim: int, dtype: torch.dtype, chunk: int, packed: bool, form: int, again: bool
):
    """`delta_scores_sm90_kernel` for gates of every channel; see `delta_channel_scores_kernel`.

    In a product of pairs a row is either the later or the earlier of its pairs, so it has one decay. The kernel also
    stores q and k times the decay since the start of the chunk.
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
        reads: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        inverse: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        o: T.Tensor((batch_size, num_tokens, value_heads, value_dim), elem),
        num_sequences: T.int32,
        bits: T.int32,
        writes: T.Tensor(decayed, elem),
        q_since: T.Tensor(decayed, elem),
        k_since: T.Tensor(decayed, elem),
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
            pairs_shared = T.alloc_shared((chunk, chunk), elem)
            rest_shared = T.alloc_shared((chunk, chunk), elem)
            beta_shared = T.alloc_shared((chunk,), T.float32)
            q_rows = T.alloc_local((chunk * wide // threads,), elem)
            k_rows = T.alloc_local((chunk * wide // threads,), elem)
            acc = T.alloc_fragment((chunk, chunk), T.float32)
            late = T.alloc_fragment((chunk, wide), T.float32)
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
                load_vectors(q_shared, q_rows, threads)
                load_vectors(k_shared, k_rows, threads)
                T.wait_wgmma(0)
                T.sync_threads()  # products of other warps may still read
                decay_since(q_rows, k_rows, gates_shared, q_shared, k_shared, threads)
                T.sync_threads()
                store_values(q_shared, 0, q_since, own.batch, own.first, value_head, own.rows, 0, wide, threads)
                store_values(k_shared, 0, k_since, own.batch, own.first, value_head, own.rows, 0, wide, threads)
                for i, j in T.Parallel(chunk, chunk):
                    pairs_shared[i, j] = T.cast(T.if_then_else(i == j, acc[i, j], T.float32(0.0)), elem)
                for i, j in T.Parallel(chunk, chunk):
                    first_shared[i, j] = T.cast(0.0, elem)
                for i, j in T.Parallel(chunk, chunk):
                    blocks_shared[i, j] = T.cast(0.0, elem)
                for i, j in T.Parallel(chunk, chunk):
                    rest_shared[i, j] = T.cast(0.0, elem)
                for level in T.unroll(levels):  # a loop would keep the places of all pairs in registers
                    T.sync_threads()
                    T.warpgroup_fence_operand(q_rows)  # else nvcc keeps them in float32 as well
                    T.warpgroup_fence_operand(k_rows)
                    meet(q_rows, k_rows, gates_shared, level, q_shared, k_shared, threads)
                    T.fence_proxy_async()
                    T.sync_threads()
                    T.wgmma_gemm(q_shared[0, :, :], k_shared[0, :, :], acc, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    for i, j in T.Parallel(chunk, chunk):
                        if meets(i, j, level):
                            pairs_shared[i, j] = T.cast(acc[i, j], elem)
                    T.wgmma_gemm(k_shared[0, :, :], k_shared[0, :, :], acc, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    if level < 4:  # blocks of 16 on the diagonal of A
                        for i, j in T.Parallel(chunk, chunk):
                            if meets(i, j, level):
                                lower_shared[j, T.truncmod(i, 16)] = finite(acc[i, j] * beta_shared[i])
                    else:
                        for i, j in T.Parallel(chunk, chunk):
                            if meets(i, j, level):
                                first_shared[i, j] = T.cast(finite(acc[i, j] * beta_shared[i]), elem)
                T.sync_threads()
                invert_blocks(lower_shared, blocks_shared, rest_shared)
                T.warpgroup_fence_operand(k_rows)
                decay_until(k_rows, gates_shared, k_shared, threads)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(blocks_shared, first_shared, acc, clear_accum=True)
                T.wgmma_gemm(rest_shared, first_shared, acc)
                T.wait_wgmma(0)
                T.sync_threads()  # products of other warps may still read
                for i, j in T.Parallel(chunk, chunk):
                    first_shared[i, j] = T.cast(acc[i, j], elem)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(first_shared, blocks_shared, acc, clear_accum=True)
                T.wait_wgmma(0)
                begin_rest(rest_shared, acc, second_shared)
                T.wgmma_gemm(first_shared, second_shared, acc, clear_accum=True)
                T.wait_wgmma(0)
                refine_rest(second_shared, acc, rest_shared)
                T.wgmma_gemm(first_shared, rest_shared, acc, clear_accum=True)
                T.wait_wgmma(0)
                T.sync_threads()
                split_inverse(blocks_shared, acc, second_shared, rest_shared)
                T.wgmma_gemm(pairs_shared, second_shared, acc, clear_accum=True)
                T.wgmma_gemm(pairs_shared, rest_shared, acc)
                T.wgmma_gemm(second_shared, k_shared[0, :, :], late, transpose_A=True, clear_accum=True)
                T.wgmma_gemm(rest_shared, k_shared[0, :, :], late, transpose_A=True)
                store_inverse(second_shared, rest_shared, inverse, index, value_head, threads)
                T.wait_wgmma(0)
                for i, j in T.Parallel(chunk, chunk):
                    first_shared[i, j] = T.cast(acc[i, j], elem)
                for i, d in T.Parallel(chunk, wide):
                    q_shared[0, i, d] = T.cast(late[i, d], elem)
                T.sync_threads()
                store_square(first_shared, reads, index, value_head, threads)
                store_values(q_shared, 0, writes, own.batch, own.first, value_head, own.rows, 0, wide, threads)
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
    """States that fit into the registers of one thread for each value; operands come from kernels for 64 rows."""
    return gpu.has_wgmma and static.chunk == 64 and static.dim <= 128 and not static.again


@macro
def note_odd(x, first_odd, any_odd, turn):
    """Note the first token with NaN or an infinity for every value."""
    for j, i in T.Parallel(x.shape[0], x.shape[1]):
        if T.Not(T.isfinite(x[j, i])):
            T.atomic_min(first_odd[turn, j], i)
            any_odd[turn] = 1


@macro
def poison_state(state, first_odd, turn, size: int):
    """The state behind a chunk is NaN for values with an odd token in it."""
    for j, i in T.Parallel(state.shape[0], state.shape[1]):
        state[j, i] = T.if_then_else(first_odd[turn, j] < size, T.float32(math.nan), state[j, i])


@macro
def poison_results(o_shared, slot, first_odd, turn, tile: int):
    """Results of a chunk are NaN from the first odd token on."""
    for i, j in T.Parallel(o_shared.shape[1], tile):
        if i >= first_odd[turn, j]:
            o_shared[slot, i, j] = T.cast(math.nan, o_shared.dtype)


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
        reads: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        inverse: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        initial_state: T.Tensor(states, T.dtype(initial or torch.float32)),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        o: T.Tensor((batch_size, num_tokens, value_heads, value_dim), elem),
        final_state: T.Tensor(states, T.float32),
        h: T.Tensor((num_chunks, value_heads, dim, value_dim), elem),
        u: T.Tensor((batch_size, num_tokens, value_heads, value_dim), elem),
        num_sequences: T.int32,
        scale: T.float32,
        writes: T.Tensor((batch_size, num_tokens, value_heads, dim), elem),
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
            k_shared = T.alloc_shared((2, chunk, wide), elem)
            writes_shared = T.alloc_shared((2, chunk, wide), elem)
            v_shared = T.alloc_shared((2, chunk, tile + PAD), elem)
            if mode != MAPS:
                q_shared = T.alloc_shared((2, chunk, wide), elem)
                reads_shared = T.alloc_shared((2, chunk, chunk), elem)
                o_shared = T.alloc_shared((2, chunk, tile + PAD), elem)
                out = T.alloc_fragment((tile, chunk), T.float32)
            if mode == JOINED:
                map_shared = T.alloc_shared((1, wide, wide), elem)
            factor_shared = T.alloc_shared((2, threads), T.float32)
            since_shared = T.alloc_shared((2, threads), T.float32)
            if channels:
                whole_shared = T.alloc_shared((2, wide), T.float32)
            first_odd = T.alloc_shared((3, tile), T.int32)
            any_odd = T.alloc_shared((3,), T.int32)
            state = T.alloc_fragment((tile, wide), T.float32)
            state_half = T.alloc_fragment((tile, wide), elem)
            known = T.alloc_fragment((tile, chunk), T.float32)
            x_half = T.alloc_fragment((tile, chunk), elem)
            next_beta = T.alloc_var(T.float32, init=0.0)
            next_sum = T.alloc_var(T.float32, init=0.0)
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
            if steps > 0:
                fetch_rows(k, own.batch, own.start, head, own.length, 0, k_shared, 0, threads)
                fetch_rows(writes, own.batch, own.start, value_head, own.length, 0, writes_shared, 0, threads)
                fetch_rows(v, own.batch, own.start, value_head, own.length, column, v_shared, 0, threads, tile)
                if mode != MAPS:
                    fetch_rows(q, own.batch, own.start, head, own.length, 0, q_shared, 0, threads)
                    fetch_square(reads, own.index, value_head, reads_shared, 0, threads)
                T.ptx_commit_group()
                length = T.min(own.length, chunk)
                factor_shared[0, thread] = beta_of(
                    beta[own.batch, own.start + T.min(thread, length - 1), value_head], form
                )
                if channels:
                    if thread < wide:
                        whole_shared[0, thread] = T.__exp(g_sum[own.batch, own.start + length - 1, value_head, channel])
                else:
                    since_shared[0, thread] = T.__exp(
                        g_sum[own.batch, own.start + T.min(thread, length - 1), value_head]
                    )
                for turn in T.unroll(3):
                    if thread < tile:
                        first_odd[turn, thread] = chunk
                    any_odd[turn] = 0
            for step in T.serial(steps):
                slot, turn, before = T.truncmod(step, 2), T.truncmod(step, 3), T.truncmod(step + 2, 3)
                T.ptx_wait_group(0)
                T.fence_proxy_async()
                T.sync_threads()
                if any_odd[before] != 0:
                    poison_state(state, first_odd, before, chunk)
                    if mode != MAPS:
                        poison_results(o_shared, 1 - slot, first_odd, before, tile)
                    T.fence_proxy_async()
                    T.sync_threads()
                T.copy(state, state_half)
                T.wgmma_gemm(
                    state_half, k_shared[slot, :, :], known, transpose_B=True, clear_accum=True, policy=rows_first
                )
                if mode != MAPS:
                    T.wgmma_gemm(
                        state_half, q_shared[slot, :, :], out, transpose_B=True, clear_accum=True, policy=rows_first
                    )
                # From here to the last product nothing but these copies writes shared memory: a fence would wait for
                # them. TileLang places fences by what is said to be written.
                first, rows = own.start + (step + 1) * chunk, own.length - (step + 1) * chunk
                index = own.index + T.min(step + 1, steps - 1)
                other = 1 - slot
                fetch_rows(k, own.batch, first, head, rows, 0, k_shared, other, threads, access='r')
                fetch_rows(writes, own.batch, first, value_head, rows, 0, writes_shared, other, threads, access='r')
                fetch_rows(v, own.batch, first, value_head, rows, column, v_shared, other, threads, tile, access='r')
                if mode != MAPS:
                    fetch_rows(q, own.batch, first, head, rows, 0, q_shared, other, threads, access='r')
                    fetch_square(reads, index, value_head, reads_shared, other, threads, access='r')
                T.ptx_commit_group()
                start = own.start + T.min(step + 1, steps - 1) * chunk
                length = T.min(own.start + own.length - start, chunk)
                next_beta = beta[own.batch, start + T.min(thread, length - 1), value_head]
                if channels:
                    next_sum = g_sum[own.batch, start + length - 1, value_head, channel]
                else:
                    next_sum = g_sum[own.batch, start + T.min(thread, length - 1), value_head]
                if mode != MAPS:
                    done = own.start + (step - 1) * chunk
                    whole = T.if_then_else(step > 0, chunk, 0)
                    store_values(o_shared, other, o, own.batch, done, value_head, whole, column, tile, threads)
                for j, i in T.Parallel(tile, wide):
                    state[j, i] = state[j, i] * (whole_shared[slot, i] if channels else since_shared[slot, chunk - 1])
                if mode == MAPS:
                    T.wait_wgmma(0)
                else:
                    T.wait_wgmma(1)
                for j, i in T.Parallel(tile, chunk):
                    value = T.cast(v_shared[slot, i, j], T.float32)
                    decay = T.float32(1.0) if channels else since_shared[slot, i]
                    known[j, i] = factor_shared[slot, i] * (value - known[j, i] * decay)
                for j, i in T.Parallel(tile, chunk):
                    x_half[j, i] = T.cast(finite(known[j, i]), elem)
                T.wgmma_gemm(x_half, writes_shared[slot, :, :], state, policy=rows_first)
                if mode != MAPS:
                    if not channels:
                        T.wait_wgmma(1)
                        for j, i in T.Parallel(tile, chunk):
                            out[j, i] = out[j, i] * since_shared[slot, i]
                    T.wgmma_gemm(x_half, reads_shared[slot, :, :], out, transpose_B=True, policy=rows_first)
                note_odd(known, first_odd, any_odd, turn)
                factor_shared[other, thread] = beta_of(next_beta, form)
                if channels:
                    if thread < wide:
                        whole_shared[other, thread] = T.__exp(next_sum)
                else:
                    since_shared[other, thread] = T.__exp(next_sum)
                following = T.truncmod(step + 1, 3)  # all have read it before the barrier of this step
                if thread < tile:
                    first_odd[following, thread] = chunk
                if thread == 0:
                    any_odd[following] = 0
                T.wait_wgmma(0)
                if mode != MAPS:
                    for j, i in T.Parallel(tile, chunk):
                        o_shared[slot, i, j] = T.cast(out[j, i] * scale, elem)
            if steps > 0:
                T.sync_threads()
                last = T.truncmod(steps - 1, 3)
                if any_odd[last] != 0:
                    poison_state(state, first_odd, last, chunk)
                    if mode != MAPS:
                        poison_results(o_shared, T.truncmod(steps - 1, 2), first_odd, last, tile)
                        T.sync_threads()
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
                if steps > 0:
                    done, rows = own.start + (steps - 1) * chunk, own.length - (steps - 1) * chunk
                    slot = T.truncmod(steps - 1, 2)
                    store_values(o_shared, slot, o, own.batch, done, value_head, rows, column, tile, threads)
                if final:  # noqa: SIM102 - known when the kernel is built
                    if piece == pieces - 1:
                        store_turned(state, final_state, sequence, value_head, column, v_first)

    return delta_states_sm90
