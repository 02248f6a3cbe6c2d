"""Kernels of linear attention with a decay for every channel of k, for Hopper, forward in time. See `chunk_gla`.

The scores of a chunk are those of `chunk_gla_kernels`. For every size of blocks one tile holds q of late rows and k of
early rows, both decayed, and is multiplied by itself. The scan keeps the state transposed, as
`chunk_simple_gla_sm90_kernels` do, with scores from memory.
"""

from typing import Any

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.linear_attention.chunk_gla_kernels import CHUNK_THREADS, LEVELS
from tile_kernels.linear_attention.chunk_simple_gla_kernels import (
    CHUNK,
    LOG2E,
    NOTHING,
    find_segment,
    padded,
    strided,
)
from tile_kernels.linear_attention.chunk_simple_gla_sm90_kernels import begin_state, choose_tile, end_state
from tile_kernels.linear_attention.delta_rule_kernels import fetch_rows, meets, reference_row
from tile_kernels.linear_attention.delta_rule_sm90_kernels import (
    BY_HAND,
    PAD,
    late_sign,
    store_square,
    store_values,
)


def place_of(channel: Any, wide: int) -> Any:
    """Where the sums of a channel are, a multiple of 4: a row has the first four of each eight channels, then the rest.

    So lanes that read eight channels each meet no bank twice.
    """
    return channel // 4 % 2 * (wide // 2) + channel // 8 * 4


