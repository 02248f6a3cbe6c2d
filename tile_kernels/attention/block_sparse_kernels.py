"""Kernels of `block_sparse` and of its gradient, by mma on every GPU. See `block_sparse` for the formula.

Forward and dq: a thread block owns 64 rows of one query head and goes over the key blocks of their list. Gradients of
keys and values: a thread block owns 64 keys of one kv head and goes over the blocks of rows that list them. So every
sum has one order, and nothing is added to memory. Tiles are those of `attend_kernels` and `attend_bwd_kernels`.
"""

import math
from typing import Any

import torch

from tile_kernels.attention._macros import THREADS, load_keys, load_rows, make_rows, padded, place_rows
from tile_kernels.attention.attend_bwd_kernels import BLOCK_K, DK, DV, load_stats, zero_infinite
from tile_kernels.attention.attend_kernels import (
    BLOCK_M,
    LN2,
    LOG2E,
    PORTABLE,
    hide_infinite,
    score_block,
    strided,
)
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.device.mask import crosses_band, in_band
from tile_kernels.device.softmax import finite_top, softmax_step


@macro
def entry_block(indices, batch, head, row_block, entry, num_keys, block: int):
    """The key block of an entry of a list, and how many of its keys exist: 0 if it is none."""
    own = T.alloc_var(T.int32)
    number = T.alloc_var(T.int32)
    own = indices[batch, head, row_block, entry]
    number = 0
    if T.And(own >= 0, own < T.truncdiv(num_keys + block - 1, block)):
        number = T.min(num_keys - own * block, block)
    return own * block, number


def meets_band(first: Any, last: Any, key: Any, size: int, left: Any, right: Any, banded: bool) -> Any:
    """Whether a query from position `first` to `last` sees one of `size` keys from `key` on."""
    return T.And(key <= last + right, key + size > first - left) if banded else True


