"""The backward kernel of attention for Hopper. See `attend_bwd_kernels` for the formulas.

A thread block owns keys of one kv head. It goes over the blocks of 64 rows that see them, of all query heads of that kv
head. One warpgroup loads by TMA, two multiply. Scores and their gradients are transposed,

    s' = k q'      dp' = v do'      p' = exp2(scale * s' - below)      ds' = p' * (dp' - delta)

Up to 128 columns, a thread block owns 128 keys, 64 for each multiplying warpgroup. There p' and ds' multiply do and q
from registers: dv += p' do and dk += ds' q. Of wider tiles, it owns 64 keys. There each multiplying warpgroup computes
the weights of 32 rows; by shared memory one gets ds' for dk, the other p' for dv.

Through shared memory ds' also gives dq = ds k, whose columns the two warpgroups divide. The loading warpgroup adds dq
to memory in float32 by TMA, in any order. In the deterministic mode the kernel leaves dq to `attend_dq_kernel`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.attention._macros import DENSE, PACKED, find_block, find_keys, used_length
from tile_kernels.attention.attend_kernels import strided
from tile_kernels.attention.attend_sm90_kernels import (
    BLOCK,
    BOTH,
    LOADING_REGISTERS,
    MEMBERS,
    MULTIPLYING_REGISTERS,
    ROLES,
    ROWS,
    WARPGROUP,
    Masks,
    make_ring,
    release,
    tile_columns,
    wait_free,
    wait_full,
)
from tile_kernels.core.gpus import Gpu
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro

BLOCK_M = 64  # rows of a step
STAGES = 2


def serves(static: Any, gpu: Gpu) -> bool:
    """Tiles of up to 256 columns, on GPUs with wgmma."""
    return gpu.has_wgmma and max(static.head_dim, static.value_dim) <= 256


def bwd_keys(head_dim: int, value_dim: int) -> int:
    """Keys of a thread block: 64 of each multiplying warpgroup, or of both where tiles have more than 128 columns."""
    return BLOCK if max(head_dim, value_dim) <= 128 else ROWS


def dq_columns(wide: int, member: int) -> tuple[int, int]:
    """The columns of dq that a multiplying warpgroup computes; they begin at a multiple of 64."""
    cut = -(-wide // 128) * 64
    return (0, cut) if member == 0 else (cut, wide)


@macro
def find_whole(key, keys: int, num_keys, num_rows, left, right, banded: bool):
    """The first and the last row at which a step may begin so that all its rows exist and see all keys of the block."""
    first_row, last_row = T.alloc_var(T.int32, init=0), T.alloc_var(T.int32, init=0)
    last_row = T.if_then_else(key + keys > num_keys, -1, num_rows - BLOCK_M)
    if banded:
        offset = num_keys - num_rows
        first_row = key + keys - 1 - right - offset
        last_row = T.min(last_row, key + left - offset - BLOCK_M + 1)
    return first_row, last_row


@macro
def zero_infinite(x_shared, slot):
    """Set what is infinite in rows of queries, or of what has their shape, to 0: some key is not seen by them.

    `below` of these rows is NaN, so the keys that they see get NaN nevertheless. Both multiplying warpgroups take part.
    """
    _, num_rows, columns = x_shared.shape
    thread = T.get_thread_binding()
    threads, vectors = MEMBERS * WARPGROUP, columns // 8
    numbers = T.alloc_local((8,), x_shared.dtype)
    odd = T.alloc_var(T.int32, init=0)
    for step in T.unroll(num_rows * vectors // threads, unroll_factor=1):
        vector = step * threads + thread
        row, column = T.truncdiv(vector, vectors), T.truncmod(vector, vectors) * 8
        for e in T.vectorized(8):
            numbers[e] = x_shared[slot, row, column + e]
        odd = 0
        for e in T.unroll(8):
            if T.Not(T.isfinite(T.cast(numbers[e], T.float32))):
                odd = 1
                numbers[e] = T.cast(0.0, x_shared.dtype)
        if odd != 0:
            for e in T.vectorized(8):
                x_shared[slot, row, column + e] = numbers[e]


@macro
def hide_keys(k_shared, v_shared, odd_shared, limit):
    """Set keys and values from `limit` on to 0, and what is infinite in other keys: it must not reach dq of all rows.

    `odd_shared` marks the others; returns whether there are any. Both multiplying warpgroups take part.
    """
    keys, columns = k_shared.shape
    thread = T.get_thread_binding()
    threads, vectors = MEMBERS * WARPGROUP, columns // 8
    lanes = vectors & -vectors  # of a warp, for a key
    odd = T.alloc_var(T.int32, init=0)
    hidden = T.alloc_var(T.int32, init=0)
    for step in T.unroll(keys * lanes // threads, unroll_factor=1):
        row = T.truncdiv(step * threads + thread, lanes)
        odd = 0
        hidden = T.if_then_else(row >= limit, 1, 0)
        for part in T.unroll(vectors // lanes, unroll_factor=1):
            for e in T.unroll(8):
                column = (part * lanes + T.truncmod(thread, lanes)) * 8 + e
                if T.Not(T.isfinite(T.cast(k_shared[row, column], T.float32))):
                    odd = 1
                    k_shared[row, column] = T.cast(0.0, k_shared.dtype)
                if hidden != 0:
                    k_shared[row, column] = T.cast(0.0, k_shared.dtype)
        for distance in [d for d in (16, 8, 4, 2, 1) if d < lanes]:  # lanes of the same key
            odd = odd | T.shfl_xor(odd, distance)
        if T.truncmod(thread, lanes) == 0:
            odd_shared[row] = T.if_then_else(hidden != 0, 0, odd)
    if limit < keys:
        for step in T.unroll(keys * v_shared.shape[1] // threads, unroll_factor=1):
            number = step * threads + thread
            if T.truncdiv(number, v_shared.shape[1]) >= limit:
                v_shared[T.truncdiv(number, v_shared.shape[1]), T.truncmod(number, v_shared.shape[1])] = 0.0
    T.fence_proxy_async()
    T.sync_threads(BOTH, threads)
    odd = 0
    for step in T.unroll(keys // 32):
        odd = odd | odd_shared[step * 32 + thread % 32]
    return T.any_sync(odd)


@dataclass(frozen=True)
class Rows:
    """The rings of rows and what belongs to them."""

    q_ring: Any
    do_ring: Any
    q_shared: Any
    do_shared: Any
    below: Any
    delta: Any


@dataclass(frozen=True)
class Products:
    """Scores and their gradients of a multiplying warpgroup, and where its keys and its rows start in shared memory."""

    scores: Any
    dp: Any
    p: Any
    keys: int
    rows: int


@macro
def begin(rows, products, k_shared, step, care):
    """Wait for the rows of a step and start the product that gives the scores."""
    stages, keys, num_rows = rows.q_shared.shape[0], products.keys, products.scores.shape[1]
    slot = T.truncmod(step, stages)
    wait_full(rows.q_ring, step)
    wait_full(rows.do_ring, step)
    if care:
        zero_infinite(rows.q_shared, slot)
        zero_infinite(rows.do_shared, slot)
        T.fence_proxy_async()
        T.sync_threads(BOTH, MEMBERS * WARPGROUP)
    T.wgmma_gemm(
        k_shared[keys : keys + ROWS, :],
        rows.q_shared[slot, products.rows : products.rows + num_rows, :],
        products.scores,
        transpose_B=True,
        clear_accum=True,
    )


@macro
def weigh(rows, products, v_shared, odd_shared, odd_keys, masks, step, low, care):
    """The weights of a step, and the gradients of weights. `low` + i is the first key that row i sees."""
    stages, keys, shift = rows.q_shared.shape[0], products.keys, products.rows
    scores, dp, p = products.scores, products.dp, products.p
    num_keys, num_rows = scores.shape
    slot = T.truncmod(step, stages)
    T.wgmma_gemm(
        v_shared[keys : keys + ROWS, :],
        rows.do_shared[slot, shift : shift + num_rows, :],
        dp,
        transpose_B=True,
        clear_accum=True,
    )
    if masks.capped:
        T.wait_wgmma(0)
        for j, i in T.Parallel(num_keys, num_rows):
            scores[j, i] = T.tanh(scores[j, i] * masks.scale)
            dp[j, i] = (dp[j, i] - rows.delta[slot, shift + i]) * (1.0 - scores[j, i] * scores[j, i])
            scores[j, i] = T.exp2(scores[j, i] * masks.cap - rows.below[slot, shift + i])
    else:
        T.wait_wgmma(1)
        for j, i in T.Parallel(num_keys, num_rows):
            scores[j, i] = T.exp2(scores[j, i] * masks.scale - rows.below[slot, shift + i])
    if masks.banded:  # noqa: SIM102 - known when the kernel is built
        if care:  # weights of rows that do not exist are 0, and of keys that do not exist harmless
            own_low = T.alloc_var(T.int32)
            own_low = low + shift - T.truncdiv(step, 1 << 30)  # minus 0; see below
            for j, i in T.Parallel(num_keys, num_rows):
                beyond = T.cast(j - i - own_low, T.uint32)  # with a constant `own_low`, all would be kept
                inside = beyond <= T.cast(masks.left, T.uint32) + T.cast(masks.right, T.uint32)
                scores[j, i] = T.if_then_else(inside, scores[j, i], T.float32(0.0))
    if odd_keys != 0:
        for j, i in T.Parallel(num_keys, num_rows):
            if T.And(odd_shared[keys + j] != 0, scores[j, i] != 0.0):
                scores[j, i] = math.nan
    T.copy(scores, p)
    T.wait_wgmma(0)


@kernel(pass_configs=ROLES, serves=serves)
def attend_bwd_sm90_kernel(
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    packed: bool,
    q_used: bool,
    k_used: bool,
    banded: bool,
    capped: bool,
    with_dq: bool,
):
    """`with_dq` adds dq without its scale to memory that holds 0."""
    q_batch, q_tokens, q_heads = T.dynamic('q_batch'), T.dynamic('q_tokens'), T.dynamic('q_heads')
    k_batch, k_tokens, kv_heads = T.dynamic('k_batch'), T.dynamic('k_tokens'), T.dynamic('kv_heads')
    num_q, num_k, num_used_q, num_used_k = (T.dynamic(name) for name in ('num_q', 'num_k', 'num_used_q', 'num_used_k'))
    num_rows_all = T.dynamic('num_rows_all')
    elem = T.dtype(dtype)
    wide, wide_v = tile_columns(head_dim), tile_columns(value_dim)
    keys = bwd_keys(head_dim, value_dim)
    apart = keys == BLOCK  # whether each multiplying warpgroup has its own keys, or each its own sums
    stages = STAGES if wide + wide_v <= 320 else 1
    own_rows = BLOCK_M if apart else BLOCK_M // MEMBERS  # of the scores of a multiplying warpgroup
    writers = [member for member in range(MEMBERS) if dq_columns(wide, member)[0] < wide]
    q_type, q_strides = strided('q', (q_batch, q_tokens, q_heads, head_dim), elem)
    k_type, k_strides = strided('k', (k_batch, k_tokens, kv_heads, head_dim), elem)
    v_type, v_strides = strided('v', (k_batch, k_tokens, kv_heads, value_dim), elem)

    @T.prim_func
    def attend_bwd_sm90(
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
        dq_sum: T.Tensor((q_batch, q_tokens, q_heads, head_dim), T.float32),
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
        with T.Kernel(num_blocks, kv_heads, threads=(MEMBERS + 1) * WARPGROUP) as (index, head):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            k_shared = T.alloc_shared((keys, wide), elem)
            v_shared = T.alloc_shared((keys, wide_v), elem)
            q_shared = T.alloc_shared((stages, BLOCK_M, wide), elem)
            do_shared = T.alloc_shared((stages, BLOCK_M, wide_v), elem)
            ds_shared = T.alloc_shared((2, keys, BLOCK_M), elem)
            p_shared = ds_shared if apart else T.alloc_shared((2, keys, BLOCK_M), elem)
            dq_shared = T.alloc_shared((BLOCK_M, wide), T.float32)
            below_shared = T.alloc_shared((stages, BLOCK_M), T.float32)
            delta_shared = T.alloc_shared((stages, BLOCK_M), T.float32)
            odd_shared = T.alloc_shared((keys,), T.int32)
            kv_full = T.alloc_barrier([WARPGROUP])
            dq_full, dq_free = T.alloc_barrier([len(writers) * WARPGROUP]), T.alloc_barrier([WARPGROUP])
            q_ring, do_ring = make_ring(stages, MEMBERS * WARPGROUP), make_ring(stages, MEMBERS * WARPGROUP)
            scores_of = [T.alloc_fragment((ROWS, own_rows), T.float32) for _ in range(MEMBERS)]
            dp_of = [T.alloc_fragment((ROWS, own_rows), T.float32) for _ in range(MEMBERS)]
            p_of = [T.alloc_fragment((ROWS, own_rows), elem) for _ in range(MEMBERS)]
            ds_of = [T.alloc_fragment((ROWS, own_rows), elem) for _ in range(MEMBERS)]
            dk_of = [T.alloc_fragment((ROWS, wide), T.float32) for _ in range(MEMBERS if apart else 1)]
            dv_of = [T.alloc_fragment((ROWS, wide_v), T.float32) for _ in range(MEMBERS if apart else 1)]

            group = T.alloc_var(T.int32)
            group = T.truncdiv(q_heads, kv_heads)
            block = find_block(cu_seqlens_k, index, num_sequences, bits, k_tokens, 1, keys, packed)
            key = block.row
            num_keys = used_length(seqused_k, block.sequence, num_sequences, block.length, k_used)
            layout = PACKED if packed else DENSE
            own = find_keys(cu_seqlens_q, seqused_q, block.sequence, num_sequences, q_tokens, layout, q_used)
            offset = num_keys - own.number  # position of the first row
            first = T.alloc_var(T.int32, init=0)
            count = T.alloc_var(T.int32, init=0)  # blocks of rows of a head
            if key < num_keys:
                last = T.alloc_var(T.int32, init=0)
                last = T.truncdiv(own.number + BLOCK_M - 1, BLOCK_M)
                if banded:
                    last_row = T.min(T.min(key + keys, num_keys) + left - offset, own.number)
                    first = T.truncdiv(T.max(key - right - offset, 0), BLOCK_M)
                    last = T.truncdiv(T.max(last_row, 0) + BLOCK_M - 1, BLOCK_M)
                count = T.max(last - first, 0)
            steps = count * group

            with T.ws(MEMBERS):
                T.dec_max_nreg(LOADING_REGISTERS)
                thread = T.get_thread_binding() - MEMBERS * WARPGROUP
                if count > 0:
                    key_token = block.start + key
                    T.tma_copy(
                        k[block.batch, key_token : key_token + keys, head, 0:wide],  # type: ignore[index]
                        k_shared,
                        barrier=kv_full[0],
                    )
                    T.tma_copy(
                        v[block.batch, key_token : key_token + keys, head, 0:wide_v],  # type: ignore[index]
                        v_shared,
                        barrier=kv_full[0],
                    )
                    T.barrier_arrive(kv_full[0])
                late = stages if with_dq else 0  # dq of a step is added when its stage is filled again
                for step in T.serial(T.if_then_else(count > 0, steps + late, 0)):
                    if step < steps:
                        own_head = T.truncdiv(step, count)
                        row = (first + step - own_head * count) * BLOCK_M
                        token = own.start + row
                        slot = T.truncmod(step, stages)
                        wait_free(q_ring, step)
                        T.tma_copy(
                            q[own.batch, token : token + BLOCK_M, head * group + own_head, 0:wide],  # type: ignore[index]
                            q_shared[slot, :, :],
                            barrier=q_ring.full[slot],
                        )
                        if thread < BLOCK_M:
                            below_shared[slot, thread] = math.inf
                            delta_shared[slot, thread] = 0.0
                            if row + thread < own.number:
                                entry = (own.batch * q_tokens + token + thread) * q_heads + head * group + own_head
                                below_shared[slot, thread] = below[entry]
                                delta_shared[slot, thread] = delta[entry]
                        T.barrier_arrive(q_ring.full[slot])
                        wait_free(do_ring, step)
                        T.tma_copy(
                            do[own.batch, token : token + BLOCK_M, head * group + own_head, 0:wide_v],
                            do_shared[slot, :, :],
                            barrier=do_ring.full[slot],
                        )
                        T.barrier_arrive(do_ring.full[slot])
                    if with_dq:  # noqa: SIM102 - known when the kernel is built
                        if step >= late:
                            done = step - late
                            done_head = T.truncdiv(done, count)
                            done_token = own.start + (first + done - done_head * count) * BLOCK_M
                            T.mbarrier_wait_parity(dq_full[0], done & 1)
                            T.atomic_add(
                                dq_sum[own.batch, done_token : done_token + BLOCK_M, head * group + done_head, 0:wide],
                                dq_shared,
                                use_tma=True,
                            )
                            T.barrier_arrive(dq_free[0])
            for member in (0, 1):
                with T.ws(member):
                    T.inc_max_nreg(MULTIPLYING_REGISTERS)
                    scores, dp, p, ds = scores_of[member], dp_of[member], p_of[member], ds_of[member]
                    gives_dk, gives_dv = apart or member == 0, apart or member == 1
                    dk_acc, dv_acc = dk_of[member if apart else 0], dv_of[member if apart else 0]
                    own_start = member * ROWS if apart else 0  # of keys
                    shift = 0 if apart else member * own_rows  # of rows
                    start_column, end_column = dq_columns(wide, member)
                    if with_dq and member in writers:
                        dq_acc = T.alloc_fragment((BLOCK_M, end_column - start_column), T.float32)
                    own_key = key + own_start
                    first_row, last_row = find_whole(key, keys, num_keys, own.number, left, right, banded)
                    first_low = T.alloc_var(T.int32)
                    first_low = offset - own_key - left
                    odd_keys = T.alloc_var(T.int32, init=0)
                    if gives_dk:
                        T.clear(dk_acc)
                    if gives_dv:
                        T.clear(dv_acc)
                    if count > 0:
                        T.mbarrier_wait_parity(kv_full[0], 0)
                        odd_keys = hide_keys(k_shared, v_shared, odd_shared, num_keys - key)
                    rings = Rows(q_ring, do_ring, q_shared, do_shared, below_shared, delta_shared)
                    products = Products(scores, dp, p, own_start, shift)
                    masks = Masks(scale, cap, left, right, banded, capped)
                    for step in T.serial(steps):
                        slot = T.truncmod(step, stages)
                        row = (first + step - T.truncdiv(step, count) * count) * BLOCK_M
                        care = T.Or(row < first_row, row > last_row)
                        begin(rings, products, k_shared, step, care)
                        weigh(rings, products, v_shared, odd_shared, odd_keys, masks, step, first_low + row, care)
                        if apart:
                            T.wgmma_gemm(p, do_shared[slot, :, :], dv_acc)
                        for j, i in T.Parallel(ROWS, own_rows):  # the rounded weights spare registers
                            weight = T.cast(p[j, i], T.float32)
                            other = dp[j, i] if capped else dp[j, i] - delta_shared[slot, shift + i]
                            dp[j, i] = T.if_then_else(weight == 0.0, T.float32(0.0), weight * other)
                        T.copy(dp, ds)
                        ds_slot = T.truncmod(step, 2)
                        if apart:
                            T.wgmma_gemm(ds, q_shared[slot, :, :], dk_acc)
                        if with_dq or not apart:
                            T.copy(ds, ds_shared[ds_slot, own_start : own_start + ROWS, shift : shift + own_rows])
                            if not apart:
                                T.copy(p, p_shared[ds_slot, :, shift : shift + own_rows])
                            T.fence_proxy_async()
                            T.sync_threads(BOTH, MEMBERS * WARPGROUP)
                        if not apart and gives_dk:
                            T.wgmma_gemm(ds_shared[ds_slot, :, :], q_shared[slot, :, :], dk_acc)
                        if not apart and gives_dv:
                            T.wgmma_gemm(p_shared[ds_slot, :, :], do_shared[slot, :, :], dv_acc)
                        if with_dq and member in writers:
                            T.wgmma_gemm(
                                ds_shared[ds_slot, :, :],
                                k_shared[:, start_column:end_column],
                                dq_acc,
                                transpose_A=True,
                                clear_accum=True,
                            )
                            T.wait_wgmma(1)
                        else:
                            T.wait_wgmma(0)
                        release(q_ring, step)
                        release(do_ring, step)
                        if with_dq and member in writers:
                            T.wait_wgmma(0)
                            T.mbarrier_wait_parity(dq_free[0], (step + 1) & 1)
                            T.copy(dq_acc, dq_shared[:, start_column:end_column])
                            T.fence_proxy_async()
                            T.barrier_arrive(dq_full[0])
                    if gives_dk:
                        for j, d in T.Parallel(ROWS, wide):
                            if T.And(own_key + j < block.length, T.truncdiv(d, 8) * 8 < head_dim):
                                dk[block.batch, block.start + own_key + j, head, d] = T.if_then_else(
                                    own_key + j < num_keys, dk_acc[j, d] * out_scale, T.float32(0.0)
                                )
                    if gives_dv:
                        for j, d in T.Parallel(ROWS, wide_v):
                            if T.And(own_key + j < block.length, T.truncdiv(d, 8) * 8 < value_dim):
                                dv[block.batch, block.start + own_key + j, head, d] = T.if_then_else(
                                    own_key + j < num_keys, dv_acc[j, d], T.float32(0.0)
                                )

    return attend_bwd_sm90
