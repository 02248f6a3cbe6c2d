"""The kernel of latent attention for Hopper and more than 32 heads, by wgmma. See `mla_decode` for the formula.

A thread block owns 64 heads of one token. Keys come in pairs of blocks of 64. Two warpgroups multiply: the first scores
the first block of a pair, the second the other one. Each owns half of the 512 columns of the result, so each needs the
weights of both blocks. Its own are in registers, those of the other come through shared memory. While one warpgroup
computes weights, the other uses the tensor cores.

    first: scores 0, maximum a -> o += p0 v0                    -> p0 scaled to b, stored -> o scaled to b, o += p1 v1
    second: scores 1            -> maximum b from a, p1 stored  -> o scaled to b, o += p1 v1 -> o += p0 v0

A third warpgroup loads: cp.async, 16 bytes per thread, zeros where there is no key. It widens the codes of an fp8 cache
on the way. A block is cut into its left and
right half of columns. A half is free as soon as its last product is done, so the next pair arrives while this one is
used. Weights are stored where the rotary channels of their block were, which nobody reads after the scores.
"""

import math
from typing import Any

import torch

from tile_kernels.attention.mla_decode_kernels import (
    BOXED,
    LISTED,
    LN2,
    LOG2E,
    OWN_BARRIERS,
    PAGED,
    VECTOR,
    WRONG,
    find_keys,
)
from tile_kernels.attention.pack_mla_cache import GROUP, GROUPS, LATENT, ROTARY, TOKEN_BYTES
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.device.softmax import finite_top

WARPGROUP = 128
ROWS = 64
KEYS = 64
HALF = LATENT // 2
PART = HALF // 2
LEFT, RIGHT = 0, 1
#: The blocks of a pair and their halves in the order in which they are freed and loaded.
ORDER = (0, LEFT), (1, RIGHT), (0, RIGHT), (1, LEFT)
CODES = 16  # of a 16-byte access
MOST_ORDERED = 3 * WARPGROUP  # sequences that are processed by falling length
#: Registers of a thread of the warpgroup that loads, and of those that multiply; together those of an SM. The loading
#: warpgroup holds the codes of half a block.
LOADING_REGISTERS, MULTIPLYING_REGISTERS = 88, 208
#: Named barriers: maximum of the first and of the second warpgroup, weights of both, sums, the loading warpgroup, and
#: each of the others.
TOP_FIRST, TOP_SECOND, WEIGHT_FIRST, WEIGHT_SECOND, SUMS, LOADING, ALONE = 8, 9, 10, 11, 12, 13, 14

#: Powers of two without instructions for denormals, which would be half of those of a softmax; and a prefetch to L2.
FUNCTIONS = """
static __device__ __forceinline__ float ex2_approx(float x) {
  float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
}
static __device__ __forceinline__ void prefetch_lines(const void *start, int number) {
#pragma unroll
  for (int i = 0; i < number; ++i)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char *>(start) + 128 * i));
}
"""


def exp2(x: Any) -> Any:
    """2^x; a result below 2^-126 is 0."""
    return T.call_extern('float32', 'ex2_approx', x)


