"""Device code of the ops that own rows: a row is cut into slots of eight channels, `row_threads` threads share it.

Slot i of a row belongs to thread i % row_threads of them. A thread holds its slots in registers, `row_local[vectors,
SLOT]`, so that every load of a row is under way before the first value is needed.
"""

from tile_kernels.core.lang import T, macro

WARP = 32
MAX_THREADS = 1024

#: Channels that belong together: 16 bytes of bfloat16.
SLOT = 8

#: Longest row; beyond it a thread would hold more than its registers.
MAX_HIDDEN = 32768

#: Rows end where slots end, so guards would only cost; barriers stand where they are needed; nvcc splits a plain
#: 16-byte store of converted values into words, an explicit one stays whole.
ROW_PASS_CONFIGS = {
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
    'TL_ENABLE_LOWER_LDGSTG': True,
}


def row_layout(hidden: int, vectors: int) -> tuple[int, int]:
    """Threads that share a row and slots each of them holds: `vectors`, or one more or less if too many would idle."""
    slots = hidden // SLOT
    layouts = []
    for count in (vectors, vectors + 1, max(1, vectors - 1)):
        threads = min(-(-slots // (WARP * count)) * WARP, MAX_THREADS)
        layouts.append((threads, -(-slots // threads)))
    held = [threads * count for threads, count in layouts]
    return layouts[0] if held[0] <= 1.1 * slots else layouts[held.index(min(held))]


def resident_blocks(resident_threads: int, num_threads: int) -> int:
    """Blocks of an SM that leave each thread the registers `resident_threads` threads would have."""
    return max(1, resident_threads // num_threads)


@macro
def load_row(x, token, stream, row_threads, piece, row_local):
    """Read the slots of a thread of row (token, stream), `piece` channels in an access; zeros beyond the end."""
    vectors, hidden = row_local.shape[0], x.shape[2]
    if hidden % (SLOT * vectors * row_threads) != 0:
        T.clear(row_local)
    for i in T.unroll(vectors):
        slot = i * row_threads + T.get_thread_binding() % row_threads
        if slot < hidden // SLOT:
            for p in T.unroll(SLOT // piece):
                for e in T.vectorized(piece):
                    row_local[i, p * piece + e] = x[token, stream, slot * SLOT + p * piece + e]


@macro
def store_slot(slot_local, y, token, stream, slot, piece):
    """Write one slot of row (token, stream), `piece` channels in an access."""
    if slot < y.shape[2] // SLOT:
        for p in T.unroll(SLOT // piece):
            for e in T.vectorized(piece):
                y[token, stream, slot * SLOT + p * piece + e] = slot_local[p * piece + e]


@macro
def store_row(row_local, y, token, stream, row_threads):
    """Write the slots of a thread of row (token, stream), which is aligned."""
    for i in T.unroll(row_local.shape[0]):
        slot = i * row_threads + T.get_thread_binding() % row_threads
        if slot < y.shape[2] // SLOT:
            for e in T.vectorized(SLOT):
                y[token, stream, slot * SLOT + e] = row_local[i, e]


@macro
def load_weights(weight, stream, row_threads, piece, weight_local):
    """Read the float32 slots of a thread of row `stream`, bytes of `piece` channels in an access; zeros beyond."""
    vectors, hidden, half = weight_local.shape[0], weight.shape[1], max(1, piece // 2)
    if hidden % (SLOT * vectors * row_threads) != 0:
        T.clear(weight_local)
    for i in T.unroll(vectors):
        slot = i * row_threads + T.get_thread_binding() % row_threads
        if slot < hidden // SLOT:
            for p in T.unroll(SLOT // half):
                for e in T.vectorized(half):
                    weight_local[i, p * half + e] = weight[stream, slot * SLOT + p * half + e]


@macro
def sum_over_row(sums, parts_shared, turn, row_threads):
    """Add up `sums` over the threads of a row, in the same order in all of them.

    `parts_shared[turns, warps of the block, sums]` is scratch; in a loop two alternating turns make one barrier enough.
    All threads of the block must come along unless a row is that of a single warp.
    """
    count, row_warps = sums.shape[0], row_threads // WARP
    warp = T.get_thread_binding() // WARP
    for j in T.unroll(count):
        sums[j] = T.warp_reduce_sum(sums[j])
    if row_warps > 1:
        if T.get_thread_binding() % WARP == 0:
            for j in T.unroll(count):
                parts_shared[turn, warp, j] = sums[j]
        T.sync_threads()
        for j in T.unroll(count):
            sums[j] = T.float32(0.0)
        for w in T.unroll(row_warps):
            for j in T.unroll(count):
                sums[j] = sums[j] + parts_shared[turn, warp // row_warps * row_warps + w, j]
