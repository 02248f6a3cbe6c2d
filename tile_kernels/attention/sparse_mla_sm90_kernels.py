"""The kernel of latent attention over listed keys for Hopper, by wgmma. See `sparse_mla` for the formula.

A thread block owns up to 64 heads of one token. Keys come in blocks of 64, in two stages. The first warpgroup computes
scores and weights, the left half of the result from its registers, and passes the weights through shared memory. The
second one computes the right half. A third one loads: cp.async, 16 bytes per thread, zeros where there is no key.

Keys come from the L2 cache, and their loads must overlap products. So a half of a block is freed as soon as its product
is done. The same half of the next but one block is requested at once. Its place in memory is known by then: lists are
read a block ahead.
"""

import math

import torch

from tile_kernels.attention.mla_decode_kernels import LISTED, LN2, LOG2E, OWN_BARRIERS, VECTOR
from tile_kernels.attention.pack_mla_cache import GROUPS, LATENT, ROTARY
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.device.softmax import finite_top, softmax_step

WARPGROUP = 128
ROWS = 64
KEYS = 64
STAGES = 2
HALF = LATENT // 2
LEFT, RIGHT = 0, 1
#: Threads that copy a row of a block, and the rows of a thread.
LANES = 8
OWN_ROWS = KEYS * LANES // WARPGROUP
#: Registers of a thread of the warpgroup that loads, and of those that multiply; together those of an SM.
LOADING_REGISTERS, MULTIPLYING_REGISTERS = 72, 216
#: Named barriers: queries are there, weights are there, weights are used, factors are there, one for each half of o.
QUERIES, WEIGHTS, USED, FACTORS, STORE = 8, 9, 10, 11, 12


