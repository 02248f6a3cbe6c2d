"""Kernels of the delta rule, forward. See `delta_rule` for the formula.

`delta_scores_kernel` runs for every chunk and value head: gate sums, decayed products of q with k, and the inverse. It
computes the inverse in float32 by columns, 16 rows at a time: a thread owns a column, so no barrier is needed.
`delta_states_kernel` owns a tile of the values of a head of a sequence, keeps the state in registers, and goes over the
chunks. It copies the next chunk by cp.async while it computes one. Packed sequences are found on the device. Sequence b
owns the chunk numbers from start[b] // chunk + b on, one more than it can need. The tokens behind the last sequence are
sequence N.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T, macro

#: Every index is in bounds by what the kernels say themselves.
PORTABLE = {**PLAIN_PRODUCTS, 'TL_DISABLE_SAFE_MEMORY_ACCESS': True}
#: The same with barriers by hand: threads that own a column of the inverse need none between its rows.
BY_HAND = {**PORTABLE, 'TL_DISABLE_THREAD_STORAGE_SYNC': True, 'TL_DISABLE_SHARED_MEMORY_REUSE': True}
#: Logarithms of decays below this count as this one. Its exponential is 2^-92: what is dropped is below 2^-40.
LEAST_GATE = -64.0
#: How `beta` is computed from its input.
PLAIN, SIGMOID, TWICE_SIGMOID = 0, 1, 2


def padded(dim: int) -> int:
    """Columns of a tile of a head dimension; those behind it hold 0."""
    return -(-dim // 32) * 32


def value_tile(dim: int, value_dim: int) -> int:
    """Columns of the state that a block owns: the state must fit into its registers."""
    return min(64 if dim <= 128 else 32, padded(value_dim))


def threads_of(chunk: int) -> int:
    """Two warps for every 16 rows of a chunk."""
    return 4 * chunk


def strided(name: str, shape: tuple, elem: Any) -> Any:
    """A parameter with a stride of its own for every dimension but the last, and these strides."""
    strides = [T.dynamic(f'{name}_stride{dim}') for dim in range(len(shape) - 1)]
    return T.StridedTensor(shape, (*strides, 1), elem), strides


@dataclass(frozen=True)
class Chunk:
    """A chunk of one sequence."""

    sequence: Any
    batch: Any  # index of the first dimension of the tensors
    first: Any  # first token of the chunk
    rows: Any  # tokens of the chunk; none if not positive


@macro
def find_chunk(cu_seqlens, index, num_sequences, bits, num_tokens, size: int, is_packed: bool):
    """The chunk of a number. `bits` is the bit length of the number of sequences; dense ones have equal lengths."""
    sequence = T.alloc_var(T.int32, init=0)
    batch = T.alloc_var(T.int32, init=0)
    first = T.alloc_var(T.int32, init=0)
    rows = T.alloc_var(T.int32, init=0)
    if is_packed:
        start = T.alloc_var(T.int32, init=0)
        end = T.alloc_var(T.int32, init=0)
        for step in T.serial(bits):
            later = sequence + (1 << (bits - 1 - step))
            if later <= num_sequences:  # noqa: SIM102
                if T.truncdiv(cu_seqlens[T.min(later, num_sequences)], size) + later <= index:
                    sequence = later
        start = T.min(cu_seqlens[sequence], num_tokens)
        end = num_tokens
        if sequence < num_sequences:
            end = T.min(cu_seqlens[T.min(sequence + 1, num_sequences)], num_tokens)
        first = start + (index - T.truncdiv(start, size) - sequence) * size
        rows = T.min(end - first, size)
    else:
        chunks = T.truncdiv(num_tokens + size - 1, size)
        sequence = T.truncdiv(index, chunks)
        batch = sequence
        first = (index - sequence * chunks) * size
        rows = T.min(num_tokens - first, size)
    return Chunk(sequence, 0 if is_packed else batch, first, rows)  # a constant spares address registers


@dataclass(frozen=True)
class Sequence:
    """Tokens and chunk numbers of a sequence."""

    batch: Any
    start: Any
    length: Any
    index: Any  # number of its first chunk


@macro
def find_sequence(cu_seqlens, sequence, num_tokens, size: int, is_packed: bool):
    """The tokens of a sequence, and the number of its first chunk."""
    batch = T.alloc_var(T.int32, init=0)
    start = T.alloc_var(T.int32, init=0)
    length = T.alloc_var(T.int32, init=0)
    index = T.alloc_var(T.int32, init=0)
    if is_packed:
        start = T.min(cu_seqlens[sequence], num_tokens)
        length = T.min(cu_seqlens[sequence + 1], num_tokens) - start
        index = T.truncdiv(start, size) + sequence
    else:
        batch = sequence
        length = num_tokens
        index = sequence * T.truncdiv(num_tokens + size - 1, size)
    return Sequence(0 if is_packed else batch, start, length, index)


@macro
def load_tile(x, batch, first, head, rows, column, x_shared):
    """Load rows of a head from `column` on; 0 behind the last row and behind the last column."""
    zero, width = T.cast(0.0, x_shared.dtype), x.shape[3]
    for i, d in T.Parallel(x_shared.shape[0], x_shared.shape[1]):
        x_shared[i, d] = T.if_then_else(
            T.And(i < rows, column + T.truncdiv(d, 8) * 8 < width), x[batch, first + i, head, column + d], zero
        )


@macro
def load_square(x, index, head, x_shared):
    """Load what a chunk has for every pair of its rows."""
    for i, j in T.Parallel(x_shared.shape[0], x_shared.shape[1]):
        x_shared[i, j] = x[index, head, i, j]


@macro
def load_sums(g_sum, batch, first, head, rows, g_shared):
    """Load gate sums; rows behind the last have that of the last."""
    for i in T.Parallel(g_shared.shape[0]):
        g_shared[i] = g_sum[batch, first + T.min(i, rows - 1), head]


def beta_of(x: Any, form: int) -> Any:
    """The factor of a token from its input."""
    if form == PLAIN:
        return x
    return T.float32(1.0 if form == SIGMOID else 2.0) / (T.float32(1.0) + T.exp(-x))


@macro
def load_beta(beta, batch, first, head, rows, beta_shared, form: int):
    """Load the factors of rows; 0 behind the last."""
    for i in T.Parallel(beta_shared.shape[0]):
        beta_shared[i] = T.if_then_else(
            i < rows, beta_of(beta[batch, first + T.min(i, rows - 1), head], form), T.float32(0.0)
        )


def finite(x: Any) -> Any:
    """A number, or 0 for NaN and infinities: products would take them to rows that do not see their token."""
    return T.if_then_else(T.isfinite(x), x, T.float32(0.0))


# Chunks -------------------------------------------------------------------------------------


@macro
def invert(lower_shared, inverse_shared, elem):
    """The inverse of 1 + A, from `lower_shared[j, i]` = A[i, j], rounded to `elem`; thread c owns column c.

    A rounding error is added to the next row: with equal keys a result is a sum over rows, and errors have one sign.
    """
    size = lower_shared.shape[0]
    column = T.get_thread_binding()
    rows = T.alloc_local((16,), T.float32)
    error = T.alloc_var(T.float32, init=0.0)
    exact = T.alloc_var(T.float32, init=0.0)
    if column < size:
        for block in T.serial(size // 16):
            for i in T.unroll(16):
                rows[i] = T.if_then_else(block * 16 + i == column, T.float32(1.0), T.float32(0.0))
            for j in T.serial(block * 16):
                for i in T.unroll(16):
                    rows[i] = rows[i] - lower_shared[j, block * 16 + i] * inverse_shared[j, column]
            for i in T.unroll(16):
                for j in T.unroll(16):
                    if j < i:
                        rows[i] = rows[i] - lower_shared[block * 16 + j, block * 16 + i] * rows[j]
            for i in T.unroll(16):
                inverse_shared[block * 16 + i, column] = rows[i]
        for i in T.serial(size):
            exact = inverse_shared[i, column] + error
            inverse_shared[i, column] = T.cast(T.cast(exact, elem), T.float32)
            error = exact - inverse_shared[i, column]


@kernel(pass_configs=BY_HAND)
def delta_scores_kernel(dim: int, value_dim: int, dtype: torch.dtype, chunk: int, packed: bool, form: int, again: bool):
    """Gate sums, scores and inverse of a chunk; `again` computes the scores alone, from gate sums."""
    batch_size, num_tokens, heads, value_heads = (
        T.dynamic(n) for n in ('batch_size', 'num_tokens', 'heads', 'v_heads')
    )
    num_starts, num_chunks = T.dynamic('num_starts'), T.dynamic('num_chunks')
    elem, wide = T.dtype(dtype), padded(dim)
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)

    @T.prim_func
    def delta_scores(
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
        writes: T.Tensor((batch_size, num_tokens, value_heads, dim), elem),
    ):
        with T.Kernel(num_chunks, value_heads, threads=2 * chunk) as (index, value_head):
            for stride in q_strides + k_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((chunk, wide), elem)
            k_shared = T.alloc_shared((chunk, wide), elem)
            g_shared = T.alloc_shared((chunk,), T.float32)
            sum_shared = T.alloc_shared((chunk,), T.float32)
            beta_shared = T.alloc_shared((chunk,), T.float32)
            products = T.alloc_fragment((chunk, chunk), T.float32)
            total = T.alloc_var(T.float32, init=0.0)
            if not again:
                lower_shared = T.alloc_shared((chunk, chunk), T.float32)
                inverse_shared = T.alloc_shared((chunk, chunk), T.float32)
            thread = T.get_thread_binding()
            own = find_chunk(cu_seqlens, index, num_sequences, bits, num_tokens, chunk, packed)
            if T.And(own.rows > 0, own.sequence < num_sequences):
                head = T.truncdiv(value_head, T.truncdiv(value_heads, heads))
                load_tile(q, own.batch, own.first, head, own.rows, 0, q_shared)
                load_tile(k, own.batch, own.first, head, own.rows, 0, k_shared)
                if again:
                    load_sums(g_sum, own.batch, own.first, value_head, own.rows, sum_shared)
                else:
                    load_beta(beta, own.batch, own.first, value_head, own.rows, beta_shared, form)
                    for i in T.Parallel(chunk):
                        gate = g[own.batch, own.first + T.min(i, own.rows - 1), value_head]
                        bounded = T.if_then_else(gate < LEAST_GATE, T.float32(LEAST_GATE), gate)
                        g_shared[i] = T.if_then_else(i < own.rows, bounded, T.float32(0.0))
                    T.sync_threads()
                    for j in T.serial(chunk):
                        total = total + T.if_then_else(j <= thread, g_shared[j], T.float32(0.0))
                    if thread < chunk:
                        sum_shared[thread] = total
                    if thread < own.rows:
                        g_sum[own.batch, own.first + thread, value_head] = total
                T.sync_threads()
                T.clear(products)
                T.gemm(q_shared, k_shared, products, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(chunk, chunk):
                    decayed = products[i, j] * T.exp(sum_shared[i] - sum_shared[j])
                    scores[index, value_head, i, j] = T.if_then_else(j <= i, decayed, T.float32(0.0))
                if not again:
                    T.clear(products)
                    T.gemm(k_shared, k_shared, products, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for i, j in T.Parallel(chunk, chunk):
                        decayed = products[i, j] * T.exp(sum_shared[i] - sum_shared[j]) * beta_shared[i]
                        lower_shared[j, i] = T.if_then_else(j < i, finite(decayed), T.float32(0.0))
                    T.sync_threads()
                    invert(lower_shared, inverse_shared, elem)
                    T.sync_threads()
                    for i, j in T.Parallel(chunk, chunk):
                        inverse[index, value_head, i, j] = T.cast(inverse_shared[i, j], elem)
            elif not again:
                for i, j in T.Parallel(chunk, chunk):
                    inverse[index, value_head, i, j] = T.cast(0.0, elem)
                for i in T.Parallel(chunk):
                    if i < own.rows:
                        g_sum[own.batch, own.first + i, value_head] = 0.0
                for i, d in T.Parallel(chunk, padded(value_dim)):
                    if T.And(i < own.rows, d < value_dim):
                        o[own.batch, own.first + i, value_head, d] = T.cast(0.0, elem)

    return delta_scores


def is_late(i: Any, level: Any) -> Any:
    """Whether a row lies in the second half of its block of 2 << level rows."""
    return ((i >> level) & 1) == 1


def reference_row(i: Any, level: Any) -> Any:
    """The last row of the first half of the block of a row: decays of pairs across the halves meet there."""
    return (i | ((2 << level) - 1)) - (1 << level)


def meets(i: Any, j: Any, level: Any) -> Any:
    """Whether i lies in the second half and j in the first half of one block: they first differ in this bit."""
    return T.And(is_late(i, level), ((i ^ j) >> level) == 1)


def late_decay(sum_shared: Any, i: Any, d: Any, level: Any) -> Any:
    """Decay of a late row since the reference; 0 for others."""
    power = sum_shared[i, d] - sum_shared[reference_row(i, level), d]
    return T.if_then_else(is_late(i, level), T.exp(power), T.float32(0.0))


def early_decay(sum_shared: Any, j: Any, d: Any, level: Any) -> Any:
    """Decay of an early row until the reference; 0 for others."""
    power = sum_shared[reference_row(j, level), d] - sum_shared[j, d]
    return T.if_then_else(is_late(j, level), T.float32(0.0), T.exp(power))


@kernel(pass_configs=BY_HAND)
def delta_channel_scores_kernel(
    dim: int, value_dim: int, dtype: torch.dtype, chunk: int, packed: bool, form: int, again: bool
):
    """`delta_scores_kernel` for gates of every channel.

    The decay of a pair is the product of two: until a reference row between both rows, and from there on. Exponents are
    never positive. Pairs of rows whose numbers first differ in the same bit share a product. Their reference is the end
    of the first half of their block. The other pairs of that product are not used.
    """
    batch_size, num_tokens = T.dynamic('batch_size'), T.dynamic('num_tokens')
    heads, value_heads = T.dynamic('heads'), T.dynamic('value_heads')
    num_starts, num_chunks = T.dynamic('num_starts'), T.dynamic('num_chunks')
    elem, wide, threads = T.dtype(dtype), padded(dim), 2 * chunk
    levels = chunk.bit_length() - 1
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)
    rowwise = T.GemmWarpPolicy.FullRow
    decayed = (batch_size, num_tokens, value_heads, dim)  # only written by the kernel for Hopper

    @T.prim_func
    def delta_channel_scores(
        q: q_type,
        k: k_type,
        g: T.Tensor((batch_size, num_tokens, value_heads, dim), T.float32),
        beta: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        g_sum: T.Tensor((batch_size, num_tokens, value_heads, dim), T.float32),
        scores: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        inverse: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        o: T.Tensor((batch_size, num_tokens, value_heads, value_dim), elem),
        num_sequences: T.int32,
        bits: T.int32,
        writes: T.Tensor(decayed, elem),
        q_since: T.Tensor(decayed, elem),
        k_since: T.Tensor(decayed, elem),
    ):
        with T.Kernel(num_chunks, value_heads, threads=threads) as (index, value_head):
            for stride in q_strides + k_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((chunk, wide), elem)
            k_shared = T.alloc_shared((chunk, wide), elem)
            late_q = T.alloc_shared((chunk, wide), elem)
            early_k = T.alloc_shared((chunk, wide), elem)
            sum_shared = T.alloc_shared((chunk, wide), T.float32)
            acc = T.alloc_fragment((chunk, chunk), T.float32)
            pairs = T.alloc_fragment((chunk, chunk), T.float32)
            total = T.alloc_var(T.float32, init=0.0)
            if not again:
                beta_shared = T.alloc_shared((chunk,), T.float32)
                late_k = T.alloc_shared((chunk, wide), elem)
                key_pairs = T.alloc_fragment((chunk, chunk), T.float32)
                lower_shared = T.alloc_shared((chunk, chunk), T.float32)
                inverse_shared = T.alloc_shared((chunk, chunk), T.float32)
            thread = T.get_thread_binding()
            own = find_chunk(cu_seqlens, index, num_sequences, bits, num_tokens, chunk, packed)
            if T.And(own.rows > 0, own.sequence < num_sequences):
                head = T.truncdiv(value_head, T.truncdiv(value_heads, heads))
                load_tile(q, own.batch, own.first, head, own.rows, 0, q_shared)
                load_tile(k, own.batch, own.first, head, own.rows, 0, k_shared)
                if not again:
                    load_beta(beta, own.batch, own.first, value_head, own.rows, beta_shared, form)
                for block in T.serial(-(-wide // threads)):
                    column = block * threads + thread
                    if column < wide:
                        total = 0.0
                        for i in T.serial(chunk):
                            if T.And(i < own.rows, column < dim):
                                if again:
                                    total = g_sum[own.batch, own.first + i, value_head, column]
                                else:
                                    gate = g[own.batch, own.first + i, value_head, column]
                                    total = total + T.if_then_else(gate < LEAST_GATE, T.float32(LEAST_GATE), gate)
                                    g_sum[own.batch, own.first + i, value_head, column] = total
                            sum_shared[i, column] = total
                T.sync_threads()
                T.clear(acc)
                T.gemm(q_shared, k_shared, acc, transpose_B=True, policy=rowwise)
                for i, j in T.Parallel(chunk, chunk):
                    pairs[i, j] = T.if_then_else(i == j, acc[i, j], T.float32(0.0))
                if not again:
                    T.clear(key_pairs)
                for level in T.serial(levels):
                    for i, d in T.Parallel(chunk, wide):
                        late = late_decay(sum_shared, i, d, level)
                        late_q[i, d] = T.cast(q_shared[i, d], T.float32) * late
                        early_k[i, d] = T.cast(k_shared[i, d], T.float32) * early_decay(sum_shared, i, d, level)
                        if not again:
                            late_k[i, d] = T.cast(k_shared[i, d], T.float32) * late
                    T.sync_threads()
                    T.clear(acc)
                    T.gemm(late_q, early_k, acc, transpose_B=True, policy=rowwise)
                    for i, j in T.Parallel(chunk, chunk):
                        pairs[i, j] = T.if_then_else(meets(i, j, level), acc[i, j], pairs[i, j])
                    if not again:
                        T.clear(acc)
                        T.gemm(late_k, early_k, acc, transpose_B=True, policy=rowwise)
                        for i, j in T.Parallel(chunk, chunk):
                            key_pairs[i, j] = T.if_then_else(meets(i, j, level), acc[i, j], key_pairs[i, j])
                    T.sync_threads()
                for i, j in T.Parallel(chunk, chunk):
                    scores[index, value_head, i, j] = pairs[i, j]
                if not again:
                    for i, j in T.Parallel(chunk, chunk):
                        lower_shared[j, i] = finite(key_pairs[i, j] * beta_shared[i])
                    T.sync_threads()
                    invert(lower_shared, inverse_shared, elem)
                    T.sync_threads()
                    for i, j in T.Parallel(chunk, chunk):
                        inverse[index, value_head, i, j] = T.cast(inverse_shared[i, j], elem)
            elif not again:
                for i, j in T.Parallel(chunk, chunk):
                    inverse[index, value_head, i, j] = T.cast(0.0, elem)
                for i, d in T.Parallel(chunk, wide):
                    if T.And(i < own.rows, d < dim):
                        g_sum[own.batch, own.first + i, value_head, d] = 0.0
                for i, d in T.Parallel(chunk, padded(value_dim)):
                    if T.And(i < own.rows, d < value_dim):
                        o[own.batch, own.first + i, value_head, d] = T.cast(0.0, elem)

    return delta_channel_scores


# Sequences ----------------------------------------------------------------------------------


@macro
def load_state(state, sequence, head, column, acc, v_first: bool):
    """Load columns of a state; 0 behind the last row and column."""
    T.clear(acc)
    for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
        if v_first:
            if T.And(i < state.shape[3], column + j < state.shape[2]):
                acc[i, j] = T.cast(state[sequence, head, column + j, i], T.float32)
        else:
            if T.And(i < state.shape[2], column + j < state.shape[3]):
                acc[i, j] = T.cast(state[sequence, head, i, column + j], T.float32)


@macro
def store_state(acc, state, sequence, head, column, v_first: bool):
    """Store columns of a state."""
    for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
        if v_first:
            if T.And(i < state.shape[3], column + j < state.shape[2]):
                state[sequence, head, column + j, i] = T.cast(acc[i, j], state.dtype)
        else:
            if T.And(i < state.shape[2], column + j < state.shape[3]):
                state[sequence, head, i, column + j] = T.cast(acc[i, j], state.dtype)


def state_shape(number: Any, heads: Any, dim: int, value_dim: int, v_first: bool) -> tuple:
    """Extents of states."""
    return (number, heads, value_dim, dim) if v_first else (number, heads, dim, value_dim)


@macro
def load_decayed(x, g_sum, batch, first, head, value_head, rows, x_shared):
    """Load rows of q or k times the decay since the start of the chunk, for gates of every channel."""
    T.clear(x_shared)
    for i, d in T.Parallel(x_shared.shape[1], x_shared.shape[2]):
        if T.And(i < rows, d < x.shape[3]):
            decay = T.exp(g_sum[batch, first + i, value_head, d])
            x_shared[0, i, d] = T.cast(x[batch, first + i, head, d], T.float32) * decay


@macro
def load_undecayed(k, g_sum, batch, first, head, value_head, rows, k_shared, last_shared):
    """Load rows of k times the decay until the end of the chunk, whose gate sums go to `last_shared`."""
    zero, width = T.float32(0.0), k.shape[3]
    for d in T.Parallel(last_shared.shape[0]):
        last_shared[d] = T.if_then_else(
            d < width, g_sum[batch, first + rows - 1, value_head, T.min(d, width - 1)], zero
        )
    T.clear(k_shared)
    T.sync_threads()
    for i, d in T.Parallel(k_shared.shape[1], k_shared.shape[2]):
        if T.And(i < rows, d < width):
            decay = T.exp(last_shared[d] - g_sum[batch, first + i, value_head, d])
            k_shared[0, i, d] = T.cast(k[batch, first + i, head, d], T.float32) * decay


def sums_shape(batch_size: Any, num_tokens: Any, value_heads: Any, dim: int, channels: bool) -> tuple:
    """Extents of gate sums: one for each token and head, or also for each channel of k."""
    return (batch_size, num_tokens, value_heads, dim) if channels else (batch_size, num_tokens, value_heads)


def vectors_of(x_shared: Any, columns: int) -> int:
    """16-byte vectors in a row: of its first columns, or of all if `columns` is 0."""
    return (columns or int(x_shared.shape[2])) // 8


@macro
def fetch_rows(x, batch, first, head, rows, column, x_shared, slot, threads: int, columns: int = 0, access: str = 'w'):
    """Start to copy rows of a head from `column` on; 0 behind the last row and behind the last column."""
    size, vectors = x_shared.shape[1], vectors_of(x_shared, columns)
    for r in T.unroll(-(-size * vectors // threads)):
        at = r * threads + T.get_thread_binding()
        i, d = at // vectors, at % vectors * 8
        if at < size * vectors:
            T.ptx_cp_async(
                T.access_ptr(x_shared[slot, i, d], access, 8),
                T.access_ptr(x[batch, first + i, head, column + d], 'r', 8),
                8,
                T.And(i < rows, column + d < x.shape[3]),
            )


@macro
def fetch_square(x, index, head, x_shared, slot, threads: int, access: str = 'w'):
    """Start to copy what a chunk has for every pair of its rows."""
    size, vectors = x_shared.shape[1], x_shared.shape[2] // 8
    for r in T.unroll(-(-size * vectors // threads)):
        at = r * threads + T.get_thread_binding()
        i, j = at // vectors, at % vectors * 8
        if at < size * vectors:
            T.ptx_cp_async(T.access_ptr(x_shared[slot, i, j], access, 8), T.access_ptr(x[index, head, i, j], 'r', 8), 8)


@macro
def fetch_numbers(x, batch, first, head, rows, x_shared, slot):
    """Start to copy a number of every row; rows behind the last have that of the last."""
    thread, size = T.get_thread_binding(), x_shared.shape[1]
    if thread < size:
        T.ptx_cp_async(
            T.access_ptr(x_shared[slot, thread], 'w', 1),
            T.access_ptr(x[batch, first + T.min(thread, rows - 1), head], 'r', 1),
            1,
        )


@macro
def row_factors(beta_shared, sum_shared, slot, factor_shared, since_shared, until_shared, form: int, channels: bool):
    """Of every row: beta, the decay since the start of the chunk, and the decay until its end."""
    size = factor_shared.shape[0]
    for i in T.Parallel(size):
        factor_shared[i] = beta_of(beta_shared[slot, i], form)
        if not channels:
            since_shared[i] = T.exp(sum_shared[slot, i])
            until_shared[i] = T.exp(sum_shared[slot, size - 1] - sum_shared[slot, i])


@macro
def split_rows(x, high_shared, low_shared):
    """A number as the sum of two in half precision: sums of rows that cancel keep their digits."""
    for i, j in T.Parallel(x.shape[0], x.shape[1]):
        high_shared[i, j] = T.cast(x[i, j], high_shared.dtype)
    for i, j in T.Parallel(x.shape[0], x.shape[1]):
        rounded = T.cast(T.cast(x[i, j], high_shared.dtype), T.float32)
        low_shared[i, j] = T.cast(x[i, j] - rounded, low_shared.dtype)


@kernel(pass_configs=PORTABLE)
def delta_states_kernel(
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
):
    """Results of all chunks of a sequence; `again` stores the state before every chunk and u instead.

    `mode` and the last arguments belong to `delta_states_sm90_kernel`.
    """
    batch_size, num_tokens = T.dynamic('batch_size'), T.dynamic('num_tokens')
    heads, value_heads = T.dynamic('heads'), T.dynamic('value_heads')
    num_starts, num_chunks, number = T.dynamic('num_starts'), T.dynamic('num_chunks'), T.dynamic('number')
    num_maps = T.dynamic('num_maps')
    elem, wide, tile, threads = T.dtype(dtype), padded(dim), value_tile(dim, value_dim), threads_of(chunk)
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)
    v_type, v_strides = strided('v', (batch_size, num_tokens, value_heads, value_dim), elem)
    states = state_shape(number, value_heads, dim, value_dim, v_first)
    rowwise = T.GemmWarpPolicy.FullRow
    stages = 1 if channels else 2  # of q and k: with gates of every channel they are scaled when they are loaded

    @T.prim_func
    def delta_states(
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
        writes: T.Tensor((batch_size, num_tokens, value_heads, dim), elem),
        maps: T.Tensor((num_maps, value_heads, wide, wide), elem),
        offsets: T.Tensor((num_maps, value_heads, value_dim, wide), T.float32),
        pieces: T.int32,
    ):
        with T.Kernel(-(-value_dim // tile), value_heads, num_sequences, threads=threads) as (
            part,
            value_head,
            sequence,
        ):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            k_shared = T.alloc_shared((stages, chunk, wide), elem)
            v_shared = T.alloc_shared((2, chunk, tile), elem)
            inverse_shared = T.alloc_shared((2, chunk, chunk), elem)
            beta_shared = T.alloc_shared((2, chunk), T.float32)
            sum_shared = T.alloc_shared((2, chunk), T.float32)
            x_shared = T.alloc_shared((chunk, tile), elem)
            u_shared = T.alloc_shared((chunk, tile), elem)
            rest_shared = T.alloc_shared((chunk, tile), elem)
            state_shared = T.alloc_shared((wide, tile), elem)
            first_odd = T.alloc_shared((tile,), T.int32)
            factor_shared = T.alloc_shared((chunk,), T.float32)
            since_shared = T.alloc_shared((chunk,), T.float32)
            until_shared = T.alloc_shared((chunk,), T.float32)
            last_shared = T.alloc_shared((wide,), T.float32)
            state = T.alloc_fragment((wide, tile), T.float32)
            acc = T.alloc_fragment((chunk, tile), T.float32)
            fresh = T.alloc_fragment((chunk, tile), T.float32)
            if not again:
                q_shared = T.alloc_shared((stages, chunk, wide), elem)
                scores_shared = T.alloc_shared((2, chunk, chunk), elem)

            own = find_sequence(cu_seqlens, sequence, num_tokens, chunk, packed)
            head = T.truncdiv(value_head, T.truncdiv(value_heads, heads))
            column = part * tile
            steps = T.truncdiv(own.length + chunk - 1, chunk)
            if initial is not None:
                load_state(initial_state, sequence, value_head, column, state, v_first)
            else:
                T.clear(state)
            for ahead in T.serial(steps + 1):  # chunk `ahead` is copied while the one before it is computed
                slot, other = ahead % 2, 1 - ahead % 2
                T.ptx_wait_group(0)
                T.sync_threads()
                if ahead < steps:
                    next_first, next_rows = own.start + ahead * chunk, own.length - ahead * chunk
                    fetch_rows(v, own.batch, next_first, value_head, next_rows, column, v_shared, slot, threads)
                    fetch_square(inverse, own.index + ahead, value_head, inverse_shared, slot, threads)
                    fetch_numbers(beta, own.batch, next_first, value_head, next_rows, beta_shared, slot)
                    if not channels:
                        fetch_rows(k, own.batch, next_first, head, next_rows, 0, k_shared, slot, threads)
                        fetch_numbers(g_sum, own.batch, next_first, value_head, next_rows, sum_shared, slot)
                    if not again:
                        fetch_square(scores, own.index + ahead, value_head, scores_shared, slot, threads)
                        if not channels:
                            fetch_rows(q, own.batch, next_first, head, next_rows, 0, q_shared, slot, threads)
                    T.ptx_commit_group()
                if ahead > 0:
                    step = ahead - 1
                    first, rows, index = own.start + step * chunk, own.length - step * chunk, own.index + step
                    used, at = T.min(rows, chunk), 0 if channels else other
                    T.copy(state, state_shared)
                    row_factors(
                        beta_shared, sum_shared, other, factor_shared, since_shared, until_shared, form, channels
                    )
                    if channels:
                        load_decayed(k, g_sum, own.batch, first, head, value_head, used, k_shared)
                        if not again:
                            load_decayed(q, g_sum, own.batch, first, head, value_head, used, q_shared)
                    if again:
                        for i, j in T.Parallel(wide, tile):
                            if T.And(i < dim, column + j < value_dim):
                                h[index, value_head, i, column + j] = state_shared[i, j]

                    T.clear(acc)
                    T.gemm(k_shared[at, :, :], state_shared, acc, policy=rowwise)
                    for i, j in T.Parallel(chunk, tile):
                        known = acc[i, j] if channels else acc[i, j] * since_shared[i]
                        acc[i, j] = factor_shared[i] * (T.cast(v_shared[other, i, j], T.float32) - known)
                    T.fill(first_odd, chunk)
                    T.sync_threads()
                    for i, j in T.Parallel(chunk, tile):
                        if T.Not(T.isfinite(acc[i, j])):
                            T.atomic_min(first_odd[j], i)
                    for i, j in T.Parallel(chunk, tile):
                        x_shared[i, j] = finite(acc[i, j])
                    T.clear(fresh)
                    T.gemm(inverse_shared[other, :, :], x_shared, fresh, policy=rowwise)
                    split_rows(fresh, u_shared, rest_shared)
                    if again:
                        for i, j in T.Parallel(chunk, tile):
                            if T.And(i < rows, column + j < value_dim):
                                u[own.batch, first + i, value_head, column + j] = u_shared[i, j]
                    else:
                        T.clear(acc)
                        T.gemm(q_shared[at, :, :], state_shared, acc, policy=rowwise)
                        if not channels:
                            for i, j in T.Parallel(chunk, tile):
                                acc[i, j] = acc[i, j] * since_shared[i]
                        T.gemm(scores_shared[other, :, :], u_shared, acc, policy=rowwise)
                        T.gemm(scores_shared[other, :, :], rest_shared, acc, policy=rowwise)
                        for i, j in T.Parallel(chunk, tile):
                            acc[i, j] = T.if_then_else(i < first_odd[j], acc[i, j] * scale, T.float32(math.nan))
                        for i, j in T.Parallel(chunk, tile):
                            if T.And(i < rows, column + j < value_dim):
                                o[own.batch, first + i, value_head, column + j] = acc[i, j]
                    if channels:
                        load_undecayed(k, g_sum, own.batch, first, head, value_head, used, k_shared, last_shared)
                        for i, j in T.Parallel(wide, tile):
                            state[i, j] = state[i, j] * T.exp(last_shared[i])
                    else:
                        for i, j in T.Parallel(chunk, tile):
                            fresh[i, j] = fresh[i, j] * until_shared[i]
                        split_rows(fresh, u_shared, rest_shared)
                        for i, j in T.Parallel(wide, tile):
                            state[i, j] = state[i, j] * since_shared[chunk - 1]
                    T.gemm(k_shared[at, :, :], u_shared, state, transpose_A=True)
                    T.gemm(k_shared[at, :, :], rest_shared, state, transpose_A=True)
                    for i, j in T.Parallel(wide, tile):
                        state[i, j] = T.if_then_else(first_odd[j] < chunk, T.float32(math.nan), state[i, j])
            if final:
                store_state(state, final_state, sequence, value_head, column, v_first)

    return delta_states
