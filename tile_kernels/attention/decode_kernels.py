"""The kernel of attention over a cache. See `decode` for the formula.

A thread block owns 16, 32 or 64 rows of one kv head (see `_macros`), 16 for each warp, and a part of the keys. Blocks
of keys and values pass through a ring in shared memory, filled by cp.async 16 bytes at a time. Copies of later blocks
are in flight while one is multiplied. Pages hold multiples of 16 tokens, so 16 keys need one entry of the table.
Scores, softmax and weights stay in the registers of a warp: warps wait for the ring alone.

A row has the same bits in tiles of every size: blocks of keys depend on head dimensions alone.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.attention._macros import (
    DENSE,
    PACKED,
    PAGED,
    find_block,
    find_keys,
    make_rows,
    padded,
    place_rows,
    used_length,
)
from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import EARLY, T, begin_early, is_short, macro
from tile_kernels.device.mask import crosses_band, first_key, in_band, last_key
from tile_kernels.device.softmax import finite_top, softmax_step

CHUNK = 16  # keys that are contiguous in a page
#: Every index is in bounds by what the kernel says itself.
PORTABLE = {
    **PLAIN_PRODUCTS,
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_DEVICE_COMPILE_FLAGS': ['-ftz=true'],  # exp2 is one instruction
}
LN2 = math.log(2)
LOG2E = math.log2(math.e)


def block_keys(head_dim: int, value_dim: int) -> int:
    """Keys of a block: of two bytes, they and their values take 16 KB, so that four thread blocks fit into an SM."""
    wanted = (8 << 10) // (padded(head_dim) + padded(value_dim))
    return 64 if wanted >= 64 else 32 if wanted >= 32 else CHUNK


def strided(name: str, shape: tuple, elem: Any) -> Any:
    """A parameter with a stride of its own for every dimension but the last, and these strides."""
    strides = [T.dynamic(f'{name}_stride{dim}') for dim in range(len(shape) - 1)]
    return T.StridedTensor(shape, (*strides, 1), elem), strides


def vector_size(dim: int, size: int) -> int:
    """Elements of a copy; rows of eight bits may end in the middle of 16 bytes."""
    return 16 // size if dim % (16 // size) == 0 else 8


@macro
def copy_chunk(x, x_shared, slot, chunk, batch, token, number, head, threads: int):
    """Start to copy 16 keys or values, of which `number` exist; the others, and columns behind the last, become 0."""
    width = x.shape[3]
    count = vector_size(width, x.dtype.bits // 8)
    vectors = x_shared.shape[2] // count
    for i in T.unroll(-(-CHUNK * vectors // threads)):
        index = i * threads + T.get_thread_binding()
        row, column = T.truncdiv(index, vectors), T.truncmod(index, vectors) * count
        if row < CHUNK:
            T.ptx_cp_async(
                T.access_ptr(x_shared[slot, chunk * CHUNK + row, column], 'w', count),
                T.access_ptr(x[batch, token + row, head, column], 'r', count),
                count,
                T.And(row < number, column < width),
            )


@macro
def copy_factors(x, ring, slot, chunk, batch, token, number, head):
    """Start to copy the factors of 16 keys or values, as `copy_chunk` does."""
    row = T.get_thread_binding()
    if row < CHUNK:
        T.ptx_cp_async(
            T.access_ptr(ring[slot, chunk * CHUNK + row], 'w', 1),
            T.access_ptr(x[batch, token + row, head], 'r', 1),
            1,
            row < number,
        )


@macro
def copy_queries(x, batch, start, rows, row, num_rows, x_shared, width: int, threads: int):
    """Start to copy rows of queries; those behind the last one, and columns behind the last, become 0."""
    vectors = x_shared.shape[1] // 8
    for step in T.unroll(-(-x_shared.shape[0] * vectors // threads)):
        index = step * threads + T.get_thread_binding()
        i, column = T.truncdiv(index, vectors), T.truncmod(index, vectors) * 8
        if i < x_shared.shape[0]:
            T.ptx_cp_async(
                T.access_ptr(x_shared[i, column], 'w', 8),
                T.access_ptr(x[batch, start + rows.query[i], rows.head[i], column], 'r', 8),
                8,
                T.And(row + i < num_rows, column < width),
            )


@macro
def narrow_rows(x, batch, start, rows, row, num_rows, x_shared, unit_shared, width: int, lent: bool):
    """Load rows of queries as float16: every row is divided by a power of two, its unit, so that none overflows.

    Codes of eight bits are exact in float16, for which there is one conversion. A row loses 2^-25 of its maximum. With
    `lent`, `x_shared` is a ring of one block of keys.
    """
    size, columns = unit_shared.shape[0], x_shared.shape[-1]
    wide = T.alloc_fragment((size, columns), T.float32)
    unit = T.alloc_fragment((size,), T.float32)
    T.clear(wide)
    for i, d in T.Parallel(size, columns):  # TileLang would load without the condition of an expression
        if T.And(row + i < num_rows, T.truncdiv(d, 8) * 8 < width):
            wide[i, d] = T.cast(x[batch, start + rows.query[i], rows.head[i], d], T.float32)
    T.reduce_absmax(wide, unit, dim=1)
    for i in T.Parallel(size):
        exponent = T.bitwise_and(T.reinterpret(unit[i], T.int32), 0x7F800000)
        usual = T.And(exponent >= 1 << 26, exponent < 0x7F800000)  # else 0, tiny, inf or NaN
        exponent = T.if_then_else(usual, T.min(exponent, 253 << 23), 127 << 23)
        unit_shared[i] = T.reinterpret(exponent, T.float32)
        unit[i] = T.reinterpret((254 << 23) - exponent, T.float32)  # its inverse
    for i, d in T.Parallel(size, columns):
        if lent:
            x_shared[0, i, d] = T.cast(wide[i, d] * unit[i], x_shared.dtype)
        else:
            x_shared[i, d] = T.cast(wide[i, d] * unit[i], x_shared.dtype)


@dataclass(frozen=True)
class Source:
    """The keys of a thread block: where they are, and the chunks that are copied next."""

    k: Any
    v: Any
    block_table: Any
    page_size: Any
    batch: Any
    start: Any
    number: Any  # of keys
    head: Any
    first: Any  # the first key of the part
    steps: Any  # blocks of the part
    page: Any  # of every chunk, -1 for a hole and behind the last key
    token: Any
    paged: bool
    threads: int
    k_factors: Any  # of every token, or None; so are the others
    v_factors: Any
    k_factor_ring: Any
    v_factor_ring: Any


@macro
def find_chunks(source, step):
    """Page and token of the chunks of a block."""
    key = source.first + step * source.page.shape[0] * CHUNK
    for c in T.unroll(source.page.shape[0]):
        source.page[c] = source.batch
        source.token[c] = source.start + key + c * CHUNK
        if source.paged:
            source.page[c] = T.truncdiv(key + c * CHUNK, source.page_size)  # kept, lest the division be repeated
            source.token[c] = key + c * CHUNK - source.page[c] * source.page_size
            if key + c * CHUNK < source.number:
                source.page[c] = source.block_table[source.batch, source.page[c]]
            else:
                source.page[c] = -1


@macro
def copy_chunks(source, x, ring, step, factors, factor_ring):
    """Start to copy the chunks of a block as one group of copies, which is empty behind the last block.

    `factors` of every token may be None.
    """
    stages, block_n, _ = ring.shape
    slot = T.truncmod(step, stages)
    left = source.number - source.first - step * block_n
    if step < source.steps:
        for c in T.unroll(source.page.shape[0]):
            number = T.if_then_else(source.page[c] >= 0, left - c * CHUNK, 0)
            page, token = T.max(source.page[c], 0), source.token[c]
            copy_chunk(x, ring, slot, c, page, token, number, source.head, source.threads)
            if factors is not None:
                copy_factors(factors, factor_ring, slot, c, page, token, number, source.head)
    T.ptx_commit_group()


@macro
def copy_block(source, k_ring, v_ring, step, holes):
    """Start to copy a block, keys before values, and find the next. `holes` gets a bit for every chunk."""
    chunks = source.page.shape[0]
    if source.paged:
        holes[0] = T.bitwise_and(T.shift_left(holes[0], chunks), (1 << chunks * k_ring.shape[0]) - 1)
        for c in T.unroll(chunks):
            if source.page[c] >= source.k.shape[0]:  # it does not exist; the results become NaN
                source.page[c] = -1
            holes[0] = T.bitwise_or(holes[0], T.if_then_else(source.page[c] < 0, T.shift_left(1, c), 0))
    copy_chunks(source, source.k, k_ring, step, source.k_factors, source.k_factor_ring)
    copy_chunks(source, source.v, v_ring, step, source.v_factors, source.v_factor_ring)
    find_chunks(source, step + 1)


@macro
def hide_infinite(v_shared, slot, acc, rows, offset, key, left, right):
    """Rows must not meet values they do not see, which may be inf or NaN: weight 0 would not hide these.

    Such values are replaced by 0 for the product; rows that see them get them as they are.
    """
    keys, columns = v_shared.shape[1], v_shared.shape[2]
    odd = T.alloc_fragment((keys, 32), T.float32)
    odd_rows = T.alloc_fragment((keys,), T.float32)
    odd_any = T.alloc_fragment((1,), T.float32)
    flag_shared = T.alloc_shared((1,), T.float32)
    T.clear(odd_rows)
    for part in T.serial(columns // 32):
        for j, d in T.Parallel(keys, 32):
            odd[j, d] = T.if_then_else(T.isfinite(T.cast(v_shared[slot, j, part * 32 + d], T.float32)), 0.0, 1.0)
        T.reduce_max(odd, odd_rows, dim=1, clear=False)
    T.reduce_max(odd_rows, odd_any, dim=0)
    flag_shared[0] = odd_any[0]
    T.sync_threads()
    if flag_shared[0] != 0.0:
        for j in T.unroll(keys, unroll_factor=1):  # rare: code is spared
            for i, d in T.Parallel(acc.shape[0], columns):
                value = T.cast(v_shared[slot, j, d], T.float32)
                sees = in_band(rows.query[i] + offset, key + j, left, right)
                if T.And(sees, T.Not(T.isfinite(value))):
                    acc[i, d] = acc[i, d] + value
        T.sync_threads()
        for j, d in T.Parallel(keys, columns):
            if T.Not(T.isfinite(T.cast(v_shared[slot, j, d], T.float32))):
                v_shared[slot, j, d] = T.cast(0.0, v_shared.dtype)
    T.sync_threads()


def choose(
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    key_dtype: torch.dtype,
    block_m: int,
    q_packed: bool,
    q_used: bool,
    keys: str,
    k_used: bool,
    banded: bool,
    capped: bool,
    sink_dtype: torch.dtype | None,
    split: bool,
    indexed: bool,
    left_padded: bool,
    token_factors: bool,
    num_bytes: int,
) -> dict:
    """Calls that read few bytes start early. Codes have two stages, so that eight thread blocks fit into an SM."""
    narrow = key_dtype is not dtype and not token_factors
    return dict(early=is_short(num_bytes), stages=2 if narrow and block_m == 16 else 3)


@kernel(choose=choose, space=dict(early=EARLY, stages=(2, 3)), pass_configs=PORTABLE)
def decode_kernel(
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    key_dtype: torch.dtype,
    block_m: int,
    q_packed: bool,
    q_used: bool,
    keys: str,
    k_used: bool,
    banded: bool,
    capped: bool,
    sink_dtype: torch.dtype | None,
    split: bool,
    indexed: bool,
    left_padded: bool,
    token_factors: bool,
    *,
    early: bool = False,
    stages: int = 3,
):
    """`keys` says how keys are stored; codes of `key_dtype` are widened to `dtype` in shared memory.

    With `token_factors` they are multiplied there, too. Other codes are widened to float16, in which they are exact.
    """
    q_batch, q_tokens, q_heads = T.dynamic('q_batch'), T.dynamic('q_tokens'), T.dynamic('q_heads')
    k_batch, k_tokens, kv_heads = T.dynamic('k_batch'), T.dynamic('k_tokens'), T.dynamic('kv_heads')
    num_q, num_k, num_used_q, num_used_k = (T.dynamic(name) for name in ('num_q', 'num_k', 'num_used_q', 'num_used_k'))
    num_tables, num_pages, num_scales = T.dynamic('num_tables'), T.dynamic('num_pages'), T.dynamic('num_scales')
    table_stride = T.dynamic('table_stride')
    num_splits, num_index, num_pads = T.dynamic('num_splits'), T.dynamic('num_index'), T.dynamic('num_pads')
    elem, key_elem = T.dtype(dtype), T.dtype(key_dtype)
    fp8 = key_dtype is not dtype
    threads = 2 * block_m
    wide, wide_v = padded(head_dim), padded(value_dim)
    block_n = block_keys(head_dim, value_dim)
    chunks = block_n // CHUNK
    kept = wide <= 128  # queries in registers: their loads would compete with those of keys
    narrow = fp8 and not token_factors
    wide_elem = T.float16 if narrow else elem
    vector = 16 // key_dtype.itemsize
    q_type, q_strides = strided('q', (q_batch, q_tokens, q_heads, head_dim), elem)
    k_type, k_strides = strided('k', (k_batch, k_tokens, kv_heads, head_dim), key_elem)
    v_type, v_strides = strided('v', (k_batch, k_tokens, kv_heads, value_dim), key_elem)
    inf, nan = math.inf, math.nan

    @T.prim_func
    def decode(
        q: q_type,
        k: k_type,
        v: v_type,
        cu_seqlens_q: T.Tensor((num_q,), T.int32),
        cu_seqlens_k: T.Tensor((num_k,), T.int32),
        seqused_q: T.Tensor((num_used_q,), T.int32),
        seqused_k: T.Tensor((num_used_k,), T.int32),
        block_table: T.StridedTensor((num_tables, num_pages), (table_stride, 1), T.int32),
        k_descale: T.Tensor((num_scales, kv_heads), T.float32),
        v_descale: T.Tensor((num_scales, kv_heads), T.float32),
        k_factors: T.Tensor((k_batch, k_tokens, kv_heads), T.float32),
        v_factors: T.Tensor((k_batch, k_tokens, kv_heads), T.float32),
        cache_batch_idx: T.Tensor((num_index,), T.int32),
        cache_leftpad: T.Tensor((num_pads,), T.int32),
        sink: T.Tensor((q_heads,), T.dtype(sink_dtype or torch.float32)),
        o: T.Tensor((num_splits, q_batch, q_tokens, q_heads, value_dim), T.float32 if split else elem),
        lse: T.Tensor((num_splits, q_batch, q_tokens, q_heads), T.float32),
        num_blocks: T.int32,
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
        cap: T.float32,
        left: T.int32,
        right: T.int32,
    ):
        with T.Kernel(num_blocks * kv_heads, num_splits, threads=threads) as (pid, part):
            if early:
                begin_early()
            elif split:
                T.pdl_trigger()  # thread blocks of `combine` may start; they wait for the end of this kernel
            for stride in q_strides:
                T.assume(stride % 8 == 0)
            for stride in k_strides + v_strides:
                T.assume(stride % vector == 0)
            k_ring = T.alloc_shared((stages, block_n, wide), key_elem)
            v_ring = T.alloc_shared((stages, block_n, wide_v), key_elem)
            k_wide = T.alloc_shared((1, block_n, wide), wide_elem) if fp8 else k_ring
            lent = narrow and kept and block_m <= block_n  # queries pass through memory that keys need later
            q_shared = k_wide if lent else T.alloc_shared((block_m, wide), wide_elem)
            v_wide = v_ring
            if fp8:
                v_wide = k_wide if wide == wide_v else T.alloc_shared((1, block_n, wide_v), wide_elem)
            factor_parts = (None, None, None, None)
            if token_factors:
                k_factor_ring = T.alloc_shared((stages, block_n), T.float32)
                v_factor_ring = T.alloc_shared((stages, block_n), T.float32)
                factor_parts = (k_factors, v_factors, k_factor_ring, v_factor_ring)
            q_local = T.alloc_fragment((block_m, wide), wide_elem) if kept else q_shared
            scores = T.alloc_fragment((block_m, block_n), T.float32)
            weights = T.alloc_fragment((block_m, block_n), wide_elem)
            acc = T.alloc_fragment((block_m, wide_v), T.float32)
            top, total = T.alloc_fragment((block_m,), T.float32), T.alloc_fragment((block_m,), T.float32)
            factor = T.alloc_fragment((block_m,), T.float32)
            block_top, block_sum = T.alloc_fragment((block_m,), T.float32), T.alloc_fragment((block_m,), T.float32)

            rows = make_rows(block_m)
            unit_shared = T.alloc_shared((block_m,), T.float32)  # of rows that were scaled
            group = T.alloc_var(T.int32)  # variables, lest their divisions be repeated
            group = T.truncdiv(q_heads, kv_heads)
            index, head = T.alloc_var(T.int32), T.alloc_var(T.int32)
            index = T.truncdiv(pid, kv_heads)
            head = pid - index * kv_heads
            block = find_block(cu_seqlens_q, index, num_sequences, bits, q_tokens, group, block_m, q_packed)
            sequence, start, row = block.sequence, block.start, block.row
            num_rows = block.length * group
            if row < num_rows:
                used_rows = used_length(seqused_q, sequence, num_sequences, block.length, q_used) * group
                place_rows(rows, head, group, row)
                if not narrow:
                    copy_queries(q, block.batch, start, rows, row, used_rows, q_shared, head_dim, threads)
                wrong = T.alloc_var(T.int32, init=0)  # a page that does not exist, or too few pages
                key_batch = T.alloc_var(T.int32, init=0)
                key_start = T.alloc_var(T.int32, init=0)
                num_keys = T.alloc_var(T.int32, init=0)
                if keys in (DENSE, PACKED):
                    own = find_keys(cu_seqlens_k, seqused_k, sequence, num_sequences, k_tokens, keys, k_used)
                    key_batch = own.batch
                    key_start = own.start
                    num_keys = own.number
                else:
                    if sequence < num_sequences:
                        key_batch = sequence
                        num_keys = T.max(seqused_k[sequence], 0)
                        if indexed:
                            key_batch = cache_batch_idx[sequence]
                    capacity = num_pages * k_tokens if keys == PAGED else k_tokens
                    if T.Or(num_keys > capacity, T.Or(key_batch < 0, indexed and key_batch >= k_batch)):
                        wrong = 1
                        num_keys = 0
                        key_batch = 0
                    if left_padded:
                        key_start = T.max(T.min(cache_leftpad[T.min(sequence, num_pads - 1)], num_keys), 0)
                        num_keys = num_keys - key_start
                # Blocks of keys that any row of the tile sees, and those of this part.
                offset = num_keys - T.truncdiv(used_rows, group)
                first_position = T.truncdiv(row, group) + offset
                last_position = T.truncdiv(T.min(row + block_m, used_rows) - 1, group) + offset
                first = T.alloc_var(T.int32, init=0)
                last = T.alloc_var(T.int32, init=0)
                if row < used_rows:
                    last = T.truncdiv(num_keys + block_n - 1, block_n)
                    if banded:
                        first = T.truncdiv(first_key(first_position, left), block_n)
                        last = T.truncdiv(last_key(last_position, right, num_keys) + block_n - 1, block_n)
                    if split:
                        every = T.truncdiv(T.max(last - first, 0) + num_splits - 1, num_splits)
                        first = first + part * every
                        last = T.min(last, first + every)

                steps = T.max(last - first, 0)
                page, token = T.alloc_local((chunks,), T.int32), T.alloc_local((chunks,), T.int32)
                holes = T.alloc_local((1,), T.int32)  # a bit for every chunk in the ring, the latest block lowest
                own_keys = (block_table, k_tokens, key_batch, key_start, num_keys, head, first * block_n, steps)
                source = Source(k, v, *own_keys, page, token, keys == PAGED, threads, *factor_parts)
                holes[0] = 0
                find_chunks(source, 0)
                for step in T.unroll(stages - 1):
                    copy_block(source, k_ring, v_ring, step, holes)
                if keys == PAGED:
                    # Every part looks at its share of the table; its rows become NaN, and so does what `combine` makes.
                    ids = T.alloc_fragment((threads,), T.int32)
                    largest = T.alloc_fragment((1,), T.int32)
                    largest_shared = T.alloc_shared((1,), T.int32)
                    own_pages = T.truncdiv(num_keys + k_tokens - 1, k_tokens)
                    every_page = T.truncdiv(own_pages + num_splits - 1, num_splits)
                    first_page = part * every_page
                    end_page = T.min(first_page + every_page, own_pages)
                    T.fill(ids, -1)
                    for step in T.serial(T.truncdiv(T.max(end_page - first_page, 0) + threads - 1, threads)):
                        for i in T.Parallel(threads):
                            if first_page + step * threads + i < end_page:
                                ids[i] = T.max(ids[i], block_table[key_batch, first_page + step * threads + i])
                    T.reduce_max(ids, largest, dim=0)
                    largest_shared[0] = largest[0]
                    T.sync_threads()
                    if largest_shared[0] >= k_batch:
                        wrong = 1
                if narrow:
                    narrow_rows(q, block.batch, start, rows, row, used_rows, q_shared, unit_shared, head_dim, lent)
                if kept:
                    if not narrow:  # queries are in the first group of copies
                        T.ptx_wait_group(2 * stages - 3)
                        T.sync_threads()
                    T.copy(q_shared[0, 0:block_m, :] if lent else q_shared, q_local)
                T.fill(top, -inf)
                T.clear(total)
                T.clear(acc)
                key_scale = scale * k_descale[T.min(sequence, num_scales - 1), head] if narrow else scale
                for step in T.serial(steps):
                    key = (first + step) * block_n
                    slot = T.truncmod(step, stages)
                    copy_block(source, k_ring, v_ring, step + stages - 1, holes)
                    T.ptx_wait_group(2 * stages - 1)
                    T.sync_threads()
                    if narrow:
                        for i, d in T.Parallel(block_n, wide):
                            k_wide[0, i, d] = T.cast(k_ring[slot, i, d], wide_elem)
                    elif fp8:
                        for i, d in T.Parallel(block_n, wide):
                            k_wide[0, i, d] = T.cast(
                                T.cast(k_ring[slot, i, d], T.float32) * k_factor_ring[slot, i], wide_elem
                            )
                    wide_slot = 0 if fp8 else slot
                    T.clear(scores)
                    T.gemm(q_local, k_wide[wide_slot, :, :], scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for i, j in T.Parallel(block_m, block_n):
                        unit = key_scale * unit_shared[i] if narrow else key_scale
                        scores[i, j] = cap * T.tanh(scores[i, j] * unit) if capped else scores[i, j] * unit
                    if keys == PAGED:  # noqa: SIM102 - known when the kernel is built
                        if T.shift_right(holes[0], chunks * (stages - 1)) != 0:
                            for i, j in T.Parallel(block_m, block_n):
                                bit = T.shift_right(holes[0], chunks * (stages - 1) + T.truncdiv(j, CHUNK))
                                scores[i, j] = T.if_then_else(T.bitwise_and(bit, 1) == 0, scores[i, j], -inf)
                    if key + block_n > num_keys:
                        for i, j in T.Parallel(block_m, block_n):
                            scores[i, j] = T.if_then_else(key + j < num_keys, scores[i, j], -inf)
                    crosses = crosses_band(first_position, last_position, key, block_n, left, right)
                    if banded:  # noqa: SIM102 - known when the kernel is built
                        if crosses:
                            for i, j in T.Parallel(block_m, block_n):
                                scores[i, j] = T.if_then_else(
                                    in_band(rows.query[i] + offset, key + j, left, right), scores[i, j], -inf
                                )
                    softmax_step(scores, top, total, factor, block_top, block_sum)
                    T.copy(scores, weights)
                    for i, d in T.Parallel(block_m, wide_v):
                        acc[i, d] = acc[i, d] * factor[i]
                    T.ptx_wait_group(2 * stages - 2)
                    T.sync_threads()
                    if narrow:
                        for i, d in T.Parallel(block_n, wide_v):
                            v_wide[0, i, d] = T.cast(v_ring[slot, i, d], wide_elem)
                    elif fp8:
                        for i, d in T.Parallel(block_n, wide_v):
                            v_wide[0, i, d] = T.cast(
                                T.cast(v_ring[slot, i, d], T.float32) * v_factor_ring[slot, i], wide_elem
                            )
                    if banded:  # noqa: SIM102
                        if crosses:
                            hide_infinite(v_wide, wide_slot, acc, rows, offset, key, left, right)
                    T.gemm(weights, v_wide[wide_slot, :, :], acc, policy=T.GemmWarpPolicy.FullRow)
                    T.sync_threads()

                for i in T.Parallel(block_m):
                    own_token, own_head = start + rows.query[i], rows.head[i]
                    seen = T.And(row + i < used_rows, total[i] != 0.0)
                    factor[i] = total[i]
                    if sink_dtype is not None:
                        number = T.cast(sink[T.min(own_head, q_heads - 1)], T.float32) * LOG2E
                        factor[i] = factor[i] + T.exp2(number - finite_top(top[i]))
                    value_scale = v_descale[T.min(sequence, num_scales - 1), head] if narrow else T.float32(1.0)
                    factor[i] = T.if_then_else(seen, value_scale / factor[i], T.float32(0.0))
                    top[i] = T.if_then_else(seen, (top[i] + T.log2(total[i])) * LN2, T.float32(-inf))
                    if wrong != 0:
                        factor[i] = nan
                        top[i] = nan
                    if row + i < num_rows:
                        lse[part, block.batch, own_token, own_head] = top[i]  # type: ignore[index]
                for i, d in T.Parallel(block_m, wide_v):
                    if T.And(row + i < num_rows, d < value_dim):
                        o[part, block.batch, start + rows.query[i], rows.head[i], d] = T.if_then_else(
                            top[i] == -inf, 0.0, acc[i, d] * factor[i]
                        )

    return decode
