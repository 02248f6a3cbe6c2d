"""Kernels of the gradient of attention. See `attend` for the formula.

    delta[i]  = sum_d o[i, d] * do[i, d]
    ds[i, j]  = p[i, j] * (sum_d do[i, d] * v[j, d] - delta[i])          times 1 - tanh^2 with softcap
    dq[i]     = scale * sum_j ds[i, j] * k[j]
    dk[j]     = scale * sum_i ds[i, j] * q[i]
    dv[j]     = sum_i p[i, j] * do[i]
    dsink     = -sum_i exp(sink - below[i]) * delta[i]                   below: lse with the sink

Scores are computed again. One kernel owns blocks of rows and goes over keys for dq. One owns blocks of keys and goes
over rows for dk and dv. So every sum has one order, and nothing is added to memory. Where dk and dv do not fit into the
registers together, the second kernel runs once for each.
"""

import math

import torch

from tile_kernels.attention._macros import (
    DENSE,
    PACKED,
    THREADS,
    find_block,
    find_keys,
    load_keys,
    load_rows,
    make_rows,
    padded,
    place_rows,
    used_length,
)
from tile_kernels.attention.attend_kernels import BLOCK_M, LOG2E, PORTABLE, strided
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.device.mask import crosses_band, first_key, in_band, last_key

BLOCK_K = 64  # keys of a block that owns them
MOST_SINK = 100.0  # a sink that exceeds the scores by more, to base 2, leaves weights of 0
#: Which gradients a launch over keys computes.
BOTH, DK, DV = 'both', 'dk', 'dv'


def key_launches(head_dim: int, value_dim: int) -> tuple[str, ...]:
    """The launches over keys: one if both gradients fit into the registers."""
    return (BOTH,) if padded(head_dim) + padded(value_dim) <= 256 else (DK, DV)


# Rows ---------------------------------------------------------------------------------------


@kernel()
def attend_delta_kernel(value_dim: int, dtype: torch.dtype, sink_dtype: torch.dtype | None, with_dlse: bool):
    """`delta`, and `below`: the logarithm to base 2 of the denominator, +inf for a row that sees nothing.

    A row with a result or a gradient that is not finite has NaN there. A gradient of lse is subtracted from `delta`;
    `plain` is then `delta` without it, for the gradient of the sink.
    """
    num_rows, batch, num_heads, num_tokens = (T.dynamic(n) for n in ('num_rows', 'batch', 'num_heads', 'num_tokens'))
    elem, wide, rows = T.dtype(dtype), max(32, 1 << (value_dim - 1).bit_length()), 32
    inf, nan = math.inf, math.nan

    @T.prim_func
    def attend_delta(
        o: T.Tensor((num_rows, value_dim), elem),
        do: T.Tensor((num_rows, value_dim), elem),
        lse: T.Tensor((batch, num_heads, num_tokens), T.float32),
        dlse: T.Tensor((batch, num_heads, num_tokens), T.float32),
        sink: T.Tensor((num_heads,), T.dtype(sink_dtype or torch.float32)),
        below: T.Tensor((num_rows,), T.float32),
        delta: T.Tensor((num_rows,), T.float32),
        plain: T.Tensor((num_rows,), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_rows, rows), threads=THREADS) as pid:
            terms = T.alloc_fragment((rows, wide), T.float32)
            sums = T.alloc_fragment((rows,), T.float32)
            for i, d in T.Parallel(rows, wide):
                terms[i, d] = 0.0
                if T.And(pid * rows + i < num_rows, d < value_dim):
                    terms[i, d] = T.cast(o[pid * rows + i, d], T.float32) * T.cast(do[pid * rows + i, d], T.float32)
            T.reduce_sum(terms, sums, dim=1)
            for i in T.Parallel(rows):
                row = pid * rows + i
                if row < num_rows:
                    head, token = T.truncmod(row, num_heads), T.truncdiv(row, num_heads)
                    batch_index, own_token = T.truncdiv(token, num_tokens), T.truncmod(token, num_tokens)
                    own = lse[batch_index, head, own_token] * LOG2E
                    number = T.alloc_var(T.float32)
                    number = own
                    if sink_dtype is not None:
                        other = T.cast(sink[head], T.float32) * LOG2E
                        larger, smaller = T.max(own, other), T.min(own, other)
                        number = larger + T.log2(1.0 + T.exp2(smaller - larger))
                        if other == inf:
                            number = inf
                    change = T.alloc_var(T.float32, init=0.0)
                    if with_dlse:  # weights of lse are without the sink
                        change = dlse[batch_index, head, own_token]
                        if sink_dtype is not None and change != 0.0:
                            change = change * T.exp2(T.min(number - own, MOST_SINK))
                    if T.Not(T.And(T.isfinite(own), T.isfinite(sums[i] - change))):
                        number = nan
                    below[row] = T.if_then_else(own == -inf, T.float32(inf), number)
                    delta[row] = T.if_then_else(own == -inf, T.float32(0.0), sums[i] - change)
                    if with_dlse and sink_dtype is not None:
                        plain[row] = sums[i]

    return attend_delta


