"""Kernels of `fp8_mqa_logits` and `fp8_paged_mqa_logits`, which describe the formula.

A thread block owns some queries, all heads of them, and goes over tiles of 64 keys. The product has keys as rows and
(query, head) as columns. So the sum over heads is one over registers of a thread and then of four lanes. The kernels
compute relu(x) as (x + |x|) / 2: one instruction that keeps NaN, and the half is in the weights.

With wgmma, one warpgroup loads tiles by TMA for two others, which take turns. The tensor cores work for one of them
while the other adds. With mma, codes are widened to bfloat16, in which they and their products are exact.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T, macro

FP8 = torch.float8_e4m3fn
TILE = 64
WARPGROUP = 128
RING = 6
MEMBERS = 2
#: Registers per thread of the loading warpgroup and of the others.
LOADING_REGISTERS, MULTIPLYING_REGISTERS = 24, 240
#: (query, head) pairs of a thread block, at most.
MAX_PAIRS = 256
#: Named barriers of the multiplying warpgroups; the compiler uses the first ones.
BARRIER = 8


def num_queries(heads: int, tokens: int) -> int:
    """Queries of a thread block: those of a sequence, or a power of two; columns of a product come in sixteens."""
    if tokens:
        return tokens if tokens * heads % 16 == 0 else tokens + 1
    return 1 << (MAX_PAIRS // heads).bit_length() - 1


@dataclass(frozen=True)
class Queries:
    """Bounds of the queries of a block, and the tiles that any of them sees, of all tiles of a row."""

    start: Any
    end: Any
    first: Any
    last: Any
    tiles: Any


@macro
def find_queries(start, end, pid, num_rows, num_columns, queries: int, tokens: int, wide: bool, part, num_parts):
    """Bounds of the queries of block `pid`; the tiles are those of one part. All threads take part."""
    start_shared, end_shared = T.alloc_shared((queries,), T.int32), T.alloc_shared((queries,), T.int32)
    first = T.alloc_var(T.int32, init=1 << 30)
    last = T.alloc_var(T.int32, init=0)
    tx = T.get_thread_binding()
    if tx < queries:
        start_shared[tx] = 0
        end_shared[tx] = 0
        if tokens:
            if tx < tokens:
                if wide:
                    end_shared[tx] = T.max(T.min(end[pid, tx], num_columns), 0)
                else:
                    end_shared[tx] = T.max(T.min(end[pid, 0] - tokens + tx + 1, num_columns), 0)
        elif pid * queries + tx < num_rows:
            start_shared[tx] = T.max(T.min(start[pid * queries + tx], num_columns), 0)
            end_shared[tx] = T.max(T.min(end[pid * queries + tx, 0], num_columns), 0)
    T.sync_threads()
    for b in T.serial(queries):
        if start_shared[b] < end_shared[b]:
            first = T.min(first, T.truncdiv(start_shared[b], TILE))
            last = T.max(last, T.truncdiv(end_shared[b] + TILE - 1, TILE))
    first = T.min(first, last)
    own = T.alloc_var(T.int32)
    own = T.truncdiv(last - first + num_parts - 1, num_parts)
    own_first = T.alloc_var(T.int32)
    own_last = T.alloc_var(T.int32)
    own_first = T.min(first + part * own, last)
    own_last = T.min(own_first + own, last)
    # Tiles that nobody sees are cleaned by all parts in turn: from `last` on, then those before `first`.
    return Queries(start_shared, end_shared, own_first, own_last, (first, last))


def sees(queries: Any, b: Any, column: Any) -> Any:
    """Whether query b of the block sees a key."""
    return T.And(column >= queries.start[b], column < queries.end[b])


@macro
def clean_tiles(logits, queries, row, num_rows, num_columns, part, num_parts, size: int):
    """Write -inf to the tiles that no query of the block sees."""
    first, last = queries.tiles
    unseen = T.truncdiv(num_columns + TILE - 1, TILE) - (last - first)
    for step in T.serial(T.truncdiv(T.max(unseen - part, 0) + num_parts - 1, num_parts)):
        number = step * num_parts + part
        tile = T.if_then_else(number < first, number, number + last - first)
        for b, i in T.Parallel(size, TILE):
            if T.And(row + b < num_rows, tile * TILE + i < num_columns):
                logits[row + b, tile * TILE + i] = -math.inf


@macro
def store_logits(logits, queries, sums_shared, row, end_row, tile, page, num_pages, num_columns, clean: bool):
    """Store a tile of logits: inside the bounds, and -inf outside if `clean`; a page that does not exist is NaN."""
    for b, i in T.Parallel(sums_shared.shape[0], TILE):
        column = tile * TILE + i
        inside = sees(queries, b, column)
        if T.And(row + b < end_row, column < num_columns):
            if clean:
                value = T.if_then_else(page >= num_pages, T.float32(math.nan), sums_shared[b, i])
                logits[row + b, column] = T.if_then_else(T.And(inside, page >= 0), value, T.float32(-math.inf))
            elif inside:
                value = T.if_then_else(page >= num_pages, T.float32(math.nan), sums_shared[b, i])
                logits[row + b, column] = T.if_then_else(page >= 0, value, T.float32(-math.inf))


# Kernels ------------------------------------------------------------------------------------


@kernel(
    pass_configs={
        'TL_DISABLE_THREAD_STORAGE_SYNC': True,
        'TL_DISABLE_SHARED_MEMORY_REUSE': True,
        'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    },
    serves=lambda static, gpu: gpu.has_wgmma and static.dim >= 64,
)
def mqa_logits_kernel(heads: int, dim: int, tokens: int, wide: bool, clean: bool):
    """`tokens` is the number of queries of a sequence with keys in pages, or 0; with `wide` each has its own length."""
    num_pairs, num_rows, num_columns = T.dynamic('num_pairs'), T.dynamic('num_rows'), T.dynamic('num_columns')
    num_pages, page_tokens = T.dynamic('num_pages'), T.dynamic('page_tokens')
    num_starts, num_ends, end_columns = T.dynamic('num_starts'), T.dynamic('num_ends'), T.dynamic('end_columns')
    tables, table_columns = T.dynamic('tables'), T.dynamic('table_columns')
    kv_stride, sf_stride, out_stride = T.dynamic('kv_stride'), T.dynamic('sf_stride'), T.dynamic('out_stride')
    queries = num_queries(heads, tokens)
    pairs = queries * heads
    step_rows = tokens or queries
    elem = T.dtype(FP8)

    @T.prim_func
    def mqa_logits(
        q: T.Tensor((num_pairs, dim), elem),
        kv: T.StridedTensor((num_pages, page_tokens, dim), (kv_stride, dim, 1), elem),
        sf: T.StridedTensor((num_pages, page_tokens), (sf_stride, 1), T.float32),
        weights: T.Tensor((num_pairs,), T.float32),
        start: T.Tensor((num_starts,), T.int32),
        end: T.Tensor((num_ends, end_columns), T.int32),
        block_table: T.Tensor((tables, table_columns), T.int32),
        logits: T.StridedTensor((num_rows, num_columns), (out_stride, 1), T.float32),
        num_blocks: T.int32,
        num_parts: T.int32,
    ):
        with T.Kernel(num_blocks, num_parts, threads=(MEMBERS + 1) * WARPGROUP) as (pid, part):
            q_shared = T.alloc_shared((pairs, dim), elem)
            kv_shared = T.alloc_shared((RING, TILE, dim), elem)
            sf_shared = T.alloc_shared((RING, TILE), T.float32)
            page_shared = T.alloc_shared((RING,), T.int32)
            weight_shared = T.alloc_shared((pairs,), T.float32)
            out_shared = [T.alloc_shared((queries, TILE), T.float32) for _ in range(MEMBERS)]
            acc_frag = [T.alloc_fragment((TILE, pairs), T.float32) for _ in range(MEMBERS)]
            weight_frag = [T.alloc_fragment((pairs,), T.float32) for _ in range(MEMBERS)]
            sums_frag = [T.alloc_fragment((TILE, queries), T.float32) for _ in range(MEMBERS)]
            q_full = T.alloc_barrier([WARPGROUP])
            full, free = T.alloc_barrier([WARPGROUP] * RING), T.alloc_barrier([WARPGROUP] * RING)
            page = T.alloc_var(T.int32, init=0)
            pages = T.alloc_var(T.int32, init=0)
            tx = T.get_thread_binding()
            row = pid * step_rows
            end_row = T.min(row + step_rows, num_rows)
            own = find_queries(start, end, pid, num_rows, num_columns, queries, tokens, wide, part, num_parts)
            for step in T.serial(T.ceildiv(pairs, (MEMBERS + 1) * WARPGROUP)):
                pair = step * ((MEMBERS + 1) * WARPGROUP) + tx
                if pair < pairs:
                    weight_shared[pair] = 0.0
                    if row * heads + pair < num_pairs:
                        weight_shared[pair] = weights[row * heads + pair] * 0.5
            T.sync_threads()

            with T.ws(MEMBERS):
                T.dec_max_nreg(LOADING_REGISTERS)
                if own.first < own.last:
                    T.tma_copy(q[row * heads : row * heads + pairs, 0:dim], q_shared, barrier=q_full[0])
                    T.barrier_arrive(q_full[0])
                for step in T.serial(own.last - own.first):
                    slot = T.truncmod(step, RING)
                    tile = own.first + step
                    if tokens:
                        if step % 32 == 0:
                            pages = -1
                            if tile + tx % 32 < T.min(own.last, table_columns):
                                pages = block_table[pid, tile + tx % 32]
                        page = T.shfl_sync(pages, step % 32)
                    T.mbarrier_wait_parity(free[slot], (T.truncdiv(step, RING) + 1) & 1)
                    source = T.max(T.min(page, num_pages - 1), 0)
                    key = 0 if tokens else tile * TILE
                    T.tma_copy(kv[source, key : key + TILE, 0:dim], kv_shared[slot, :, :], barrier=full[slot])
                    T.tma_copy(sf[source, key : key + TILE], sf_shared[slot, :], barrier=full[slot])
                    if tx % WARPGROUP == 0:
                        page_shared[slot] = page
                    T.barrier_arrive(full[slot])
            for member in (0, 1):
                with T.ws(member):
                    T.inc_max_nreg(MULTIPLYING_REGISTERS)
                    acc, weight, sums = acc_frag[member], weight_frag[member], sums_frag[member]
                    if own.first < own.last:
                        T.copy(weight_shared, weight)
                        T.mbarrier_wait_parity(q_full[0], 0)
                    for turn in T.serial(T.truncdiv(own.last - own.first - member + 1, MEMBERS)):
                        step = turn * MEMBERS + member
                        slot = T.truncmod(step, RING)
                        T.mbarrier_wait_parity(full[slot], T.truncdiv(step, RING) & 1)
                        T.wgmma_gemm(kv_shared[slot, :, :], q_shared, acc, transpose_B=True, clear_accum=True)
                        T.wait_wgmma(0)
                        for i, j in T.Parallel(TILE, pairs):
                            acc[i, j] = (acc[i, j] + T.abs(acc[i, j])) * weight[j]
                        T.reduce_sum(T.reshape(acc, (TILE, queries, heads)), sums, dim=2)
                        for i, b in T.Parallel(TILE, queries):
                            out_shared[member][b, i] = sums[i, b] * sf_shared[slot, i]
                        page = page_shared[slot]
                        T.sync_threads(BARRIER + member, WARPGROUP)
                        T.barrier_arrive(free[slot])
                        store_logits(
                            logits, own, out_shared[member], row, end_row, own.first + step, page, num_pages,
                            num_columns, clean,
                        )  # fmt: skip
                        T.sync_threads(BARRIER + member, WARPGROUP)
                    if clean:
                        clean_tiles(
                            logits, own, row, end_row, num_columns, part * MEMBERS + member, num_parts * MEMBERS,
                            step_rows,
                        )  # fmt: skip

    return mqa_logits


@kernel(pass_configs=PLAIN_PRODUCTS)
def portable_mqa_logits_kernel(heads: int, dim: int, tokens: int, wide: bool, clean: bool):
    """The same with `T.gemm` on codes widened to bfloat16."""
    num_pairs, num_rows, num_columns = T.dynamic('num_pairs'), T.dynamic('num_rows'), T.dynamic('num_columns')
    num_pages, page_tokens = T.dynamic('num_pages'), T.dynamic('page_tokens')
    num_starts, num_ends, end_columns = T.dynamic('num_starts'), T.dynamic('num_ends'), T.dynamic('end_columns')
    tables, table_columns = T.dynamic('tables'), T.dynamic('table_columns')
    kv_stride, sf_stride, out_stride = T.dynamic('kv_stride'), T.dynamic('sf_stride'), T.dynamic('out_stride')
    queries = num_queries(heads, tokens)
    pairs = queries * heads
    step_rows = tokens or queries
    elem = T.dtype(FP8)

    @T.prim_func
    def portable_mqa_logits(
        q: T.Tensor((num_pairs, dim), elem),
        kv: T.StridedTensor((num_pages, page_tokens, dim), (kv_stride, dim, 1), elem),
        sf: T.StridedTensor((num_pages, page_tokens), (sf_stride, 1), T.float32),
        weights: T.Tensor((num_pairs,), T.float32),
        start: T.Tensor((num_starts,), T.int32),
        end: T.Tensor((num_ends, end_columns), T.int32),
        block_table: T.Tensor((tables, table_columns), T.int32),
        logits: T.StridedTensor((num_rows, num_columns), (out_stride, 1), T.float32),
        num_blocks: T.int32,
        num_parts: T.int32,
    ):
        with T.Kernel(num_blocks, num_parts, threads=WARPGROUP) as (pid, part):
            T.assume(kv_stride % 16 == 0)
            q_shared = T.alloc_shared((pairs, dim), T.bfloat16)
            kv_shared = T.alloc_shared((TILE, dim), T.bfloat16)
            out_shared = T.alloc_shared((queries, TILE), T.float32)
            weight_shared = T.alloc_shared((pairs,), T.float32)
            acc = T.alloc_fragment((TILE, pairs), T.float32)
            sums = T.alloc_fragment((TILE, queries), T.float32)
            page = T.alloc_var(T.int32, init=0)
            row = pid * step_rows
            end_row = T.min(row + step_rows, num_rows)
            own = find_queries(start, end, pid, num_rows, num_columns, queries, tokens, wide, part, num_parts)
            if own.first < own.last:
                for j in T.Parallel(pairs):
                    weight_shared[j] = T.if_then_else(
                        row * heads + j < num_pairs, weights[T.min(row * heads + j, num_pairs - 1)] * 0.5, 0.0
                    )
                for j, d in T.Parallel(pairs, dim):
                    q_shared[j, d] = T.if_then_else(
                        row * heads + j < num_pairs,
                        T.cast(T.cast(q[T.min(row * heads + j, num_pairs - 1), d], T.float32), T.bfloat16),
                        T.bfloat16(0.0),
                    )
            for step in T.serial(own.last - own.first):
                tile = own.first + step
                if tokens:
                    page = -1
                    if tile < table_columns:
                        page = block_table[pid, tile]
                source = T.max(T.min(page, num_pages - 1), 0)
                key = 0 if tokens else tile * TILE
                for i, d in T.Parallel(TILE, dim):
                    kv_shared[i, d] = T.cast(
                        T.cast(kv[source, T.min(key + i, page_tokens - 1), d], T.float32), T.bfloat16
                    )
                T.clear(acc)
                T.gemm(kv_shared, q_shared, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(TILE, pairs):
                    acc[i, j] = (acc[i, j] + T.abs(acc[i, j])) * weight_shared[j]
                T.reduce_sum(T.reshape(acc, (TILE, queries, heads)), sums, dim=2)
                for i, b in T.Parallel(TILE, queries):
                    out_shared[b, i] = sums[i, b] * sf[source, T.min(key + i, page_tokens - 1)]
                store_logits(logits, own, out_shared, row, end_row, tile, page, num_pages, num_columns, clean)
            if clean:
                clean_tiles(logits, own, row, end_row, num_columns, part, num_parts, step_rows)

    return portable_mqa_logits


MQA_LOGITS = mqa_logits_kernel, portable_mqa_logits_kernel
