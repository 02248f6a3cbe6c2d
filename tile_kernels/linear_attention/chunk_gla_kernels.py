"""Kernels of linear attention with a decay for every channel of k. See `chunk_gla` for the formula.

A decay between two tokens i > j of a chunk of 64 is a product of two exponentials, neither of which exceeds 1:

    exp(G[i] - G[j]) = exp(G[i] - G[r]) * exp(G[r] - G[j])             j <= r < i

For blocks of 32, 16, ..., 1 tokens r is the last token of an even block. Rows of q in odd blocks and of k in even
blocks are scaled. One product of these rows has all pairs of an odd block with the even block before it. The six
products cover every pair once. Nothing can overflow, and no pair loses digits. The diagonal has no decay.

1. `gla_scores` computes these scores of every chunk, and q and k with their decay to the start and to the end of it.
2. `gla_scan` goes over the chunks of a segment with the state in registers, for o and for three parts of gradients.
3. `gla_gradient` adds the pairs inside a chunk to dq and dk, and `gla_gates` finishes dg.
"""

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.linear_attention.chunk_simple_gla_kernels import (
    CHUNK,
    LOG2E,
    NOTHING,
    PORTABLE,
    THREADS,
    ask_for_rows,
    find_segment,
    padded,
    strided,
    tile_columns,
)

#: Columns of a tile of channels.
TILE = 64
#: Threads of a block that owns one chunk.
CHUNK_THREADS = 256
#: Blocks of 2^5, 2^4, ..., 2^0 tokens.
LEVELS = 6


@macro
def place_blocks(odd_shared, last_shared, level):
    """Whether tokens are in odd blocks, and the last token of the even block of their pair, which names the pair."""
    bits = LEVELS - 1 - level
    for i in T.Parallel(CHUNK):
        odd_shared[i] = (i >> bits) & 1
        last_shared[i] = ((i >> (bits + 1)) << (bits + 1)) + (1 << bits) - 1


@macro
def load_tile(x, batch, first, number, head, column, x_shared, width: int):
    """Load rows of a head; 0 behind the last row and behind the last column."""
    zero = T.cast(0.0, x_shared.dtype)
    for i, d in T.Parallel(CHUNK, TILE):
        x_shared[i, d] = T.if_then_else(
            T.And(i < number, column + T.truncdiv(d, 8) * 8 < width), x[batch, first + i, head, column + d], zero
        )


@macro
def load_sums(g, batch, first, number, head, column, sums_shared, width: int):
    """Load gates, as logarithms to base 2, and add them up along the chunk."""
    for i, d in T.Parallel(CHUNK, TILE):
        inside = T.And(i < number, column + T.truncdiv(d, 4) * 4 < width)
        gate = T.if_then_else(inside, g[batch, first + i, head, column + d], T.float32(0.0))
        sums_shared[i, d] = T.max(gate * LOG2E, T.float32(NOTHING))
    T.cumsum(sums_shared, dim=0)


@macro
def scale_rows(q_shared, k_shared, sums_shared, odd_shared, last_shared, z_shared):
    """Q of odd blocks and k of even blocks, decayed to the last token of the even block."""
    for i, d in T.Parallel(CHUNK, TILE):
        power = sums_shared[i, d] - sums_shared[last_shared[i], d]
        row = T.if_then_else(odd_shared[i] == 1, q_shared[i, d], k_shared[i, d])
        z_shared[i, d] = T.cast(row, T.float32) * T.exp2(T.if_then_else(odd_shared[i] == 1, power, -power))


