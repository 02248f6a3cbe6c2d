"""The kernel of `topk_indices` for few rows of thousands of columns: they stay in the registers of a cluster of blocks.

Keys are compared digit by digit: 11, 11 and 10 bits from the highest. A histogram over the keys that share all digits
of the edge so far finds its next digit. Blocks of a cluster send each other their histograms. So all of them know the
edge, and each knows how many entries of the blocks before it are kept. The search ends with the digit that decides.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.attention.topk_indices_kernels import BINS, PASS_CONFIGS, order_key, scan
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, begin_early, macro
from tile_kernels.device.cluster import SEND_FOUR, send

THREADS = 1024
WARPS = THREADS // WARP
#: Bins of a thread.
OWN_BINS = BINS // THREADS
#: The lowest bit of every digit, and that of the one before it.
DIGITS = (21, 32), (10, 21), (0, 10)
#: Keys of a thread, at most, and blocks of a cluster with the rows for which all of them run at the same time.
MAX_SLOTS = 32
MOST_ROWS = {8: 15, 4: 30, 2: 66, 1: 132}
#: Columns of a block from which on a row may have more blocks.
BLOCK_COLUMNS = 8192


def resident_shape(rows: Any, columns: Any, width: int, max_cluster: int) -> tuple[int, int] | None:
    """Keys of a thread and blocks of a row, if all rows fit into the registers of all blocks at once."""
    if not all(isinstance(n, int) for n in (rows, columns)):
        return None  # fake tensors: nothing is launched
    for blocks, most_rows in MOST_ROWS.items():
        if blocks <= max_cluster and rows <= most_rows and (blocks == 1 or columns > BLOCK_COLUMNS * (blocks // 2)):
            vectors = -(-columns // (THREADS * width * blocks))
            slots = max(4, width * (1 << (vectors - 1).bit_length()))
            return (slots, blocks) if slots <= MAX_SLOTS else None
    return None


@dataclass(frozen=True)
class Parts:
    """Sums of warps, as `scan` needs them."""

    part: Any


@macro
def send_bins(histogram_shared, sent_shared, sent, level: int, rank, blocks: int):
    """Send the histogram to the other blocks and wait for theirs."""
    tx = T.get_thread_binding()
    four_local = T.alloc_local((4,), T.float32)
    if tx < BINS // 4:
        for e in T.unroll(4):
            four_local[e] = T.reinterpret(histogram_shared[level, tx * 4 + e], T.float32)
        for other in T.unroll(blocks):
            if other != rank:
                send(sent_shared[level, rank, tx * 4], four_local, sent[level], other)
    T.mbarrier_wait_parity(sent[level], 0)


@macro
def find_places(parts_shared, parity: int, mask, place_local, width: int):
    """Where the kept numbers of this thread go: those before a vector are counted in the order of columns."""
    vectors = place_local.shape[0]
    tx = T.get_thread_binding()
    lane, warp = tx % WARP, tx // WARP
    group = 4 if width <= 4 else 2  # vectors whose counts share a word
    field = 32 // group
    words = -(-vectors // group)
    before = T.alloc_local((words,), T.uint32)
    totals = T.alloc_local((words,), T.uint32)
    every = T.alloc_var(T.int32, init=0)
    every = 0
    for w in T.unroll(words):
        own = T.alloc_var(T.uint32)
        own = T.uint32(0)
        for g in T.unroll(min(group, vectors)):
            bits = (mask >> T.cast((w * group + g) * width, T.uint32)) & T.uint32((1 << width) - 1)
            own += T.popcount(bits) << T.cast(g * field, T.uint32)
        before[w] = own
        for s in T.unroll(5):
            other = T.shfl_up(before[w], 1 << s)
            if lane >= (1 << s):
                before[w] = before[w] + other
        totals[w] = T.shfl_sync(before[w], WARP - 1)
        before[w] = before[w] - own
        for g in T.unroll(min(group, vectors)):
            every += T.cast(totals[w] >> T.cast(g * field, T.uint32) & T.uint32((1 << field) - 1), T.int32)
    if lane == 0:
        parts_shared[parity, warp] = every
    T.sync_threads()
    every = T.warp_reduce_sum(T.if_then_else(lane < warp, parts_shared[parity, lane], 0))
    for u in T.unroll(vectors):
        shift = T.cast(u % group * field, T.uint32)
        place_local[u] = every + T.cast(before[u // group] >> shift & T.uint32((1 << field) - 1), T.int32)
        every += T.cast(totals[u // group] >> shift & T.uint32((1 << field) - 1), T.int32)


@kernel(pass_configs=PASS_CONFIGS)
def topk_resident_kernel(
    dtype: torch.dtype, vector_bytes: int, has_start: bool, has_end: bool, values: bool, slots: int, blocks: int
):
    """`slots` keys of a thread, `blocks` blocks of a row."""
    num_rows, num_columns, stride, k = (T.dynamic(n) for n in ('num_rows', 'num_columns', 'stride', 'k'))
    num_starts, num_ends = T.dynamic('num_starts'), T.dynamic('num_ends')
    value_rows, value_columns = T.dynamic('value_rows'), T.dynamic('value_columns')
    elem = T.dtype(dtype)
    width = vector_bytes // dtype.itemsize
    vectors = slots // width
    levels = len(DIGITS)

    @T.prim_func
    def topk_resident(
        logits: T.StridedTensor((num_rows, num_columns), (stride, 1), elem),
        start: T.Tensor((num_starts,), T.int32),
        end: T.Tensor((num_ends,), T.int32),
        indices: T.Tensor((num_rows, k), T.int32),
        chosen: T.Tensor((value_rows, value_columns), elem),
    ):
        cluster_dims = (blocks, 1, 1) if blocks > 1 else None
        with T.Kernel(blocks, num_rows, threads=THREADS, cluster_dims=cluster_dims) as (rank, row):
            T.assume(stride % width == 0)
            histogram_shared = T.alloc_shared((levels, BINS), T.int32)
            parts_shared = T.alloc_shared((2, WARPS), T.int32)
            found_shared = T.alloc_shared((5,), T.int32)
            x_local = T.alloc_local((vectors, width), elem)
            key_local = T.alloc_local((slots,), T.uint32)
            bins_local, lower_local = T.alloc_local((OWN_BINS,), T.int32), T.alloc_local((OWN_BINS,), T.int32)
            sums_local, place_local = T.alloc_local((2,), T.int32), T.alloc_local((vectors,), T.int32)
            first = T.alloc_var(T.int32, init=0)
            last = T.alloc_var(T.int32)
            aligned = T.alloc_var(T.int32)  # variables, lest divisions be repeated
            part_first = T.alloc_var(T.int32)
            stop = T.alloc_var(T.int32)
            number = T.alloc_var(T.int32)
            valid = T.alloc_var(T.uint32, init=0)
            mask = T.alloc_var(T.uint32, init=0)
            ties = T.alloc_var(T.uint32, init=0)
            edge = T.alloc_var(T.uint32, init=0)
            need = T.alloc_var(T.int32)
            is_open = T.alloc_var(T.int32)
            kept_before = T.alloc_var(T.int32, init=0)  # in the blocks before this one
            before = T.alloc_var(T.int32)
            lower = T.alloc_var(T.int32, init=0)
            own = T.alloc_var(T.int32)
            tx = T.get_thread_binding()
            own_column = T.alloc_var(T.int32)
            own_vector = T.alloc_var(T.int32)

            begin_early()
            if blocks > 1:
                T.import_source(SEND_FOUR)
                sent_shared = T.alloc_shared((levels, blocks, BINS), T.float32)
                sent = T.alloc_barrier([1] * levels)
                if tx == 0:
                    for level in T.unroll(levels):
                        T.mbarrier_arrive_expect_tx(sent[level], (blocks - 1) * BINS * 4)
                T.cluster_arrive()  # no block sends before the others expect it
            last = num_columns
            if has_start:
                first = T.max(T.min(start[row], num_columns), 0)
            if has_end:
                last = T.min(end[row], num_columns)
            number = T.max(last - first, 0)
            aligned = T.truncdiv(first, width) * width if has_start else 0
            own = T.truncdiv(T.truncdiv(T.max(last - aligned, 0) + width - 1, width) + blocks - 1, blocks) * width
            part_first = aligned + rank * own
            stop = T.min(part_first + own, last)
            own_vector = T.truncdiv(part_first, width) + tx // WARP * (vectors * WARP) + tx % WARP
            own_column = own_vector * width
            for u in T.unroll(vectors):
                column = own_column + u * (WARP * width)
                if T.And(column >= first, column + width <= stop):
                    for e in T.vectorized(width):
                        x_local[u, e] = logits[row, (own_vector + u * WARP) * width + e]
                    valid = valid | T.uint32((1 << width) - 1) << T.cast(u * width, T.uint32)
                else:
                    for e in T.unroll(width):
                        x_local[u, e] = T.cast(0, elem)
                        if T.And(column + e >= first, column + e < stop):
                            x_local[u, e] = logits[row, column + e]
                            valid = valid | T.uint32(1) << T.cast(u * width + e, T.uint32)
            for i in T.unroll(levels * OWN_BINS):
                histogram_shared[i // OWN_BINS, i % OWN_BINS * THREADS + tx] = 0
            T.sync_threads()
            for u in T.unroll(vectors):
                for e in T.unroll(width):
                    key_local[u * width + e] = order_key(T.cast(x_local[u, e], T.float32))
            if blocks > 1:
                T.cluster_wait()
            need = k
            is_open = T.if_then_else(number > k, 1, 0)
            if is_open == 0:
                kept_before = T.min(T.max(part_first - first, 0), number)
            for level, (shift, known) in enumerate(DIGITS):
                if is_open != 0:
                    for i in T.unroll(slots):
                        if (valid >> T.cast(i, T.uint32)) & T.uint32(1) != T.uint32(0):
                            distance = (key_local[i] - edge) >> T.uint32(shift)
                            if distance < T.uint32(1 << known - shift):
                                T.atomic_add(histogram_shared[level, T.cast(distance, T.int32)], 1)
                    T.sync_threads()
                    if blocks > 1:
                        send_bins(histogram_shared, sent_shared, sent, level, rank, blocks)
                    own = 0
                    lower = 0
                    for i in T.unroll(OWN_BINS):
                        digit = BINS - OWN_BINS - tx * OWN_BINS + i
                        bins_local[i] = histogram_shared[level, digit]
                        lower_local[i] = 0
                        if blocks > 1:
                            for other in T.unroll(blocks):
                                if other != rank:
                                    there = T.reinterpret(sent_shared[level, other, digit], T.int32)
                                    bins_local[i] = bins_local[i] + there
                                    if other < rank:
                                        lower_local[i] = lower_local[i] + there
                        own += bins_local[i]
                        lower += lower_local[i]
                    scan(Parts(parts_shared), 0, own, sums_local, THREADS)
                    before = sums_local[0]
                    if blocks > 1:
                        scan(Parts(parts_shared), 1, lower, sums_local, THREADS)
                        lower = sums_local[0]
                    for i in T.unroll(OWN_BINS):  # from the highest bin down
                        if T.And(before < need, before + bins_local[OWN_BINS - 1 - i] >= need):
                            found_shared[0] = BINS - 1 - (tx * OWN_BINS + i)
                            found_shared[1] = before
                            found_shared[2] = bins_local[OWN_BINS - 1 - i]
                            found_shared[3] = lower
                            found_shared[4] = lower_local[OWN_BINS - 1 - i]
                        before += bins_local[OWN_BINS - 1 - i]
                        lower += lower_local[OWN_BINS - 1 - i]
                    T.sync_threads()
                    edge = edge + (T.cast(found_shared[0], T.uint32) << T.uint32(shift))
                    need = need - found_shared[1]
                    kept_before += found_shared[3]
                    lower = found_shared[4]
                    if found_shared[2] == need:  # all keys that share these digits are kept
                        is_open = 0
                        kept_before += lower
            for i in T.unroll(slots):
                bit = (valid >> T.cast(i, T.uint32)) & T.uint32(1)
                if key_local[i] >= edge:
                    mask = mask | bit << T.cast(i, T.uint32)
                if key_local[i] == edge:
                    ties = ties | bit << T.cast(i, T.uint32)
            if is_open != 0:  # more keys are equal to the edge than are needed: the first ones are kept
                kept_before += T.min(lower, need)
                find_places(parts_shared, 1, ties, place_local, width)
                for u in T.unroll(vectors):
                    for e in T.unroll(width):
                        bit = T.uint32(1) << T.cast(u * width + e, T.uint32)
                        if (ties & bit) != T.uint32(0):
                            if lower + place_local[u] >= need:
                                mask = mask ^ bit
                            place_local[u] = place_local[u] + 1
            find_places(parts_shared, 0, mask, place_local, width)
            for u in T.unroll(vectors):
                for e in T.unroll(width):
                    if (mask & (T.uint32(1) << T.cast(u * width + e, T.uint32))) != T.uint32(0):
                        column = own_column + u * (WARP * width) + e
                        indices[row, kept_before + place_local[u]] = column - first
                        if values:
                            chosen[row, kept_before + place_local[u]] = logits[row, column]
                        place_local[u] = place_local[u] + 1
            if rank == 0:
                for turn in T.serial(T.ceildiv(k, THREADS)):
                    if T.And(turn * THREADS + tx < k, turn * THREADS + tx >= number):
                        indices[row, turn * THREADS + tx] = -1
                        if values:
                            chosen[row, turn * THREADS + tx] = T.cast(-T.infinity('float32'), elem)

    return topk_resident
