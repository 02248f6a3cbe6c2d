"""Kernels of `mqa_logits` and of its gradient, by mma. See `mqa_logits` for the formula.

A thread block owns up to 64 rows, the pairs of query and head of whole queries, and goes over tiles of 64 keys. For the
gradient of keys it owns 64 keys and goes over tiles of rows. There products are computed again. Sums have one order.
"""

import math

import torch

from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T, macro

TILE = 64
THREADS = 128


def num_queries(heads: int) -> int:
    """Queries of a tile of rows."""
    return TILE // heads


@macro
def find_bounds(start, end, query, num_tokens, num_keys, start_shared, end_shared):
    """Bounds of the queries of a tile; those behind the last query see nothing."""
    for b in T.Parallel(start_shared.shape[0]):
        own = T.min(query + b, num_tokens - 1)
        exists = query + b < num_tokens
        start_shared[b] = T.if_then_else(exists, T.max(T.min(start[own], num_keys), 0), num_keys)
        end_shared[b] = T.if_then_else(exists, T.max(T.min(end[own], num_keys), 0), 0)
    T.sync_threads()


@macro
def load_tile(x, first, number, x_shared):
    """Rows of a matrix, 0 behind the last."""
    for i, d in T.Parallel(x_shared.shape[0], x_shared.shape[1]):
        x_shared[i, d] = T.if_then_else(i < number, x[first + T.min(i, number - 1), d], T.cast(0.0, x_shared.dtype))


@macro
def load_gradients(dlogits, query, key, num_tokens, num_keys, start_shared, end_shared, dl_shared):
    """Gradients of a tile of logits, 0 for keys that a query does not see."""
    for b, i in T.Parallel(dl_shared.shape[0], TILE):
        seen = T.And(key + i >= start_shared[b], key + i < end_shared[b])
        dl_shared[b, i] = 0.0
        if seen:
            dl_shared[b, i] = dlogits[T.min(query + b, num_tokens - 1), T.min(key + i, num_keys - 1)]


@macro
def key_range(start_shared, end_shared):
    """The first and the last tile of keys that any query of a tile sees."""
    first = T.alloc_var(T.int32, init=1 << 30)
    last = T.alloc_var(T.int32, init=0)
    for b in T.serial(start_shared.shape[0]):
        if start_shared[b] < end_shared[b]:
            first = T.min(first, T.truncdiv(start_shared[b], TILE))
            last = T.max(last, T.truncdiv(end_shared[b] + TILE - 1, TILE))
    return first, last


