"""Kernels of latent attention, by mma on every GPU. See `mla_decode` for the formula.

All heads share keys of 576 channels, whose first 512 are the values; or of 512 channels, which are values as a whole. A
thread block owns a tile of rows. With few heads and pages, row r of a sequence is head r % heads of token r // heads.
The causal mask then differs inside a tile. With more heads, or with lists of keys, rows are heads of one token; a
causal mask only shortens its keys.

Keys come in blocks of 32. While a block is used, cp.async loads the next: 16 bytes per thread, zeros where there is no
key. An fp8 block is loaded as it is and widened to the model dtype in shared memory. Warps stand in two groups behind
each 16 rows; each group owns half of the columns of scores and of values. Weights pass through shared memory.

A key that must not exist, because its page id is too large, has the score NaN, and so have all rows that meet it.
"""

import math
from typing import Any

import torch

from tile_kernels.attention.pack_mla_cache import (
    CODES,
    FACTOR_BYTES,
    GROUP,
    GROUPS,
    LATENT,
    ROTARY,
    SMALL_GROUP,
    factor_of,
)
from tile_kernels.core.gpus import Gpu
from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import WARP, T, begin_early, macro
from tile_kernels.device.softmax import finite_top, softmax_step

#: How keys are found: by a table of pages and lengths, or by a list for every token. SINGLE has rows of one token.
#: BOXED has these and pages of whole blocks of 64 keys.
PAGED, SINGLE, BOXED, LISTED = 'paged', 'single', 'boxed', 'listed'
#: Heads of a tile whose rows may belong to several tokens, at most.
PACKED_HEADS = 32

BLOCK_N = 32
VECTOR = 8  # channels of a 16-byte access; 16 codes
#: Page id of a key that must not exist; any other negative one is a hole.
WRONG = -(1 << 31) + 1
LN2 = math.log(2)
#: Every index is in bounds by what the kernels say themselves; they also say where threads wait for each other.
OWN_BARRIERS = {
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
}
PORTABLE = {**PLAIN_PRODUCTS, **OWN_BARRIERS}
LOG2E = math.log2(math.e)


def tile_rows(num_rows: int) -> int:
    """Rows of a tile: the next of 16, 32 and 64."""
    return 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64


def choose(
    dtype: torch.dtype,
    fp8: bool,
    keys: str,
    shortened: bool,
    causal: bool,
    sink_dtype: torch.dtype | None,
    split: bool,
    logits: bool,
    tall: bool,
    short: bool,
    num_rows: int,
    gpu: Gpu,
) -> dict:
    """Tall tiles read keys less often. GPUs with little shared memory take 32 rows and one stage."""
    small = gpu.smem_per_block < 150 << 10
    block_m = min(tile_rows(num_rows), 32 if small else 64)
    return dict(
        block_m=block_m, stages=1 if fp8 or (small and block_m > 16) else 2, threads=128 if block_m == 16 else 256
    )


# Parts of the kernels -----------------------------------------------------------------------


@macro
def find_keys(table, lengths, batch, token, num_tokens, later, width, page_size, num_pages, keys: str, shortened: bool):
    """The number of keys of a unit, and whether its sequence is wrong: too long, or with a page behind its own keys.

    Pages of its own keys are checked when they are loaded. With `later` a token does not see the keys behind it.
    """
    num_keys = T.alloc_var(T.int32)
    is_wrong = T.alloc_var(T.int32, init=0)
    num_keys = width
    if keys == LISTED:
        if shortened:
            num_keys = T.max(T.min(lengths[batch], width), 0)
    else:
        num_keys = T.max(lengths[batch], 0)
        if num_keys > width * page_size:
            num_keys = 0
            is_wrong = 1
        if keys != PAGED:
            length = T.alloc_var(T.int32)
            length = T.truncdiv(num_keys + page_size - 1, page_size)
            num_keys = T.max(num_keys - later * (num_tokens - 1 - token), 0)
            own = T.truncdiv(num_keys + page_size - 1, page_size)
            for page in T.serial(length - own):
                if table[batch, own + page] >= num_pages:
                    is_wrong = 1
    return num_keys, is_wrong


