"""The forward kernel of attention for Hopper: one warpgroup loads, two multiply and take turns. See `attend`.

A thread block owns 128 rows of one query head, 64 for each multiplying warpgroup. It goes over blocks of the keys that
any of them sees. TMA fills rings of keys and of values. A warpgroup starts two products: block i of the keys with the
queries, and the weights of block i - 1 with the values. The second runs while softmax works on the scores of block i.
Weights stay in registers. Named barriers give the two warpgroups turns, so one multiplies while the other has softmax.
Thread blocks are persistent and process the longest tiles first.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.attention._macros import DENSE, PACKED, find_block, find_keys, used_length
from tile_kernels.attention.attend_kernels import LN2, LOG2E, attend_kernel, strided
from tile_kernels.core.gpus import Gpu
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.device.mask import crosses_band, first_key, in_band, last_key
from tile_kernels.device.softmax import finite_top

WARPGROUP = 128
MEMBERS = 2  # multiplying warpgroups
ROWS = 64  # rows of a multiplying warpgroup
BLOCK = MEMBERS * ROWS
LOADING_REGISTERS, MULTIPLYING_REGISTERS = 24, 240
#: Named barriers: the turn of each multiplying warpgroup, both together, each alone. TileLang uses 1 to 3.
TURN, BOTH, ALONE = 8, 10, 11
SHARED_BYTES = 227 << 10
#: Keys and values of the heads in progress stay in this many bytes of the L2 cache.
L2_BYTES = 24 << 20

#: The warpgroups use barriers of their own; an inserted barrier of all threads would deadlock.
ROLES = {
    'TL_DEVICE_COMPILE_FLAGS': ['-ftz=true'],  # exp2 is one instruction
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
}


def tile_columns(dim: int) -> int:
    """Columns of the tile of a head dimension: TMA fills those behind it with 0."""
    return -(-dim // 64) * 64


def key_block(wide: int, wide_v: int) -> int:
    """Keys of a block: as many as registers (sums, scores, weights) and shared memory allow."""
    return 64 if wide_v > 128 or wide > 192 else 128


def serves(static: Any, gpu: Gpu) -> bool:
    """All calls, on GPUs with wgmma."""
    return gpu.has_wgmma


# Tiles --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """A block of rows of one query head, and the blocks of keys it sees."""

    batch: Any
    head: Any
    start: Any  # first token of the sequence
    row: Any  # first row of the tile in the sequence
    num_rows: Any  # rows of the sequence
    used_rows: Any  # those that count
    key_batch: Any
    key_start: Any
    num_keys: Any
    first: Any  # first block of keys
    count: Any  # number of blocks of keys


@dataclass(frozen=True)
class Calls:
    """What the tiles of a call depend on."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any
    seqused_k: Any
    num_sequences: Any
    bits: Any
    q_tokens: Any
    k_tokens: Any
    q_heads: Any
    left: Any
    right: Any
    packed: bool
    q_used: bool
    k_used: bool
    banded: bool


def num_row_blocks(calls: Calls) -> Any:
    """Blocks of rows of a head: of one dense sequence, or of all packed ones with numbers to spare."""
    if calls.packed:
        return T.truncdiv(calls.q_tokens, BLOCK) + calls.num_sequences + 1
    return T.truncdiv(calls.q_tokens + BLOCK - 1, BLOCK)


def num_tiles(calls: Calls) -> Any:
    """Numbers of tiles."""
    return num_row_blocks(calls) * calls.q_heads * (1 if calls.packed else calls.num_sequences)


