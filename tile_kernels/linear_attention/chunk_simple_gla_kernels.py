"""Kernels of linear attention with one decay for each token and head. See `chunk_simple_gla` for the formula.

One kernel serves the forward pass and all gradients, since these are the same sum with other operands:

    o  = f(q, k, v)      forward in time          dv = f(k, q, do)     backward in time
    dq = f(do, v, k)     forward in time          dk = f(v, do, q)     backward in time

A thread block owns a segment of one sequence, one head and a tile of columns of the result. It goes over chunks of 64
tokens with the state in registers; cp.async loads the next chunk meanwhile. A decay between two tokens of a chunk is
one exponential of a difference of sums. Sums start anew in every chunk. No gate counts for less than 2^-160, which is 0
in float32.

A long sequence is cut into segments if there are few heads. With `states_only` the kernel computes what each segment
adds to the state; `join_states` computes the state before each of them. Blocks of segments are numbered as in
attention: sequence n owns the numbers from start[n] // size + n on.
"""

from typing import Any

import torch

from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T, macro

CHUNK = 64
THREADS = 128
LOG2E = 1.4426950408889634
#: Logarithm to base 2 of a factor that is 0 in float32.
NOTHING = -160.0
#: Every index is in bounds by what the kernels say themselves.
PORTABLE = {**PLAIN_PRODUCTS, 'TL_DISABLE_SAFE_MEMORY_ACCESS': True}

#: Where the weight of a token is applied: nowhere, to keys, to rows of the matrix, to rows of the result after `dots`.
UNWEIGHTED, KEYS, ROWS, RESULT = 'unweighted', 'keys', 'rows', 'result'