@kernel(pass_configs=PORTABLE)
def block_sparse_kernel(
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    block: int,
    banded: bool,
    capped: bool,
    sink_dtype: torch.dtype | None,
):
    """Lists are those of blocks of `block` rows, and name blocks of as many keys."""
    batch, q_tokens, q_heads = T.dynamic('batch'), T.dynamic('q_tokens'), T.dynamic('q_heads')
    k_tokens, kv_heads = T.dynamic('k_tokens'), T.dynamic('kv_heads')
    num_blocks, num_listed = T.dynamic('num_blocks'), T.dynamic('num_listed')
    elem, inf = T.dtype(dtype), math.inf
    wide, wide_v = padded(head_dim), padded(value_dim)
    block_n = 64 if wide_v <= 128 else 32
    q_type, q_strides = strided('q', (batch, q_tokens, q_heads, head_dim), elem)
    k_type, k_strides = strided('k', (batch, k_tokens, kv_heads, head_dim), elem)
    v_type, v_strides = strided('v', (batch, k_tokens, kv_heads, value_dim), elem)

    @T.prim_func
    def block_sparse(
        q: q_type,
        k: k_type,
        v: v_type,
        indices: T.Tensor((batch, q_heads, num_blocks, num_listed), T.int32),
        counts: T.Tensor((batch, q_heads, num_blocks), T.int32),
        sink: T.Tensor((q_heads,), T.dtype(sink_dtype or torch.float32)),
        o: T.Tensor((batch, q_tokens, q_heads, value_dim), elem),
        lse: T.Tensor((batch, q_heads, q_tokens), T.float32),
        scale: T.float32,
        cap: T.float32,
        left: T.int32,
        right: T.int32,
    ):
        with T.Kernel(T.ceildiv(q_tokens, BLOCK_M), q_heads, batch, threads=THREADS) as (tile, head, index):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((BLOCK_M, wide), elem)
            k_shared = T.alloc_shared((block_n, wide), elem)
            v_shared = T.alloc_shared((block_n, wide_v), elem)
            scores = T.alloc_fragment((BLOCK_M, block_n), T.float32)
            weights = T.alloc_fragment((BLOCK_M, block_n), elem)
            acc = T.alloc_fragment((BLOCK_M, wide_v), T.float32)
            top, total = T.alloc_fragment((BLOCK_M,), T.float32), T.alloc_fragment((BLOCK_M,), T.float32)
            factor = T.alloc_fragment((BLOCK_M,), T.float32)
            block_top, block_sum = T.alloc_fragment((BLOCK_M,), T.float32), T.alloc_fragment((BLOCK_M,), T.float32)

            rows = make_rows(BLOCK_M)
            row = tile * BLOCK_M
            row_block = T.truncdiv(row, block)
            kv_head = T.truncdiv(head, T.truncdiv(q_heads, kv_heads))
            offset = k_tokens - q_tokens
            first_position, last_position = row + offset, T.min(row + BLOCK_M, q_tokens) - 1 + offset
            place_rows(rows, head, 1, row)
            load_rows(q, index, 0, rows, row, q_tokens, q_shared, head_dim)
            T.fill(top, -inf)
            T.clear(total)
            T.clear(acc)
            for entry in T.serial(T.max(T.min(counts[index, head, row_block], num_listed), 0)):
                start, number = entry_block(indices, index, head, row_block, entry, k_tokens, block)
                for step in T.serial(T.truncdiv(number + block_n - 1, block_n)):
                    key = start + step * block_n
                    if meets_band(first_position, last_position, key, block_n, left, right, banded):
                        load_keys(k, index, 0, kv_head, key, k_tokens, k_shared, head_dim)
                        load_keys(v, index, 0, kv_head, key, k_tokens, v_shared, value_dim)
                        score_block(q_shared, k_shared, scores, scale, cap, capped)
                        if key + block_n > k_tokens:
                            for i, j in T.Parallel(BLOCK_M, block_n):
                                scores[i, j] = T.if_then_else(key + j < k_tokens, scores[i, j], -inf)
                        crosses = crosses_band(first_position, last_position, key, block_n, left, right)
                        if banded:  # noqa: SIM102 - known when the kernel is built
                            if crosses:
                                for i, j in T.Parallel(BLOCK_M, block_n):
                                    scores[i, j] = T.if_then_else(
                                        in_band(rows.query[i] + offset, key + j, left, right), scores[i, j], -inf
                                    )
                        softmax_step(scores, top, total, factor, block_top, block_sum)
                        T.copy(scores, weights)
                        for i, d in T.Parallel(BLOCK_M, wide_v):
                            acc[i, d] = acc[i, d] * factor[i]
                        if banded:  # noqa: SIM102
                            if crosses:
                                hide_infinite(v_shared, acc, rows, offset, key, left, right)
                        T.gemm(weights, v_shared, acc, policy=T.GemmWarpPolicy.FullRow)

            for i in T.Parallel(BLOCK_M):
                seen = T.And(row + i < q_tokens, total[i] != 0.0)
                factor[i] = total[i]
                if sink_dtype is not None:
                    logit = T.cast(sink[head], T.float32) * LOG2E
                    factor[i] = factor[i] + T.exp2(logit - finite_top(top[i]))
                factor[i] = T.if_then_else(seen, 1.0 / factor[i], T.float32(0.0))
                top[i] = T.if_then_else(seen, (top[i] + T.log2(total[i])) * LN2, T.float32(-inf))
                if row + i < q_tokens:
                    lse[index, head, row + i] = top[i]
            for i, d in T.Parallel(BLOCK_M, wide_v):
                if T.And(row + i < q_tokens, d < value_dim):
                    o[index, row + i, head, d] = T.if_then_else(top[i] == -inf, 0.0, acc[i, d] * factor[i])

    return block_sparse