@macro
def find_tile(calls, turn, pid, num_blocks, section, block_n: int):
    """The tile of a thread block in a turn.

    Thread blocks get tiles in alternating order, so that their work is about equal. The keys of a section of heads stay
    in the L2 cache. Its last rows come first: with a causal mask they see the most keys.
    """
    count = T.alloc_var(T.int32, init=0)
    first = T.alloc_var(T.int32, init=0)
    blocks = num_row_blocks(calls)
    every = calls.q_heads if calls.packed else calls.q_heads * calls.num_sequences
    index = T.alloc_var(T.int32, init=0)
    index = turn * num_blocks + T.if_then_else(turn % 2 == 0, pid, num_blocks - 1 - pid)
    first_unit = T.alloc_var(T.int32, init=0)
    first_unit = T.truncdiv(index, section * blocks) * section
    inside = index - first_unit * blocks
    size = T.alloc_var(T.int32, init=0)
    size = T.max(T.min(section, every - first_unit), 1)
    part = T.alloc_var(T.int32, init=0)
    part = T.truncdiv(inside, size)
    unit = T.min(first_unit + inside - part * size, every - 1)
    number = blocks - 1 - part
    sequence_number = T.alloc_var(T.int32, init=0)
    head = T.alloc_var(T.int32, init=0)
    head = unit
    if not calls.packed:
        sequence_number = T.truncdiv(unit, calls.q_heads)
        head = unit - sequence_number * calls.q_heads
    found = find_block(
        calls.cu_seqlens_q,
        T.max(number, 0) + sequence_number * blocks,
        calls.num_sequences,
        calls.bits,
        calls.q_tokens,
        1,
        BLOCK,
        calls.packed,
    )
    used = used_length(calls.seqused_q, found.sequence, calls.num_sequences, found.length, calls.q_used)
    keys = PACKED if calls.packed else DENSE
    own = find_keys(
        calls.cu_seqlens_k, calls.seqused_k, found.sequence, calls.num_sequences, calls.k_tokens, keys, calls.k_used
    )
    offset = own.number - used
    num_rows = T.alloc_var(T.int32, init=0)
    if index < every * blocks:
        num_rows = found.length
        if found.row < used:
            end = T.alloc_var(T.int32, init=0)
            end = T.truncdiv(own.number + block_n - 1, block_n)
            if calls.banded:
                last_row = T.min(found.row + BLOCK, used) - 1
                end = T.truncdiv(last_key(last_row + offset, calls.right, own.number) + block_n - 1, block_n)
                first = T.truncdiv(first_key(found.row + offset, calls.left), block_n)
            count = T.max(end - first, 0)
    return Tile(
        found.batch, head, found.start, found.row, num_rows, used, own.batch, own.start, own.number, first, count
    )


# The rings ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Stages that the loading warpgroup fills for the others."""

    full: Any
    free: Any
    size: int


@macro
def make_ring(size: int, readers: int):
    """A ring of free stages, each read by `readers` threads."""
    return Ring(T.alloc_barrier([WARPGROUP] * size), T.alloc_barrier([readers] * size), size)


@macro
def wait_free(ring, number):
    """Wait until stage `number`, counted from the start of the kernel, is free."""
    T.mbarrier_wait_parity(ring.free[T.truncmod(number, ring.size)], (T.truncdiv(number, ring.size) + 1) & 1)


@macro
def wait_full(ring, number):
    """Wait until stage `number` is full."""
    T.mbarrier_wait_parity(ring.full[T.truncmod(number, ring.size)], T.truncdiv(number, ring.size) & 1)


@macro
def release(ring, number):
    """The calling warpgroup has read stage `number`."""
    T.barrier_arrive(ring.free[T.truncmod(number, ring.size)])


# Softmax ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stats:
    """Of every row the maximum, the sum, the factor of earlier sums, and the maximum and the sum of a block."""

    top: Any
    total: Any
    factor: Any
    block_top: Any
    block_sum: Any


@dataclass(frozen=True)
class Masks:
    """How products become scores, and which of them count."""

    scale: Any
    cap: Any
    left: Any
    right: Any
    banded: bool
    capped: bool


def needs_mask(tile: Tile, key: Any, last_position: Any, block_n: int, masks: Masks) -> Any:
    """Whether a row of the tile does not see all keys of the block; the same for both multiplying warpgroups."""
    behind = key + block_n > tile.num_keys
    if not masks.banded:
        return behind
    first_position = tile.row + tile.num_keys - tile.used_rows
    return T.Or(behind, crosses_band(first_position, last_position, key, block_n, masks.left, masks.right))