def padded(dim: int) -> int:
    """Columns of a tile of keys; those behind the last hold 0."""
    return -(-dim // 64) * 64


def tile_columns(dim: int, out_dim: int) -> int:
    """Columns of the result that a block owns; a state of more than 128 x 64 does not fit into the registers."""
    return 32 if out_dim <= 32 or padded(dim) > 128 else 64


def num_tiles(dim: int, out_dim: int) -> int:
    """Blocks side by side for the columns of a result."""
    return -(-out_dim // tile_columns(dim, out_dim))


def strided(name: str, shape: tuple, elem: Any, dense: int = 1) -> Any:
    """A parameter with dynamic strides for all but its last `dense` dimensions, and these strides."""
    strides = [T.dynamic(f'{name}_stride{dim}') for dim in range(len(shape) - dense)]
    return T.StridedTensor(shape, (*strides, *(1,) * dense), elem), strides


@macro
def find_segment(cu_seqlens, slot, num_sequences, bits, num_tokens, size, is_packed: bool, found):
    """Sequence, batch index, first token and tokens of the sequence, and first token of a segment, into `found`."""
    sequence = T.alloc_var(T.int32, init=0)
    batch = T.alloc_var(T.int32, init=0)
    start = T.alloc_var(T.int32, init=0)
    length = T.alloc_var(T.int32, init=0)
    row = T.alloc_var(T.int32, init=0)
    if is_packed:
        for step in T.serial(bits):
            later = sequence + (1 << (bits - 1 - step))
            if later <= num_sequences:  # noqa: SIM102
                if T.truncdiv(cu_seqlens[T.min(later, num_sequences)], size) + later <= slot:
                    sequence = later
        start = T.min(cu_seqlens[sequence], num_tokens)
        length = num_tokens - start
        if sequence < num_sequences:
            length = T.min(cu_seqlens[T.min(sequence + 1, num_sequences)], num_tokens) - start
        row = (slot - T.truncdiv(start, size) - sequence) * size
    else:
        segments = T.max(T.truncdiv(num_tokens + size - 1, size), 1)
        sequence = T.truncdiv(slot, segments)
        batch = sequence
        length = num_tokens
        row = (slot - sequence * segments) * size
    found[0] = sequence
    found[1] = batch
    found[2] = start
    found[3] = length
    found[4] = row


@macro
def ask_for_rows(x, batch, first, number, head, column, x_shared, stage, width: int):
    """Start to copy rows of a head; 0 behind the last row and behind the last column."""
    vectors = x_shared.shape[2] // 8
    for r in T.unroll(x_shared.shape[1] * vectors // THREADS):
        index = r * THREADS + T.get_thread_binding()
        i, d = index // vectors, index % vectors * 8
        T.ptx_cp_async(
            T.access_ptr(x_shared[stage, i, d], 'w', 8),
            T.access_ptr(x[batch, first + i, head, column + d], 'r', 8),
            8,
            T.And(i < number, column + d < width),
        )


@macro
def ask_for_gates(g, batch, first, number, head, g_shared, stage):
    """Start to copy numbers of a head, one for each token; 0 behind the last."""
    i = T.get_thread_binding()
    if i < CHUNK:
        T.ptx_cp_async(
            T.access_ptr(g_shared[stage, i], 'w', 1),
            T.access_ptr(g[batch, first + i, head], 'r', 1),
            1,
            i < number,
        )


@kernel(pass_configs=PORTABLE)
def simple_gla_kernel(
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
):
    """f(q, k, v) of the module docstring for one segment, head and tile of columns.

    `begin` has a state for each sequence, or for each segment if `by_slot`. `dots` are products of rows of the result
    with rows of `other`, one sum for each tile.
    """
    batches, num_tokens, num_heads = T.dynamic('batches'), T.dynamic('num_tokens'), T.dynamic('num_heads')
    q_heads, k_heads, v_heads = T.dynamic('q_heads'), T.dynamic('k_heads'), T.dynamic('v_heads')
    other_heads, num_cuts, num_begin, num_end = (T.dynamic(n) for n in ('other_heads', 'num_cuts', 'n_begin', 'n_end'))
    num_slots, num_dots, all_tokens = T.dynamic('num_slots'), T.dynamic('num_dots'), T.dynamic('all_tokens')
    elem, wide, cols = T.dtype(dtype), padded(dim), tile_columns(dim, out_dim)
    q_type, q_strides = strided('q', (batches, num_tokens, q_heads, dim), elem)
    k_type, k_strides = strided('k', (batches, num_tokens, k_heads, dim), elem)
    v_type, v_strides = strided('v', (batches, num_tokens, v_heads, out_dim), elem)
    other_type, other_strides = strided('other', (batches, num_tokens, other_heads, out_dim), elem)
    g_type, _ = strided('g', (batches, num_tokens, num_heads), T.float32, dense=0)
    w_type, _ = strided('w', (batches, num_tokens, num_heads), T.float32, dense=0)
    begin_type, _ = strided('begin', (num_begin, num_heads, dim, out_dim), T.dtype(begin_dtype or torch.float32), 0)
    end_type, _ = strided('end', (num_end, num_heads, dim, out_dim), T.dtype(end_dtype or torch.float32), 0)
    weighted = weights != UNWEIGHTED

    @T.prim_func
    def simple_gla(
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
        with T.Kernel(slots, -(-out_dim // cols), heads, threads=THREADS) as (slot, tile, head):
            for stride in q_strides + k_strides + v_strides + (other_strides if with_dots else []):
                T.assume(stride % 8 == 0)
            k_shared = T.alloc_shared((2, CHUNK, wide), elem)
            v_shared = T.alloc_shared((2, CHUNK, cols), elem)
            g_shared = T.alloc_shared((2, CHUNK), T.float32)
            w_shared = T.alloc_shared((2, CHUNK), T.float32)
            sums_shared = T.alloc_shared((CHUNK,), T.float32)
            row_shared = T.alloc_shared((CHUNK,), T.float32)
            column_shared = T.alloc_shared((CHUNK,), T.float32)
            state = T.alloc_fragment((wide, cols), T.float32)
            if not states_only:
                q_shared = T.alloc_shared((2, CHUNK, wide), elem)
                state_shared = T.alloc_shared((wide, cols), elem)
                scores = T.alloc_fragment((CHUNK, CHUNK), T.float32)
                scores_elem = T.alloc_fragment((CHUNK, CHUNK), elem)
                acc = T.alloc_fragment((CHUNK, cols), T.float32)
            if with_dots:
                terms = T.alloc_fragment((CHUNK, cols), T.float32)
                sums = T.alloc_fragment((CHUNK,), T.float32)

            found = T.alloc_local((5,), T.int32)
            find_segment(cu_seqlens, slot, num_sequences, bits, num_tokens, size, packed, found)
            sequence, batch, length, row = found[0], found[1], found[3], found[4]
            column = tile * cols
            needed = T.alloc_var(T.bool, init=False)
            needed = T.Or(row < length, row == 0)
            if states_only:  # no other segment needs the state behind the last one
                needed = T.And(row < length, row > 0 if backwards else row + size < length)
            if needed:
                first = found[2] + row  # first token of the segment
                tokens = T.alloc_var(T.int32, init=0)  # of the segment
                tokens = T.min(length - row, size)
                used = T.alloc_var(T.int32, init=0)  # that belong to a sequence
                if sequence < num_sequences:
                    used = tokens
                chunks = T.truncdiv(tokens + CHUNK - 1, CHUNK)
                q_head = T.truncdiv(head * q_heads, num_heads)
                k_head = T.truncdiv(head * k_heads, num_heads)
                v_head = T.truncdiv(head * v_heads, num_heads)
                other_head = T.truncdiv(head * other_heads, num_heads) if with_dots else 0

                total_gate = T.alloc_var(T.float32, init=0.0)
                T.clear(state)
                if begin_dtype is not None:  # noqa: SIM102
                    if sequence < num_sequences:
                        place = slot if by_slot else sequence
                        for d, e in T.Parallel(wide, cols):
                            if T.And(d < dim, column + e < out_dim):
                                state[d, e] = T.cast(begin[place, head, d, column + e], T.float32)  # type: ignore[index]
                for ahead in T.serial(chunks + 1):  # chunk `ahead` is asked for, the one before is computed
                    if ahead < chunks:
                        chunk = chunks - 1 - ahead if backwards else ahead
                        stage = ahead % 2
                        here = first + chunk * CHUNK
                        left = used - chunk * CHUNK
                        if not states_only:
                            ask_for_rows(q, batch, here, left, q_head, 0, q_shared, stage, dim)
                        ask_for_rows(k, batch, here, left, k_head, 0, k_shared, stage, dim)
                        ask_for_rows(v, batch, here, left, v_head, column, v_shared, stage, out_dim)
                        if gated:
                            ask_for_gates(g, batch, here, left, head, g_shared, stage)
                        if weighted:
                            ask_for_gates(weight, batch, here, left, head, w_shared, stage)
                    T.ptx_commit_group()
                    if ahead > 0:
                        chunk = chunks - ahead if backwards else ahead - 1
                        stage = (ahead - 1) % 2
                        here = first + chunk * CHUNK
                        left = used - chunk * CHUNK
                        T.ptx_wait_group(1)
                        T.sync_threads()
                        if gated:
                            for i in T.Parallel(CHUNK):
                                sums_shared[i] = T.max(g_shared[stage, i] * LOG2E, T.float32(NOTHING))
                            T.cumsum(sums_shared)
                        total = sums_shared[CHUNK - 1] if gated else T.float32(0.0)
                        for i in T.Parallel(CHUNK):
                            since = T.exp2(sums_shared[i]) if gated else T.float32(1.0)
                            until = T.exp2(total - sums_shared[i]) if gated else T.float32(1.0)
                            if weights == KEYS:
                                row_shared[i] = since * scale
                                column_shared[i] = until * w_shared[stage, i]
                            elif backwards:
                                row_shared[i] = until * w_shared[stage, i] if weights == ROWS else until
                                column_shared[i] = since * scale
                            else:
                                row_shared[i] = since * scale
                                column_shared[i] = until

                        if not states_only:
                            T.copy(state, state_shared)
                            T.gemm(
                                q_shared[stage, :, :],
                                k_shared[stage, :, :],
                                scores,
                                transpose_B=True,
                                clear_accum=True,
                                policy=T.GemmWarpPolicy.FullRow,
                            )
                            for i, j in T.Parallel(CHUNK, CHUNK):
                                later, sooner = (j, i) if backwards else (i, j)
                                power = sums_shared[later] - sums_shared[sooner] if gated else T.float32(0.0)
                                factor = T.exp2(power) * scale if gated else scale
                                if weights == KEYS:
                                    factor = factor * w_shared[stage, j]
                                elif weights == ROWS:
                                    factor = factor * w_shared[stage, i]
                                scores[i, j] = T.if_then_else(sooner <= later, scores[i, j] * factor, T.float32(0.0))
                            T.copy(scores, scores_elem)
                            T.gemm(
                                q_shared[stage, :, :],
                                state_shared,
                                acc,
                                clear_accum=True,
                                policy=T.GemmWarpPolicy.FullRow,
                            )
                            for i, e in T.Parallel(CHUNK, cols):
                                acc[i, e] = acc[i, e] * row_shared[i]
                            T.gemm(scores_elem, v_shared[stage, :, :], acc, policy=T.GemmWarpPolicy.FullRow)
                            if with_dots:
                                for i, e in T.Parallel(CHUNK, cols):
                                    terms[i, e] = 0.0
                                    if T.And(i < left, column + e < out_dim):
                                        own = other[batch, here + i, other_head, column + e]  # type: ignore[index]
                                        terms[i, e] = acc[i, e] * T.cast(own, T.float32)
                                T.reduce_sum(terms, sums, dim=1)
                                for i in T.Parallel(CHUNK):
                                    if chunk * CHUNK + i < tokens:
                                        dots[tile, head, T.cast(batch, T.int64) * num_tokens + here + i] = sums[i]
                            if weights == RESULT:
                                for i, e in T.Parallel(CHUNK, cols):
                                    acc[i, e] = acc[i, e] * w_shared[stage, i]
                        for j, e in T.Parallel(CHUNK, cols):
                            v_shared[stage, j, e] = T.cast(v_shared[stage, j, e], T.float32) * column_shared[j]
                        if gated:
                            for d, e in T.Parallel(wide, cols):
                                state[d, e] = state[d, e] * T.exp2(sums_shared[CHUNK - 1])
                        T.gemm(
                            k_shared[stage, :, :],
                            v_shared[stage, :, :],
                            state,
                            transpose_A=True,
                            policy=T.GemmWarpPolicy.FullRow,
                        )
                        if gated and states_only:
                            total_gate = total_gate + sums_shared[CHUNK - 1]
                        if not states_only:
                            T.sync_threads()
                            T.copy(acc, q_shared[stage, :, 0:cols])
                            T.sync_threads()
                            for i, e in T.Parallel(CHUNK, cols):
                                if T.And(chunk * CHUNK + i < tokens, column + T.truncdiv(e, 8) * 8 < out_dim):
                                    o[batch, here + i, head, column + e] = q_shared[stage, i, e]
                        T.sync_threads()

                if states_only:
                    if sequence < num_sequences:
                        for d, e in T.Parallel(wide, cols):
                            if T.And(d < dim, column + e < out_dim):
                                end[slot, head, d, column + e] = state[d, e]  # type: ignore[index]
                        if tile == 0:
                            factors[slot, head] = T.exp2(total_gate)
                elif end_dtype is not None:
                    last = row == 0 if backwards else row + size >= length
                    if T.And(sequence < num_sequences, last):
                        for d, e in T.Parallel(wide, cols):
                            if T.And(d < dim, column + e < out_dim):
                                end[sequence, head, d, column + e] = state[d, e]  # type: ignore[index]

    return simple_gla


@kernel()
def join_states_kernel(packed: bool, backwards: bool, begin_dtype: torch.dtype | None, channels: bool):
    """The state before each segment, in place of what the segment adds; a thread owns an element of the state.

    With `channels` a segment has a factor for every row of the state.
    """
    num_slots, num_heads, num_cuts = T.dynamic('num_slots'), T.dynamic('num_heads'), T.dynamic('num_cuts')
    num_begin, rows, columns = T.dynamic('num_begin'), T.dynamic('rows'), T.dynamic('columns')
    begin_type, _ = strided('begin', (num_begin, num_heads, rows, columns), T.dtype(begin_dtype or torch.float32), 0)

    @T.prim_func
    def join_states(
        states: T.Tensor((num_slots, num_heads, rows, columns), T.float32),
        factors: T.Tensor((num_slots, num_heads, rows) if channels else (num_slots, num_heads), T.float32),
        begin: begin_type,
        cu_seqlens: T.Tensor((num_cuts,), T.int32),
        num_sequences: T.int32,
        num_tokens: T.int32,
        size: T.int32,
    ):
        with T.Kernel(T.ceildiv(rows * columns, THREADS), num_heads, num_sequences, threads=THREADS) as (
            part,
            head,
            sequence,
        ):
            first = T.alloc_var(T.int32, init=0)
            length = T.alloc_var(T.int32, init=0)
            if packed:
                start = T.min(cu_seqlens[sequence], num_tokens)
                length = T.min(cu_seqlens[sequence + 1], num_tokens) - start
                first = T.truncdiv(start, size) + sequence
            else:
                length = num_tokens
                first = sequence * T.max(T.truncdiv(num_tokens + size - 1, size), 1)
            number = T.max(T.truncdiv(length + size - 1, size), 1)
            index = part * THREADS + T.get_thread_binding()
            d, e = T.truncdiv(index, columns), T.truncmod(index, columns)
            if index < rows * columns:
                value = T.alloc_var(T.float32, init=0.0)
                added = T.alloc_var(T.float32, init=0.0)
                if begin_dtype is not None:
                    value = T.cast(begin[sequence, head, d, e], T.float32)  # type: ignore[index]
                for step in T.serial(number):
                    slot = first + (number - 1 - step if backwards else step)
                    if step + 1 < number:
                        added = states[slot, head, d, e]
                    states[slot, head, d, e] = value
                    if step + 1 < number:
                        factor = factors[slot, head, d] if channels else factors[slot, head]
                        value = value * factor + added

    return join_states


@kernel()
def decay_gradient_kernel(packed: bool, split: bool, begin_dtype: torch.dtype | None, weighted: bool):
    """Gradient of the gates of a segment and head from products of rows.

        dg[first] = <state, gradient of the state> before the first token
        dg[t + 1] = dg[t] - (q[t] . dq[t] - k[t] . dk[t])

    Every segment starts from its own product of states, so that errors do not add up along a sequence. The gradient of
    a weight is v[t] . dv[t], where dv lacks the weight.
    """
    batches, num_tokens, num_heads = T.dynamic('batches'), T.dynamic('num_tokens'), T.dynamic('num_heads')
    num_slots, num_cuts, num_begin = T.dynamic('num_slots'), T.dynamic('num_cuts'), T.dynamic('num_begin')
    rows, columns, all_tokens = T.dynamic('rows'), T.dynamic('columns'), T.dynamic('all_tokens')
    q_tiles, k_tiles, v_tiles = T.dynamic('q_tiles'), T.dynamic('k_tiles'), T.dynamic('v_tiles')
    begin_type, _ = strided('begin', (num_begin, num_heads, rows, columns), T.dtype(begin_dtype or torch.float32), 0)
    dbegin_type, _ = strided('dbegin', (num_begin, num_heads, rows, columns), T.dtype(begin_dtype or torch.float32), 0)

    @T.prim_func
    def decay_gradient(
        q_dots: T.Tensor((q_tiles, num_heads, all_tokens), T.float32),
        k_dots: T.Tensor((k_tiles, num_heads, all_tokens), T.float32),
        v_dots: T.Tensor((v_tiles, num_heads, all_tokens), T.float32),
        states: T.Tensor((num_slots, num_heads, rows, columns), T.float32),
        dstates: T.Tensor((num_slots, num_heads, rows, columns), T.float32),
        begin: begin_type,
        dbegin: dbegin_type,
        cu_seqlens: T.Tensor((num_cuts,), T.int32),
        dg: T.Tensor((batches, num_tokens, num_heads), T.float32),
        dweight: T.Tensor((batches, num_tokens, num_heads), T.float32),
        slots: T.int32,
        heads: T.int32,
        num_sequences: T.int32,
        bits: T.int32,
        size: T.int32,
    ):
        with T.Kernel(slots, heads, threads=THREADS) as (slot, head):
            terms = T.alloc_fragment((THREADS,), T.float32)
            sums = T.alloc_fragment((1,), T.float32)
            scan_shared = T.alloc_shared((THREADS,), T.float32)
            carried_shared = T.alloc_shared((1,), T.float32)
            found = T.alloc_local((5,), T.int32)
            find_segment(cu_seqlens, slot, num_sequences, bits, num_tokens, size, packed, found)
            sequence, batch, length, row = found[0], found[1], found[3], found[4]
            if row < length:
                tokens = T.alloc_var(T.int32, init=0)
                tokens = T.min(length - row, size)
                here = T.cast(batch, T.int64) * num_tokens + found[2] + row
                T.clear(terms)
                if sequence < num_sequences:
                    if split:  # noqa: SIM102 - known when the kernel is built
                        if row > 0:
                            for step in T.serial(T.truncdiv(rows * columns + THREADS - 1, THREADS)):
                                for i in T.Parallel(THREADS):
                                    index = step * THREADS + i
                                    d, e = T.truncdiv(index, columns), T.truncmod(index, columns)
                                    if index < rows * columns:
                                        terms[i] = terms[i] + states[slot, head, d, e] * dstates[slot - 1, head, d, e]
                    if begin_dtype is not None:  # noqa: SIM102
                        if row == 0:
                            for step in T.serial(T.truncdiv(rows * columns + THREADS - 1, THREADS)):
                                for i in T.Parallel(THREADS):
                                    index = step * THREADS + i
                                    d, e = T.truncdiv(index, columns), T.truncmod(index, columns)
                                    if index < rows * columns:
                                        own = T.cast(begin[sequence, head, d, e], T.float32)  # type: ignore[index]
                                        terms[i] = terms[i] + own * T.cast(dbegin[sequence, head, d, e], T.float32)  # type: ignore[index]
                T.reduce_sum(terms, sums, dim=0)
                carried_shared[0] = sums[0]
                T.sync_threads()
                for step in T.serial(T.truncdiv(tokens + THREADS - 1, THREADS)):
                    for i in T.Parallel(THREADS):
                        token = step * THREADS + i
                        terms[i] = 0.0
                        if token < tokens:
                            for tile in T.serial(q_tiles):
                                terms[i] = terms[i] + q_dots[tile, head, here + token]
                            for tile in T.serial(k_tiles):
                                terms[i] = terms[i] - k_dots[tile, head, here + token]
                        scan_shared[i] = terms[i]
                    T.cumsum(scan_shared)
                    T.sync_threads()
                    for i in T.Parallel(THREADS):
                        token = step * THREADS + i
                        if token < tokens:
                            value = carried_shared[0] - (scan_shared[i] - terms[i])
                            dg[batch, found[2] + row + token, head] = T.if_then_else(
                                sequence < num_sequences, value, T.float32(0.0)
                            )
                            if weighted:
                                terms[i] = 0.0
                                for tile in T.serial(v_tiles):
                                    terms[i] = terms[i] + v_dots[tile, head, here + token]
                                dweight[batch, found[2] + row + token, head] = terms[i]
                    T.sync_threads()
                    if T.get_thread_binding() == 0:
                        carried_shared[0] = carried_shared[0] - scan_shared[THREADS - 1]
                    T.sync_threads()

    return decay_gradient


@kernel()
def sum_heads_kernel(dim: int, dtype: torch.dtype):
    """y[r, h] = sum of x[r, h * group + i] over i, for gradients of heads that several value heads share."""
    num_rows, num_heads, group = T.dynamic('num_rows'), T.dynamic('num_heads'), T.dynamic('group')
    elem, vectors = T.dtype(dtype), dim // 8

    @T.prim_func
    def sum_heads(
        x: T.Tensor((num_rows, num_heads, group, dim), elem),
        y: T.Tensor((num_rows, num_heads, dim), elem),
    ):
        with T.Kernel(T.ceildiv(num_rows * num_heads * vectors, THREADS), threads=THREADS) as pid:
            x_local = T.alloc_local((8,), elem)
            sum_local = T.alloc_local((8,), T.float32)
            index = T.cast(pid, T.int64) * THREADS + T.get_thread_binding()
            if index < T.cast(num_rows, T.int64) * num_heads * vectors:
                row, d = T.truncdiv(index, vectors), T.truncmod(index, vectors) * 8
                r, h = T.truncdiv(row, num_heads), T.truncmod(row, num_heads)
                for j in T.unroll(8):
                    sum_local[j] = 0.0
                for i in T.serial(group):
                    for j in T.vectorized(8):
                        x_local[j] = x[r, h, i, d + j]
                    for j in T.unroll(8):
                        sum_local[j] = sum_local[j] + T.cast(x_local[j], T.float32)
                for j in T.unroll(8):
                    x_local[j] = T.cast(sum_local[j], elem)
                for j in T.vectorized(8):
                    y[r, h, d + j] = x_local[j]

    return sum_heads