@kernel(pass_configs=PLAIN_PRODUCTS)
def mqa_logits_half_kernel(heads: int, dim: int, dtype: torch.dtype):
    """Logits of the queries of a tile; -inf where a query does not see a key."""
    num_pairs, num_tokens, num_keys, stride = (T.dynamic(n) for n in ('num_pairs', 'num_tokens', 'num_keys', 'stride'))
    elem, queries = T.dtype(dtype), num_queries(heads)

    @T.prim_func
    def mqa_logits_half(
        q: T.Tensor((num_pairs, dim), elem),
        k: T.Tensor((num_keys, dim), elem),
        weights: T.Tensor((num_pairs,), T.float32),
        start: T.Tensor((num_tokens,), T.int32),
        end: T.Tensor((num_tokens,), T.int32),
        logits: T.StridedTensor((num_tokens, num_keys), (stride, 1), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_tokens, queries), threads=THREADS) as pid:
            q_shared = T.alloc_shared((queries * heads, dim), elem)
            k_shared = T.alloc_shared((TILE, dim), elem)
            weight_shared = T.alloc_shared((queries * heads,), T.float32)
            start_shared, end_shared = T.alloc_shared((queries,), T.int32), T.alloc_shared((queries,), T.int32)
            out_shared = T.alloc_shared((queries, TILE), T.float32)
            acc = T.alloc_fragment((TILE, queries * heads), T.float32)
            sums = T.alloc_fragment((TILE, queries), T.float32)
            query = pid * queries
            find_bounds(start, end, query, num_tokens, num_keys, start_shared, end_shared)
            first, last = key_range(start_shared, end_shared)
            number = T.min(num_tokens - query, queries) * heads
            load_tile(q, query * heads, number, q_shared)
            for j in T.Parallel(queries * heads):
                weight_shared[j] = T.if_then_else(
                    j < number, weights[query * heads + T.min(j, number - 1)] * 0.5, T.float32(0.0)
                )
            for tile in T.serial(T.truncdiv(num_keys + TILE - 1, TILE)):
                key = tile * TILE
                if T.And(tile >= first, tile < last):
                    load_tile(k, key, T.min(num_keys - key, TILE), k_shared)
                    T.clear(acc)
                    T.gemm(k_shared, q_shared, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for i, j in T.Parallel(TILE, queries * heads):
                        acc[i, j] = (acc[i, j] + T.abs(acc[i, j])) * weight_shared[j]
                    T.reduce_sum(T.reshape(acc, (TILE, queries, heads)), sums, dim=2)
                    for i, b in T.Parallel(TILE, queries):
                        out_shared[b, i] = sums[i, b]
                    T.sync_threads()
                for b, i in T.Parallel(queries, TILE):
                    if T.And(query + b < num_tokens, key + i < num_keys):
                        if T.And(key + i >= start_shared[b], key + i < end_shared[b]):
                            logits[query + b, key + i] = out_shared[b, i]
                        else:
                            logits[query + b, key + i] = -math.inf
                T.sync_threads()

    return mqa_logits_half


@kernel(pass_configs=PLAIN_PRODUCTS)
def mqa_logits_dq_kernel(heads: int, dim: int, dtype: torch.dtype):
    """Gradients of queries and weights."""
    num_pairs, num_tokens, num_keys, stride = (T.dynamic(n) for n in ('num_pairs', 'num_tokens', 'num_keys', 'stride'))
    elem, queries = T.dtype(dtype), num_queries(heads)

    @T.prim_func
    def mqa_logits_dq(
        q: T.Tensor((num_pairs, dim), elem),
        k: T.Tensor((num_keys, dim), elem),
        weights: T.Tensor((num_pairs,), T.float32),
        start: T.Tensor((num_tokens,), T.int32),
        end: T.Tensor((num_tokens,), T.int32),
        dlogits: T.StridedTensor((num_tokens, num_keys), (stride, 1), T.float32),
        dq: T.Tensor((num_pairs, dim), elem),
        dweights: T.Tensor((num_pairs,), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_tokens, queries), threads=THREADS) as pid:
            q_shared = T.alloc_shared((TILE, dim), elem)
            k_shared = T.alloc_shared((TILE, dim), elem)
            weight_shared = T.alloc_shared((TILE,), T.float32)
            start_shared, end_shared = T.alloc_shared((queries,), T.int32), T.alloc_shared((queries,), T.int32)
            dl_shared = T.alloc_shared((queries, TILE), T.float32)
            scores = T.alloc_fragment((TILE, TILE), T.float32)
            ds = T.alloc_fragment((TILE, TILE), elem)
            sums, total = T.alloc_fragment((TILE,), T.float32), T.alloc_fragment((TILE,), T.float32)
            acc = T.alloc_fragment((TILE, dim), T.float32)
            query = pid * queries
            find_bounds(start, end, query, num_tokens, num_keys, start_shared, end_shared)
            first, last = key_range(start_shared, end_shared)
            number = T.min(num_tokens - query, queries) * heads
            load_tile(q, query * heads, number, q_shared)
            for j in T.Parallel(TILE):
                weight_shared[j] = T.if_then_else(
                    j < number, weights[query * heads + T.min(j, number - 1)], T.float32(0.0)
                )
            T.clear(acc)
            T.clear(total)
            for step in T.serial(T.max(last - first, 0)):
                key = (first + step) * TILE
                load_tile(k, key, T.min(num_keys - key, TILE), k_shared)
                load_gradients(dlogits, query, key, num_tokens, num_keys, start_shared, end_shared, dl_shared)
                T.sync_threads()
                T.clear(scores)
                T.gemm(q_shared, k_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(TILE, TILE):
                    own = T.min(T.truncdiv(i, heads), queries - 1)
                    ds[i, j] = T.if_then_else(
                        T.And(i < number, scores[i, j] > 0.0), dl_shared[own, j] * weight_shared[i], T.float32(0.0)
                    )
                    scores[i, j] = T.if_then_else(
                        T.And(i < number, scores[i, j] > 0.0), scores[i, j] * dl_shared[own, j], T.float32(0.0)
                    )
                T.reduce_sum(scores, sums, dim=1)
                for i in T.Parallel(TILE):
                    total[i] = total[i] + sums[i]
                T.gemm(ds, k_shared, acc, policy=T.GemmWarpPolicy.FullRow)
                T.sync_threads()
            for i in T.Parallel(TILE):
                if i < number:
                    dweights[query * heads + i] = total[i]
            for i, d in T.Parallel(TILE, dim):
                if i < number:
                    dq[query * heads + i, d] = acc[i, d]

    return mqa_logits_dq


@kernel(pass_configs=PLAIN_PRODUCTS)
def mqa_logits_dk_kernel(heads: int, dim: int, dtype: torch.dtype):
    """Gradients of keys."""
    num_pairs, num_tokens, num_keys, stride = (T.dynamic(n) for n in ('num_pairs', 'num_tokens', 'num_keys', 'stride'))
    elem, queries = T.dtype(dtype), num_queries(heads)

    @T.prim_func
    def mqa_logits_dk(
        q: T.Tensor((num_pairs, dim), elem),
        k: T.Tensor((num_keys, dim), elem),
        weights: T.Tensor((num_pairs,), T.float32),
        start: T.Tensor((num_tokens,), T.int32),
        end: T.Tensor((num_tokens,), T.int32),
        dlogits: T.StridedTensor((num_tokens, num_keys), (stride, 1), T.float32),
        dk: T.Tensor((num_keys, dim), elem),
    ):
        with T.Kernel(T.ceildiv(num_keys, TILE), threads=THREADS) as pid:
            q_shared = T.alloc_shared((TILE, dim), elem)
            k_shared = T.alloc_shared((TILE, dim), elem)
            weight_shared = T.alloc_shared((TILE,), T.float32)
            start_shared, end_shared = T.alloc_shared((queries,), T.int32), T.alloc_shared((queries,), T.int32)
            dl_shared = T.alloc_shared((queries, TILE), T.float32)
            scores = T.alloc_fragment((TILE, TILE), T.float32)
            ds = T.alloc_fragment((TILE, TILE), elem)
            acc = T.alloc_fragment((TILE, dim), T.float32)
            key = pid * TILE
            load_tile(k, key, T.min(num_keys - key, TILE), k_shared)
            T.clear(acc)
            for step in T.serial(T.ceildiv(num_tokens, queries)):
                query = step * queries
                find_bounds(start, end, query, num_tokens, num_keys, start_shared, end_shared)
                first, last = key_range(start_shared, end_shared)
                if T.And(pid >= first, pid < last):
                    number = T.min(num_tokens - query, queries) * heads
                    load_tile(q, query * heads, number, q_shared)
                    for j in T.Parallel(TILE):
                        weight_shared[j] = T.if_then_else(
                            j < number, weights[query * heads + T.min(j, number - 1)], T.float32(0.0)
                        )
                    load_gradients(dlogits, query, key, num_tokens, num_keys, start_shared, end_shared, dl_shared)
                    T.sync_threads()
                    T.clear(scores)
                    T.gemm(k_shared, q_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for i, j in T.Parallel(TILE, TILE):
                        own = T.min(T.truncdiv(j, heads), queries - 1)
                        ds[i, j] = T.if_then_else(
                            T.And(j < number, scores[i, j] > 0.0), dl_shared[own, i] * weight_shared[j], T.float32(0.0)
                        )
                    T.gemm(ds, q_shared, acc, policy=T.GemmWarpPolicy.FullRow)
                T.sync_threads()
            for i, d in T.Parallel(TILE, dim):
                if key + i < num_keys:
                    dk[key + i, d] = acc[i, d]

    return mqa_logits_dk