def sees(tile: Tile, position: Any, key: Any, masks: Masks) -> Any:
    """Whether the query at a position sees a key."""
    exists = key < tile.num_keys
    return T.And(exists, in_band(position, key, masks.left, masks.right)) if masks.banded else exists


@macro
def weigh(scores, stats, tile, key, position, last_position, masks):
    """Turn products of a block into weights relative to the new maximum; the scale is part of one FMA."""
    rows, columns = scores.shape
    top, total, factor, block_top, block_sum = (
        stats.top,
        stats.total,
        stats.factor,
        stats.block_top,
        stats.block_sum,
    )
    scale = T.float32(1.0) if masks.capped else masks.scale
    if masks.capped:
        for i, j in T.Parallel(rows, columns):
            scores[i, j] = masks.cap * T.tanh(scores[i, j] * masks.scale)
    if needs_mask(tile, key, last_position, columns, masks):
        for i, j in T.Parallel(rows, columns):
            scores[i, j] = T.if_then_else(sees(tile, position + i, key + j, masks), scores[i, j], -math.inf)
    T.reduce_max(scores, block_top, dim=1)
    for i in T.Parallel(rows):
        block_top[i] = T.max(top[i], block_top[i] * scale)
        factor[i] = T.exp2(top[i] - finite_top(block_top[i]))
        top[i] = block_top[i]
        block_top[i] = finite_top(block_top[i])
    for i, j in T.Parallel(rows, columns):
        scores[i, j] = T.exp2(scores[i, j] * scale - block_top[i])
    T.reduce_sum(scores, block_sum, dim=1)
    for i in T.Parallel(rows):
        total[i] = total[i] * factor[i] + block_sum[i]


@macro
def shield(values, number, acc, flags, scratch, tile, key, position, last_position, masks):
    """Before the product with the values of a block: hide what is infinite in them where some row must not see it."""
    if needs_mask(tile, key, last_position, values.shape[1], masks):
        hide_infinite(
            values,
            T.truncmod(number, values.shape[0]),
            acc,
            flags,
            scratch,
            tile,
            key,
            position,
            masks,
        )


