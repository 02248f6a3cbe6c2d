"""The kernels of `topk_indices`, which describes the methods."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.core.gpus import Gpu
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, begin_early, macro

#: Bins of a histogram, and the bits of a key that one histogram tells apart.
DIGIT = 11
BINS = 1 << DIGIT
#: Entries of the list that a thread takes at a time.
ENTRIES = 4
#: The largest k, and that of the short list.
MAX_K, SHORT_LIST_K = 4096, 2048

#: Bytes of shared memory of a block of 512 threads with a short list, rounded up; of 1024 threads twice as many.
SMALL_BYTES = 108 << 10

#: Threads exchange what they found through shared memory, so the code itself places the barriers.
PASS_CONFIGS = {
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
}


def choose(
    dtype: torch.dtype, vector_bytes: int, has_start: bool, has_end: bool, mapped: bool, values: bool, large: bool,
    size: int, gpu: Gpu,
) -> dict:  # fmt: skip
    """Few rows get large thread blocks, each of which has an SM of its own, if it has enough shared memory."""
    if gpu.smem_per_block < 2 * SMALL_BYTES:
        return dict(num_threads=256, vectors=4)
    return dict(num_threads=1024, vectors=2) if size <= 132 else dict(num_threads=512, vectors=4)


# Keys ---------------------------------------------------------------------------------------


def order_key(x: Any) -> Any:
    """A uint32 in the order of the float32 `x`; both zeros are equal, and NaN is 0, below -inf."""
    bits = T.reinterpret(x, T.uint32)
    flipped = T.if_then_else(bits >= T.uint32(0x80000000), ~bits, bits | T.uint32(0x80000000))
    return T.if_then_else(T.isnan(x), T.uint32(0), T.if_then_else(x == 0.0, T.uint32(0x80000000), flipped))


@dataclass(frozen=True)
class Shared:
    """What the threads of a block share: the list in the order of columns, a histogram, partial sums and extrema.

    New entries of the list have the bits of a float32 instead of a key. The histogram has a bin for all other keys.
    """

    key: Any
    column: Any
    histogram: Any
    part: Any
    extreme: Any
    found: Any


@dataclass(frozen=True)
class Cut:
    """Kept are the entries above `edge`, and those of this key up to the one at `last`. `bits` bits were not needed."""

    edge: Any
    bits: Any
    last: Any


def bin_mask(bits: Any) -> Any:
    """The largest distance of a key of a bin from its edge."""
    full = T.uint32(0xFFFFFFFF)
    return T.if_then_else(bits > 0, full >> T.cast(T.max(32 - bits, 0), T.uint32) % T.uint32(32), T.uint32(0))


def lanes_below(lane: Any) -> Any:
    """The bits of the lanes before this one."""
    return (T.uint32(1) << T.cast(lane, T.uint32)) - T.uint32(1)


def count_bits(votes: Any) -> Any:
    """Bits that are set."""
    return T.cast(T.popcount(T.cast(votes, T.uint32)), T.int32)


@macro
def scan(shared, parity, own, sums, num_threads: int):
    """`sums` become the sums of `own` over the threads before this one and over all."""
    num_warps = num_threads // WARP
    tx = T.get_thread_binding()
    lane, warp = tx % WARP, tx // WARP
    earlier = T.alloc_var(T.int32)
    earlier = own
    for s in T.unroll(5):
        other = T.shfl_up(earlier, 1 << s)
        if lane >= (1 << s):
            earlier += other
    if lane == WARP - 1:
        shared.part[parity, warp] = earlier
    T.sync_threads()
    parts = shared.part[parity, lane % num_warps]
    sums[0] = earlier + T.warp_reduce_sum(T.if_then_else(lane < warp, parts, 0)) - own
    sums[1] = T.warp_reduce_sum(T.if_then_else(lane < num_warps, parts, 0))


@macro
def load_keys(shared, number, index, keys):
    """Load the keys of `ENTRIES` entries of the list, as far as it has them."""
    if index + ENTRIES <= number:
        for e in T.vectorized(ENTRIES):
            keys[e] = shared.key[index + e]
    else:
        for e in T.unroll(ENTRIES):
            keys[e] = T.uint32(0)
            if index + e < number:
                keys[e] = shared.key[index + e]


@macro
def make_keys(shared, fresh, number, extremes, keys, num_threads: int):
    """Turn the entries from `fresh` on into keys; `extremes` become bounds of those of this thread."""
    tx = T.get_thread_binding()
    start = fresh // ENTRIES * ENTRIES
    for step in T.serial(T.ceildiv(number - start, ENTRIES * num_threads)):
        index = start + (step * num_threads + tx) * ENTRIES
        load_keys(shared, number, index, keys)
        for e in T.unroll(ENTRIES):
            if T.And(index + e >= fresh, index + e < number):
                keys[e] = order_key(T.reinterpret(keys[e], T.float32))
                extremes[0] = T.max(extremes[0], keys[e])
                extremes[1] = T.min(extremes[1], keys[e])
        if index + ENTRIES <= number:
            for e in T.vectorized(ENTRIES):
                shared.key[index + e] = keys[e]
        else:
            for e in T.unroll(ENTRIES):
                if index + e < number:
                    shared.key[index + e] = keys[e]


@macro
def find_cut(shared, number, k, slack: int, extremes, cut, keys, sums, num_threads: int):
    """Find the cut that keeps the k largest of the list, which has more than k, and at most `slack` others.

    `extremes` are bounds of the keys that this thread made.
    """
    num_warps = num_threads // WARP
    own_bins = BINS // num_threads
    tx = T.get_thread_binding()
    lane, warp = tx % WARP, tx // WARP
    bins_local = T.alloc_local((own_bins,), T.int32)
    top = T.alloc_var(T.uint32)
    bottom = T.alloc_var(T.uint32)
    shift = T.alloc_var(T.int32, init=0)
    before = T.alloc_var(T.int32, init=0)
    own = T.alloc_var(T.int32, init=0)
    need = T.alloc_var(T.int32)
    is_open = T.alloc_var(T.int32, init=1)
    top = T.warp_reduce_max(extremes[0])
    bottom = T.warp_reduce_min(extremes[1])
    if lane == 0:
        shared.extreme[0, warp] = top
        shared.extreme[1, warp] = bottom
    for i in T.unroll(own_bins):
        shared.histogram[i * num_threads + tx] = 0
    T.sync_threads()
    top = T.warp_reduce_max(shared.extreme[0, lane % num_warps])
    bottom = T.warp_reduce_min(shared.extreme[1, lane % num_warps])
    cut.edge[0] = bottom
    cut.bits[0] = 32 - T.cast(T.clz(T.reinterpret(top - bottom, T.int32)), T.int32)
    cut.last[0] = number - 1
    need = k  # of the bin: the numbers above it are kept
    for level in T.serial(-(-32 // DIGIT)):
        if T.And(is_open != 0, cut.bits[0] > 0):
            shift = T.max(cut.bits[0] - DIGIT, 0)
            if level > 0:
                for i in T.unroll(own_bins):
                    shared.histogram[i * num_threads + tx] = 0
                T.sync_threads()
            for step in T.serial(T.ceildiv(number, ENTRIES * num_threads)):
                index = (step * num_threads + tx) * ENTRIES
                if index < number:
                    load_keys(shared, number, index, keys)
                    for e in T.unroll(ENTRIES):
                        distance = keys[e] - cut.edge[0]  # huge for keys below the edge: no key is above that of inf
                        digit = T.cast(distance >> T.cast(shift, T.uint32), T.int32)
                        is_counted = T.And(index + e < number, distance <= bin_mask(cut.bits[0]))
                        T.atomic_add(shared.histogram[T.if_then_else(is_counted, digit, BINS)], 1)
            T.sync_threads()
            for i in T.vectorized(own_bins):
                bins_local[i] = shared.histogram[BINS - own_bins - tx * own_bins + i]
            own = 0
            for i in T.unroll(own_bins):
                own += bins_local[i]
            scan(shared, 0, own, sums, num_threads)
            before = sums[0]
            for i in T.unroll(own_bins):  # from the highest bin down
                if T.And(before < need, before + bins_local[own_bins - 1 - i] >= need):
                    shared.found[0] = BINS - 1 - (tx * own_bins + i)
                    shared.found[1] = before
                    shared.found[2] = bins_local[own_bins - 1 - i]
                before += bins_local[own_bins - 1 - i]
            T.sync_threads()
            cut.edge[0] = cut.edge[0] + (T.cast(shared.found[0], T.uint32) << T.cast(shift, T.uint32))
            need = need - shared.found[1]
            cut.bits[0] = shift
            if shared.found[2] - need <= slack:
                is_open = 0
    if is_open != 0:  # more keys are equal to the edge than are needed: the first ones
        before = 0
        for step in T.serial(T.ceildiv(number, ENTRIES * num_threads)):
            index = (step * num_threads + tx) * ENTRIES
            load_keys(shared, number, index, keys)
            own = 0
            for e in T.unroll(ENTRIES):
                own += T.if_then_else(T.And(index + e < number, keys[e] == cut.edge[0]), 1, 0)
            scan(shared, step % 2, own, sums, num_threads)
            sums[0] = sums[0] + before
            before += sums[1]
            for e in T.unroll(ENTRIES):
                if T.And(index + e < number, keys[e] == cut.edge[0]):
                    sums[0] = sums[0] + 1
                    if sums[0] == need:
                        shared.found[0] = index + e
        T.sync_threads()
        cut.last[0] = shared.found[0]


@dataclass(frozen=True)
class Kept:
    """Entries of the list, and a bit for each of them that is kept."""

    key: Any
    column: Any
    mask: Any


@macro
def find_kept(shared, number, step, cut, kept, sums, num_threads: int):
    """Find the entries of this thread in a step over the list that are kept; `sums` count those before, and all."""
    tx = T.get_thread_binding()
    index = (step * num_threads + tx) * ENTRIES
    load_keys(shared, number, index, kept.key)
    if index + ENTRIES <= number:
        for e in T.vectorized(ENTRIES):
            kept.column[e] = shared.column[index + e]
    else:
        for e in T.unroll(ENTRIES):
            if index + e < number:
                kept.column[e] = shared.column[index + e]
    kept.mask[0] = T.uint32(0)
    for e in T.unroll(ENTRIES):
        if T.Or(kept.key[e] > cut.edge[0], T.And(kept.key[e] == cut.edge[0], index + e <= cut.last[0])):
            kept.mask[0] = kept.mask[0] | T.uint32(1 << e)
    scan(shared, step % 2, count_bits(kept.mask[0]), sums, num_threads)


def value_of(key: Any) -> Any:
    """The least float32 whose key is `key` or more, for keys above that of NaN."""
    bits = T.if_then_else(key >= T.uint32(0x80000000), key & T.uint32(0x7FFFFFFF), ~key)
    return T.if_then_else(key <= T.uint32(0x007FFFFF), T.float32(-math.inf), T.reinterpret(bits, T.float32))


# Kernel -------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(num_threads=(256, 512, 1024), vectors=(2, 4)), pass_configs=PASS_CONFIGS)
def topk_indices_kernel(
    dtype: torch.dtype,
    vector_bytes: int,
    has_start: bool,
    has_end: bool,
    mapped: bool,
    values: bool,
    large: bool,
    *,
    num_threads: int,
    vectors: int,
):
    """The k largest of a part of a row. With `mapped`, `names` has the indices of the numbers; negative ones are none.

    `large` is for k beyond `SHORT_LIST_K`.
    """
    num_rows, num_columns, stride = T.dynamic('num_rows'), T.dynamic('num_columns'), T.dynamic('stride')
    num_parts, k = T.dynamic('num_parts'), T.dynamic('k')
    num_starts, num_ends = T.dynamic('num_starts'), T.dynamic('num_ends')
    name_rows, name_columns = T.dynamic('name_rows'), T.dynamic('name_columns')
    value_rows, value_parts, value_columns = (T.dynamic(f'value_{name}') for name in ('rows', 'parts', 'columns'))
    elem = T.dtype(dtype)
    width = vector_bytes // dtype.itemsize
    copied = vector_bytes >= 4  # what cp.async can copy
    num_warps = num_threads // WARP
    # Entries of the list: k, the slack of a cut and half a step. Two blocks of 512 threads share an SM. A step of 256
    # threads is so short that 8192 entries serve the largest k.
    capacity = 16384 if num_threads == 1024 or (large and num_threads == 512) else 8192
    slack = capacity // 16
    vectors = min(vectors, 4 if width <= 4 else 2)  # of a thread in a step
    field = 32 // vectors  # bits of a number of up to 32 * width
    warp_columns = vectors * WARP * width
    step_columns = num_warps * warp_columns
    stages = min(4, num_threads * 64 // (vectors * num_threads * vector_bytes))
    full = (1 << width) - 1

    @T.prim_func
    def topk_indices(
        logits: T.StridedTensor((num_rows, num_columns), (stride, 1), elem),
        start: T.Tensor((num_starts,), T.int32),
        end: T.Tensor((num_ends,), T.int32),
        names: T.Tensor((name_rows, name_columns), T.int32),
        indices: T.Tensor((num_rows, num_parts, k), T.int32),
        chosen: T.Tensor((value_rows, value_parts, value_columns), elem),
    ):
        with T.Kernel(num_rows, num_parts, threads=num_threads) as (row, part):
            T.assume(stride % width == 0)
            if capacity == 8192:
                T.annotate_min_blocks_per_sm(2)
            if mapped:
                T.assume(name_columns % width == 0)
            key_shared = T.alloc_shared((capacity,), T.uint32)
            column_shared = T.alloc_shared((capacity,), T.int32)
            stage_shared = T.alloc_shared((stages, vectors, num_threads, width), elem)
            histogram_shared = T.alloc_shared((BINS + 4,), T.int32)
            part_shared = T.alloc_shared((2, num_warps), T.int32)
            extreme_shared = T.alloc_shared((2, num_warps), T.uint32)
            found_shared = T.alloc_shared((3,), T.int32)
            shared = Shared(key_shared, column_shared, histogram_shared, part_shared, extreme_shared, found_shared)
            x_local = T.alloc_local((vectors, width), elem)
            name_local = T.alloc_local((vectors, width), T.int32)
            valid_local, mask_local = T.alloc_local((vectors,), T.uint32), T.alloc_local((vectors,), T.uint32)
            edge_local = T.alloc_local((1,), T.uint32)
            bits_local, last_local = T.alloc_local((1,), T.int32), T.alloc_local((1,), T.int32)
            cut = Cut(edge_local, bits_local, last_local)
            kept_key, kept_column = T.alloc_local((ENTRIES,), T.uint32), T.alloc_local((ENTRIES,), T.int32)
            kept_mask = T.alloc_local((1,), T.uint32)
            kept = Kept(kept_key, kept_column, kept_mask)
            sums_local = T.alloc_local((2,), T.int32)
            number = T.alloc_var(T.int32, init=0)
            fresh = T.alloc_var(T.int32, init=0)
            lowest = T.alloc_var(T.uint32, init=0)  # smaller keys are not among the k largest
            least = T.alloc_var(T.float32, init=0.0)  # the number of this key, once there is one
            extreme_local = T.alloc_local((2,), T.uint32)
            parity = T.alloc_var(T.int32, init=0)
            passed = T.alloc_var(T.uint32)
            place = T.alloc_var(T.int32)
            first_warp = T.alloc_var(T.int32)
            last_warp = T.alloc_var(T.int32)
            earlier = T.alloc_var(T.uint32)
            every = T.alloc_var(T.int32)
            totals = T.alloc_var(T.uint32)
            before = T.alloc_var(T.uint32)
            slot = T.alloc_var(T.int32)
            first = T.alloc_var(T.int32, init=0)
            last = T.alloc_var(T.int32)
            tx = T.get_thread_binding()
            lane, warp = tx % WARP, tx // WARP
            own_column = warp * warp_columns + lane * width  # of a step

            begin_early()
            last = num_columns
            if has_start:
                first = T.max(T.min(start[row], num_columns), 0)
            if has_end:
                last = T.min(end[row], num_columns)
            # The vectors of this part, in order: one for each thread, and so on. Variables, lest divisions be repeated.
            aligned = T.alloc_var(T.int32)
            part_first = T.alloc_var(T.int32)
            stop = T.alloc_var(T.int32)
            num_steps = T.alloc_var(T.int32)
            aligned = T.truncdiv(first, width) * width if has_start else 0
            num_steps = T.truncdiv(
                T.max(last - aligned, 0) + width - 1, width
            )  # first the vectors of a row, then of a part
            num_steps = T.truncdiv(num_steps + num_parts - 1, num_parts)
            part_first = aligned + part * num_steps * width
            stop = T.min(part_first + num_steps * width, last)
            num_steps = T.truncdiv(T.max(stop - part_first, 0) + step_columns - 1, step_columns)

            if tx == 0:
                histogram_shared[BINS] = 0  # a count that nothing reads
            extreme_local[0] = T.uint32(0)
            extreme_local[1] = T.uint32(0xFFFFFFFF)
            for step in T.serial(-stages, num_steps):
                if step >= 0:
                    if copied:
                        T.ptx_wait_group(stages - 1)
                    step_first = part_first + step * step_columns
                    if T.And(step_first >= first, step_first + step_columns <= stop):  # the same for all threads
                        for u in T.unroll(vectors):
                            valid_local[u] = T.uint32(full)
                            if copied:
                                for e in T.vectorized(width):
                                    x_local[u, e] = stage_shared[step % stages, u, tx, e]
                            else:
                                x_local[u, 0] = logits[row, step_first + own_column + u * WARP]
                            if mapped:
                                vector = T.truncdiv(step_first + own_column, width) + u * WARP
                                for e in T.vectorized(width):  # these rows have no start
                                    name_local[u, e] = names[row, vector * width + e]
                    else:
                        for u in T.unroll(vectors):
                            column = step_first + own_column + u * WARP * width
                            valid_local[u] = T.uint32(0)
                            for e in T.unroll(width):
                                x_local[u, e] = T.cast(0, elem)
                                name_local[u, e] = 0
                                if T.And(column + e >= first, column + e < stop):
                                    valid_local[u] = valid_local[u] | T.uint32(1 << e)
                                    if mapped:
                                        name_local[u, e] = names[row, column + e]
                                    if T.And(copied, T.And(column >= first, column + width <= stop)):
                                        x_local[u, e] = stage_shared[step % stages, u, tx, e]
                                    else:
                                        x_local[u, e] = logits[row, column + e]
                    if mapped:
                        for u in T.unroll(vectors):
                            for e in T.unroll(width):
                                if name_local[u, e] < 0:
                                    valid_local[u] = valid_local[u] & ~T.uint32(1 << e)
                if copied:  # the vectors of a thread pass through memory that no other thread uses
                    next_first = part_first + (step + stages) * step_columns
                    if T.And(next_first >= first, next_first + step_columns <= stop):
                        for u in T.unroll(vectors):
                            column = next_first + own_column + u * WARP * width
                            T.ptx_cp_async(
                                T.access_ptr(stage_shared[(step + stages) % stages, u, tx, 0], 'w', width),
                                T.access_ptr(logits[row, column], 'r', width),
                                width,
                            )
                    else:
                        for u in T.unroll(vectors):
                            column = next_first + own_column + u * WARP * width
                            if T.And(column >= first, column + width <= stop):
                                T.ptx_cp_async(
                                    T.access_ptr(stage_shared[(step + stages) % stages, u, tx, 0], 'w', width),
                                    T.access_ptr(logits[row, column], 'r', width),
                                    width,
                                )
                    T.ptx_commit_group()
                # The numbers of some warps are appended at a time: of all, or of half of them.
                first_warp = T.if_then_else(step >= 0, 0, num_warps)
                last_warp = num_warps
                while first_warp < num_warps:
                    # What may still be among the k largest: a bit for each number of a vector.
                    passed = T.uint32(0)
                    for u in T.unroll(vectors):
                        mask_local[u] = T.uint32(0)
                        for e in T.unroll(width):
                            if T.Or(lowest == T.uint32(0), T.cast(x_local[u, e], T.float32) >= least):
                                mask_local[u] = mask_local[u] | T.uint32(1 << e)
                        mask_local[u] = mask_local[u] & valid_local[u]
                        passed += T.popcount(mask_local[u]) << T.uint32(field * u)
                    if T.Or(warp < first_warp, warp >= last_warp):
                        passed = T.uint32(0)
                    earlier = passed
                    for s in T.unroll(5):
                        other = T.shfl_up(earlier, 1 << s)
                        if lane >= (1 << s):
                            earlier += other
                    totals = T.shfl_sync(earlier, WARP - 1)
                    every = 0
                    for u in T.unroll(vectors):
                        every += T.cast(totals >> T.uint32(field * u) & T.uint32((1 << field) - 1), T.int32)
                    parity = 1 - parity  # others may still read what they got last
                    if lane == 0:
                        part_shared[parity, warp] = every
                    T.sync_threads()
                    parts = part_shared[parity, lane % num_warps]
                    place = number + T.warp_reduce_sum(T.if_then_else(lane < warp, parts, 0))
                    every = T.warp_reduce_sum(T.if_then_else(lane < num_warps, parts, 0))
                    if number + every <= capacity:
                        # Append them to the list, in the order of columns.
                        number += every
                        before = earlier - passed
                        for u in T.unroll(vectors):
                            column = part_first + step * step_columns + own_column + u * WARP * width
                            slot = place + T.cast(before >> T.uint32(field * u) & T.uint32((1 << field) - 1), T.int32)
                            if T.And(warp >= first_warp, warp < last_warp):
                                for e in T.unroll(width):
                                    if (mask_local[u] & T.uint32(1 << e)) != T.uint32(0):
                                        key_shared[slot] = T.reinterpret(T.cast(x_local[u, e], T.float32), T.uint32)
                                        column_shared[slot] = column + e
                                        slot += 1
                            place += T.cast(totals >> T.uint32(field * u) & T.uint32((1 << field) - 1), T.int32)
                        first_warp = last_warp
                        last_warp = num_warps
                    elif number <= k + slack:
                        last_warp = first_warp + num_warps // 2
                    else:
                        # The list has no room: cut it, and try again.
                        make_keys(shared, fresh, number, extreme_local, kept_key, num_threads)
                        find_cut(shared, number, k, slack, extreme_local, cut, kept_key, sums_local, num_threads)
                        fresh = 0
                        for turn in T.serial(T.ceildiv(number, ENTRIES * num_threads)):
                            find_kept(shared, number, turn, cut, kept, sums_local, num_threads)
                            place = fresh + sums_local[0]
                            for e in T.unroll(ENTRIES):
                                if (kept.mask[0] & T.uint32(1 << e)) != T.uint32(0):
                                    key_shared[place] = kept.key[e]
                                    column_shared[place] = kept.column[e]
                                    place += 1
                            fresh += sums_local[1]
                        number = fresh
                        # Of equal keys the earlier ones are in the list already.
                        lowest = cut.edge[0] + T.if_then_else(cut.bits[0] == 0, T.uint32(1), T.uint32(0))
                        least = value_of(lowest)
                        extreme_local[1] = cut.edge[0]
                        T.sync_threads()

            T.sync_threads()
            edge_local[0] = T.uint32(0)
            last_local[0] = number - 1
            if number > k:
                make_keys(shared, fresh, number, extreme_local, kept_key, num_threads)
                find_cut(shared, number, k, 0, extreme_local, cut, kept_key, sums_local, num_threads)
            fresh = 0
            for turn in T.serial(T.ceildiv(number, ENTRIES * num_threads)):
                find_kept(shared, number, turn, cut, kept, sums_local, num_threads)
                place = fresh + sums_local[0]
                for e in T.unroll(ENTRIES):
                    if (kept.mask[0] & T.uint32(1 << e)) != T.uint32(0):
                        name = names[row, kept.column[e]] if mapped else kept.column[e] - first
                        indices[row, part, place] = name
                        if values:
                            chosen[row, part, place] = logits[row, kept.column[e]]
                        place += 1
                fresh += sums_local[1]
            for turn in T.serial(T.ceildiv(k, num_threads)):
                if T.And(turn * num_threads + tx < k, turn * num_threads + tx >= number):
                    indices[row, part, turn * num_threads + tx] = -1
                    if values:
                        chosen[row, part, turn * num_threads + tx] = T.cast(-T.infinity('float32'), elem)

    return topk_indices


# Short rows ---------------------------------------------------------------------------------

#: Columns up to which a warp holds a row in registers, and rows of a thread block.
SHORT_COLUMNS, SHORT_ROWS = 1024, 4


def num_slots(columns: int) -> int:
    """Keys of a lane: a power of two, lest every width be compiled."""
    return max(4, 1 << (-(-columns // WARP) - 1).bit_length())


@kernel(pass_configs=PASS_CONFIGS)
def topk_short_kernel(dtype: torch.dtype, slots: int, has_start: bool, has_end: bool, values: bool):
    """A warp owns a row of up to 32 * `slots` columns: column i * 32 + lane is key i of a lane."""
    num_rows, num_columns, stride, k = (T.dynamic(n) for n in ('num_rows', 'num_columns', 'stride', 'k'))
    num_starts, num_ends = T.dynamic('num_starts'), T.dynamic('num_ends')
    value_rows, value_columns = T.dynamic('value_rows'), T.dynamic('value_columns')
    elem = T.dtype(dtype)

    @T.prim_func
    def topk_short(
        logits: T.StridedTensor((num_rows, num_columns), (stride, 1), elem),
        start: T.Tensor((num_starts,), T.int32),
        end: T.Tensor((num_ends,), T.int32),
        indices: T.Tensor((num_rows, k), T.int32),
        chosen: T.Tensor((value_rows, value_columns), elem),
    ):
        with T.Kernel(T.ceildiv(num_rows, SHORT_ROWS), threads=SHORT_ROWS * WARP) as pid:
            x_local = T.alloc_local((slots,), elem)
            key_local = T.alloc_local((slots,), T.uint32)
            kept_local = T.alloc_local((1,), T.int32)
            cut = T.alloc_var(T.uint32, init=0)
            first = T.alloc_var(T.int32, init=0)
            last = T.alloc_var(T.int32)
            high = T.alloc_var(T.uint32, init=0)
            low = T.alloc_var(T.uint32, init=0xFFFFFFFF)
            bit = T.alloc_var(T.uint32, init=0)
            count = T.alloc_var(T.int32)
            need = T.alloc_var(T.int32, init=0)
            before = T.alloc_var(T.int32, init=0)
            ties_before = T.alloc_var(T.int32, init=0)
            tx = T.get_thread_binding()
            lane = tx % WARP
            row = pid * SHORT_ROWS + tx // WARP
            begin_early()
            if row < num_rows:
                last = num_columns
                if has_start:
                    first = T.max(T.min(start[row], num_columns), 0)
                if has_end:
                    last = T.min(end[row], num_columns)
                for i in T.unroll(slots):
                    if T.And(i * WARP + lane >= first, i * WARP + lane < last):
                        x_local[i] = logits[row, i * WARP + lane]
                for i in T.unroll(slots):
                    key_local[i] = T.uint32(0)
                    if T.And(i * WARP + lane >= first, i * WARP + lane < last):
                        key_local[i] = order_key(T.cast(x_local[i], T.float32))
                        high = T.max(high, key_local[i])
                        low = T.min(low, key_local[i])
                # The largest cut that k keys reach, bit by bit from a lower bound: 32 keys reach the least of the
                # maxima of 32 lanes. It is 0 if no number is dropped. If just k keys reach a cut, there are no ties.
                count = T.max(last - first, 0)
                if count > k:
                    cut = T.warp_reduce_min(T.if_then_else(k <= WARP, high, low))
                    high = T.warp_reduce_max(high) - cut
                    bit = T.uint32(0x80000000)
                while T.And(bit != T.uint32(0), count != k):
                    if high >= bit:
                        trial = cut + bit
                        need = 0
                        for i in T.unroll(slots):
                            need += T.if_then_else(key_local[i] >= trial, 1, 0)
                        need = T.warp_reduce_sum(need)
                        if need >= k:
                            cut = cut + bit
                            count = need
                            high = high - bit
                    bit = bit >> T.uint32(1)
                if count > k:
                    need = 0
                    for i in T.unroll(slots):
                        need += T.if_then_else(key_local[i] > cut, 1, 0)
                    need = k - T.warp_reduce_sum(need)
                for i in T.unroll(slots):
                    is_kept = T.And(key_local[i] >= cut, T.And(i * WARP + lane >= first, i * WARP + lane < last))
                    kept_local[0] = T.if_then_else(is_kept, 1, 0)
                    if count > k:
                        is_tie = T.And(kept_local[0] != 0, key_local[i] == cut)
                        ties = T.cast(T.ballot(is_tie), T.uint32)
                        if T.And(is_tie, ties_before + count_bits(ties & lanes_below(lane)) >= need):
                            kept_local[0] = 0
                        ties_before += count_bits(ties)
                    votes = T.cast(T.ballot(kept_local[0] != 0), T.uint32)
                    if kept_local[0] != 0:
                        place = before + count_bits(votes & lanes_below(lane))
                        indices[row, place] = i * WARP + lane - first
                        if values:
                            chosen[row, place] = x_local[i]
                    before += count_bits(votes)
                count = before
                for turn in T.serial(T.ceildiv(k, WARP)):
                    if T.And(turn * WARP + lane < k, turn * WARP + lane >= count):
                        indices[row, turn * WARP + lane] = -1
                        if values:
                            chosen[row, turn * WARP + lane] = T.cast(-T.infinity('float32'), elem)

    return topk_short