@macro
def find_block(table, unit, num_keys, block, page_size, num_pages, keys: str, page_shared, offset_shared, slot):
    """Find page and offset of every key of a block."""
    thread = T.get_thread_binding()
    page = T.alloc_var(T.int32, init=-1)
    found = T.alloc_var(T.int32, init=0)
    if thread < BLOCK_N:
        page = -1
        found = 0
        key = block * BLOCK_N + thread
        if key < num_keys:
            if keys != LISTED:
                page = T.truncdiv(key, page_size)
                found = key - page * page_size
                page = table[unit, page]
                if page >= num_pages:
                    page = WRONG
            else:
                found = table[unit, key]
                if found >= 0:
                    page = T.truncdiv(found, page_size)
                    found = found - page * page_size
                    if page >= num_pages:
                        page = -1
        page_shared[slot, thread] = page
        offset_shared[slot, thread] = T.if_then_else(page < 0, 0, found)


@macro
def load_block(x, page_shared, offset_shared, slot, x_shared, stage, width: int, vector: int, threads: int):
    """Start to copy `width` channels of the keys of a block; zeros where there is no key."""
    lanes = width // vector
    for step in T.unroll(-(-BLOCK_N * lanes // threads)):
        index = step * threads + T.get_thread_binding()
        j = index // lanes
        column = index % lanes * vector
        if j < BLOCK_N:
            T.ptx_cp_async(
                T.access_ptr(x_shared[stage, j, column], 'w', vector),
                T.access_ptr(x[T.max(page_shared[slot, j], 0), offset_shared[slot, j], column], 'r', vector),
                vector,
                page_shared[slot, j] >= 0,
            )


@macro
def widen_short(codes_shared, factor_shared, rotary_shared, stage, kv_shared, elem):
    """The same for keys of 512 channels, whose last 64 come as they are."""
    for j, d in T.Parallel(BLOCK_N, CODES):
        factor = factor_of(factor_shared[0, j, T.truncdiv(d, SMALL_GROUP)])
        kv_shared[0, j, d] = T.cast(T.cast(codes_shared[0, j, d], T.float32) * factor, elem)
    for j, d in T.Parallel(BLOCK_N, ROTARY):
        kv_shared[0, j, CODES + d] = rotary_shared[stage, j, d]


@macro
def widen(codes_shared, factor_shared, kv_shared, elem):
    """Turn the codes of a block into numbers of the model dtype."""
    for j, d in T.Parallel(BLOCK_N, LATENT):
        number = T.cast(codes_shared[0, j, d], T.float32) * factor_shared[0, j, T.truncdiv(d, GROUP)]
        kv_shared[0, j, d] = T.cast(number, elem)


@macro
def hide_infinite(kv_shared, stage, acc, token_shared, offset, key):
    """Rows must not meet values they do not see, which may be inf or NaN: weight 0 would not hide these.

    Such values are replaced by 0 for the product; rows that see them get them as they are.
    """
    odd = T.alloc_fragment((BLOCK_N, 32), T.float32)
    odd_rows = T.alloc_fragment((BLOCK_N,), T.float32)
    odd_any = T.alloc_fragment((1,), T.float32)
    flag_shared = T.alloc_shared((1,), T.float32)
    T.clear(odd_rows)
    for part in T.serial(LATENT // 32):
        for j, d in T.Parallel(BLOCK_N, 32):
            number = T.cast(kv_shared[stage, j, part * 32 + d], T.float32)
            odd[j, d] = T.if_then_else(T.isfinite(number), 0.0, 1.0)
        T.reduce_max(odd, odd_rows, dim=1, clear=False)
    T.reduce_max(odd_rows, odd_any, dim=0)
    T.sync_threads()
    if T.get_thread_binding() == 0:
        flag_shared[0] = odd_any[0]
    T.sync_threads()
    if flag_shared[0] != 0.0:
        for j in T.unroll(BLOCK_N, unroll_factor=1):  # rare: code is spared
            for i, d in T.Parallel(acc.shape[0], LATENT):
                value = T.cast(kv_shared[stage, j, d], T.float32)
                sees = key + j <= token_shared[i] + offset
                if T.And(sees, T.Not(T.isfinite(value))):
                    acc[i, d] = acc[i, d] + value
        T.sync_threads()
        for j, d in T.Parallel(BLOCK_N, LATENT):
            if T.Not(T.isfinite(T.cast(kv_shared[stage, j, d], T.float32))):
                kv_shared[stage, j, d] = T.cast(0.0, kv_shared.dtype)
    T.sync_threads()


# Attention ----------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(block_m=(16, 32, 64), stages=(1, 2), threads=(128, 256)),
    pass_configs=PORTABLE,
    fixed='block_m threads',
)
def mla_decode_kernel(
    dtype: torch.dtype,
    fp8: bool,
    keys: str,
    shortened: bool,
    causal: bool,
    sink_dtype: torch.dtype | None,
    split: bool,
    logits: bool,
    tall: bool,
    short: bool,
    *,
    block_m: int,
    stages: int,
    threads: int,
):
    """`latent` is the cache, or the codes of an fp8 one, whose `factors` and `rotary` channels come beside it.

    With `short`, keys have 512 channels, and the last ones of an fp8 cache are in `rotary`.
    """
    batch, tokens, heads = T.dynamic('batch'), T.dynamic('tokens'), T.dynamic('heads')
    pages, page_size, units, width = (T.dynamic(name) for name in ('pages', 'page_size', 'units', 'width'))
    num_lengths, num_splits = T.dynamic('num_lengths'), T.dynamic('num_splits')
    elem = T.dtype(dtype)
    stored = T.float8_e4m3fn if fp8 else elem
    q_strides = [T.dynamic(f'q_stride{dim}') for dim in range(3)]

    def cached(name: str, columns: int, cache_elem: Any) -> Any:
        strides = [T.dynamic(f'{name}_stride{dim}') for dim in range(2)]
        return T.StridedTensor((pages, page_size, columns), (*strides, 1), cache_elem), strides

    columns = CODES if short and fp8 else LATENT  # of the cache that `latent` holds
    groups = FACTOR_BYTES if short else GROUPS
    factor_elem = T.uint8 if short else T.float32
    latent_type, latent_strides = cached('latent', columns, stored)
    factor_type, factor_strides = cached('factor', groups, factor_elem)
    rotary_type, rotary_strides = cached('rotary', ROTARY, elem)
    inf, nan = math.inf, math.nan
    raw = 2 if fp8 else 1  # rotary channels of an fp8 cache need no widening, so two stages of their own
    rotary_stages = max(stages, raw)

    @T.prim_func
    def mla_decode(
        q: T.StridedTensor((batch, tokens, heads, LATENT if short else LATENT + ROTARY), (*q_strides, 1), elem),
        latent: latent_type,
        factors: factor_type,
        rotary: rotary_type,
        table: T.Tensor((units, width), T.int32),
        lengths: T.Tensor((num_lengths,), T.int32),
        sink: T.Tensor((heads,), T.dtype(sink_dtype or torch.float32)),
        o: T.Tensor((num_splits, batch, tokens, heads, LATENT), T.float32 if split else elem),
        lse: T.Tensor((num_splits, batch, tokens, heads), T.float32),
        max_logits: T.Tensor((batch, tokens, heads), T.float32),
        num_units: T.int32,
        unit_tokens: T.int32,
        later: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(unit_tokens * heads, block_m) * num_units, num_splits, threads=threads) as (pid, part):
            for stride in q_strides:
                T.assume(stride % VECTOR == 0)
            for stride in latent_strides:
                T.assume(stride % (16 if fp8 else VECTOR) == 0)
            for stride in factor_strides if fp8 else ():
                T.assume(stride % groups == 0)
            for stride in rotary_strides if fp8 or not short else ():
                T.assume(stride % VECTOR == 0)
            q_shared = T.alloc_shared((block_m, LATENT), elem)
            q_rotary_shared = T.alloc_shared((block_m, ROTARY), elem)
            kv_shared = T.alloc_shared((stages, BLOCK_N, LATENT), elem)
            rotary_shared = T.alloc_shared((rotary_stages, BLOCK_N, ROTARY), elem)
            weight_shared = T.alloc_shared((block_m, BLOCK_N), elem)
            page_shared = T.alloc_shared((2, BLOCK_N), T.int32)
            offset_shared = T.alloc_shared((2, BLOCK_N), T.int32)
            scores = T.alloc_fragment((block_m, BLOCK_N), T.float32)
            acc = T.alloc_fragment((block_m, LATENT), T.float32)
            top, total = T.alloc_fragment((block_m,), T.float32), T.alloc_fragment((block_m,), T.float32)
            factor = T.alloc_fragment((block_m,), T.float32)
            block_top, block_sum = T.alloc_fragment((block_m,), T.float32), T.alloc_fragment((block_m,), T.float32)
            if fp8:
                codes_shared = T.alloc_shared((1, BLOCK_N, columns), stored)
                factor_shared = T.alloc_shared((1, BLOCK_N, groups), factor_elem)

            num_rows = unit_tokens * heads
            unit = T.alloc_var(T.int32)  # variables, lest divisions be repeated
            row = T.alloc_var(T.int32)
            unit = T.truncdiv(pid, T.truncdiv(num_rows + block_m - 1, block_m))
            row = (pid - unit * T.truncdiv(num_rows + block_m - 1, block_m)) * block_m
            own_batch = T.alloc_var(T.int32)
            own_token = T.alloc_var(T.int32, init=0)
            own_batch = unit
            if keys != PAGED:
                own_batch = T.truncdiv(unit, tokens)
                own_token = unit - own_batch * tokens

            num_keys, is_wrong = find_keys(
                table, lengths, own_batch, own_token, tokens, later, width, page_size, pages, keys, shortened
            )
            listed = unit if keys == LISTED else own_batch
            first = T.alloc_var(T.int32, init=0)
            last = T.alloc_var(T.int32)
            last = T.truncdiv(num_keys + BLOCK_N - 1, BLOCK_N)
            if split:
                every = T.truncdiv(last + num_splits - 1, num_splits)
                first = T.min(part * every, last)
                last = T.min(first + every, last)
            offset = num_keys - unit_tokens  # position of the first token among the keys

            token_shared = T.alloc_shared((block_m,), T.int32)
            head_shared = T.alloc_shared((block_m,), T.int32)
            thread = T.get_thread_binding()
            if thread < block_m:
                token_shared[thread] = own_token + T.truncdiv(row + thread, heads)
                head_shared[thread] = T.truncmod(row + thread, heads)
            T.sync_threads()
            zero = T.cast(0.0, elem)
            for i, d in T.Parallel(block_m, LATENT):
                q_shared[i, d] = T.if_then_else(
                    row + i < num_rows, q[own_batch, token_shared[i], head_shared[i], d], zero
                )
            if not short:
                for i, d in T.Parallel(block_m, ROTARY):
                    q_rotary_shared[i, d] = T.if_then_else(
                        row + i < num_rows, q[own_batch, token_shared[i], head_shared[i], LATENT + d], zero
                    )
            T.fill(top, -inf)
            T.clear(total)
            T.clear(acc)

            if first < last:
                find_block(table, listed, num_keys, first, page_size, pages, keys, page_shared, offset_shared, 0)
                T.sync_threads()
                if fp8:
                    load_block(latent, page_shared, offset_shared, 0, codes_shared, 0, columns, 16, threads)
                    load_block(factors, page_shared, offset_shared, 0, factor_shared, 0, groups, groups, threads)
                else:
                    load_block(latent, page_shared, offset_shared, 0, kv_shared, 0, LATENT, VECTOR, threads)
                if fp8 or not short:
                    load_block(rotary, page_shared, offset_shared, 0, rotary_shared, 0, ROTARY, VECTOR, threads)
                T.ptx_commit_group()
            for step in T.serial(T.max(last - first, 0)):
                slot, following = step % 2, (step + 1) % 2
                stage = step % stages
                key = (first + step) * BLOCK_N
                if first + step + 1 < last:
                    find_block(
                        table,
                        listed,
                        num_keys,
                        first + step + 1,
                        page_size,
                        pages,
                        keys,
                        page_shared,
                        offset_shared,
                        following,
                    )
                T.ptx_wait_group(0)
                T.sync_threads()
                if fp8:
                    if short:
                        widen_short(codes_shared, factor_shared, rotary_shared, slot, kv_shared, elem)
                    else:
                        widen(codes_shared, factor_shared, kv_shared, elem)
                    T.sync_threads()
                if first + step + 1 < last:
                    if fp8:
                        load_block(latent, page_shared, offset_shared, following, codes_shared, 0, columns, 16, threads)
                        load_block(
                            factors, page_shared, offset_shared, following, factor_shared, 0, groups, groups, threads
                        )
                        load_block(
                            rotary,
                            page_shared,
                            offset_shared,
                            following,
                            rotary_shared,
                            following,
                            ROTARY,
                            VECTOR,
                            threads,
                        )
                    elif stages == 2:
                        load_block(
                            latent, page_shared, offset_shared, following, kv_shared, following, LATENT, VECTOR, threads
                        )
                        if not short:
                            load_block(
                                rotary,
                                page_shared,
                                offset_shared,
                                following,
                                rotary_shared,
                                following,
                                ROTARY,
                                VECTOR,
                                threads,
                            )
                T.ptx_commit_group()

                T.gemm(
                    q_shared,
                    kv_shared[stage, :, :],
                    scores,
                    transpose_B=True,
                    clear_accum=True,
                    policy=T.GemmWarpPolicy.FullRow,
                )
                if not short:
                    T.gemm(
                        q_rotary_shared,
                        rotary_shared[step % rotary_stages, :, :],
                        scores,
                        transpose_B=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                crosses = key + BLOCK_N - 1 > offset
                for i, j in T.Parallel(block_m, BLOCK_N):
                    scores[i, j] = T.if_then_else(page_shared[slot, j] >= 0, scores[i, j] * scale, -inf)
                if causal:  # noqa: SIM102 - known when the kernel is built
                    if crosses:
                        for i, j in T.Parallel(block_m, BLOCK_N):
                            scores[i, j] = T.if_then_else(key + j <= token_shared[i] + offset, scores[i, j], -inf)
                if keys != LISTED:
                    for i, j in T.Parallel(block_m, BLOCK_N):
                        scores[i, j] = T.if_then_else(page_shared[slot, j] == WRONG, nan, scores[i, j])
                softmax_step(scores, top, total, factor, block_top, block_sum)
                T.copy(scores, weight_shared)
                for i, d in T.Parallel(block_m, LATENT):
                    acc[i, d] = acc[i, d] * factor[i]
                if causal:  # noqa: SIM102
                    if crosses:
                        hide_infinite(kv_shared, stage, acc, token_shared, offset, key)
                T.sync_threads()
                T.gemm(weight_shared, kv_shared[stage, :, :], acc, policy=T.GemmWarpPolicy.FullRow)
                if stages == 1 and not fp8:  # noqa: SIM102
                    if first + step + 1 < last:
                        T.sync_threads()
                        load_block(latent, page_shared, offset_shared, following, kv_shared, 0, LATENT, VECTOR, threads)
                        if not short:
                            load_block(
                                rotary, page_shared, offset_shared, following, rotary_shared, 0, ROTARY, VECTOR, threads
                            )
                        T.ptx_commit_group()

            nothing = T.float32(-inf if split else inf)
            for i in T.Parallel(block_m):
                token, head = token_shared[i], head_shared[i]
                seen = total[i] != 0.0
                factor[i] = total[i]
                if sink_dtype is not None:
                    number = T.cast(sink[head], T.float32) * LOG2E
                    factor[i] = factor[i] + T.exp2(number - finite_top(top[i]))
                factor[i] = T.if_then_else(seen, 1.0 / factor[i], T.float32(0.0))
                if is_wrong != 0:
                    factor[i] = nan
                if row + i < num_rows:
                    if logits:
                        max_logits[own_batch, token, head] = top[i] * LN2
                    lse[part, own_batch, token, head] = T.if_then_else(
                        is_wrong != 0, nan, T.if_then_else(seen, (top[i] + T.log2(total[i])) * LN2, nothing)
                    )
            for i, d in T.Parallel(block_m, LATENT):
                if row + i < num_rows:
                    o[part, own_batch, token_shared[i], head_shared[i], d] = acc[i, d] * factor[i]

    return mla_decode


# Merge of parts -----------------------------------------------------------------------------

PIECE = 128  # columns of a block: four of a thread
AHEAD = 8  # parts that a warp adds; it loads all of them at once


def merge_warps(num_parts: int) -> int:
    """Warps of a block that has so many parts to add."""
    return max(4, 1 << (-(-num_parts // AHEAD) - 1).bit_length())


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def mla_merge_kernel(dtype: torch.dtype, sink_dtype: torch.dtype | None, warps: int):
    """One block for 128 columns of a row. Warp w adds parts w, w + warps, ... in order, then sums of warps are added.

    A row without keys has +inf.
    """
    num_parts, num_rows, heads = T.dynamic('num_parts'), T.dynamic('num_rows'), T.dynamic('heads')
    elem = T.dtype(dtype)
    inf = math.inf

    @T.prim_func
    def mla_merge(
        parts: T.Tensor((num_parts, num_rows, LATENT), T.float32),
        lse_parts: T.Tensor((num_parts, num_rows), T.float32),
        sink: T.Tensor((heads,), T.dtype(sink_dtype or torch.float32)),
        o: T.Tensor((num_rows, LATENT), elem),
        lse: T.Tensor((num_rows,), T.float32),
    ):
        with T.Kernel(num_rows * (LATENT // PIECE), threads=warps * WARP) as pid:
            thread = T.get_thread_binding()
            warp, lane = thread // WARP, thread % WARP
            row = pid // (LATENT // PIECE)
            column = pid % (LATENT // PIECE) * PIECE + lane * 4
            sums_shared = T.alloc_shared((warps, PIECE), T.float32)
            totals_shared = T.alloc_shared((warps,), T.float32)
            x = T.alloc_local((AHEAD, 4), T.float32)
            lses = T.alloc_local((AHEAD,), T.float32)
            acc = T.alloc_local((4,), T.float32)
            top = T.alloc_var(T.float32, init=-inf)
            total = T.alloc_var(T.float32, init=0.0)
            weight = T.alloc_var(T.float32)
            factor = T.alloc_var(T.float32)
            begin_early()
            for i in T.unroll(AHEAD):  # parts behind the last one repeat it, with weight 0
                lses[i] = lse_parts[T.min(i * warps + warp, num_parts - 1), row]
                for e in T.vectorized(4):
                    x[i, e] = parts[T.min(i * warps + warp, num_parts - 1), row, column + e]
            for i in T.unroll(warps * AHEAD // WARP):
                top = T.max(top, lse_parts[T.min(i * WARP + lane, num_parts - 1), row])
            top = T.warp_reduce_max(top)
            if top == -inf:
                top = 0.0  # every part is empty, or NaN
            for e in T.unroll(4):
                acc[e] = 0.0
            for i in T.unroll(AHEAD):
                weight = T.exp2((lses[i] - top) * LOG2E)  # 0 for a part without keys, whose sums are 0
                weight = T.if_then_else(i * warps + warp < num_parts, weight, 0.0)
                total += weight
                for e in T.unroll(4):
                    acc[e] += weight * x[i, e]
            for e in T.vectorized(4):
                sums_shared[warp, lane * 4 + e] = acc[e]
            if lane == 0:
                totals_shared[warp] = total
            T.sync_threads()
            if warp == 0:
                total = totals_shared[0]
                for w in T.unroll(warps - 1):
                    total += totals_shared[w + 1]
                    for e in T.unroll(4):
                        acc[e] += sums_shared[w + 1, lane * 4 + e]
                factor = total
                if sink_dtype is not None:
                    factor += T.exp2((T.cast(sink[T.truncmod(row, heads)], T.float32) - top) * LOG2E)
                factor = T.if_then_else(total == 0.0, T.float32(0.0), 1.0 / factor)
                y = T.alloc_local((4,), elem)
                for e in T.unroll(4):
                    y[e] = T.cast(acc[e] * factor, elem)
                for e in T.vectorized(4):
                    o[row, column + e] = y[e]
                if column == 0:
                    lse[row] = T.if_then_else(total == 0.0, T.float32(inf), top + T.log2(total) * LN2)

    return mla_merge