@macro
def load_queries(q, unit, row, q_shared, half: int):
    """Start to copy half of the latent channels of the queries; a warp copies a row, zeros where there is no head."""
    heads = q.shape[2]
    thread = T.get_thread_binding() % WARPGROUP
    column = thread % 32 * VECTOR
    for step in T.unroll(ROWS // 4):
        i = step * 4 + thread // 32
        T.ptx_cp_async(
            T.access_ptr(q_shared[half, i, column], 'w', VECTOR),
            T.access_ptr(q[unit, 0, T.min(row + i, heads - 1), half * HALF + column], 'r', VECTOR),
            VECTOR,
            row + i < heads,
        )


@macro
def load_query_rotary(q, unit, row, q_rotary_shared):
    """Start to copy the rotary channels of the queries."""
    heads = q.shape[2]
    thread = T.get_thread_binding() % WARPGROUP
    column = thread % LANES * VECTOR
    for step in T.unroll(ROWS * LANES // WARPGROUP):
        i = step * (WARPGROUP // LANES) + thread // LANES
        T.ptx_cp_async(
            T.access_ptr(q_rotary_shared[i, column], 'w', VECTOR),
            T.access_ptr(q[unit, 0, T.min(row + i, heads - 1), LATENT + column], 'r', VECTOR),
            VECTOR,
            row + i < heads,
        )


@macro
def read_list(table, unit, num_keys, block, listed):
    """Read the keys of this thread's rows of a block; -1 behind the list."""
    thread = T.get_thread_binding() % WARPGROUP
    for r in T.unroll(OWN_ROWS):
        listed[r] = -1
        place = block * KEYS + r * (WARPGROUP // LANES) + thread // LANES
        if place < num_keys:
            listed[r] = table[unit, place]


@macro
def load_columns(x, key, x_shared, which, first: int, width: int):
    """Start to copy `width` columns of this thread's rows."""
    thread = T.get_thread_binding() % WARPGROUP
    column = thread % LANES * VECTOR
    for r in T.unroll(OWN_ROWS):
        for part in T.unroll(width // (LANES * VECTOR)):
            T.ptx_cp_async(
                T.access_ptr(
                    x_shared[which, r * (WARPGROUP // LANES) + thread // LANES, part * LANES * VECTOR + column],
                    'w',
                    VECTOR,
                ),
                T.access_ptr(x[0, T.max(key[r], 0), first + part * LANES * VECTOR + column], 'r', VECTOR),
                VECTOR,
                key[r] >= 0,
            )


@macro
def store_half(acc, factor, q_shared, o, part, unit, row, half: int):
    """Scale half of the columns and store them, by way of the memory of the queries."""
    heads = o.shape[3]
    T.sync_threads(STORE + half, WARPGROUP)  # products have read the queries
    for i, d in T.Parallel(ROWS, HALF):
        q_shared[half, i, d] = acc[i, d] * factor[i]
    T.sync_threads(STORE + half, WARPGROUP)
    thread = T.get_thread_binding() % WARPGROUP
    column = thread % 32 * VECTOR
    for step in T.unroll(ROWS // 4):
        i = step * 4 + thread // 32
        if row + i < heads:
            for e in T.vectorized(VECTOR):
                o[part, unit, 0, row + i, half * HALF + column + e] = q_shared[half, i, column + e]


@kernel(
    pass_configs=OWN_BARRIERS,
    serves=lambda static, gpu: gpu.has_wgmma and not static.fp8 and static.keys == LISTED and not static.split,
)
def sparse_mla_sm90_kernel(
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
):
    """Parameters are those of `mla_decode_kernel`; a batch is a token, and keys are not `short`."""
    batch, tokens, heads = T.dynamic('batch'), T.dynamic('tokens'), T.dynamic('heads')
    pages, page_size, units, width = (T.dynamic(name) for name in ('pages', 'page_size', 'units', 'width'))
    num_lengths, num_splits = T.dynamic('num_lengths'), T.dynamic('num_splits')
    elem = T.dtype(dtype)
    q_strides = [T.dynamic(f'q_stride{dim}') for dim in range(3)]
    kv_strides = [T.dynamic(f'kv_stride{dim}') for dim in range(2)]
    inf = math.inf

    @T.prim_func
    def sparse_mla_sm90(
        q: T.StridedTensor((batch, tokens, heads, LATENT + ROTARY), (*q_strides, 1), elem),
        latent: T.StridedTensor((pages, page_size, LATENT), (*kv_strides, 1), elem),
        factors: T.Tensor((pages, page_size, GROUPS), T.float32),
        rotary: T.StridedTensor((pages, page_size, ROTARY), (*kv_strides, 1), elem),
        table: T.Tensor((units, width), T.int32),
        lengths: T.Tensor((num_lengths,), T.int32),
        sink: T.Tensor((heads,), T.dtype(sink_dtype or torch.float32)),
        o: T.Tensor((num_splits, batch, tokens, heads, LATENT), elem),
        lse: T.Tensor((num_splits, batch, tokens, heads), T.float32),
        max_logits: T.Tensor((batch, tokens, heads), T.float32),
        num_units: T.int32,
        unit_tokens: T.int32,
        later: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(heads, ROWS) * num_units, num_splits, threads=3 * WARPGROUP) as (pid, part):
            for stride in q_strides + kv_strides:
                T.assume(stride % VECTOR == 0)
            q_shared = T.alloc_shared((2, ROWS, HALF), elem)  # in the end the result
            q_rotary_shared = T.alloc_shared((ROWS, ROTARY), elem)
            kv_shared = T.alloc_shared((STAGES * 2, KEYS, HALF), elem)
            rotary_shared = T.alloc_shared((STAGES, KEYS, ROTARY), elem)
            weight_shared = T.alloc_shared((ROWS, KEYS), elem)
            key_shared = T.alloc_shared((STAGES, KEYS), T.int32)
            factor_shared = T.alloc_shared((ROWS,), T.float32)
            last_shared = T.alloc_shared((ROWS,), T.float32)
            listed = T.alloc_local((OWN_ROWS,), T.int32)
            key = T.alloc_local((OWN_ROWS,), T.int32)
            scores = T.alloc_fragment((ROWS, KEYS), T.float32)
            weights = T.alloc_fragment((ROWS, KEYS), elem)
            acc = [T.alloc_fragment((ROWS, HALF), T.float32) for _ in (LEFT, RIGHT)]
            factor = [T.alloc_fragment((ROWS,), T.float32) for _ in (LEFT, RIGHT)]
            top, total = T.alloc_fragment((ROWS,), T.float32), T.alloc_fragment((ROWS,), T.float32)
            block_top, block_sum = T.alloc_fragment((ROWS,), T.float32), T.alloc_fragment((ROWS,), T.float32)
            # every loading thread arrives when its copies are complete; for the left half also when keys are written
            full = [T.alloc_barrier([count * WARPGROUP] * STAGES) for count in (2, 1)]
            free = [T.alloc_barrier([WARPGROUP] * STAGES) for _ in (LEFT, RIGHT)]

            unit = T.alloc_var(T.int32)  # variables, lest divisions be repeated
            row = T.alloc_var(T.int32)
            num_keys = T.alloc_var(T.int32)
            unit = T.truncdiv(pid, T.truncdiv(heads + ROWS - 1, ROWS))
            row = (pid - unit * T.truncdiv(heads + ROWS - 1, ROWS)) * ROWS
            num_keys = width
            if shortened:
                num_keys = T.max(T.min(lengths[unit], width), 0)
            num_blocks = T.truncdiv(num_keys + KEYS - 1, KEYS)

            with T.ws(2):
                T.dec_max_nreg(LOADING_REGISTERS)
                read_list(table, unit, num_keys, 0, listed)
                for step in T.serial(num_blocks):
                    stage = step % STAGES
                    parity = (T.truncdiv(step, STAGES) & 1) ^ 1
                    for r in T.unroll(OWN_ROWS):
                        key[r] = T.if_then_else(listed[r] < page_size, listed[r], -1)
                    read_list(table, unit, num_keys, step + 1, listed)
                    T.mbarrier_wait_parity(free[LEFT][stage], parity)
                    load_columns(latent, key, kv_shared, stage * 2 + LEFT, 0, HALF)
                    load_columns(rotary, key, rotary_shared, stage, 0, ROTARY)
                    T.cp_async_barrier_noinc(full[LEFT][stage])
                    if T.get_thread_binding() % LANES == 0:
                        for r in T.unroll(OWN_ROWS):
                            key_shared[
                                stage, r * (WARPGROUP // LANES) + T.get_thread_binding() % WARPGROUP // LANES
                            ] = key[r]
                    T.mbarrier_arrive(full[LEFT][stage])
                    T.mbarrier_wait_parity(free[RIGHT][stage], parity)
                    load_columns(latent, key, kv_shared, stage * 2 + RIGHT, HALF, HALF)
                    T.cp_async_barrier_noinc(full[RIGHT][stage])

            with T.ws(0):
                T.inc_max_nreg(MULTIPLYING_REGISTERS)
                load_queries(q, unit, row, q_shared, LEFT)
                load_query_rotary(q, unit, row, q_rotary_shared)
                T.ptx_commit_group()
                T.fill(top, -inf)
                T.clear(total)
                T.clear(acc[LEFT])
                T.ptx_wait_group(0)
                T.fence_proxy_async()
                T.sync_threads(QUERIES, 2 * WARPGROUP)
                for step in T.serial(num_blocks):
                    stage = step % STAGES
                    parity = T.truncdiv(step, STAGES) & 1
                    T.mbarrier_wait_parity(full[LEFT][stage], parity)
                    T.fence_proxy_async()
                    T.wgmma_gemm(
                        q_shared[LEFT, :, :],
                        kv_shared[stage * 2 + LEFT, :, :],
                        scores,
                        transpose_B=True,
                        clear_accum=True,
                    )
                    T.wgmma_gemm(q_rotary_shared, rotary_shared[stage, :, :], scores, transpose_B=True)
                    T.mbarrier_wait_parity(full[RIGHT][stage], parity)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_shared[RIGHT, :, :], kv_shared[stage * 2 + RIGHT, :, :], scores, transpose_B=True)
                    T.wait_wgmma(0)
                    for i, j in T.Parallel(ROWS, KEYS):
                        scores[i, j] = T.if_then_else(key_shared[stage, j] >= 0, scores[i, j] * scale, -inf)
                    softmax_step(scores, top, total, factor[LEFT], block_top, block_sum)
                    T.copy(scores, weights)
                    if step > 0:
                        T.sync_threads(USED, 2 * WARPGROUP)
                    for i in T.Parallel(ROWS):
                        factor_shared[i] = factor[LEFT][i]
                    T.copy(weights, weight_shared)
                    T.fence_proxy_async()
                    T.named_barrier_arrive(WEIGHTS, 2 * WARPGROUP)
                    for i, d in T.Parallel(ROWS, HALF):
                        acc[LEFT][i, d] = acc[LEFT][i, d] * factor[LEFT][i]
                    T.wgmma_gemm(weights, kv_shared[stage * 2 + LEFT, :, :], acc[LEFT])
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(free[LEFT][stage])
                for i in T.Parallel(ROWS):
                    factor[LEFT][i] = total[i]
                    if sink_dtype is not None:
                        number = T.cast(sink[T.min(row + i, heads - 1)], T.float32) * LOG2E
                        factor[LEFT][i] = factor[LEFT][i] + T.exp2(number - finite_top(top[i]))
                    factor[LEFT][i] = T.if_then_else(total[i] != 0.0, 1.0 / factor[LEFT][i], T.float32(0.0))
                    last_shared[i] = factor[LEFT][i]
                T.named_barrier_arrive(FACTORS, 2 * WARPGROUP)
                store_half(acc[LEFT], factor[LEFT], q_shared, o, part, unit, row, LEFT)
                for i in T.Parallel(ROWS):
                    if row + i < heads:
                        if logits:
                            max_logits[unit, 0, row + i] = top[i] * LN2
                        lse[part, unit, 0, row + i] = T.if_then_else(
                            total[i] != 0.0, (top[i] + T.log2(total[i])) * LN2, T.float32(inf)
                        )

            with T.ws(1):
                T.inc_max_nreg(MULTIPLYING_REGISTERS)
                load_queries(q, unit, row, q_shared, RIGHT)
                T.ptx_commit_group()
                T.clear(acc[RIGHT])
                T.ptx_wait_group(0)
                T.fence_proxy_async()
                T.named_barrier_arrive(QUERIES, 2 * WARPGROUP)
                for step in T.serial(num_blocks):
                    stage = step % STAGES
                    T.mbarrier_wait_parity(full[RIGHT][stage], T.truncdiv(step, STAGES) & 1)
                    T.fence_proxy_async()
                    T.sync_threads(WEIGHTS, 2 * WARPGROUP)
                    for i in T.Parallel(ROWS):
                        factor[RIGHT][i] = factor_shared[i]
                    for i, d in T.Parallel(ROWS, HALF):
                        acc[RIGHT][i, d] = acc[RIGHT][i, d] * factor[RIGHT][i]
                    T.wgmma_gemm(weight_shared, kv_shared[stage * 2 + RIGHT, :, :], acc[RIGHT])
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(free[RIGHT][stage])
                    if step + 1 < num_blocks:
                        T.named_barrier_arrive(USED, 2 * WARPGROUP)
                T.sync_threads(FACTORS, 2 * WARPGROUP)
                for i in T.Parallel(ROWS):
                    factor[RIGHT][i] = last_shared[i]
                store_half(acc[RIGHT], factor[RIGHT], q_shared, o, part, unit, row, RIGHT)

    return sparse_mla_sm90