@kernel()
def attend_dsink_kernel(sink_dtype: torch.dtype):
    """A thread block sums the rows of a head, in one order."""
    num_tokens, num_heads = T.dynamic('num_tokens'), T.dynamic('num_heads')
    elem, rows = T.dtype(sink_dtype), 4 * THREADS

    @T.prim_func
    def attend_dsink(
        below: T.Tensor((num_tokens, num_heads), T.float32),
        delta: T.Tensor((num_tokens, num_heads), T.float32),
        sink: T.Tensor((num_heads,), elem),
        dsink: T.Tensor((num_heads,), elem),
    ):
        with T.Kernel(num_heads, threads=THREADS) as head:
            sums = T.alloc_fragment((rows,), T.float32)
            total = T.alloc_fragment((1,), T.float32)
            T.clear(sums)
            own = T.cast(sink[head], T.float32) * LOG2E
            for step in T.serial(T.truncdiv(num_tokens + rows - 1, rows)):
                for i in T.Parallel(rows):
                    token = step * rows + i
                    if token < num_tokens:  # noqa: SIM102 - the other must not be read
                        if below[token, head] != math.inf:
                            sums[i] = sums[i] - T.exp2(own - below[token, head]) * delta[token, head]
            T.reduce_sum(sums, total, dim=0)
            for i in T.Parallel(1):
                dsink[head] = T.cast(total[i], elem)

    return attend_dsink


@kernel()
def attend_dq_cast_kernel(dtype: torch.dtype):
    """Scale the sum of dq and round it; a thread block has 4096 numbers. Indices count vectors, which fit int32."""
    num_vectors = T.dynamic('num_vectors')
    block = 4 * THREADS

    @T.prim_func
    def attend_dq_cast(
        dq_sum: T.Tensor((num_vectors, 8), T.float32),
        dq: T.Tensor((num_vectors, 8), T.dtype(dtype)),
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_vectors, block), threads=THREADS) as pid:
            for i, e in T.Parallel(block, 8):
                if pid * block + i < num_vectors:
                    dq[pid * block + i, e] = dq_sum[pid * block + i, e] * scale

    return attend_dq_cast


# Products -----------------------------------------------------------------------------------


@macro
def load_stats(below, delta, batch, start, num_tokens, q_heads, rows, row, num_rows, below_shared, delta_shared):
    """Statistics of rows; behind the last row those of one that sees nothing."""
    for i in T.Parallel(below_shared.shape[0]):
        entry = (batch * num_tokens + start + rows.query[i]) * q_heads + rows.head[i]
        below_shared[i] = T.if_then_else(row + i < num_rows, below[entry], T.float32(math.inf))
        delta_shared[i] = T.if_then_else(row + i < num_rows, delta[entry], T.float32(0.0))


