"""The forward kernel of attention for training and prefill, by mma. See `attend` for the formula.

A thread block owns 64 rows of one kv head (see `_macros`) and goes over blocks of the keys that any of them sees.
Scores come from mma. The mask is applied only in blocks that the band or the end crosses. Softmax stays in registers,
and so do the weights that mma multiplies with values. Pages, fp8 keys and split keys are in `decode_kernels`.
"""

import math
from typing import Any

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
from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.device.mask import crosses_band, first_key, in_band, last_key
from tile_kernels.device.softmax import finite_top, softmax_step

BLOCK_M = 64
#: Every index is in bounds by what the kernels say themselves.
PORTABLE = {**PLAIN_PRODUCTS, 'TL_DISABLE_SAFE_MEMORY_ACCESS': True}
LN2 = math.log(2)
LOG2E = math.log2(math.e)


def strided(name: str, shape: tuple, elem: Any) -> Any:
    """A parameter with a stride of its own for every dimension but the last, and these strides."""
    strides = [T.dynamic(f'{name}_stride{dim}') for dim in range(len(shape) - 1)]
    return T.StridedTensor(shape, (*strides, 1), elem), strides


@macro
def score_block(q_shared, k_shared, scores, scale, cap, capped: bool):
    """Scores of a block as logarithms to base 2."""
    T.clear(scores)
    T.gemm(q_shared, k_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
    for i, j in T.Parallel(scores.shape[0], scores.shape[1]):
        scores[i, j] = cap * T.tanh(scores[i, j] * scale) if capped else scores[i, j] * scale


@macro
def hide_infinite(v_shared, acc, rows, offset, key, left, right):
    """Rows must not meet values they do not see, which may be inf or NaN: weight 0 would not hide these.

    Such values are replaced by 0 for the product; rows that see them get them as they are.
    """
    keys, columns = v_shared.shape
    odd = T.alloc_fragment((keys, 32), T.float32)
    odd_rows = T.alloc_fragment((keys,), T.float32)
    odd_any = T.alloc_fragment((1,), T.float32)
    flag_shared = T.alloc_shared((1,), T.float32)
    T.clear(odd_rows)
    for part in T.serial(columns // 32):
        for j, d in T.Parallel(keys, 32):
            odd[j, d] = T.if_then_else(T.isfinite(T.cast(v_shared[j, part * 32 + d], T.float32)), 0.0, 1.0)
        T.reduce_max(odd, odd_rows, dim=1, clear=False)
    T.reduce_max(odd_rows, odd_any, dim=0)
    flag_shared[0] = odd_any[0]
    T.sync_threads()
    if flag_shared[0] != 0.0:
        for j in T.unroll(keys, unroll_factor=1):  # rare: code is spared
            for i, d in T.Parallel(acc.shape[0], columns):
                value = T.cast(v_shared[j, d], T.float32)
                sees = in_band(rows.query[i] + offset, key + j, left, right)
                if T.And(sees, T.Not(T.isfinite(value))):
                    acc[i, d] = acc[i, d] + value
        T.sync_threads()
        for j, d in T.Parallel(keys, columns):
            if T.Not(T.isfinite(T.cast(v_shared[j, d], T.float32))):
                v_shared[j, d] = T.cast(0.0, v_shared.dtype)
    T.sync_threads()


@kernel(pass_configs=PORTABLE)
def attend_kernel(
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    packed: bool,
    q_used: bool,
    k_used: bool,
    banded: bool,
    capped: bool,
    sink_dtype: torch.dtype | None,
):
    """Dense or packed sequences; `q_used` and `k_used` say whether they may be shortened."""
    q_batch, q_tokens, q_heads = T.dynamic('q_batch'), T.dynamic('q_tokens'), T.dynamic('q_heads')
    k_batch, k_tokens, kv_heads = T.dynamic('k_batch'), T.dynamic('k_tokens'), T.dynamic('kv_heads')
    num_q, num_k, num_used_q, num_used_k = (T.dynamic(name) for name in ('num_q', 'num_k', 'num_used_q', 'num_used_k'))
    elem = T.dtype(dtype)
    wide, wide_v = padded(head_dim), padded(value_dim)
    block_n = 16 if wide > 256 else 64 if wide_v <= 128 else 32  # scores and sums share the registers
    q_type, q_strides = strided('q', (q_batch, q_tokens, q_heads, head_dim), elem)
    k_type, k_strides = strided('k', (k_batch, k_tokens, kv_heads, head_dim), elem)
    v_type, v_strides = strided('v', (k_batch, k_tokens, kv_heads, value_dim), elem)
    lse_strides = [T.dynamic(f'lse_stride{dim}') for dim in range(3)]
    lse_type = T.StridedTensor((q_batch, q_tokens, q_heads), lse_strides, T.float32)
    inf = math.inf

    @T.prim_func
    def attend(
        q: q_type,
        k: k_type,
        v: v_type,
        cu_seqlens_q: T.Tensor((num_q,), T.int32),
        cu_seqlens_k: T.Tensor((num_k,), T.int32),
        seqused_q: T.Tensor((num_used_q,), T.int32),
        seqused_k: T.Tensor((num_used_k,), T.int32),
        sink: T.Tensor((q_heads,), T.dtype(sink_dtype or torch.float32)),
        o: T.Tensor((q_batch, q_tokens, q_heads, value_dim), elem),
        lse: lse_type,
        num_blocks: T.int32,
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
        cap: T.float32,
        left: T.int32,
        right: T.int32,
    ):
        with T.Kernel(num_blocks, kv_heads, threads=THREADS) as (index, head):
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
            group = T.alloc_var(T.int32)  # a variable, lest its division be repeated
            group = T.truncdiv(q_heads, kv_heads)
            block = find_block(cu_seqlens_q, index, num_sequences, bits, q_tokens, group, BLOCK_M, packed)
            sequence, start, row = block.sequence, block.start, block.row
            num_rows = block.length * group
            if row < num_rows:
                used_rows = used_length(seqused_q, sequence, num_sequences, block.length, q_used) * group
                stored = PACKED if packed else DENSE
                own = find_keys(cu_seqlens_k, seqused_k, sequence, num_sequences, k_tokens, stored, k_used)
                num_keys = own.number

                # Keys that any row of the block sees.
                offset = num_keys - T.truncdiv(used_rows, group)
                first_position = T.truncdiv(row, group) + offset
                last_position = T.truncdiv(T.min(row + BLOCK_M, used_rows) - 1, group) + offset
                first = T.alloc_var(T.int32, init=0)
                last = T.alloc_var(T.int32, init=0)
                if row < used_rows:
                    last = T.truncdiv(num_keys + block_n - 1, block_n)
                    if banded:
                        first = T.truncdiv(first_key(first_position, left), block_n)
                        last = T.truncdiv(last_key(last_position, right, num_keys) + block_n - 1, block_n)

                place_rows(rows, head, group, row)
                load_rows(q, block.batch, start, rows, row, used_rows, q_shared, head_dim)
                T.fill(top, -inf)
                T.clear(total)
                T.clear(acc)
                for step in T.serial(T.max(last - first, 0)):
                    key = (first + step) * block_n
                    load_keys(k, own.batch, own.start, head, key, num_keys, k_shared, head_dim)
                    load_keys(v, own.batch, own.start, head, key, num_keys, v_shared, value_dim)
                    score_block(q_shared, k_shared, scores, scale, cap, capped)
                    if key + block_n > num_keys:
                        for i, j in T.Parallel(BLOCK_M, block_n):
                            scores[i, j] = T.if_then_else(key + j < num_keys, scores[i, j], -inf)
                    crosses = crosses_band(first_position, last_position, key, block_n, left, right)
                    if banded:  # noqa: SIM102 - known when the kernel is built
                        if crosses:
                            for i, j in T.Parallel(BLOCK_M, block_n):
                                scores[i, j] = T.if_then_else(
                                    in_band(rows.query[i] + offset, key + j, left, right),
                                    scores[i, j],
                                    -inf,
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
                    token, own_head = start + rows.query[i], rows.head[i]
                    seen = T.And(row + i < used_rows, total[i] != 0.0)
                    factor[i] = total[i]
                    if sink_dtype is not None:
                        number = T.cast(sink[T.min(own_head, q_heads - 1)], T.float32) * LOG2E
                        factor[i] = factor[i] + T.exp2(number - finite_top(top[i]))
                    factor[i] = T.if_then_else(seen, 1.0 / factor[i], T.float32(0.0))
                    top[i] = T.if_then_else(seen, (top[i] + T.log2(total[i])) * LN2, T.float32(-inf))
                    if row + i < num_rows:
                        lse[block.batch, token, own_head] = top[i]  # type: ignore[index]
                for i, d in T.Parallel(BLOCK_M, wide_v):
                    if T.And(row + i < num_rows, d < value_dim):
                        o[block.batch, start + rows.query[i], rows.head[i], d] = T.if_then_else(
                            top[i] == -inf, 0.0, acc[i, d] * factor[i]
                        )

    return attend