@macro
def longest_first(lengths, unit, tokens, batch, order_shared):
    """The unit whose turn it is if long sequences come first; they would leave SMs idle at the end."""
    chosen = T.alloc_var(T.int32)
    chosen = unit
    if batch > 1 and batch <= MOST_ORDERED:
        thread = T.get_thread_binding()
        place = T.alloc_var(T.int32, init=0)
        own = T.alloc_var(T.int32, init=-1)
        others = T.alloc_local((4,), T.int32)
        wanted = T.truncdiv(unit, tokens)
        if thread < batch:  # different numbers for all
            own = T.min(T.max(lengths[thread], 0) // (2 * KEYS), 1 << 21) * 512 + 511 - thread
        order_shared[thread] = own
        T.sync_threads()
        for i in T.serial(T.truncdiv(batch + 3, 4)):
            for e in T.vectorized(4):
                others[e] = order_shared[i * 4 + e]
            for e in T.unroll(4):
                if others[e] > own:
                    place += 1
        T.sync_threads()
        if thread < batch and place == wanted:
            order_shared[0] = thread
        T.sync_threads()
        chosen = order_shared[0] * tokens + unit - wanted * tokens
    return chosen


@macro
def read_entry(table, listed, num_keys, pair, page_size, keys: str):
    """The table's or list's entry for the key of this loading thread; a thread stands for a key of a pair."""
    key = pair * (2 * KEYS) + T.get_thread_binding() - 2 * WARPGROUP
    entry = T.alloc_var(T.int32, init=-1)
    entry = -1
    if key < num_keys:
        if keys != LISTED:
            entry = table[listed, T.truncdiv(key, page_size)]
        else:
            entry = table[listed, key]
    return entry


@macro
def place_keys(entry, latent, pair, page_size, num_pages, keys: str, page_shared, offset_shared, slot, lines: int):
    """Store page and offset of every key of a pair of blocks, and prefetch lines of keys to L2; page < 0 is no key."""
    thread = T.get_thread_binding() - 2 * WARPGROUP
    key = pair * (2 * KEYS) + thread
    page = T.alloc_var(T.int32, init=-1)
    found = T.alloc_var(T.int32, init=0)
    page = -1
    found = 0
    if entry >= 0:
        found = key if keys != LISTED else entry
        page = T.truncdiv(found, page_size)
        found = found - page * page_size
        if keys != LISTED:
            page = T.if_then_else(entry >= num_pages, WRONG, entry)
        elif page >= num_pages:
            page = -1
    page_shared[slot, thread] = page
    offset_shared[slot, thread] = T.if_then_else(page < 0, 0, found)
    T.sync_threads(LOADING, WARPGROUP)
    if lines:  # noqa: SIM102 - known when the kernel is built
        if page >= 0:
            T.evaluate(T.call_extern('handle', 'prefetch_lines', T.address_of(latent[page, found, 0]), lines))


@macro
def find_boxes(page_shared, offset_shared, slot, page_of, offset_of):
    """Page and offset of the blocks of a pair; a block that lacks keys, which all are in one page, has page -1."""
    for which in T.unroll(2):
        page_of[which] = T.min(page_shared[slot, which * KEYS], page_shared[slot, which * KEYS + KEYS - 1])
        offset_of[which] = offset_shared[slot, which * KEYS]


@macro
def end_rows(boxed: bool):
    """A reader that expects TMA needs no fence: rows must be there, and visible to wgmma, when this thread arrives."""
    if boxed:
        T.ptx_commit_group()
        T.ptx_wait_group(0)
        T.fence_proxy_async()


@macro
def load_half(
    latent,
    page_shared,
    offset_shared,
    slot,
    page_of,
    offset_of,
    kv_shared,
    begun,
    full,
    which: int,
    half: int,
    boxed: bool,
):
    """Start to copy half of the columns of a block: by TMA if the block is a page, else a row by a warp.

    A whole block comes in two parts, lest scores wait for all of it.
    """
    thread = T.get_thread_binding() - 2 * WARPGROUP
    column = thread % 32 * VECTOR
    if boxed and page_of[which] >= 0:
        for part, barrier in ((0, begun), (1, full)):
            start = half * HALF + part * PART
            T.tma_copy(
                latent[page_of[which], offset_of[which] : offset_of[which] + KEYS, start : start + PART],
                kv_shared[which, half, :, part * PART : (part + 1) * PART],
                barrier=barrier[which],
            )
    else:
        for step in T.unroll(KEYS // 4):
            j = which * KEYS + step * 4 + thread // 32
            T.ptx_cp_async(
                T.access_ptr(kv_shared[which, half, step * 4 + thread // 32, column], 'w', VECTOR),
                T.access_ptr(
                    latent[T.max(page_shared[slot, j], 0), offset_shared[slot, j], half * HALF + column], 'r', VECTOR
                ),
                VECTOR,
                page_shared[slot, j] >= 0,
            )
        end_rows(boxed)


@macro
def fetch_codes(latent, factors, page_shared, offset_shared, slot, codes, scales, which: int, half: int, step):
    """Load the codes of 8 keys and half of the columns; 16 codes of a thread."""
    thread = T.get_thread_binding() - 2 * WARPGROUP
    column = half * HALF + thread % 16 * CODES
    j = which * KEYS + step * 8 + thread // 16
    scales[step] = 0.0
    if page_shared[slot, j] >= 0:
        scales[step] = factors[page_shared[slot, j], offset_shared[slot, j], column // GROUP]
        for e in T.vectorized(CODES):
            codes[step, e] = latent[page_shared[slot, j], offset_shared[slot, j], column + e]
    else:
        for e in T.vectorized(CODES):
            codes[step, e] = T.cast(0.0, latent.dtype)


@macro
def store_codes(codes, scales, kv_shared, which: int, half: int, step):
    """Store what `fetch_codes` loaded as numbers."""
    thread = T.get_thread_binding() - 2 * WARPGROUP
    column = thread % 16 * CODES
    wide = T.alloc_local((4,), T.float32)  # casts of neighbors come in pairs
    numbers = T.alloc_local((VECTOR,), kv_shared.dtype)
    for p in T.unroll(CODES // VECTOR):
        for r in T.unroll(VECTOR // 4):
            for e in T.vectorized(4):
                wide[e] = T.cast(codes[step, p * VECTOR + r * 4 + e], T.float32)
            for e in T.unroll(4):
                wide[e] = wide[e] * scales[step]
            for e in T.vectorized(4):
                numbers[r * 4 + e] = T.cast(wide[e], kv_shared.dtype)
        for e in T.vectorized(VECTOR):
            kv_shared[which, half, step * 8 + thread // 16, column + p * VECTOR + e] = numbers[e]


@macro
def load_rotary(
    rotary, page_shared, offset_shared, slot, page_of, offset_of, rotary_shared, full, which: int, boxed: bool
):
    """Start to copy the rotary channels of a block."""
    thread = T.get_thread_binding() - 2 * WARPGROUP
    column = thread % 8 * VECTOR
    if boxed and page_of[which] >= 0:
        T.tma_copy(
            rotary[page_of[which], offset_of[which] : offset_of[which] + KEYS, 0:ROTARY],
            rotary_shared[which, :, :],
            barrier=full[which],
        )
    else:
        for step in T.unroll(KEYS // 16):
            j = which * KEYS + step * 16 + thread // 8
            T.ptx_cp_async(
                T.access_ptr(rotary_shared[which, step * 16 + thread // 8, column], 'w', VECTOR),
                T.access_ptr(rotary[T.max(page_shared[slot, j], 0), offset_shared[slot, j], column], 'r', VECTOR),
                VECTOR,
                page_shared[slot, j] >= 0,
            )
        end_rows(boxed)


@macro
def finish(full, which: int, widened: bool, copied: bool):
    """Tell the readers when what this thread widened and copied is there; see the counts of `full`."""
    if copied:
        T.cp_async_barrier_noinc(full[which])
    if widened:
        T.fence_proxy_async()
    T.mbarrier_arrive(full[which])


@macro
def score_half(
    q_shared, kv_shared, scores, begun, full, step, which: int, half: int, clear: bool, boxed: bool, copied: bool
):
    """Wait for half of the columns of a block and add their products to the scores.

    What cp.async has copied becomes visible to wgmma by a fence of the reader.
    """
    if boxed:
        T.mbarrier_wait_parity(begun[which], step & 1)
        T.wgmma_gemm(
            q_shared[half, :, 0:PART],
            kv_shared[which, half, :, 0:PART],
            scores,
            transpose_B=True,
            clear_accum=clear,
        )
        T.mbarrier_wait_parity(full[which], step & 1)
        T.wgmma_gemm(q_shared[half, :, PART:HALF], kv_shared[which, half, :, PART:HALF], scores, transpose_B=True)
    else:
        T.mbarrier_wait_parity(full[which], step & 1)
        if copied:
            T.fence_proxy_async()
        T.wgmma_gemm(q_shared[half, :, :], kv_shared[which, half, :, :], scores, transpose_B=True, clear_accum=clear)


@macro
def mask_scores(scores, page_shared, slot, which: int, scale, keys: str):
    """Scale scores; those of missing keys become -inf, those of keys that must not exist NaN."""
    for i, j in T.Parallel(ROWS, KEYS):
        scores[i, j] = scores[i, j] * scale
    if keys != BOXED or page_shared[slot, which * KEYS + KEYS - 1] < 0:  # else every key of the page exists
        for i, j in T.Parallel(ROWS, KEYS):
            scores[i, j] = T.if_then_else(page_shared[slot, which * KEYS + j] >= 0, scores[i, j], -math.inf)
        if keys != LISTED:
            for i, j in T.Parallel(ROWS, KEYS):
                scores[i, j] = T.if_then_else(page_shared[slot, which * KEYS + j] == WRONG, math.nan, scores[i, j])


@macro
def read_place(place_shared):
    """Sequence, token and first head of the block, and whether the sequence is wrong."""
    place = T.alloc_local((4,), T.int32)
    for i in T.unroll(4):
        place[i] = place_shared[i]
    return place


@macro
def share_sums(total, sum_shared, which: int):
    """Add the sums of both warpgroups."""
    for i in T.Parallel(ROWS):
        sum_shared[which, i] = total[i]
    T.sync_threads(SUMS, 2 * WARPGROUP)
    for i in T.Parallel(ROWS):
        total[i] = sum_shared[0, i] + sum_shared[1, i]


@macro
def store_half(
    acc, top, total, factor, sink, o, kv_shared, part, batch, token, row, is_wrong, sink_dtype, split: bool, which: int
):
    """Divide half of the columns by the sum and store them, 16 bytes of a row at a time.

    Only this warpgroup has read this half of this block, which is done.
    """
    heads = o.shape[3]
    for i in T.Parallel(ROWS):
        factor[i] = total[i]
        if sink_dtype is not None:
            number = T.cast(sink[T.min(row + i, heads - 1)], T.float32) * LOG2E
            factor[i] = factor[i] + exp2(number - finite_top(top[i]))
        factor[i] = T.if_then_else(total[i] != 0.0, 1.0 / factor[i], T.float32(0.0))
        if is_wrong != 0:
            factor[i] = math.nan
    if split:
        for i, d in T.Parallel(ROWS, HALF):
            if row + i < heads:
                o[part, batch, token, row + i, which * HALF + d] = acc[i, d] * factor[i]
    else:
        for i, d in T.Parallel(ROWS, HALF):
            acc[i, d] = acc[i, d] * factor[i]
        T.copy(acc, kv_shared[which, which, :, :])
        T.sync_threads(ALONE + which, WARPGROUP)
        for i, d in T.Parallel(ROWS, HALF):
            if row + i < heads:
                o[part, batch, token, row + i, which * HALF + d] = kv_shared[which, which, i, d]


@macro
def store_logs(top, total, lse, max_logits, part, batch, token, row, is_wrong, logits: bool, nothing: float):
    """Store lse, and the largest score with `logits`."""
    heads = lse.shape[3]
    for i in T.Parallel(ROWS):
        if row + i < heads:
            if logits:
                max_logits[batch, token, row + i] = top[i] * LN2
            number = T.if_then_else(total[i] != 0.0, (top[i] + T.log2(total[i])) * LN2, T.float32(nothing))
            lse[part, batch, token, row + i] = T.if_then_else(is_wrong != 0, math.nan, number)


@kernel(
    pass_configs=OWN_BARRIERS,
    serves=lambda static, gpu: gpu.has_wgmma and static.tall and static.keys != PAGED and not static.short,
)
def mla_decode_hopper_kernel(
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
    """Parameters are those of `mla_decode_kernel`; keys are not `short`."""
    batch, tokens, heads = T.dynamic('batch'), T.dynamic('tokens'), T.dynamic('heads')
    pages, page_size, units, width = (T.dynamic(name) for name in ('pages', 'page_size', 'units', 'width'))
    num_lengths, num_splits = T.dynamic('num_lengths'), T.dynamic('num_splits')
    elem = T.dtype(dtype)
    q_strides = [T.dynamic(f'q_stride{dim}') for dim in range(3)]

    def cached(name: str, columns: int, cache_elem: Any) -> Any:
        strides = [T.dynamic(f'{name}_stride{dim}') for dim in range(2)]
        return T.StridedTensor((pages, page_size, columns), (*strides, 1), cache_elem), strides

    latent_type, latent_strides = cached('latent', LATENT, T.float8_e4m3fn if fp8 else elem)
    factor_type, _ = cached('factor', GROUPS, T.float32)
    rotary_type, rotary_strides = cached('rotary', ROTARY, elem)
    # TMA does not need lines of keys in L2 before: it is slower with them.
    lines = 0 if keys == BOXED else TOKEN_BYTES // 128 + 1 if fp8 else 2 * (LATENT + ROTARY) // 128
    inf = math.inf
    nothing = -inf if split else inf  # lse without a key

    @T.prim_func
    def mla_decode_hopper(
        q: T.StridedTensor((batch, tokens, heads, LATENT + ROTARY), (*q_strides, 1), elem),
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
        with T.Kernel(T.ceildiv(heads, ROWS) * num_units, num_splits, threads=3 * WARPGROUP) as (pid, part):
            T.import_source(FUNCTIONS)
            if split:
                T.pdl_sync()
            for stride in q_strides + rotary_strides:
                T.assume(stride % VECTOR == 0)
            for stride in latent_strides:
                T.assume(stride % (CODES if fp8 else VECTOR) == 0)
            q_shared = T.alloc_shared((2, ROWS, HALF), elem)
            q_rotary_shared = T.alloc_shared((ROWS, ROTARY), elem)
            kv_shared = T.alloc_shared((2, 2, KEYS, HALF), elem)
            rotary_shared = T.alloc_shared((2, KEYS, ROTARY), elem)  # then the weights of the block, (rows, keys)
            page_shared = T.alloc_shared((2, 2 * KEYS), T.int32)  # of a pair of blocks and of the next
            offset_shared = T.alloc_shared((2, 2 * KEYS), T.int32)
            page_of, offset_of = T.alloc_local((2,), T.int32), T.alloc_local((2,), T.int32)
            if fp8:
                codes = T.alloc_local((KEYS // 8, CODES), latent.dtype)
                scales = T.alloc_local((KEYS // 8,), T.float32)
            top_shared = T.alloc_shared((2, ROWS), T.float32)
            sum_shared = T.alloc_shared((2, ROWS), T.float32)
            scores = [T.alloc_fragment((ROWS, KEYS), T.float32) for _ in (0, 1)]
            weights = [T.alloc_fragment((ROWS, KEYS), elem) for _ in (0, 1)]
            acc = [T.alloc_fragment((ROWS, HALF), T.float32) for _ in (0, 1)]
            top = [T.alloc_fragment((ROWS,), T.float32) for _ in (0, 1)]
            block_top = [T.alloc_fragment((ROWS,), T.float32) for _ in (0, 1)]
            total = [T.alloc_fragment((ROWS,), T.float32) for _ in (0, 1)]
            block_sum = [T.alloc_fragment((ROWS,), T.float32) for _ in (0, 1)]
            factor = [T.alloc_fragment((ROWS,), T.float32) for _ in (0, 1)]
            place_shared = T.alloc_shared((4,), T.int32)
            order_shared = T.alloc_shared((MOST_ORDERED,), T.int32)
            q_full = T.alloc_barrier([WARPGROUP])
            # every loading thread arrives, and once more when its cp.async copies are complete; codes are not copied
            once, twice = WARPGROUP, 2 * WARPGROUP
            counts = (once, once) if keys == BOXED else (once, twice) if fp8 else (twice, twice)
            begun = [T.alloc_barrier([once] * 2) for _ in (LEFT, RIGHT)]
            full = [T.alloc_barrier([*counts]), T.alloc_barrier([*reversed(counts)])]
            free = [T.alloc_barrier([WARPGROUP] * 2) for _ in (LEFT, RIGHT)]

            unit = T.alloc_var(T.int32)  # variables, lest divisions be repeated
            row = T.alloc_var(T.int32)
            own_batch = T.alloc_var(T.int32)
            own_token = T.alloc_var(T.int32)
            unit = T.truncdiv(pid, T.truncdiv(heads + ROWS - 1, ROWS))
            row = (pid - unit * T.truncdiv(heads + ROWS - 1, ROWS)) * ROWS
            if shortened and keys != LISTED:
                unit = longest_first(lengths, unit, tokens, batch, order_shared)
            own_batch = T.truncdiv(unit, tokens)
            own_token = unit - own_batch * tokens
            num_keys, is_wrong = find_keys(
                table, lengths, own_batch, own_token, tokens, later, width, page_size, pages, keys, shortened
            )
            listed = unit if keys == LISTED else own_batch
            first = T.alloc_var(T.int32, init=0)
            last = T.alloc_var(T.int32)
            last = T.truncdiv(num_keys + 2 * KEYS - 1, 2 * KEYS)  # pairs of blocks
            if split:
                every = T.truncdiv(last + num_splits - 1, num_splits)
                first = T.min(part * every, last)
                last = T.min(first + every, last)

            if T.get_thread_binding() == 0:  # kept for the end, out of registers
                place_shared[0] = own_batch
                place_shared[1] = own_token
                place_shared[2] = row
                place_shared[3] = is_wrong
            T.sync_threads()

            with T.ws(2):
                T.dec_max_nreg(LOADING_REGISTERS)
                for half in (LEFT, RIGHT):
                    T.tma_copy(
                        q[own_batch, own_token, row : row + ROWS, half * HALF : (half + 1) * HALF],
                        q_shared[half, :, :],
                        barrier=q_full[0],
                    )
                T.tma_copy(
                    q[own_batch, own_token, row : row + ROWS, LATENT : LATENT + ROTARY],
                    q_rotary_shared,
                    barrier=q_full[0],
                )
                T.barrier_arrive(q_full[0])
                entry = read_entry(table, listed, num_keys, first, page_size, keys)
                place_keys(entry, latent, first, page_size, pages, keys, page_shared, offset_shared, 0, 0)
                following = T.alloc_var(T.int32)
                following = read_entry(table, listed, num_keys, first + 1, page_size, keys)
                if fp8:
                    for i in T.unroll(KEYS // 8):
                        fetch_codes(latent, factors, page_shared, offset_shared, 0, codes, scales, 0, LEFT, i)
                for step in T.serial(last - first):
                    parity = (step & 1) ^ 1
                    slot = step & 1
                    if keys == BOXED:
                        find_boxes(page_shared, offset_shared, slot, page_of, offset_of)
                    for turn in (0, 1, 2, 3):
                        which, half = ORDER[turn]
                        T.mbarrier_wait_parity(free[half][which], parity)
                        if turn == 1:
                            pair = first + step + 1
                            place_keys(
                                following,
                                latent,
                                pair,
                                page_size,
                                pages,
                                keys,
                                page_shared,
                                offset_shared,
                                slot ^ 1,
                                lines,
                            )
                            following = read_entry(table, listed, num_keys, pair + 1, page_size, keys)
                        if fp8:
                            then, after = ORDER[(turn + 1) % 4]
                            for i in T.unroll(KEYS // 8):
                                store_codes(codes, scales, kv_shared, which, half, i)
                                fetch_codes(
                                    latent,
                                    factors,
                                    page_shared,
                                    offset_shared,
                                    slot ^ (turn // 3),
                                    codes,
                                    scales,
                                    then,
                                    after,
                                    i,
                                )
                        else:
                            load_half(
                                latent,
                                page_shared,
                                offset_shared,
                                slot,
                                page_of,
                                offset_of,
                                kv_shared,
                                begun[half],
                                full[half],
                                which,
                                half,
                                keys == BOXED,
                            )
                        if turn >= 2:
                            load_rotary(
                                rotary,
                                page_shared,
                                offset_shared,
                                slot,
                                page_of,
                                offset_of,
                                rotary_shared,
                                full[half],
                                which,
                                keys == BOXED,
                            )
                        if keys == BOXED:
                            T.mbarrier_arrive(begun[half][which])
                        finish(full[half], which, fp8, keys != BOXED and (not fp8 or turn >= 2))

            with T.ws(0):
                T.inc_max_nreg(MULTIPLYING_REGISTERS)
                T.fill(top[0], -inf)
                T.clear(total[0])
                T.clear(acc[0])
                T.mbarrier_wait_parity(q_full[0], 0)
                for step in T.serial(last - first):
                    for order, half in enumerate((LEFT, RIGHT)):
                        score_half(
                            q_shared,
                            kv_shared,
                            scores[0],
                            begun[half],
                            full[half],
                            step,
                            0,
                            half,
                            order == 0,
                            keys == BOXED,
                            not fp8 or order == 1,
                        )
                    T.wgmma_gemm(q_rotary_shared, rotary_shared[0, :, :], scores[0], transpose_B=True)
                    T.wait_wgmma(0)
                    mask_scores(scores[0], page_shared, step & 1, 0, scale, keys)
                    T.reduce_max(scores[0], block_top[0], dim=1)
                    for i in T.Parallel(ROWS):
                        block_top[0][i] = T.max(top[0][i], block_top[0][i])
                        factor[0][i] = exp2(top[0][i] - finite_top(block_top[0][i]))
                        top_shared[0, i] = block_top[0][i]
                    T.named_barrier_arrive(TOP_FIRST, 2 * WARPGROUP)
                    for i, j in T.Parallel(ROWS, KEYS):
                        scores[0][i, j] = exp2(scores[0][i, j] - finite_top(block_top[0][i]))
                    T.copy(scores[0], weights[0])
                    for i, d in T.Parallel(ROWS, HALF):
                        acc[0][i, d] = acc[0][i, d] * factor[0][i]
                    T.wgmma_gemm(weights[0], kv_shared[0, LEFT, :, :], acc[0])
                    T.reduce_sum(scores[0], block_sum[0], dim=1)
                    for i in T.Parallel(ROWS):
                        total[0][i] = total[0][i] * factor[0][i] + block_sum[0][i]
                    T.sync_threads(TOP_SECOND, 2 * WARPGROUP)
                    for i in T.Parallel(ROWS):
                        top[0][i] = top_shared[1, i]
                        factor[0][i] = exp2(block_top[0][i] - finite_top(top[0][i]))
                        total[0][i] = total[0][i] * factor[0][i]
                    for i, j in T.Parallel(ROWS, KEYS):
                        scores[0][i, j] = scores[0][i, j] * factor[0][i]
                    T.copy(scores[0], rotary_shared[0, :, :])
                    T.fence_proxy_async()
                    T.named_barrier_arrive(WEIGHT_FIRST, 2 * WARPGROUP)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(free[LEFT][0])
                    for i, d in T.Parallel(ROWS, HALF):
                        acc[0][i, d] = acc[0][i, d] * factor[0][i]
                    T.sync_threads(WEIGHT_SECOND, 2 * WARPGROUP)
                    T.wgmma_gemm(rotary_shared[1, :, :], kv_shared[1, LEFT, :, :], acc[0])
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(free[LEFT][1])
                if split:
                    T.pdl_trigger()  # blocks of the merge may start; they wait for the end of this kernel
                share_sums(total[0], sum_shared, 0)
                place = read_place(place_shared)
                store_logs(
                    top[0], total[0], lse, max_logits, part, place[0], place[1], place[2], place[3], logits, nothing
                )
                store_half(
                    acc[0],
                    top[0],
                    total[0],
                    factor[0],
                    sink,
                    o,
                    kv_shared,
                    part,
                    place[0],
                    place[1],
                    place[2],
                    place[3],
                    sink_dtype,
                    split,
                    0,
                )

            with T.ws(1):
                T.inc_max_nreg(MULTIPLYING_REGISTERS)
                T.fill(top[1], -inf)
                T.clear(total[1])
                T.clear(acc[1])
                T.mbarrier_wait_parity(q_full[0], 0)
                for step in T.serial(last - first):
                    for order, half in enumerate((RIGHT, LEFT)):
                        score_half(
                            q_shared,
                            kv_shared,
                            scores[1],
                            begun[half],
                            full[half],
                            step,
                            1,
                            half,
                            order == 0,
                            keys == BOXED,
                            not fp8 or order == 1,
                        )
                    T.wgmma_gemm(q_rotary_shared, rotary_shared[1, :, :], scores[1], transpose_B=True)
                    T.wait_wgmma(0)
                    mask_scores(scores[1], page_shared, step & 1, 1, scale, keys)
                    T.reduce_max(scores[1], block_top[1], dim=1)
                    T.sync_threads(TOP_FIRST, 2 * WARPGROUP)
                    for i in T.Parallel(ROWS):
                        block_top[1][i] = T.max(top_shared[0, i], block_top[1][i])
                        factor[1][i] = exp2(top[1][i] - finite_top(block_top[1][i]))
                        top[1][i] = block_top[1][i]
                        top_shared[1, i] = block_top[1][i]
                    T.named_barrier_arrive(TOP_SECOND, 2 * WARPGROUP)
                    for i, j in T.Parallel(ROWS, KEYS):
                        scores[1][i, j] = exp2(scores[1][i, j] - finite_top(top[1][i]))
                    T.copy(scores[1], weights[1])
                    T.copy(weights[1], rotary_shared[1, :, :])
                    T.fence_proxy_async()
                    T.named_barrier_arrive(WEIGHT_SECOND, 2 * WARPGROUP)
                    for i, d in T.Parallel(ROWS, HALF):
                        acc[1][i, d] = acc[1][i, d] * factor[1][i]
                    T.wgmma_gemm(weights[1], kv_shared[1, RIGHT, :, :], acc[1])
                    T.reduce_sum(scores[1], block_sum[1], dim=1)
                    for i in T.Parallel(ROWS):
                        total[1][i] = total[1][i] * factor[1][i] + block_sum[1][i]
                    T.sync_threads(WEIGHT_FIRST, 2 * WARPGROUP)
                    T.wgmma_gemm(rotary_shared[0, :, :], kv_shared[0, RIGHT, :, :], acc[1])
                    T.wait_wgmma(1)
                    T.mbarrier_arrive(free[RIGHT][1])
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(free[RIGHT][0])
                if split:
                    T.pdl_trigger()  # blocks of the merge may start; they wait for the end of this kernel
                share_sums(total[1], sum_shared, 1)
                place = read_place(place_shared)
                store_half(
                    acc[1],
                    top[1],
                    total[1],
                    factor[1],
                    sink,
                    o,
                    kv_shared,
                    part,
                    place[0],
                    place[1],
                    place[2],
                    place[3],
                    sink_dtype,
                    split,
                    1,
                )

    return mla_decode_hopper