@macro
def zero_infinite(x_shared):
    """Set what is infinite to 0: a weight of 0 would not hide it from sums that must not contain it.

    Rows and keys that see it get NaN nevertheless, from scores computed before or from `below`.
    """
    for part in T.unroll(x_shared.shape[1] // 32, unroll_factor=1):  # a loop saves registers
        for i, d in T.Parallel(x_shared.shape[0], 32):
            if T.Not(T.isfinite(T.cast(x_shared[i, part * 32 + d], T.float32))):
                x_shared[i, part * 32 + d] = T.cast(0.0, x_shared.dtype)


@kernel(pass_configs=PORTABLE)
def attend_dq_kernel(
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    packed: bool,
    q_used: bool,
    k_used: bool,
    banded: bool,
    capped: bool,
):
    """A thread block owns 64 rows and goes over the keys they see."""
    q_batch, q_tokens, q_heads = T.dynamic('q_batch'), T.dynamic('q_tokens'), T.dynamic('q_heads')
    k_batch, k_tokens, kv_heads = T.dynamic('k_batch'), T.dynamic('k_tokens'), T.dynamic('kv_heads')
    num_q, num_k, num_used_q, num_used_k = (T.dynamic(name) for name in ('num_q', 'num_k', 'num_used_q', 'num_used_k'))
    num_rows_all = T.dynamic('num_rows_all')
    elem = T.dtype(dtype)
    wide, wide_v = padded(head_dim), padded(value_dim)
    block_n = 64 if wide <= 128 else 32
    q_type, q_strides = strided('q', (q_batch, q_tokens, q_heads, head_dim), elem)
    k_type, k_strides = strided('k', (k_batch, k_tokens, kv_heads, head_dim), elem)
    v_type, v_strides = strided('v', (k_batch, k_tokens, kv_heads, value_dim), elem)

    @T.prim_func
    def attend_dq(
        q: q_type,
        k: k_type,
        v: v_type,
        do: T.Tensor((q_batch, q_tokens, q_heads, value_dim), elem),
        below: T.Tensor((num_rows_all,), T.float32),
        delta: T.Tensor((num_rows_all,), T.float32),
        cu_seqlens_q: T.Tensor((num_q,), T.int32),
        cu_seqlens_k: T.Tensor((num_k,), T.int32),
        seqused_q: T.Tensor((num_used_q,), T.int32),
        seqused_k: T.Tensor((num_used_k,), T.int32),
        dq: T.Tensor((q_batch, q_tokens, q_heads, head_dim), elem),
        num_blocks: T.int32,
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
        cap: T.float32,
        left: T.int32,
        right: T.int32,
        out_scale: T.float32,
    ):
        with T.Kernel(num_blocks, kv_heads, threads=THREADS) as (index, head):
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

            block_rows = make_rows(BLOCK_M)
            group = T.alloc_var(T.int32)
            group = T.truncdiv(q_heads, kv_heads)
            block = find_block(cu_seqlens_q, index, num_sequences, bits, q_tokens, group, BLOCK_M, packed)
            sequence, start, row = block.sequence, block.start, block.row
            num_rows = block.length * group
            if row < num_rows:
                used_rows = used_length(seqused_q, sequence, num_sequences, block.length, q_used) * group
                keys = PACKED if packed else DENSE
                own = find_keys(cu_seqlens_k, seqused_k, sequence, num_sequences, k_tokens, keys, k_used)
                offset = own.number - T.truncdiv(used_rows, group)
                first = T.alloc_var(T.int32, init=0)
                last = T.alloc_var(T.int32, init=0)
                if row < used_rows:
                    last = T.truncdiv(own.number + block_n - 1, block_n)
                    if banded:
                        last_row = T.min(row + BLOCK_M, used_rows) - 1
                        end = last_key(T.truncdiv(last_row, group) + offset, right, own.number)
                        first = T.truncdiv(first_key(T.truncdiv(row, group) + offset, left), block_n)
                        last = T.truncdiv(end + block_n - 1, block_n)
                place_rows(block_rows, head, group, row)
                load_rows(q, block.batch, start, block_rows, row, used_rows, q_shared, head_dim)
                load_rows(do, block.batch, start, block_rows, row, used_rows, do_shared, value_dim)
                stats = (block_rows, row, used_rows, below_shared, delta_shared)
                load_stats(below, delta, block.batch, start, q_tokens, q_heads, *stats)
                T.clear(acc)
                for step in T.serial(T.max(last - first, 0)):
                    key = (first + step) * block_n
                    load_keys(k, own.batch, own.start, head, key, own.number, k_shared, head_dim)
                    load_keys(v, own.batch, own.start, head, key, own.number, v_shared, value_dim)
                    T.clear(scores)
                    T.gemm(q_shared, k_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    T.clear(dp)
                    T.gemm(do_shared, v_shared, dp, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for i, j in T.Parallel(BLOCK_M, block_n):
                        scores[i, j] = T.tanh(scores[i, j] * scale) if capped else scores[i, j] * scale
                        position = block_rows.query[i] + offset
                        seen = T.And(key + j < own.number, below_shared[i] != math.inf)
                        visible = T.And(seen, in_band(position, key + j, left, right)) if banded else seen
                        power = scores[i, j] * cap - below_shared[i] if capped else scores[i, j] - below_shared[i]
                        slope = 1.0 - scores[i, j] * scores[i, j] if capped else T.float32(1.0)
                        dp[i, j] = T.if_then_else(
                            visible, T.exp2(power) * (dp[i, j] - delta_shared[i]) * slope, T.float32(0.0)
                        )
                    T.copy(dp, ds)
                    first_position = T.truncdiv(row, group) + offset
                    last_position = T.truncdiv(T.min(row + BLOCK_M, used_rows) - 1, group) + offset
                    if banded:  # noqa: SIM102 - known when the kernel is built
                        if crosses_band(first_position, last_position, key, block_n, left, right):
                            zero_infinite(k_shared)
                    T.gemm(ds, k_shared, acc, policy=T.GemmWarpPolicy.FullRow)
                for i, d in T.Parallel(BLOCK_M, wide):
                    if T.And(row + i < num_rows, d < head_dim):
                        dq[block.batch, start + block_rows.query[i], block_rows.head[i], d] = acc[i, d] * out_scale

    return attend_dq


@kernel(pass_configs=PORTABLE)
def attend_dkv_kernel(
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    packed: bool,
    q_used: bool,
    k_used: bool,
    banded: bool,
    capped: bool,
    result: str,
):
    """A thread block owns 64 keys and goes over the rows that see them; `result` says which gradients it computes."""
    q_batch, q_tokens, q_heads = T.dynamic('q_batch'), T.dynamic('q_tokens'), T.dynamic('q_heads')
    k_batch, k_tokens, kv_heads = T.dynamic('k_batch'), T.dynamic('k_tokens'), T.dynamic('kv_heads')
    num_q, num_k, num_used_q, num_used_k = (T.dynamic(name) for name in ('num_q', 'num_k', 'num_used_q', 'num_used_k'))
    num_rows_all = T.dynamic('num_rows_all')
    elem = T.dtype(dtype)
    wide, wide_v = padded(head_dim), padded(value_dim)
    most = max(wide, wide_v)
    block_m = 64 if most <= 64 else 32 if most <= 128 else 16  # sums of wide heads leave few registers
    with_dk, with_dv = result != DV, result != DK
    q_type, q_strides = strided('q', (q_batch, q_tokens, q_heads, head_dim), elem)
    k_type, k_strides = strided('k', (k_batch, k_tokens, kv_heads, head_dim), elem)
    v_type, v_strides = strided('v', (k_batch, k_tokens, kv_heads, value_dim), elem)

    @T.prim_func
    def attend_dkv(
        q: q_type,
        k: k_type,
        v: v_type,
        do: T.Tensor((q_batch, q_tokens, q_heads, value_dim), elem),
        below: T.Tensor((num_rows_all,), T.float32),
        delta: T.Tensor((num_rows_all,), T.float32),
        cu_seqlens_q: T.Tensor((num_q,), T.int32),
        cu_seqlens_k: T.Tensor((num_k,), T.int32),
        seqused_q: T.Tensor((num_used_q,), T.int32),
        seqused_k: T.Tensor((num_used_k,), T.int32),
        dk: T.Tensor((k_batch, k_tokens, kv_heads, head_dim), elem),
        dv: T.Tensor((k_batch, k_tokens, kv_heads, value_dim), elem),
        num_blocks: T.int32,
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
        cap: T.float32,
        left: T.int32,
        right: T.int32,
        out_scale: T.float32,
    ):
        with T.Kernel(num_blocks, kv_heads, threads=THREADS) as (index, head):
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

            block_rows = make_rows(block_m)
            group = T.alloc_var(T.int32)
            group = T.truncdiv(q_heads, kv_heads)
            block = find_block(cu_seqlens_k, index, num_sequences, bits, k_tokens, 1, BLOCK_K, packed)
            sequence, key = block.sequence, block.row
            if key < block.length:
                num_keys = used_length(seqused_k, sequence, num_sequences, block.length, k_used)
                rows = PACKED if packed else DENSE
                own = find_keys(cu_seqlens_q, seqused_q, sequence, num_sequences, q_tokens, rows, q_used)
                offset = num_keys - own.number
                num_rows = own.number * group
                first = T.alloc_var(T.int32, init=0)
                last = T.alloc_var(T.int32, init=0)
                if key < num_keys:
                    last = T.truncdiv(num_rows + block_m - 1, block_m)
                    if banded:
                        last_token = T.min(T.min(key + BLOCK_K, num_keys) + left - offset, own.number)
                        first = T.truncdiv(T.max(key - right - offset, 0) * group, block_m)
                        last = T.truncdiv(T.max(last_token, 0) * group + block_m - 1, block_m)
                load_keys(k, block.batch, block.start, head, key, num_keys, k_shared, head_dim)
                if with_dk:
                    load_keys(v, block.batch, block.start, head, key, num_keys, v_shared, value_dim)
                    T.clear(dk_acc)
                if with_dv:
                    T.clear(dv_acc)
                for step in T.serial(T.max(last - first, 0)):
                    row = (first + step) * block_m
                    place_rows(block_rows, head, group, row)
                    load_rows(q, own.batch, own.start, block_rows, row, num_rows, q_shared, head_dim)
                    load_rows(do, own.batch, own.start, block_rows, row, num_rows, do_shared, value_dim)
                    stats = (block_rows, row, num_rows, below_shared, delta_shared)
                    load_stats(below, delta, own.batch, own.start, q_tokens, q_heads, *stats)
                    T.clear(scores)
                    T.gemm(k_shared, q_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for j, i in T.Parallel(BLOCK_K, block_m):
                        scores[j, i] = T.tanh(scores[j, i] * scale) if capped else scores[j, i] * scale
                        position = block_rows.query[i] + offset
                        seen = T.And(key + j < num_keys, below_shared[i] != math.inf)
                        visible = T.And(seen, in_band(position, key + j, left, right)) if banded else seen
                        power = scores[j, i] * cap - below_shared[i] if capped else scores[j, i] - below_shared[i]
                        if with_dk and capped:
                            slope[j, i] = 1.0 - scores[j, i] * scores[j, i]
                        scores[j, i] = T.if_then_else(visible, T.exp2(power), T.float32(0.0))
                    first_position = T.truncdiv(row, group) + offset
                    last_position = T.truncdiv(T.min(row + block_m, num_rows) - 1, group) + offset
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
                        if T.And(key + j < block.length, d < head_dim):
                            dk[block.batch, block.start + key + j, head, d] = dk_acc[j, d] * out_scale
                if with_dv:
                    for j, d in T.Parallel(BLOCK_K, wide_v):
                        if T.And(key + j < block.length, d < value_dim):
                            dv[block.batch, block.start + key + j, head, d] = dv_acc[j, d]

    return attend_dkv