@kernel(pass_configs=PORTABLE)
def block_sparse_dq_kernel(head_dim: int, value_dim: int, dtype: torch.dtype, block: int, banded: bool, capped: bool):
    """A thread block owns 64 rows and goes over the keys of their list."""
    batch, q_tokens, q_heads = T.dynamic('batch'), T.dynamic('q_tokens'), T.dynamic('q_heads')
    k_tokens, kv_heads, num_rows = T.dynamic('k_tokens'), T.dynamic('kv_heads'), T.dynamic('num_rows')
    num_blocks, num_listed = T.dynamic('num_blocks'), T.dynamic('num_listed')
    elem = T.dtype(dtype)
    wide, wide_v = padded(head_dim), padded(value_dim)
    block_n = 64 if wide <= 128 else 32
    q_type, q_strides = strided('q', (batch, q_tokens, q_heads, head_dim), elem)
    k_type, k_strides = strided('k', (batch, k_tokens, kv_heads, head_dim), elem)
    v_type, v_strides = strided('v', (batch, k_tokens, kv_heads, value_dim), elem)

    @T.prim_func
    def block_sparse_dq(
        q: q_type,
        k: k_type,
        v: v_type,
        indices: T.Tensor((batch, q_heads, num_blocks, num_listed), T.int32),
        counts: T.Tensor((batch, q_heads, num_blocks), T.int32),
        do: T.Tensor((batch, q_tokens, q_heads, value_dim), elem),
        below: T.Tensor((num_rows,), T.float32),
        delta: T.Tensor((num_rows,), T.float32),
        dq: T.Tensor((batch, q_tokens, q_heads, head_dim), elem),
        scale: T.float32,
        cap: T.float32,
        left: T.int32,
        right: T.int32,
        out_scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(q_tokens, BLOCK_M), q_heads, batch, threads=THREADS) as (tile, head, index):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((BLOCK_M, wide), elem)
            do_shared = T.alloc_shared((BLOCK_M, wide_v), elem)
            k_shared = T.alloc_shared((block_n, wide), elem)
            v_shared = T.alloc_shared((block_n, wide_v), elem)
            below_shared = T.alloc_shared((BLOCK_M,), T.float32)
            delta_shared = T.alloc_shared((BLOCK_M,), T.float32)
            scores = T.alloc_fragment((BLOCK_M, block_n), T.float32)
            dp = T.alloc_fragment((BLOCK_M, block_n), T.float32)
            ds = T.alloc_fragment((BLOCK_M, block_n), elem)
            acc = T.alloc_fragment((BLOCK_M, wide), T.float32)

            rows = make_rows(BLOCK_M)
            row = tile * BLOCK_M
            row_block = T.truncdiv(row, block)
            kv_head = T.truncdiv(head, T.truncdiv(q_heads, kv_heads))
            offset = k_tokens - q_tokens
            first_position, last_position = row + offset, T.min(row + BLOCK_M, q_tokens) - 1 + offset
            place_rows(rows, head, 1, row)
            load_rows(q, index, 0, rows, row, q_tokens, q_shared, head_dim)
            load_rows(do, index, 0, rows, row, q_tokens, do_shared, value_dim)
            load_stats(below, delta, index, 0, q_tokens, q_heads, rows, row, q_tokens, below_shared, delta_shared)
            T.clear(acc)
            for entry in T.serial(T.max(T.min(counts[index, head, row_block], num_listed), 0)):
                start, number = entry_block(indices, index, head, row_block, entry, k_tokens, block)
                for step in T.serial(T.truncdiv(number + block_n - 1, block_n)):
                    key = start + step * block_n
                    if meets_band(first_position, last_position, key, block_n, left, right, banded):
                        load_keys(k, index, 0, kv_head, key, k_tokens, k_shared, head_dim)
                        load_keys(v, index, 0, kv_head, key, k_tokens, v_shared, value_dim)
                        T.clear(scores)
                        T.gemm(q_shared, k_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                        T.clear(dp)
                        T.gemm(do_shared, v_shared, dp, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                        for i, j in T.Parallel(BLOCK_M, block_n):
                            scores[i, j] = T.tanh(scores[i, j] * scale) if capped else scores[i, j] * scale
                            position = rows.query[i] + offset
                            seen = T.And(key + j < k_tokens, below_shared[i] != math.inf)
                            visible = T.And(seen, in_band(position, key + j, left, right)) if banded else seen
                            power = scores[i, j] * cap - below_shared[i] if capped else scores[i, j] - below_shared[i]
                            slope = 1.0 - scores[i, j] * scores[i, j] if capped else T.float32(1.0)
                            dp[i, j] = T.if_then_else(
                                visible, T.exp2(power) * (dp[i, j] - delta_shared[i]) * slope, T.float32(0.0)
                            )
                        T.copy(dp, ds)
                        if banded:  # noqa: SIM102 - known when the kernel is built
                            if crosses_band(first_position, last_position, key, block_n, left, right):
                                zero_infinite(k_shared)
                        T.gemm(ds, k_shared, acc, policy=T.GemmWarpPolicy.FullRow)
            for i, d in T.Parallel(BLOCK_M, wide):
                if T.And(row + i < q_tokens, d < head_dim):
                    dq[index, row + i, head, d] = acc[i, d] * out_scale

    return block_sparse_dq


@kernel(pass_configs=PORTABLE)
def block_sparse_dkv_kernel(
    head_dim: int, value_dim: int, dtype: torch.dtype, block: int, banded: bool, capped: bool, result: str
):
    """A thread block owns 64 keys and goes over the blocks of rows that list them; `result` as in `attend_dkv_kernel`.

    `lists[b, h, n, m]` says whether the rows of block m list the keys of block n.
    """
    batch, q_tokens, q_heads = T.dynamic('batch'), T.dynamic('q_tokens'), T.dynamic('q_heads')
    k_tokens, kv_heads, num_rows = T.dynamic('k_tokens'), T.dynamic('kv_heads'), T.dynamic('num_rows')
    row_blocks, key_blocks = T.dynamic('row_blocks'), T.dynamic('key_blocks')
    elem = T.dtype(dtype)
    wide, wide_v = padded(head_dim), padded(value_dim)
    most = max(wide, wide_v)
    block_m = 64 if most <= 64 else 32 if most <= 128 else 16  # sums of wide heads leave few registers
    with_dk, with_dv = result != DV, result != DK
    q_type, q_strides = strided('q', (batch, q_tokens, q_heads, head_dim), elem)
    k_type, k_strides = strided('k', (batch, k_tokens, kv_heads, head_dim), elem)
    v_type, v_strides = strided('v', (batch, k_tokens, kv_heads, value_dim), elem)

    @T.prim_func
    def block_sparse_dkv(
        q: q_type,
        k: k_type,
        v: v_type,
        lists: T.Tensor((batch, q_heads, key_blocks, row_blocks), T.uint8),
        do: T.Tensor((batch, q_tokens, q_heads, value_dim), elem),
        below: T.Tensor((num_rows,), T.float32),
        delta: T.Tensor((num_rows,), T.float32),
        dk: T.Tensor((batch, k_tokens, kv_heads, head_dim), elem),
        dv: T.Tensor((batch, k_tokens, kv_heads, value_dim), elem),
        scale: T.float32,
        cap: T.float32,
        left: T.int32,
        right: T.int32,
        out_scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(k_tokens, BLOCK_K), kv_heads, batch, threads=THREADS) as (tile, head, index):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            k_shared = T.alloc_shared((BLOCK_K, wide), elem)
            q_shared = T.alloc_shared((block_m, wide), elem)
            do_shared = T.alloc_shared((block_m, wide_v), elem)
            below_shared = T.alloc_shared((block_m,), T.float32)
            delta_shared = T.alloc_shared((block_m,), T.float32)
            scores = T.alloc_fragment((BLOCK_K, block_m), T.float32)
            weights = T.alloc_fragment((BLOCK_K, block_m), elem)
            if with_dk:
                v_shared = T.alloc_shared((BLOCK_K, wide_v), elem)
                dp = T.alloc_fragment((BLOCK_K, block_m), T.float32)
                slope = T.alloc_fragment((BLOCK_K, block_m), T.float32) if capped else dp
                dk_acc = T.alloc_fragment((BLOCK_K, wide), T.float32)
            if with_dv:
                dv_acc = T.alloc_fragment((BLOCK_K, wide_v), T.float32)

            rows = make_rows(block_m)
            key = tile * BLOCK_K
            key_block = T.truncdiv(key, block)
            group = T.alloc_var(T.int32)
            group = T.truncdiv(q_heads, kv_heads)
            offset = k_tokens - q_tokens
            load_keys(k, index, 0, head, key, k_tokens, k_shared, head_dim)
            if with_dk:
                load_keys(v, index, 0, head, key, k_tokens, v_shared, value_dim)
                T.clear(dk_acc)
            if with_dv:
                T.clear(dv_acc)
            number = T.alloc_var(T.int32)
            for pair in T.serial(group * row_blocks):
                own_head = head * group + T.truncdiv(pair, row_blocks)
                row_block = T.truncmod(pair, row_blocks)
                number = 0
                if lists[index, own_head, key_block, row_block] != T.uint8(0):
                    number = T.truncdiv(T.min(q_tokens - row_block * block, block) + block_m - 1, block_m)
                for step in T.serial(number):
                    row = row_block * block + step * block_m
                    first_position, last_position = row + offset, T.min(row + block_m, q_tokens) - 1 + offset
                    if meets_band(first_position, last_position, key, BLOCK_K, left, right, banded):
                        place_rows(rows, own_head, 1, row)
                        load_rows(q, index, 0, rows, row, q_tokens, q_shared, head_dim)
                        load_rows(do, index, 0, rows, row, q_tokens, do_shared, value_dim)
                        load_stats(
                            below, delta, index, 0, q_tokens, q_heads, rows, row, q_tokens, below_shared, delta_shared
                        )
                        T.clear(scores)
                        T.gemm(k_shared, q_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                        for j, i in T.Parallel(BLOCK_K, block_m):
                            scores[j, i] = T.tanh(scores[j, i] * scale) if capped else scores[j, i] * scale
                            position = rows.query[i] + offset
                            seen = T.And(key + j < k_tokens, below_shared[i] != math.inf)
                            visible = T.And(seen, in_band(position, key + j, left, right)) if banded else seen
                            power = scores[j, i] * cap - below_shared[i] if capped else scores[j, i] - below_shared[i]
                            if with_dk and capped:
                                slope[j, i] = 1.0 - scores[j, i] * scores[j, i]
                            scores[j, i] = T.if_then_else(visible, T.exp2(power), T.float32(0.0))
                        if banded:  # noqa: SIM102 - known when the kernel is built
                            if crosses_band(first_position, last_position, key, BLOCK_K, left, right):
                                if with_dk:
                                    zero_infinite(q_shared)
                                zero_infinite(do_shared)
                        if with_dv:
                            T.copy(scores, weights)
                            T.gemm(weights, do_shared, dv_acc, policy=T.GemmWarpPolicy.FullRow)
                        if with_dk:
                            T.clear(dp)
                            T.gemm(v_shared, do_shared, dp, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                            for j, i in T.Parallel(BLOCK_K, block_m):
                                other = dp[j, i] - delta_shared[i]
                                ds = scores[j, i] * (other * slope[j, i] if capped else other)
                                weights[j, i] = T.if_then_else(scores[j, i] == 0.0, T.float32(0.0), ds)
                            T.gemm(weights, q_shared, dk_acc, policy=T.GemmWarpPolicy.FullRow)
            if with_dk:
                for j, d in T.Parallel(BLOCK_K, wide):
                    if T.And(key + j < k_tokens, d < head_dim):
                        dk[index, key + j, head, d] = dk_acc[j, d] * out_scale
            if with_dv:
                for j, d in T.Parallel(BLOCK_K, wide_v):
                    if T.And(key + j < k_tokens, d < value_dim):
                        dv[index, key + j, head, d] = dv_acc[j, d]

    return block_sparse_dkv