@kernel(pass_configs=PORTABLE)
def gla_scores_kernel(dim: int, dtype: torch.dtype, packed: bool):
    """Scores of a chunk and head, q decayed since its start, k decayed until its end, sums of its gates."""
    batches, num_tokens, num_heads = T.dynamic('batches'), T.dynamic('num_tokens'), T.dynamic('num_heads')
    num_cuts, num_chunks = T.dynamic('num_cuts'), T.dynamic('num_chunks')
    elem = T.dtype(dtype)
    q_type, q_strides = strided('q', (batches, num_tokens, num_heads, dim), elem)
    k_type, k_strides = strided('k', (batches, num_tokens, num_heads, dim), elem)
    g_type, g_strides = strided('g', (batches, num_tokens, num_heads, dim), T.float32)

    @T.prim_func
    def gla_scores(
        q: q_type,
        k: k_type,
        g: g_type,
        cu_seqlens: T.Tensor((num_cuts,), T.int32),
        since: T.Tensor((batches, num_tokens, num_heads, dim), elem),
        until: T.Tensor((batches, num_tokens, num_heads, dim), elem),
        totals: T.Tensor((num_chunks, num_heads, dim), T.float32),
        scores: T.Tensor((num_chunks, num_heads, CHUNK, CHUNK), elem),
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(num_chunks, num_heads, threads=CHUNK_THREADS) as (chunk, head):
            for stride in q_strides + k_strides:
                T.assume(stride % 8 == 0)
            for stride in g_strides:
                T.assume(stride % 4 == 0)
            q_shared = T.alloc_shared((CHUNK, TILE), elem)
            k_shared = T.alloc_shared((CHUNK, TILE), elem)
            z_shared = T.alloc_shared((CHUNK, TILE), elem)
            sums_shared = T.alloc_shared((CHUNK, TILE), T.float32)
            odd_shared = T.alloc_shared((CHUNK,), T.int32)
            last_shared = T.alloc_shared((CHUNK,), T.int32)
            dots_shared = T.alloc_shared((CHUNK,), T.float32)
            pairs = T.alloc_fragment((CHUNK, CHUNK), T.float32)
            total = T.alloc_fragment((CHUNK, CHUNK), T.float32)
            terms = T.alloc_fragment((CHUNK, TILE), T.float32)
            dots = T.alloc_fragment((CHUNK,), T.float32)
            found = T.alloc_local((5,), T.int32)
            find_segment(cu_seqlens, chunk, num_sequences, bits, num_tokens, CHUNK, packed, found)
            batch, row, first = found[1], found[4], found[2] + found[4]
            tokens = T.alloc_var(T.int32, init=0)
            tokens = T.min(found[3] - row, CHUNK)
            if T.And(tokens > 0, found[0] < num_sequences):
                T.clear(total)
                T.clear(dots)
                for tile in T.serial(-(-dim // TILE)):
                    column = tile * TILE
                    load_tile(q, batch, first, tokens, head, column, q_shared, dim)
                    load_tile(k, batch, first, tokens, head, column, k_shared, dim)
                    load_sums(g, batch, first, tokens, head, column, sums_shared, dim)
                    T.sync_threads()
                    for i, d in T.Parallel(CHUNK, TILE):
                        q_wide, k_wide = T.cast(q_shared[i, d], T.float32), T.cast(k_shared[i, d], T.float32)
                        terms[i, d] = q_wide * k_wide
                        if T.And(i < tokens, column + T.truncdiv(d, 8) * 8 < dim):
                            since[batch, first + i, head, column + d] = q_wide * T.exp2(sums_shared[i, d]) * scale
                            last = sums_shared[CHUNK - 1, d]
                            until[batch, first + i, head, column + d] = k_wide * T.exp2(last - sums_shared[i, d])
                    for d in T.Parallel(TILE):
                        if column + d < dim:
                            totals[chunk, head, column + d] = sums_shared[CHUNK - 1, d]
                    T.reduce_sum(terms, dots, dim=1, clear=False)
                    for level in T.serial(LEVELS):
                        place_blocks(odd_shared, last_shared, level)
                        scale_rows(q_shared, k_shared, sums_shared, odd_shared, last_shared, z_shared)
                        T.gemm(
                            z_shared,
                            z_shared,
                            pairs,
                            transpose_B=True,
                            clear_accum=True,
                            policy=T.GemmWarpPolicy.Square,
                        )
                        for i, j in T.Parallel(CHUNK, CHUNK):
                            if T.And(last_shared[i] == last_shared[j], odd_shared[i] > odd_shared[j]):
                                total[i, j] = total[i, j] + pairs[i, j]
                        T.sync_threads()
                T.copy(dots, dots_shared)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    own = T.if_then_else(i == j, dots_shared[i], total[i, j])
                    scores[chunk, head, i, j] = own * scale

    return gla_scores


@kernel(pass_configs=PORTABLE)
def gla_scan_kernel(
    dim: int,
    out_dim: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    scored: bool,
    rows_decay: bool,
    packed: bool,
    backwards: bool,
    begin_dtype: torch.dtype | None,
    by_slot: bool,
    states_only: bool,
    end_dtype: torch.dtype | None,
):
    """O = q S + scores v, then S = decay(S) + k^T v, over the chunks of a segment.

    The decay is that of rows of the state, or of its columns. Backwards in time the scores are transposed.
    """
    batches, num_tokens, num_heads = T.dynamic('batches'), T.dynamic('num_tokens'), T.dynamic('num_heads')
    num_cuts, num_begin, num_end = (T.dynamic(n) for n in ('num_cuts', 'n_begin', 'n_end'))
    num_slots, num_chunks = T.dynamic('num_slots'), T.dynamic('num_chunks')
    elem, wide, cols = T.dtype(dtype), padded(dim), tile_columns(dim, out_dim)
    channels = dim if rows_decay else out_dim
    decays = wide if rows_decay else cols
    q_type, q_strides = strided('q', (batches, num_tokens, num_heads, dim), elem)
    k_type, k_strides = strided('k', (batches, num_tokens, num_heads, dim), elem)
    v_type, v_strides = strided('v', (batches, num_tokens, num_heads, out_dim), elem)
    begin_type, _ = strided('begin', (num_begin, num_heads, dim, out_dim), T.dtype(begin_dtype or torch.float32), 0)
    end_type, _ = strided('end', (num_end, num_heads, dim, out_dim), T.dtype(end_dtype or torch.float32), 0)

    @T.prim_func
    def gla_scan(
        q: q_type,
        k: k_type,
        v: v_type,
        totals: T.Tensor((num_chunks, num_heads, channels), T.float32),
        scores: T.Tensor((num_chunks, num_heads, CHUNK, CHUNK), elem),
        cu_seqlens: T.Tensor((num_cuts,), T.int32),
        begin: begin_type,
        end: end_type,
        factors: T.Tensor((num_slots, num_heads, channels), T.float32),
        o: T.Tensor((batches, num_tokens, num_heads, out_dim), T.dtype(out_dtype)),
        slots: T.int32,
        heads: T.int32,
        num_sequences: T.int32,
        bits: T.int32,
        size: T.int32,
    ):
        with T.Kernel(slots, -(-out_dim // cols), heads, threads=THREADS) as (slot, tile, head):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            k_shared = T.alloc_shared((2, CHUNK, wide), elem)
            v_shared = T.alloc_shared((2, CHUNK, cols), elem)
            decay_shared = T.alloc_shared((decays,), T.float32)
            total_shared = T.alloc_shared((decays,), T.float32)
            state = T.alloc_fragment((wide, cols), T.float32)
            if not states_only:
                q_shared = T.alloc_shared((2, CHUNK, wide), elem)
                state_shared = T.alloc_shared((wide, cols), elem)
                acc = T.alloc_fragment((CHUNK, cols), T.float32)
            if scored:
                scores_shared = T.alloc_shared((2, CHUNK, CHUNK), elem)

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
                first_chunk = T.alloc_var(T.int32, init=0)
                if packed:
                    first_chunk = T.truncdiv(found[2], CHUNK) + sequence + T.truncdiv(row, CHUNK)
                else:
                    first_chunk = sequence * T.truncdiv(num_tokens + CHUNK - 1, CHUNK) + T.truncdiv(row, CHUNK)
                T.clear(state)
                if states_only:
                    T.fill(total_shared, 0.0)
                if begin_dtype is not None:  # noqa: SIM102
                    if sequence < num_sequences:
                        place = slot if by_slot else sequence
                        for d, e in T.Parallel(wide, cols):
                            if T.And(d < dim, column + e < out_dim):
                                own = begin[place, head, d, column + e]  # type: ignore[index]
                                state[d, e] = T.cast(own, T.float32)
                for ahead in T.serial(chunks + 1):  # chunk `ahead` is asked for, the one before is computed
                    if ahead < chunks:
                        chunk = chunks - 1 - ahead if backwards else ahead
                        stage = ahead % 2
                        here = first + chunk * CHUNK
                        left = used - chunk * CHUNK
                        if not states_only:
                            ask_for_rows(q, batch, here, left, head, 0, q_shared, stage, dim)
                        ask_for_rows(k, batch, here, left, head, 0, k_shared, stage, dim)
                        ask_for_rows(v, batch, here, left, head, column, v_shared, stage, out_dim)
                        if scored:
                            for r in T.unroll(CHUNK * CHUNK // 8 // THREADS):
                                index = r * THREADS + T.get_thread_binding()
                                i, j = index // (CHUNK // 8), index % (CHUNK // 8) * 8
                                T.ptx_cp_async(
                                    T.access_ptr(scores_shared[stage, i, j], 'w', 8),
                                    T.access_ptr(scores[first_chunk + chunk, head, i, j], 'r', 8),
                                    8,
                                    left > 0,
                                )
                    T.ptx_commit_group()
                    if ahead > 0:
                        chunk = chunks - ahead if backwards else ahead - 1
                        stage = (ahead - 1) % 2
                        here = first + chunk * CHUNK
                        for d in T.Parallel(decays):
                            channel = d if rows_decay else column + d
                            decay_shared[d] = T.if_then_else(
                                T.And(channel < channels, chunk * CHUNK < used),
                                totals[first_chunk + chunk, head, T.min(channel, channels - 1)],
                                T.float32(0.0),
                            )
                            if states_only:
                                total_shared[d] = total_shared[d] + decay_shared[d]
                        T.ptx_wait_group(1)
                        T.sync_threads()
                        if not states_only:
                            T.copy(state, state_shared)
                            T.gemm(
                                q_shared[stage, :, :],
                                state_shared,
                                acc,
                                clear_accum=True,
                                policy=T.GemmWarpPolicy.FullRow,
                            )
                            if scored:
                                T.gemm(
                                    scores_shared[stage, :, :],
                                    v_shared[stage, :, :],
                                    acc,
                                    transpose_A=backwards,
                                    policy=T.GemmWarpPolicy.FullRow,
                                )
                        for d, e in T.Parallel(wide, cols):
                            state[d, e] = state[d, e] * T.exp2(decay_shared[d if rows_decay else e])
                        T.gemm(
                            k_shared[stage, :, :],
                            v_shared[stage, :, :],
                            state,
                            transpose_A=True,
                            policy=T.GemmWarpPolicy.FullRow,
                        )
                        if not states_only:
                            for i, e in T.Parallel(CHUNK, cols):
                                if T.And(chunk * CHUNK + i < tokens, column + e < out_dim):
                                    o[batch, here + i, head, column + e] = acc[i, e]
                        T.sync_threads()

                if states_only:
                    if sequence < num_sequences:
                        for d, e in T.Parallel(wide, cols):
                            if T.And(d < dim, column + e < out_dim):
                                end[slot, head, d, column + e] = state[d, e]  # type: ignore[index]
                        if tile == 0:
                            for d in T.Parallel(decays):
                                if d < channels:
                                    factors[slot, head, d] = T.exp2(total_shared[d])
                elif end_dtype is not None:
                    last = row == 0 if backwards else row + size >= length
                    if T.And(sequence < num_sequences, last):
                        for d, e in T.Parallel(wide, cols):
                            if T.And(d < dim, column + e < out_dim):
                                end[sequence, head, d, column + e] = state[d, e]  # type: ignore[index]

    return gla_scan


@kernel(pass_configs=PORTABLE)
def gla_gradient_kernel(dim: int, value_dim: int, dtype: torch.dtype, packed: bool):
    """Dq and dk of a chunk, head and tile of channels, and dg but for what the chunks before it add.

    `q_parts` and `k_parts` are the products with states, without their decay inside the chunk.
    """
    batches, num_tokens, num_heads = T.dynamic('batches'), T.dynamic('num_tokens'), T.dynamic('num_heads')
    num_cuts, num_chunks = T.dynamic('num_cuts'), T.dynamic('num_chunks')
    elem = T.dtype(dtype)
    q_type, q_strides = strided('q', (batches, num_tokens, num_heads, dim), elem)
    k_type, k_strides = strided('k', (batches, num_tokens, num_heads, dim), elem)
    v_type, v_strides = strided('v', (batches, num_tokens, num_heads, value_dim), elem)
    g_type, g_strides = strided('g', (batches, num_tokens, num_heads, dim), T.float32)

    @T.prim_func
    def gla_gradient(
        q: q_type,
        k: k_type,
        v: v_type,
        g: g_type,
        do: T.Tensor((batches, num_tokens, num_heads, value_dim), elem),
        q_parts: T.Tensor((batches, num_tokens, num_heads, dim), T.float32),
        k_parts: T.Tensor((batches, num_tokens, num_heads, dim), T.float32),
        cu_seqlens: T.Tensor((num_cuts,), T.int32),
        dq: T.Tensor((batches, num_tokens, num_heads, dim), elem),
        dk: T.Tensor((batches, num_tokens, num_heads, dim), elem),
        dg: T.Tensor((batches, num_tokens, num_heads, dim), T.float32),
        changes: T.Tensor((num_chunks, num_heads, dim), T.float32),
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(num_chunks, -(-dim // TILE), num_heads, threads=CHUNK_THREADS) as (chunk, tile, head):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            for stride in g_strides:
                T.assume(stride % 4 == 0)
            q_shared = T.alloc_shared((CHUNK, TILE), elem)
            k_shared = T.alloc_shared((CHUNK, TILE), elem)
            z_shared = T.alloc_shared((CHUNK, TILE), elem)
            v_shared = T.alloc_shared((CHUNK, TILE), elem)
            sums_shared = T.alloc_shared((CHUNK, TILE), T.float32)
            odd_shared = T.alloc_shared((CHUNK,), T.int32)
            last_shared = T.alloc_shared((CHUNK,), T.int32)
            change_shared = T.alloc_shared((CHUNK, TILE), T.float32)
            ds_shared = T.alloc_shared((CHUNK, CHUNK), elem)
            ds = T.alloc_fragment((CHUNK, CHUNK), T.float32)
            pairs = T.alloc_fragment((CHUNK, CHUNK), elem)
            acc = T.alloc_fragment((CHUNK, TILE), T.float32)
            dq_acc = T.alloc_fragment((CHUNK, TILE), T.float32)
            dk_acc = T.alloc_fragment((CHUNK, TILE), T.float32)
            found = T.alloc_local((5,), T.int32)
            find_segment(cu_seqlens, chunk, num_sequences, bits, num_tokens, CHUNK, packed, found)
            batch, row, first = found[1], found[4], found[2] + found[4]
            column = tile * TILE
            tokens = T.alloc_var(T.int32, init=0)
            tokens = T.min(found[3] - row, CHUNK)
            if tokens > 0:
                if found[0] >= num_sequences:  # behind the last sequence
                    for i, d in T.Parallel(CHUNK, TILE):
                        if T.And(i < tokens, column + d < dim):
                            dq[batch, first + i, head, column + d] = T.cast(0.0, elem)
                            dk[batch, first + i, head, column + d] = T.cast(0.0, elem)
                            dg[batch, first + i, head, column + d] = 0.0
                else:
                    T.clear(ds)
                    for part in T.serial(-(-value_dim // TILE)):
                        load_tile(do, batch, first, tokens, head, part * TILE, z_shared, value_dim)
                        load_tile(v, batch, first, tokens, head, part * TILE, v_shared, value_dim)
                        T.gemm(z_shared, v_shared, ds, transpose_B=True, policy=T.GemmWarpPolicy.Square)
                        T.sync_threads()
                    for i, j in T.Parallel(CHUNK, CHUNK):
                        ds_shared[i, j] = T.if_then_else(j <= i, ds[i, j] * scale, T.float32(0.0))
                    load_tile(q, batch, first, tokens, head, column, q_shared, dim)
                    load_tile(k, batch, first, tokens, head, column, k_shared, dim)
                    load_sums(g, batch, first, tokens, head, column, sums_shared, dim)
                    T.sync_threads()
                    for i, d in T.Parallel(CHUNK, TILE):
                        inside = T.And(i < tokens, column + d < dim)
                        token, channel = T.min(i, tokens - 1), T.min(column + d, dim - 1)
                        own = T.cast(ds_shared[i, i], T.float32)
                        q_part = q_parts[batch, first + token, head, channel] * T.exp2(sums_shared[i, d]) * scale
                        last = sums_shared[CHUNK - 1, d]
                        k_part = k_parts[batch, first + token, head, channel] * T.exp2(last - sums_shared[i, d])
                        dq_acc[i, d] = T.if_then_else(inside, q_part, 0.0) + own * T.cast(k_shared[i, d], T.float32)
                        dk_acc[i, d] = T.if_then_else(inside, k_part, 0.0) + own * T.cast(q_shared[i, d], T.float32)
                    for level in T.serial(LEVELS):
                        place_blocks(odd_shared, last_shared, level)
                        scale_rows(q_shared, k_shared, sums_shared, odd_shared, last_shared, z_shared)
                        for i, j in T.Parallel(CHUNK, CHUNK):
                            both = T.if_then_else(odd_shared[i] == 1, ds_shared[i, j], ds_shared[j, i])
                            wanted = T.And(last_shared[i] == last_shared[j], odd_shared[i] != odd_shared[j])
                            pairs[i, j] = T.if_then_else(wanted, both, T.cast(0.0, elem))
                        T.gemm(pairs, z_shared, acc, clear_accum=True, policy=T.GemmWarpPolicy.Square)
                        for i, d in T.Parallel(CHUNK, TILE):
                            power = sums_shared[i, d] - sums_shared[last_shared[i], d]
                            decayed = acc[i, d] * T.exp2(T.if_then_else(odd_shared[i] == 1, power, -power))
                            dq_acc[i, d] = dq_acc[i, d] + T.if_then_else(odd_shared[i] == 1, decayed, 0.0)
                            dk_acc[i, d] = dk_acc[i, d] + T.if_then_else(odd_shared[i] == 1, 0.0, decayed)
                        T.sync_threads()
                    for i, d in T.Parallel(CHUNK, TILE):
                        q_dot = T.cast(q_shared[i, d], T.float32) * dq_acc[i, d]
                        acc[i, d] = q_dot - T.cast(k_shared[i, d], T.float32) * dk_acc[i, d]
                        change_shared[i, d] = acc[i, d]
                        if T.And(i < tokens, column + d < dim):
                            dq[batch, first + i, head, column + d] = dq_acc[i, d]
                            dk[batch, first + i, head, column + d] = dk_acc[i, d]
                    T.cumsum(change_shared, dim=0)
                    T.sync_threads()
                    for i, d in T.Parallel(CHUNK, TILE):
                        if T.And(i < tokens, column + d < dim):
                            dg[batch, first + i, head, column + d] = acc[i, d] - change_shared[i, d]
                    for d in T.Parallel(TILE):
                        if column + d < dim:
                            changes[chunk, head, column + d] = change_shared[CHUNK - 1, d]

    return gla_gradient


@kernel()
def gla_gates_kernel(dim: int, packed: bool, split: bool, begin_dtype: torch.dtype | None):
    """Add to dg what the tokens before a chunk contribute; a block owns a segment, a head and 128 channels.

    A segment starts from the product of its state and the gradient of it, chunk by chunk `changes` are subtracted.
    """
    batches, num_tokens, num_heads = T.dynamic('batches'), T.dynamic('num_tokens'), T.dynamic('num_heads')
    num_slots, num_cuts, num_begin = T.dynamic('num_slots'), T.dynamic('num_cuts'), T.dynamic('num_begin')
    columns, num_chunks = T.dynamic('columns'), T.dynamic('num_chunks')
    begin_type, _ = strided('begin', (num_begin, num_heads, dim, columns), T.dtype(begin_dtype or torch.float32), 0)
    dbegin_type, _ = strided('dbegin', (num_begin, num_heads, dim, columns), T.dtype(begin_dtype or torch.float32), 0)

    @T.prim_func
    def gla_gates(
        dg: T.Tensor((batches, num_tokens, num_heads, dim), T.float32),
        changes: T.Tensor((num_chunks, num_heads, dim), T.float32),
        states: T.Tensor((num_slots, num_heads, dim, columns), T.float32),
        dstates: T.Tensor((num_slots, num_heads, dim, columns), T.float32),
        begin: begin_type,
        dbegin: dbegin_type,
        cu_seqlens: T.Tensor((num_cuts,), T.int32),
        slots: T.int32,
        heads: T.int32,
        num_sequences: T.int32,
        bits: T.int32,
        size: T.int32,
    ):
        with T.Kernel(slots, heads, -(-dim // THREADS), threads=THREADS) as (slot, head, part):
            found = T.alloc_local((5,), T.int32)
            find_segment(cu_seqlens, slot, num_sequences, bits, num_tokens, size, packed, found)
            sequence, batch, length, row = found[0], found[1], found[3], found[4]
            d = part * THREADS + T.get_thread_binding()
            if T.And(T.And(row < length, sequence < num_sequences), d < dim):
                tokens = T.min(length - row, size)
                carried = T.alloc_var(T.float32, init=0.0)
                if split:  # noqa: SIM102 - known when the kernel is built
                    if row > 0:
                        for e in T.serial(columns):
                            carried = carried + states[slot, head, d, e] * dstates[slot - 1, head, d, e]
                if begin_dtype is not None:  # noqa: SIM102
                    if row == 0:
                        for e in T.serial(columns):
                            own = T.cast(begin[sequence, head, d, e], T.float32)  # type: ignore[index]
                            carried = carried + own * T.cast(dbegin[sequence, head, d, e], T.float32)  # type: ignore[index]
                first_chunk = T.alloc_var(T.int32, init=0)
                if packed:
                    first_chunk = T.truncdiv(found[2], CHUNK) + sequence + T.truncdiv(row, CHUNK)
                else:
                    first_chunk = sequence * T.truncdiv(num_tokens + CHUNK - 1, CHUNK) + T.truncdiv(row, CHUNK)
                for t in T.serial(tokens):
                    token = found[2] + row + t
                    if T.And(t > 0, t % CHUNK == 0):
                        carried = carried - changes[first_chunk + T.truncdiv(t, CHUNK) - 1, head, d]
                    dg[batch, token, head, d] = dg[batch, token, head, d] + carried

    return gla_gates
