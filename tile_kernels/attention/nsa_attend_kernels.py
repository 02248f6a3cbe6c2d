"""Kernels of `nsa_attend` and of its gradient, by mma. See `nsa_attend` for the formula.

Forward and dq: a thread block owns one token and one kv head. Its rows are the query heads of that kv head, padded to
16, 32 or 64. It goes over the blocks of the token's list.
Gradients of keys and values: a thread block owns up to 64 keys of a block. It goes over the tokens whose list has the
block, several at a time; their numbers are sorted by block beforehand.
So every sum has one order, and nothing is added to memory. Tiles are copied by cp.async, which needs no registers.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.attention._macros import Rows, load_keys, load_rows, padded
from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.device.softmax import softmax_step

#: Every index is in bounds by what the kernels say themselves. The analysis of lifetimes may not see cp.async.
PORTABLE = {**PLAIN_PRODUCTS, 'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_DISABLE_SHARED_MEMORY_REUSE': True}
FAST_POWERS = {**PORTABLE, 'TL_DEVICE_COMPILE_FLAGS': ['-ftz=true']}  # exp2 is one instruction
LN2 = math.log(2)
LOG2E = math.log2(math.e)
#: Rows of queries that a block of keys takes at a time.
QUERY_ROWS = 64
#: Which gradients a launch over keys computes.
BOTH, DK, DV = 'both', 'dk', 'dv'


def num_rows(group: int) -> int:
    """Rows of the tile of `group` query heads."""
    return 16 if group <= 16 else 32 if group <= 32 else 64


def key_launches(head_dim: int, value_dim: int) -> tuple[str, ...]:
    """The launches over keys: one if both gradients fit into the registers."""
    return (BOTH,) if padded(head_dim) + padded(value_dim) <= 256 else (DK, DV)


def strided(name: str, shape: tuple, elem: Any) -> Any:
    """A parameter with a stride of its own for every dimension but the last, and these strides."""
    strides = [T.dynamic(f'{name}_stride{dim}') for dim in range(len(shape) - 1)]
    return T.StridedTensor(shape, (*strides, 1), elem), strides


@dataclass(frozen=True)
class Token:
    """A token: its batch index, its number in the tensor, where its sequence starts, and its position there.

    The position of a token behind the last sequence is -1: it sees nothing.
    """

    batch: Any
    number: Any
    start: Any
    position: Any


@macro
def find_token(cu_seqlens, index, num_tokens, num_sequences, bits, packed: bool):
    """The token of a number. `bits` is the bit length of the number of sequences."""
    batch = T.alloc_var(T.int32, init=0)
    start = T.alloc_var(T.int32, init=0)
    position = T.alloc_var(T.int32, init=0)
    sequence = T.alloc_var(T.int32, init=0)
    if packed:
        for step in T.serial(bits):
            later = sequence + (1 << (bits - 1 - step))
            if later <= num_sequences:  # noqa: SIM102
                if cu_seqlens[T.min(later, num_sequences)] <= index:
                    sequence = later
        start = cu_seqlens[sequence]
        position = T.if_then_else(sequence < num_sequences, index - start, -1)
    else:
        batch = T.truncdiv(index, num_tokens)
        position = index - batch * num_tokens
    number = T.alloc_var(T.int32)
    number = index - batch * num_tokens
    return Token(batch, number, start, position)


@macro
def place_heads(rows, token, head, group):
    """The rows of a token: all query heads of a kv head; heads behind the last one are repeated."""
    for i in T.Parallel(rows.query.shape[0]):
        rows.query[i] = token.number
        rows.head[i] = head * group + T.min(i, group - 1)


@macro
def list_length(block_counts, token, head, num_listed, counted: bool):
    """Blocks of the list of a token that count."""
    length = T.alloc_var(T.int32)
    length = num_listed
    if counted:
        length = T.max(T.min(block_counts[token.batch, token.number, head], num_listed), 0)
    return length


@macro
def copy_keys(x, batch, first, head, number, x_shared, width: int, num_threads: int):
    """Start to copy `number` keys or values from token `first` on, 16 bytes per thread; 0 behind them."""
    rows, vectors = int(x_shared.shape[0]), int(x_shared.shape[1]) // 8
    for step in T.unroll(-(-rows * vectors // num_threads), unroll_factor=8):
        index = step * num_threads + T.get_thread_binding()
        i, column = T.truncdiv(index, vectors), T.truncmod(index, vectors) * 8
        if index < rows * vectors:
            T.ptx_cp_async(
                T.access_ptr(x_shared[i, column], 'w', 8),
                T.access_ptr(x[batch, first + T.min(i, number - 1), head, T.min(column, width - 8)], 'r', 8),
                8,
                T.And(i < number, column < width),
            )


@macro
def copy_block(x, batch, first, head, number, x_shared, width: int, num_threads: int):
    """Start to copy keys or values as `copy_keys` does, as one group. Whole blocks need no conditions."""
    rows, vectors = int(x_shared.shape[0]), int(x_shared.shape[1]) // 8
    if vectors * 8 == width and rows * vectors % num_threads == 0:
        if number >= rows:
            for step in T.unroll(rows * vectors // num_threads):
                index = step * num_threads + T.get_thread_binding()
                i, column = T.truncdiv(index, vectors), T.truncmod(index, vectors) * 8
                T.ptx_cp_async(
                    T.access_ptr(x_shared[i, column], 'w', 8),
                    T.access_ptr(x[batch, first + i, head, column], 'r', 8),
                    8,
                )
        else:
            copy_keys(x, batch, first, head, number, x_shared, width, num_threads)
    else:
        copy_keys(x, batch, first, head, number, x_shared, width, num_threads)
    T.ptx_commit_group()


@macro
def find_keys(block_indices, token, head, length, size: int, keys: int, item, key):
    """Find the next keys that the token sees: `key` is the first of them, or -1; `item` counts parts of the list."""
    parts = size // keys
    key[0] = -1
    while T.And(item[0] < length * parts, key[0] < 0):
        block = block_indices[token.batch, token.number, head, T.truncdiv(item[0], parts)]
        part = T.truncmod(item[0], parts)
        if T.And(T.And(block >= 0, block <= T.truncdiv(token.position, size)), token.position >= 0):  # noqa: SIM102
            if block * size + part * keys <= token.position:
                key[0] = block * size + part * keys
        item[0] = item[0] + 1


@macro
def copy_rows(x, batch, rows, number, x_shared, width: int, num_threads: int):
    """Start to copy the first `number` of some rows; 0 behind them."""
    extent, vectors = int(x_shared.shape[0]), int(x_shared.shape[1]) // 8
    for step in T.unroll(-(-extent * vectors // num_threads), unroll_factor=8):
        index = step * num_threads + T.get_thread_binding()
        i, column = T.truncdiv(index, vectors), T.truncmod(index, vectors) * 8
        if index < extent * vectors:
            T.ptx_cp_async(
                T.access_ptr(x_shared[i, column], 'w', 8),
                T.access_ptr(x[batch, rows.query[i], rows.head[i], T.min(column, width - 8)], 'r', 8),
                8,
                T.And(i < number, column < width),
            )


@macro
def finish_copies():
    """Wait until all threads have what they copied."""
    T.ptx_commit_group()
    T.ptx_wait_group(0)
    T.sync_threads()


# Forward ------------------------------------------------------------------------------------


@kernel(pass_configs=FAST_POWERS)
def nsa_attend_kernel(
    head_dim: int, value_dim: int, dtype: torch.dtype, size: int, tile: int, packed: bool, counted: bool
):
    """`size` is the number of keys of a block, `tile` that of the rows of a token."""
    batch, num_tokens, q_heads, kv_heads = (T.dynamic(n) for n in ('batch', 'num_tokens', 'q_heads', 'kv_heads'))
    num_listed, num_cuts = T.dynamic('num_listed'), T.dynamic('num_cuts')
    count_batch, count_tokens, count_heads = (T.dynamic(f'count_{n}') for n in ('batch', 'tokens', 'heads'))
    elem = T.dtype(dtype)
    wide, wide_v = padded(head_dim), padded(value_dim)
    keys = min(size, 64 if wide_v <= 128 else 32)
    q_type, q_strides = strided('q', (batch, num_tokens, q_heads, head_dim), elem)
    k_type, k_strides = strided('k', (batch, num_tokens, kv_heads, head_dim), elem)
    v_type, v_strides = strided('v', (batch, num_tokens, kv_heads, value_dim), elem)
    inf = math.inf

    @T.prim_func
    def nsa_attend(
        q: q_type,
        k: k_type,
        v: v_type,
        block_indices: T.Tensor((batch, num_tokens, kv_heads, num_listed), T.int32),
        block_counts: T.Tensor((count_batch, count_tokens, count_heads), T.int32),
        cu_seqlens: T.Tensor((num_cuts,), T.int32),
        o: T.Tensor((batch, num_tokens, q_heads, value_dim), elem),
        lse: T.Tensor((batch, q_heads, num_tokens), T.float32),
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(batch * num_tokens, kv_heads, threads=2 * tile) as (index, head):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((tile, wide), elem)
            k_shared = T.alloc_shared((keys, wide), elem)
            v_shared = T.alloc_shared((keys, wide_v), elem)
            query_shared, head_shared = T.alloc_shared((tile,), T.int32), T.alloc_shared((tile,), T.int32)
            rows = Rows(query_shared, head_shared)
            scores = T.alloc_fragment((tile, keys), T.float32)
            weights = T.alloc_fragment((tile, keys), elem)
            acc = T.alloc_fragment((tile, wide_v), T.float32)
            top, total = T.alloc_fragment((tile,), T.float32), T.alloc_fragment((tile,), T.float32)
            factor = T.alloc_fragment((tile,), T.float32)
            block_top, block_sum = T.alloc_fragment((tile,), T.float32), T.alloc_fragment((tile,), T.float32)
            group = T.alloc_var(T.int32)
            group = T.truncdiv(q_heads, kv_heads)
            token = find_token(cu_seqlens, index, num_tokens, num_sequences, bits, packed)
            length = list_length(block_counts, token, head, num_listed, counted)
            place_heads(rows, token, head, group)
            load_rows(q, token.batch, 0, rows, 0, group, q_shared, head_dim)
            T.fill(top, -inf)
            T.clear(total)
            T.clear(acc)
            item, next_key = T.alloc_local((1,), T.int32), T.alloc_local((1,), T.int32)
            key = T.alloc_var(T.int32)
            item[0] = 0
            find_keys(block_indices, token, head, length, size, keys, item, next_key)
            if next_key[0] >= 0:
                own_keys = (token.batch, token.start + next_key[0], head, token.position + 1 - next_key[0])
                copy_block(k, *own_keys, k_shared, head_dim, 2 * tile)
                copy_block(v, *own_keys, v_shared, value_dim, 2 * tile)
            while next_key[0] >= 0:
                key = next_key[0]
                find_keys(block_indices, token, head, length, size, keys, item, next_key)
                T.ptx_wait_group(1)
                T.sync_threads()
                T.clear(scores)
                T.gemm(q_shared, k_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.sync_threads()
                if next_key[0] >= 0:  # the next keys arrive while values are multiplied
                    more_keys = (token.batch, token.start + next_key[0], head, token.position + 1 - next_key[0])
                    copy_block(k, *more_keys, k_shared, head_dim, 2 * tile)
                else:
                    T.ptx_commit_group()
                for i, j in T.Parallel(tile, keys):
                    scores[i, j] = scores[i, j] * scale
                if key + keys > token.position + 1:
                    for i, j in T.Parallel(tile, keys):
                        scores[i, j] = T.if_then_else(key + j <= token.position, scores[i, j], -inf)
                softmax_step(scores, top, total, factor, block_top, block_sum)
                T.copy(scores, weights)
                for i, d in T.Parallel(tile, wide_v):
                    acc[i, d] = acc[i, d] * factor[i]
                T.ptx_wait_group(1)
                T.sync_threads()
                T.gemm(weights, v_shared, acc, policy=T.GemmWarpPolicy.FullRow)
                T.sync_threads()
                if next_key[0] >= 0:
                    next_values = (token.batch, token.start + next_key[0], head, token.position + 1 - next_key[0])
                    copy_block(v, *next_values, v_shared, value_dim, 2 * tile)
                else:
                    T.ptx_commit_group()
            for i in T.Parallel(tile):
                seen = total[i] != 0.0
                factor[i] = T.if_then_else(seen, 1.0 / total[i], T.float32(0.0))
                top[i] = T.if_then_else(seen, (top[i] + T.log2(total[i])) * LN2, T.float32(-inf))
                if i < group:
                    lse[token.batch, head * group + i, token.number] = top[i]
            for i, d in T.Parallel(tile, wide_v):
                if T.And(i < group, d < value_dim):
                    o[token.batch, token.number, head * group + i, d] = T.if_then_else(
                        top[i] == -inf, 0.0, acc[i, d] * factor[i]
                    )

    return nsa_attend


# Gradients ----------------------------------------------------------------------------------


@kernel(pass_configs=PORTABLE)
def nsa_attend_dq_kernel(
    head_dim: int, value_dim: int, dtype: torch.dtype, size: int, tile: int, packed: bool, counted: bool
):
    """Gradient of queries, and for the other kernel `delta` = sum o * do and `below`: lse to base 2, +inf for none."""
    batch, num_tokens, q_heads, kv_heads = (T.dynamic(n) for n in ('batch', 'num_tokens', 'q_heads', 'kv_heads'))
    num_listed, num_cuts = T.dynamic('num_listed'), T.dynamic('num_cuts')
    count_batch, count_tokens, count_heads = (T.dynamic(f'count_{n}') for n in ('batch', 'tokens', 'heads'))
    elem = T.dtype(dtype)
    wide, wide_v = padded(head_dim), padded(value_dim)
    keys = min(size, 64 if wide <= 128 else 32)
    q_type, q_strides = strided('q', (batch, num_tokens, q_heads, head_dim), elem)
    k_type, k_strides = strided('k', (batch, num_tokens, kv_heads, head_dim), elem)
    v_type, v_strides = strided('v', (batch, num_tokens, kv_heads, value_dim), elem)
    inf = math.inf

    @T.prim_func
    def nsa_attend_dq(
        q: q_type,
        k: k_type,
        v: v_type,
        block_indices: T.Tensor((batch, num_tokens, kv_heads, num_listed), T.int32),
        block_counts: T.Tensor((count_batch, count_tokens, count_heads), T.int32),
        cu_seqlens: T.Tensor((num_cuts,), T.int32),
        o: T.Tensor((batch, num_tokens, q_heads, value_dim), elem),
        do: T.Tensor((batch, num_tokens, q_heads, value_dim), elem),
        lse: T.Tensor((batch, q_heads, num_tokens), T.float32),
        below: T.Tensor((batch, num_tokens, q_heads), T.float32),
        delta: T.Tensor((batch, num_tokens, q_heads), T.float32),
        dq: T.Tensor((batch, num_tokens, q_heads, head_dim), elem),
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
        out_scale: T.float32,
    ):
        with T.Kernel(batch * num_tokens, kv_heads, threads=2 * tile) as (index, head):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((tile, wide), elem)
            do_shared = T.alloc_shared((tile, wide_v), elem)
            k_shared = T.alloc_shared((keys, wide), elem)
            v_shared = T.alloc_shared((keys, wide_v), elem)
            query_shared, head_shared = T.alloc_shared((tile,), T.int32), T.alloc_shared((tile,), T.int32)
            below_shared, delta_shared = T.alloc_shared((tile,), T.float32), T.alloc_shared((tile,), T.float32)
            rows = Rows(query_shared, head_shared)
            terms = T.alloc_fragment((tile, wide_v), T.float32)
            sums = T.alloc_fragment((tile,), T.float32)
            scores = T.alloc_fragment((tile, keys), T.float32)
            dp = T.alloc_fragment((tile, keys), T.float32)
            ds = T.alloc_fragment((tile, keys), elem)
            acc = T.alloc_fragment((tile, wide), T.float32)
            group = T.alloc_var(T.int32)
            group = T.truncdiv(q_heads, kv_heads)
            token = find_token(cu_seqlens, index, num_tokens, num_sequences, bits, packed)
            length = list_length(block_counts, token, head, num_listed, counted)
            place_heads(rows, token, head, group)
            load_rows(q, token.batch, 0, rows, 0, group, q_shared, head_dim)
            load_rows(do, token.batch, 0, rows, 0, group, do_shared, value_dim)
            T.clear(terms)
            for i, d in T.Parallel(tile, wide_v):
                if T.And(i < group, T.truncdiv(d, 8) * 8 < value_dim):
                    terms[i, d] = T.cast(o[token.batch, token.number, rows.head[i], d], T.float32) * T.cast(
                        do_shared[i, d], T.float32
                    )
            T.reduce_sum(terms, sums, dim=1)
            for i in T.Parallel(tile):
                own = lse[token.batch, rows.head[i], token.number] * LOG2E
                delta_shared[i] = sums[i]
                below_shared[i] = T.if_then_else(T.And(i < group, own != -inf), own, T.float32(inf))
                if i < group:
                    delta[token.batch, token.number, head * group + i] = delta_shared[i]
                    below[token.batch, token.number, head * group + i] = below_shared[i]
            T.clear(acc)
            for n in T.serial(length):
                block = block_indices[token.batch, token.number, head, n]
                if T.And(block >= 0, block <= T.truncdiv(token.position, size)):  # noqa: SIM102
                    if token.position >= 0:
                        for part in T.serial(size // keys):
                            key = block * size + part * keys
                            if key <= token.position:
                                own_keys = (token.batch, token.start + key, head, token.position + 1 - key)
                                copy_keys(k, *own_keys, k_shared, head_dim, 2 * tile)
                                copy_keys(v, *own_keys, v_shared, value_dim, 2 * tile)
                                finish_copies()
                                T.clear(scores)
                                T.gemm(q_shared, k_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                                T.clear(dp)
                                T.gemm(do_shared, v_shared, dp, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                                for i, j in T.Parallel(tile, keys):
                                    seen = T.And(key + j <= token.position, below_shared[i] != inf)
                                    power = T.exp2(scores[i, j] * scale - below_shared[i])
                                    dp[i, j] = T.if_then_else(
                                        seen, power * (dp[i, j] - delta_shared[i]), T.float32(0.0)
                                    )
                                T.copy(dp, ds)
                                T.gemm(ds, k_shared, acc, policy=T.GemmWarpPolicy.FullRow)
                                T.sync_threads()
            for i, d in T.Parallel(tile, wide):
                if T.And(i < group, d < head_dim):
                    dq[token.batch, token.number, head * group + i, d] = acc[i, d] * out_scale

    return nsa_attend_dq


@kernel(pass_configs=PORTABLE)
def nsa_attend_dkv_kernel(head_dim: int, value_dim: int, dtype: torch.dtype, size: int, packed: bool, result: str):
    """Gradients of the keys and values of a block, or of 64 of them.

    `listed` has the tokens that list a block, those of block b and kv head h from `first[b * kv_heads + h]` on. Blocks
    of packed sequences are numbered from start // size + sequence on.
    """
    with_dk, with_dv = result != DV, result != DK
    batch, num_tokens, q_heads, kv_heads = (T.dynamic(n) for n in ('batch', 'num_tokens', 'q_heads', 'kv_heads'))
    num_entries, num_lists, num_cuts = T.dynamic('num_entries'), T.dynamic('num_lists'), T.dynamic('num_cuts')
    elem = T.dtype(dtype)
    wide, wide_v = padded(head_dim), padded(value_dim)
    keys = min(size, 64)
    queries = QUERY_ROWS if wide + wide_v < 256 else QUERY_ROWS // 2  # registers
    q_type, q_strides = strided('q', (batch, num_tokens, q_heads, head_dim), elem)
    k_type, k_strides = strided('k', (batch, num_tokens, kv_heads, head_dim), elem)
    v_type, v_strides = strided('v', (batch, num_tokens, kv_heads, value_dim), elem)

    @T.prim_func
    def nsa_attend_dkv(
        q: q_type,
        k: k_type,
        v: v_type,
        do: T.Tensor((batch, num_tokens, q_heads, value_dim), elem),
        below: T.Tensor((batch, num_tokens, q_heads), T.float32),
        delta: T.Tensor((batch, num_tokens, q_heads), T.float32),
        listed: T.Tensor((num_entries,), T.int32),
        first: T.Tensor((num_lists,), T.int32),
        cu_seqlens: T.Tensor((num_cuts,), T.int32),
        dk: T.Tensor((batch, num_tokens, kv_heads, head_dim), elem),
        dv: T.Tensor((batch, num_tokens, kv_heads, value_dim), elem),
        num_blocks: T.int32,
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
        out_scale: T.float32,
    ):
        with T.Kernel(num_blocks * (size // keys), kv_heads, threads=2 * keys) as (index, head):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            k_shared = T.alloc_shared((keys, wide), elem)
            q_shared = T.alloc_shared((queries, wide), elem)
            do_shared = T.alloc_shared((queries, wide_v), elem)
            query_shared, head_shared = T.alloc_shared((queries,), T.int32), T.alloc_shared((queries,), T.int32)
            below_shared, delta_shared = T.alloc_shared((queries,), T.float32), T.alloc_shared((queries,), T.float32)
            rows = Rows(query_shared, head_shared)
            scores = T.alloc_fragment((keys, queries), T.float32)
            weights = T.alloc_fragment((keys, queries), elem)
            if with_dk:
                v_shared = T.alloc_shared((keys, wide_v), elem)
                dp = T.alloc_fragment((keys, queries), T.float32)
                dk_acc = T.alloc_fragment((keys, wide), T.float32)
            if with_dv:
                dv_acc = T.alloc_fragment((keys, wide_v), T.float32)
            group = T.alloc_var(T.int32)
            group = T.truncdiv(q_heads, kv_heads)
            block = T.alloc_var(T.int32)
            block = T.truncdiv(index, size // keys)
            own_batch = T.alloc_var(T.int32, init=0)
            start = T.alloc_var(T.int32, init=0)
            length = T.alloc_var(T.int32)
            key = T.alloc_var(T.int32)
            sequence = T.alloc_var(T.int32, init=0)
            length = num_tokens
            if packed:
                for step in T.serial(bits):
                    later = sequence + (1 << (bits - 1 - step))
                    if later <= num_sequences:  # noqa: SIM102
                        if T.truncdiv(cu_seqlens[T.min(later, num_sequences)], size) + later <= block:
                            sequence = later
                start = cu_seqlens[sequence]
                length = num_tokens - start
                if sequence < num_sequences:
                    length = cu_seqlens[T.min(sequence + 1, num_sequences)] - start
                key = (block - T.truncdiv(start, size) - sequence) * size
            else:
                own_batch = T.truncdiv(block, T.truncdiv(num_tokens + size - 1, size))
                key = (block - own_batch * T.truncdiv(num_tokens + size - 1, size)) * size
            key += (index - block * (size // keys)) * keys
            if key < length:
                begin = first[block * kv_heads + head]
                num_rows = (first[block * kv_heads + head + 1] - begin) * group
                load_keys(k, own_batch, start, head, key, length, k_shared, head_dim)
                if with_dk:
                    load_keys(v, own_batch, start, head, key, length, v_shared, value_dim)
                    T.clear(dk_acc)
                if with_dv:
                    T.clear(dv_acc)
                for step in T.serial(T.truncdiv(num_rows + queries - 1, queries)):
                    own_rows = T.min(num_rows - step * queries, queries)
                    for i in T.Parallel(queries):
                        row = step * queries + T.min(i, own_rows - 1)
                        rows.query[i] = listed[begin + T.truncdiv(row, group)] - own_batch * num_tokens
                        rows.head[i] = head * group + T.truncmod(row, group)
                    for i in T.Parallel(queries):
                        below_shared[i] = T.if_then_else(
                            i < own_rows, below[own_batch, rows.query[i], rows.head[i]], T.float32(math.inf)
                        )
                        delta_shared[i] = T.if_then_else(
                            i < own_rows, delta[own_batch, rows.query[i], rows.head[i]], T.float32(0.0)
                        )
                    T.sync_threads()
                    copy_rows(q, own_batch, rows, own_rows, q_shared, head_dim, 2 * keys)
                    copy_rows(do, own_batch, rows, own_rows, do_shared, value_dim, 2 * keys)
                    finish_copies()
                    T.clear(scores)
                    T.gemm(k_shared, q_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for j, i in T.Parallel(keys, queries):
                        visible = T.And(start + key + j <= rows.query[i], below_shared[i] != math.inf)
                        power = T.exp2(scores[j, i] * scale - below_shared[i])
                        scores[j, i] = T.if_then_else(T.And(visible, key + j < length), power, T.float32(0.0))
                    if with_dv:
                        T.copy(scores, weights)
                        T.gemm(weights, do_shared, dv_acc, policy=T.GemmWarpPolicy.FullRow)
                    if with_dk:
                        T.clear(dp)
                        T.gemm(v_shared, do_shared, dp, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                        for j, i in T.Parallel(keys, queries):
                            weights[j, i] = T.if_then_else(
                                scores[j, i] == 0.0, T.float32(0.0), scores[j, i] * (dp[j, i] - delta_shared[i])
                            )
                        T.gemm(weights, q_shared, dk_acc, policy=T.GemmWarpPolicy.FullRow)
                    T.sync_threads()
                if with_dk:
                    for j, d in T.Parallel(keys, wide):
                        if T.And(key + j < length, d < head_dim):
                            dk[own_batch, start + key + j, head, d] = dk_acc[j, d] * out_scale
                if with_dv:
                    for j, d in T.Parallel(keys, wide_v):
                        if T.And(key + j < length, d < value_dim):
                            dv[own_batch, start + key + j, head, d] = dv_acc[j, d]

    return nsa_attend_dkv