@macro
def fetch_gates(g, batch, first, head, rows, sums_shared):
    """Start to copy the gates of a chunk; 0 behind the last row and behind the last channel."""
    wide = sums_shared.shape[1]
    vectors = wide // 4
    for r in T.unroll(CHUNK * vectors // CHUNK_THREADS):
        at = r * CHUNK_THREADS + T.get_thread_binding()
        i, d = at // vectors, at % vectors * 4
        T.ptx_cp_async(
            T.access_ptr(sums_shared[i, place_of(d, wide)], 'w', 4),
            T.access_ptr(g[batch, first + i, head, d], 'r', 4),
            4,
            T.And(i < rows, d < g.shape[3]),
        )


@macro
def sum_decays(sums_shared, ends_shared, totals, chunk, head):
    """Turn gates into their sums since the start of the chunk, to base 2, by two threads for a channel."""
    wide, dim, half = sums_shared.shape[1], totals.shape[2], CHUNK // 2
    part, place = T.get_thread_binding() // wide, T.get_thread_binding() % wide
    own = T.alloc_local((half,), T.float32)
    if part < 2:
        for e in T.unroll(half):
            own[e] = T.max(sums_shared[part * half + e, place] * LOG2E, T.float32(NOTHING))
        for e in T.unroll(half):
            if e > 0:
                own[e] = own[e] + own[e - 1]
        if part == 0:
            ends_shared[place] = own[half - 1]
            for e in T.unroll(half):
                sums_shared[e, place] = own[e]
    T.sync_threads()
    if part == 1:
        for e in T.unroll(half):
            own[e] = own[e] + ends_shared[place]
            sums_shared[half + e, place] = own[e]
        channel = place % (wide // 2) // 4 * 8 + place // (wide // 2) * 4 + place % 4
        if channel < dim:
            totals[chunk, head, channel] = own[half - 1]


@macro
def load_sums(sums_shared, i, d, sums):
    """Sums of eight channels of a row."""
    wide = sums_shared.shape[1]
    for half in T.unroll(2):
        for e in T.vectorized(4):
            sums[half * 4 + e] = sums_shared[i, half * (wide // 2) + d // 2 + e]


@macro
def store_decayed(rows_shared, slot, sums_shared, until: bool, scale, y, batch, first, head, rows):
    """Store rows times their decay since the start of the chunk, or `until` its end."""
    vectors, dim = rows_shared.shape[2] // 8, y.shape[3]
    decay = T.alloc_local((8,), T.float32)
    last = T.alloc_local((8,), T.float32)
    row = T.alloc_local((8,), y.dtype)
    for r in T.unroll(CHUNK * vectors // CHUNK_THREADS):
        at = r * CHUNK_THREADS + T.get_thread_binding()
        i, d = at // vectors, at % vectors * 8
        if until:
            load_sums(sums_shared, CHUNK - 1, d, last)
        load_sums(sums_shared, i, d, decay)
        for e in T.vectorized(8):
            row[e] = rows_shared[slot, i, d + e]
        for e in T.unroll(8):
            decay[e] = T.exp2(last[e] - decay[e] if until else decay[e]) * scale
        for e in T.vectorized(8):
            row[e] = T.cast(T.cast(row[e], T.float32) * decay[e], y.dtype)
        if T.And(i < rows, d < dim):
            for e in T.vectorized(8):
                y[batch, first + i, head, d + e] = row[e]


@macro
def scale_blocks(rows_shared, sums_shared, level, z_shared, slot):
    """Write q of late rows and k of early rows, decayed to the reference of their block; see `reference_row`."""
    vectors = rows_shared.shape[2] // 8
    decay = T.alloc_local((8,), T.float32)
    other = T.alloc_local((8,), T.float32)
    row = T.alloc_local((8,), rows_shared.dtype)
    for r in T.unroll(CHUNK * vectors // CHUNK_THREADS):
        at = r * CHUNK_THREADS + T.get_thread_binding()
        i, d = at // vectors, at % vectors * 8
        load_sums(sums_shared, i, d, decay)
        load_sums(sums_shared, reference_row(i, level), d, other)
        for e in T.vectorized(8):
            row[e] = rows_shared[1 - ((i >> level) & 1), i, d + e]
        for e in T.unroll(8):
            decay[e] = T.exp2((decay[e] - other[e]) * late_sign(i, level))
        for e in T.vectorized(8):
            row[e] = T.cast(T.cast(row[e], T.float32) * decay[e], rows_shared.dtype)
        for e in T.vectorized(8):
            z_shared[slot, i, d + e] = row[e]


def serves_scores(static: Any, gpu: Any) -> bool:
    """Heads whose vectors fit into the registers."""
    return gpu.has_wgmma and padded(static.dim) <= 128


@kernel(pass_configs={**BY_HAND, 'TL_ENABLE_LOWER_LDGSTG': True}, serves=serves_scores)
def gla_scores_sm90_kernel(dim: int, dtype: torch.dtype, packed: bool):
    """`gla_scores_kernel` by wgmma."""
    batches, num_tokens, num_heads = T.dynamic('batches'), T.dynamic('num_tokens'), T.dynamic('num_heads')
    num_cuts, num_chunks = T.dynamic('num_cuts'), T.dynamic('num_chunks')
    elem, wide = T.dtype(dtype), padded(dim)
    q_type, q_strides = strided('q', (batches, num_tokens, num_heads, dim), elem)
    k_type, k_strides = strided('k', (batches, num_tokens, num_heads, dim), elem)
    g_type, g_strides = strided('g', (batches, num_tokens, num_heads, dim), T.float32)

    @T.prim_func
    def gla_scores_sm90(
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
        with T.Kernel(num_chunks * num_heads, threads=CHUNK_THREADS) as block:
            T.annotate_min_blocks_per_sm(2)
            for stride in q_strides + k_strides:
                T.assume(stride % 8 == 0)
            for stride in g_strides:
                T.assume(stride % 4 == 0)
            rows_shared = T.alloc_shared((2, CHUNK, wide), elem)
            z_shared = T.alloc_shared((2, CHUNK, wide), elem)
            sums_shared = T.alloc_shared((CHUNK, wide), T.float32)
            scores_shared = T.alloc_shared((CHUNK, CHUNK), elem)
            ends_shared = T.alloc_shared((wide,), T.float32)
            pairs = T.alloc_fragment((CHUNK, CHUNK), T.float32)
            total = T.alloc_fragment((CHUNK, CHUNK), T.float32)
            chunk = T.alloc_var(T.int32)
            head = T.alloc_var(T.int32)
            chunk = T.truncdiv(block, num_heads)
            head = block - chunk * num_heads
            found = T.alloc_local((5,), T.int32)
            find_segment(cu_seqlens, chunk, num_sequences, bits, num_tokens, CHUNK, packed, found)
            batch, row, first = found[1], found[4], found[2] + found[4]
            tokens = T.alloc_var(T.int32, init=0)
            tokens = T.min(found[3] - row, CHUNK)
            if T.And(tokens > 0, found[0] < num_sequences):
                fetch_rows(q, batch, first, head, tokens, 0, rows_shared, 0, CHUNK_THREADS)
                fetch_rows(k, batch, first, head, tokens, 0, rows_shared, 1, CHUNK_THREADS)
                fetch_gates(g, batch, first, head, tokens, sums_shared)
                T.ptx_commit_group()
                T.ptx_wait_group(0)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(rows_shared[0, :, :], rows_shared[1, :, :], pairs, transpose_B=True, clear_accum=True)
                T.wait_wgmma(0)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    total[i, j] = T.if_then_else(i == j, pairs[i, j], T.float32(0.0))
                sum_decays(sums_shared, ends_shared, totals, chunk, head)
                T.sync_threads()
                store_decayed(rows_shared, 0, sums_shared, False, scale, since, batch, first, head, tokens)
                store_decayed(rows_shared, 1, sums_shared, True, T.float32(1.0), until, batch, first, head, tokens)
                for level in T.serial(LEVELS):
                    scale_blocks(rows_shared, sums_shared, level, z_shared, level % 2)
                    T.fence_proxy_async()
                    T.sync_threads()
                    T.wgmma_gemm(
                        z_shared[level % 2, :, :], z_shared[level % 2, :, :], pairs, transpose_B=True, clear_accum=True
                    )
                    T.wait_wgmma(0)
                    for i, j in T.Parallel(CHUNK, CHUNK):
                        total[i, j] = T.if_then_else(meets(i, j, level), pairs[i, j], total[i, j])
                for i, j in T.Parallel(CHUNK, CHUNK):
                    scores_shared[i, j] = T.cast(total[i, j] * scale, elem)
                T.sync_threads()
                store_square(scores_shared, scores, chunk, head, CHUNK_THREADS)

    return gla_scores_sm90


@macro
def fetch_scores(scores, index, head, scores_shared, slot, wanted, threads: int):
    """Start to copy the scores of a chunk; 0 if they are not wanted."""
    for r in T.unroll(CHUNK * CHUNK // 8 // threads):
        at = r * threads + T.get_thread_binding()
        i, j = at // (CHUNK // 8), at % (CHUNK // 8) * 8
        T.ptx_cp_async(
            T.access_ptr(scores_shared[slot, i, j], 'r', 8), T.access_ptr(scores[index, head, i, j], 'r', 8), 8, wanted
        )


def choose_scan(
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
    size: int,
) -> dict:
    """`size` is the number of segments and heads."""
    return dict(tile=choose_tile(dim, out_dim))


def serves_scan(static: Any, gpu: Any) -> bool:
    """The forward pass, with states that fit into the registers of one thread for each value."""
    forward = not static.backwards and static.rows_decay and (static.scored or static.states_only)
    return gpu.has_wgmma and forward and static.out_dtype == static.dtype and padded(static.dim) <= 128


@kernel(choose_scan, space=dict(tile=(64, 128)), pass_configs=BY_HAND, serves=serves_scan)
def gla_scan_sm90_kernel(
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
    *,
    tile: int,
):
    """`gla_scan_kernel` forward in time, for the result or for states alone."""
    batches, num_tokens, num_heads = T.dynamic('batches'), T.dynamic('num_tokens'), T.dynamic('num_heads')
    num_cuts, num_begin, num_end = (T.dynamic(n) for n in ('num_cuts', 'n_begin', 'n_end'))
    num_slots, num_chunks = T.dynamic('num_slots'), T.dynamic('num_chunks')
    elem, wide, threads = T.dtype(dtype), padded(dim), 2 * tile
    q_type, q_strides = strided('q', (batches, num_tokens, num_heads, dim), elem)
    k_type, k_strides = strided('k', (batches, num_tokens, num_heads, dim), elem)
    v_type, v_strides = strided('v', (batches, num_tokens, num_heads, out_dim), elem)
    begin_type, _ = strided('begin', (num_begin, num_heads, dim, out_dim), T.dtype(begin_dtype or torch.float32), 0)
    end_type, _ = strided('end', (num_end, num_heads, dim, out_dim), T.dtype(end_dtype or torch.float32), 0)
    rows_first = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def gla_scan_sm90(
        q: q_type,
        k: k_type,
        v: v_type,
        totals: T.Tensor((num_chunks, num_heads, dim), T.float32),
        scores: T.Tensor((num_chunks, num_heads, CHUNK, CHUNK), elem),
        cu_seqlens: T.Tensor((num_cuts,), T.int32),
        begin: begin_type,
        end: end_type,
        factors: T.Tensor((num_slots, num_heads, dim), T.float32),
        o: T.Tensor((batches, num_tokens, num_heads, out_dim), elem),
        slots: T.int32,
        heads: T.int32,
        num_sequences: T.int32,
        bits: T.int32,
        size: T.int32,
    ):
        with T.Kernel(slots, -(-out_dim // tile), heads, threads=threads) as (slot, part, head):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            k_shared = T.alloc_shared((2, CHUNK, wide), elem)
            v_shared = T.alloc_shared((2, CHUNK, tile + PAD), elem)
            whole_shared = T.alloc_shared((2, wide), T.float32)
            state = T.alloc_fragment((tile, wide), T.float32)
            v_half = T.alloc_fragment((tile, CHUNK), elem)
            if not states_only:
                q_shared = T.alloc_shared((2, CHUNK, wide), elem)
                scores_shared = T.alloc_shared((2, CHUNK, CHUNK), elem)
                o_shared = T.alloc_shared((2, CHUNK, tile + PAD), elem)
                state_half = T.alloc_fragment((tile, wide), elem)
                out = T.alloc_fragment((tile, CHUNK), T.float32)
            power = T.alloc_var(T.float32, init=0.0)
            total = T.alloc_var(T.float32, init=0.0)
            channel = T.get_thread_binding()

            found = T.alloc_local((5,), T.int32)
            find_segment(cu_seqlens, slot, num_sequences, bits, num_tokens, size, packed, found)
            sequence, batch, length, row = found[0], found[1], found[3], found[4]
            column = part * tile
            needed = T.alloc_var(T.bool, init=False)
            needed = T.Or(row < length, row == 0)
            if states_only:  # no other segment needs the state behind the last one
                needed = T.And(row < length, row + size < length)
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
                if begin_dtype is not None:  # noqa: SIM102
                    if sequence < num_sequences:
                        begin_state(begin, slot if by_slot else sequence, head, column, state)
                if chunks > 0:
                    if not states_only:
                        fetch_rows(q, batch, first, head, used, 0, q_shared, 0, threads)
                        fetch_scores(scores, first_chunk, head, scores_shared, 0, used > 0, threads)
                    fetch_rows(k, batch, first, head, used, 0, k_shared, 0, threads)
                    fetch_rows(v, batch, first, head, used, column, v_shared, 0, threads, tile)
                    T.ptx_commit_group()
                    if channel < wide:
                        power = T.if_then_else(
                            T.And(channel < dim, used > 0),
                            totals[first_chunk, head, T.min(channel, dim - 1)],
                            T.float32(0.0),
                        )
                        total = power
                        whole_shared[0, channel] = T.exp2(power)
                for step in T.serial(chunks):
                    stage, following = T.truncmod(step, 2), T.truncmod(step + 1, 2)
                    left, soon = used - (step + 1) * CHUNK, first + (step + 1) * CHUNK
                    index = first_chunk + T.min(step + 1, chunks - 1)
                    T.ptx_wait_group(0)
                    T.fence_proxy_async()
                    T.sync_threads()
                    if not states_only:
                        T.copy(state, state_half)
                        T.wgmma_gemm(
                            state_half,
                            q_shared[stage, :, :],
                            out,
                            transpose_B=True,
                            clear_accum=True,
                            policy=rows_first,
                        )
                    # TileLang would place a fence before the next product if these copies were said to write.
                    if not states_only:
                        fetch_rows(q, batch, soon, head, left, 0, q_shared, following, threads, access='r')
                        fetch_scores(scores, index, head, scores_shared, following, left > 0, threads)
                    fetch_rows(k, batch, soon, head, left, 0, k_shared, following, threads, access='r')
                    fetch_rows(v, batch, soon, head, left, column, v_shared, following, threads, tile, access='r')
                    T.ptx_commit_group()
                    power = T.if_then_else(
                        T.And(channel < dim, left > 0), totals[index, head, T.min(channel, dim - 1)], T.float32(0.0)
                    )
                    if not states_only:
                        done = T.if_then_else(step > 0, CHUNK, 0)
                        store_values(o_shared, following, o, batch, soon - 2 * CHUNK, head, done, column, tile, threads)
                    for j, i in T.Parallel(tile, CHUNK):
                        v_half[j, i] = v_shared[stage, i, j]
                    for j, i in T.Parallel(tile, wide):
                        state[j, i] = state[j, i] * whole_shared[stage, i]
                    if not states_only:
                        T.wgmma_gemm(v_half, scores_shared[stage, :, :], out, transpose_B=True, policy=rows_first)
                    T.wgmma_gemm(v_half, k_shared[stage, :, :], state, policy=rows_first)
                    if channel < wide:
                        whole_shared[following, channel] = T.exp2(power)
                    total = total + T.if_then_else(step + 1 < chunks, power, T.float32(0.0))
                    if not states_only:
                        T.wait_wgmma(1)
                        for j, i in T.Parallel(tile, CHUNK):
                            o_shared[stage, i, j] = T.cast(out[j, i], elem)
                    T.wait_wgmma(0)
                if states_only:
                    if sequence < num_sequences:
                        end_state(state, end, slot, head, column)
                        if T.And(part == 0, channel < dim):
                            factors[slot, head, channel] = T.exp2(total)
                else:
                    if chunks > 0:
                        T.sync_threads()
                        last, stage = (chunks - 1) * CHUNK, T.truncmod(chunks - 1, 2)
                        store_values(
                            o_shared, stage, o, batch, first + last, head, tokens - last, column, tile, threads
                        )
                    if end_dtype is not None:  # noqa: SIM102
                        if T.And(sequence < num_sequences, row + size >= length):
                            end_state(state, end, sequence, head, column)

    return gla_scan_sm90