@macro
def hide_infinite(values, slot, acc, flags, scratch, tile, key, position, masks):
    """Rows must not meet values they do not see, which may be inf or NaN: weight 0 would not hide these.

    They are replaced by 0 for the product; rows of `acc` that see them get them as they are. Both multiplying
    warpgroups take part. A flag tells of 256 numbers in order whether one of them is infinite.
    """
    _, keys, columns = values.shape
    thread = T.get_thread_binding()
    threads, vectors, groups = MEMBERS * WARPGROUP, columns // 8, flags.shape[1]
    numbers = T.alloc_local((8,), values.dtype)
    odd = T.alloc_var(T.int32, init=0)
    for step in T.unroll(keys * vectors // threads, unroll_factor=1):
        vector = step * threads + thread
        for e in T.vectorized(8):
            numbers[e] = values[slot, T.truncdiv(vector, vectors), T.truncmod(vector, vectors) * 8 + e]
        odd = 0
        for e in T.unroll(8):
            if T.Not(T.isfinite(T.cast(numbers[e], T.float32))):
                odd = 1
        odd = T.any_sync(odd)
        if thread % 32 == 0:
            flags[slot, T.truncdiv(vector, 32)] = odd
    T.sync_threads(BOTH, threads)
    odd = 0
    for step in T.unroll(-(-groups // 32)):
        odd = odd | flags[slot, T.min(step * 32 + thread % 32, groups - 1)]
    odd = T.any_sync(odd)
    if odd != 0:
        for j in T.unroll(T.min(keys, tile.num_keys - key), unroll_factor=1):  # rare: code is spared
            first, last = T.truncdiv(j * vectors, 32), T.truncdiv(j * vectors + vectors - 1, 32)
            if (flags[slot, first] | flags[slot, last]) != 0:
                for i in T.Parallel(acc.shape[0]):
                    scratch[i] = T.if_then_else(sees(tile, position + i, key + j, masks), 1.0, 0.0)
                for i, d in T.Parallel(acc.shape[0], columns):
                    value = T.cast(values[slot, j, d], T.float32)
                    counts = T.And(scratch[i] != 0.0, T.Not(T.isfinite(value)))
                    acc[i, d] = acc[i, d] + T.if_then_else(counts, value, T.float32(0.0))
        T.sync_threads(BOTH, threads)
        for step in T.unroll(keys * vectors // threads, unroll_factor=1):
            vector = step * threads + thread
            for e in T.unroll(8):
                row, column = T.truncdiv(vector, vectors), T.truncmod(vector, vectors) * 8 + e
                if T.Not(T.isfinite(T.cast(values[slot, row, column], T.float32))):
                    values[slot, row, column] = T.cast(0.0, values.dtype)
        T.fence_proxy_async()
        T.sync_threads(BOTH, threads)


# Kernel -------------------------------------------------------------------------------------


@kernel(pass_configs=ROLES, serves=serves)
def attend_sm90_kernel(
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
    """Takes the static arguments of `attend_kernel`; `scale` must be positive."""
    q_batch, q_tokens, q_heads = T.dynamic('q_batch'), T.dynamic('q_tokens'), T.dynamic('q_heads')
    k_batch, k_tokens, kv_heads = T.dynamic('k_batch'), T.dynamic('k_tokens'), T.dynamic('kv_heads')
    num_q, num_k, num_used_q, num_used_k = (T.dynamic(name) for name in ('num_q', 'num_k', 'num_used_q', 'num_used_k'))
    elem = T.dtype(dtype)
    wide, wide_v = tile_columns(head_dim), tile_columns(value_dim)
    block_n = key_block(wide, wide_v)
    ring_bytes = block_n * (wide + wide_v) * 2
    stages = 2
    apart = BLOCK * (wide + wide_v) * 2 + stages * ring_bytes + 2048 <= SHARED_BYTES
    q_type, q_strides = strided('q', (q_batch, q_tokens, q_heads, head_dim), elem)
    k_type, k_strides = strided('k', (k_batch, k_tokens, kv_heads, head_dim), elem)
    v_type, v_strides = strided('v', (k_batch, k_tokens, kv_heads, value_dim), elem)
    lse_strides = [T.dynamic(f'lse_stride{dim}') for dim in range(3)]
    lse_type = T.StridedTensor((q_batch, q_tokens, q_heads), lse_strides, T.float32)
    inf = math.inf

    @T.prim_func
    def attend_sm90(
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
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
        cap: T.float32,
        left: T.int32,
        right: T.int32,
        num_blocks: T.int32,
    ):
        with T.Kernel(num_blocks, threads=(MEMBERS + 1) * WARPGROUP) as pid:
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((MEMBERS, ROWS, wide), elem)
            k_shared = T.alloc_shared((stages, block_n, wide), elem)
            v_shared = T.alloc_shared((stages, block_n, wide_v), elem)
            if apart:
                o_shared = T.alloc_shared((MEMBERS, ROWS, wide_v), elem)
            else:
                o_shared = q_shared
            flags = T.alloc_shared((stages, block_n * wide_v // 256), T.int32)
            q_full, q_free = T.alloc_barrier([WARPGROUP] * MEMBERS), T.alloc_barrier([WARPGROUP] * MEMBERS)
            k_ring, v_ring = make_ring(stages, MEMBERS * WARPGROUP), make_ring(stages, MEMBERS * WARPGROUP)
            scores_of = [T.alloc_fragment((ROWS, block_n), T.float32) for _ in range(MEMBERS)]
            weights_of = [T.alloc_fragment((ROWS, block_n), elem) for _ in range(MEMBERS)]
            acc_of = [T.alloc_fragment((ROWS, wide_v), T.float32) for _ in range(MEMBERS)]
            rows_of = [Stats(*[T.alloc_fragment((ROWS,), T.float32) for _ in range(5)]) for _ in range(MEMBERS)]
            masks = Masks(scale, cap, left, right, banded, capped)

            calls = Calls(
                cu_seqlens_q,
                cu_seqlens_k,
                seqused_q,
                seqused_k,
                num_sequences,
                bits,
                q_tokens,
                k_tokens,
                q_heads,
                left,
                right,
                packed,
                q_used,
                k_used,
                banded,
            )
            group = T.alloc_var(T.int32)
            group = T.truncdiv(q_heads, kv_heads)
            section = T.alloc_var(T.int32)
            length = T.truncdiv(k_tokens, T.max(num_sequences, 1)) + 1 if packed else k_tokens
            section = T.max(T.truncdiv(L2_BYTES // (2 * (wide + wide_v)), length), 1) * group
            rounds = T.alloc_var(T.int32)
            rounds = T.truncdiv(num_tiles(calls) + num_blocks - 1, num_blocks)
            used = T.alloc_var(T.int32, init=0)  # blocks of keys loaded or read so far
            loads = T.alloc_var(T.int32, init=0)  # tiles of queries loaded or read so far

            with T.ws(MEMBERS):
                T.dec_max_nreg(LOADING_REGISTERS)
                for turn in T.serial(rounds):
                    tile = find_tile(calls, turn, pid, num_blocks, section, block_n)
                    head_k = T.truncdiv(tile.head, group)
                    for step in T.serial(tile.count):
                        key = tile.key_start + (tile.first + step) * block_n
                        slot = T.truncmod(used, stages)
                        wait_free(k_ring, used)
                        T.tma_copy(
                            k[tile.key_batch, key : key + block_n, head_k, 0:wide],  # type: ignore[index]
                            k_shared[slot, :, :],
                            barrier=k_ring.full[slot],
                        )
                        T.barrier_arrive(k_ring.full[slot])
                        if step == 0:
                            for member in range(MEMBERS):
                                row = tile.start + tile.row + member * ROWS
                                T.mbarrier_wait_parity(q_free[member], (loads + 1) & 1)
                                T.tma_copy(
                                    q[tile.batch, row : row + ROWS, tile.head, 0:wide],  # type: ignore[index]
                                    q_shared[member, :, :],
                                    barrier=q_full[member],
                                )
                                T.barrier_arrive(q_full[member])
                            loads = loads + 1
                        wait_free(v_ring, used)
                        T.tma_copy(
                            v[tile.key_batch, key : key + block_n, head_k, 0:wide_v],  # type: ignore[index]
                            v_shared[slot, :, :],
                            barrier=v_ring.full[slot],
                        )
                        T.barrier_arrive(v_ring.full[slot])
                        used = used + 1
            for member in (0, 1):
                with T.ws(member):
                    T.inc_max_nreg(MULTIPLYING_REGISTERS)
                    scores, weights, acc = scores_of[member], weights_of[member], acc_of[member]
                    top, total, factor = rows_of[member].top, rows_of[member].total, rows_of[member].factor
                    if member == 1:
                        T.named_barrier_arrive(TURN, MEMBERS * WARPGROUP)
                    for turn in T.serial(rounds):
                        tile = find_tile(calls, turn, pid, num_blocks, section, block_n)
                        offset = tile.num_keys - tile.used_rows
                        position = T.alloc_var(T.int32)
                        position = tile.row + member * ROWS + offset
                        last_position = T.min(tile.row + BLOCK, tile.used_rows) - 1 + offset
                        T.fill(top, -inf)
                        T.clear(total)
                        T.clear(acc)
                        if tile.count > 0:
                            T.mbarrier_wait_parity(q_full[member], loads & 1)
                            wait_full(k_ring, used)
                            T.wgmma_gemm(
                                q_shared[member, :, :],
                                k_shared[T.truncmod(used, stages), :, :],
                                scores,
                                transpose_B=True,
                                clear_accum=True,
                            )
                            T.wait_wgmma(0)
                            release(k_ring, used)
                            weigh(scores, rows_of[member], tile, tile.first * block_n, position, last_position, masks)
                            T.copy(scores, weights)
                            wait_full(v_ring, used)
                            shield(
                                v_shared,
                                used,
                                acc,
                                flags,
                                rows_of[member].block_sum,
                                tile,
                                tile.first * block_n,
                                position,
                                last_position,
                                masks,
                            )
                            used = used + 1
                            for step in T.serial(tile.count - 1):
                                key = (tile.first + step + 1) * block_n
                                wait_full(k_ring, used)
                                T.sync_threads(TURN + member, MEMBERS * WARPGROUP)
                                T.wgmma_gemm(
                                    q_shared[member, :, :],
                                    k_shared[T.truncmod(used, stages), :, :],
                                    scores,
                                    transpose_B=True,
                                    clear_accum=True,
                                )
                                T.wgmma_gemm(weights, v_shared[T.truncmod(used - 1, stages), :, :], acc)
                                T.named_barrier_arrive(TURN + 1 - member, MEMBERS * WARPGROUP)
                                T.wait_wgmma(1)
                                release(k_ring, used)
                                weigh(scores, rows_of[member], tile, key, position, last_position, masks)
                                wait_full(v_ring, used)  # its branch also keeps ptxas from moving the next wait up
                                T.wait_wgmma(0)
                                release(v_ring, used - 1)
                                for i, d in T.Parallel(ROWS, wide_v):
                                    acc[i, d] = acc[i, d] * rows_of[member].factor[i]
                                T.copy(scores, weights)
                                shield(
                                    v_shared,
                                    used,
                                    acc,
                                    flags,
                                    rows_of[member].block_sum,
                                    tile,
                                    key,
                                    position,
                                    last_position,
                                    masks,
                                )
                                used = used + 1
                            if apart:
                                T.barrier_arrive(q_free[member])
                            T.wgmma_gemm(weights, v_shared[T.truncmod(used - 1, stages), :, :], acc)
                            T.wait_wgmma(0)
                            release(v_ring, used - 1)

                        for i in T.Parallel(ROWS):
                            token = tile.row + member * ROWS + i
                            seen = T.And(token < tile.used_rows, total[i] != 0.0)
                            factor[i] = total[i]
                            if sink_dtype is not None:
                                number = T.cast(sink[tile.head], T.float32) * LOG2E
                                factor[i] = factor[i] + T.exp2(number - finite_top(top[i]))
                            factor[i] = T.if_then_else(seen, 1.0 / factor[i], T.float32(0.0))
                            top[i] = T.if_then_else(seen, (top[i] + T.log2(total[i])) * LN2, T.float32(-inf))
                            if token < tile.num_rows:
                                lse[tile.batch, tile.start + token, tile.head] = top[i]  # type: ignore[index]
                        for i, d in T.Parallel(ROWS, wide_v):
                            acc[i, d] = T.if_then_else(top[i] == -inf, T.float32(0.0), acc[i, d] * factor[i])
                        if tile.count > 0:
                            if apart:
                                T.sync_threads(ALONE + member, WARPGROUP)  # the last tile has been stored
                            T.copy(acc, o_shared[member, :, 0:wide_v])
                            T.sync_threads(ALONE + member, WARPGROUP)
                            for i, d in T.Parallel(ROWS, wide_v):
                                token = tile.row + member * ROWS + i
                                if T.And(token < tile.num_rows, T.truncdiv(d, 8) * 8 < value_dim):
                                    o[tile.batch, tile.start + token, tile.head, d] = o_shared[member, i, d]
                            if not apart:
                                T.fence_proxy_async()
                                T.barrier_arrive(q_free[member])
                            loads = loads + 1
                        else:
                            for i, d in T.Parallel(ROWS, wide_v):
                                token = tile.row + member * ROWS + i
                                if T.And(token < tile.num_rows, T.truncdiv(d, 8) * 8 < value_dim):
                                    o[tile.batch, tile.start + token, tile.head, d] = T.cast(0.0, elem)
                    if member == 0:
                        T.sync_threads(TURN, MEMBERS * WARPGROUP)

    return attend_sm90


ATTEND = attend_sm90_kernel, attend_kernel
