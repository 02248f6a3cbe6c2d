"""Device code of the ops that process rows: a row consists of 16-byte slots and belongs to `row_threads` threads.

Slot i of a row belongs to thread i % row_threads. A thread holds its slots in registers, `row_local[vectors, slot]`. So
every load of a row is in flight before the first value is needed.
"""

from tile_kernels.core.lang import WARP, T, macro

MAX_THREADS = 1024


#: Channels of a slot of a bfloat16 row: 16 bytes. Neighbouring threads access neighbouring slots.
SLOT = 8


#: Elements of a row in the registers of one thread of a Sinkhorn step.
OWN = 24

#: The longest supported row; longer rows would exceed the registers of a thread.
MAX_HIDDEN = 32768


#: Rows end at slot boundaries, so bounds checks are not needed. The kernels contain all barriers they need. nvcc splits
#: a plain 16-byte store of converted values into words; an explicit one stays a single store.
ROW_PASS_CONFIGS = {
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
    'TL_ENABLE_LOWER_LDGSTG': True,
}


#: The hardware's 2^x, which flushes denormals; the named CUDA function takes three more instructions for denormals.
FAST_EXP2 = """
static __device__ __forceinline__ float ex2_approx(float x) {
  float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
}
"""


def row_layout(hidden: int, vectors: int, slot: int = SLOT) -> tuple[int, int]:
    """Threads per row and slots per thread: `vectors`, or one more or less if too many threads would idle."""
    slots = hidden // slot
    layouts = []
    for count in (vectors, vectors + 1, max(1, vectors - 1)):
        threads = min(-(-slots // (WARP * count)) * WARP, MAX_THREADS)
        layouts.append((threads, -(-slots // threads)))
    held = [threads * count for threads, count in layouts]
    return layouts[0] if held[0] <= 1.1 * slots else layouts[held.index(min(held))]


def sigmoid_of(x):
    """1 / (1 + exp(-x)), accurate to a few units in the last place and not bit-exact; needs `FAST_EXP2`."""
    return T.fast_rcp(T.float32(1.0) + T.call_extern('float32', 'ex2_approx', x * T.float32(-1.4426950408889634)))


@macro
def load_row(x, token, stream, row_threads, piece, row_local):
    """Load a thread's slots of row (token, stream) with `piece` channels per access; zeros beyond the end.

    A weight tensor has one row per stream.
    """
    vectors, width = row_local.shape
    hidden = x.shape[len(x.shape) - 1]
    if hidden % (width * vectors * row_threads) != 0:
        T.clear(row_local)
    for i in T.unroll(vectors):
        slot = i * row_threads + T.get_thread_binding() % row_threads
        if slot < hidden // width:
            for p in T.unroll(width // piece):
                for e in T.vectorized(piece):
                    if len(x.shape) == 2:
                        row_local[i, p * piece + e] = x[stream, slot * width + p * piece + e]
                    else:
                        row_local[i, p * piece + e] = x[token, stream, slot * width + p * piece + e]


@macro
def store_slot(slot_local, y, token, stream, slot, piece):
    """Store one slot of row (token, stream) with `piece` channels per access."""
    width = slot_local.shape[0]
    if slot < y.shape[2] // width:
        for p in T.unroll(width // piece):
            for e in T.vectorized(piece):
                y[token, stream, slot * width + p * piece + e] = slot_local[p * piece + e]


@macro
def store_row(row_local, y, token, stream, row_threads):
    """Store a thread's slots of row (token, stream), which must be aligned."""
    for i in T.unroll(row_local.shape[0]):
        slot = i * row_threads + T.get_thread_binding() % row_threads
        if slot < y.shape[2] // SLOT:
            for e in T.vectorized(SLOT):
                y[token, stream, slot * SLOT + e] = row_local[i, e]


@macro
def sum_over_row(sums, parts_shared, turn, row_threads):
    """Sum `sums` over the threads of a row, in the same order in all of them.

    `parts_shared[turns, warps of the block, sums]` is scratch. In a loop, two alternating turns make one barrier
    sufficient. All threads of the block must call this unless a row belongs to a single warp.
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


@macro
def wait_for(row_local, zero, sums):
    """Make the sums depend on loads of rows needed later, so the compiler issues these loads first; `zero` is 0."""
    count = row_local.shape[0] * row_local.shape[1] * row_local.dtype.bits // 128
    words = T.view(row_local, (count, 4), T.uint32)
    for i in T.unroll(count):
        sums[0] = T.reinterpret(T.reinterpret(sums[0], T.uint32) | (words[i, 0] & zero), T.float32)


@macro
def scale_row(raw_local, row_scale, col_local, x_local, sums):
    """Multiply the matrix by both scales in float32; sums[0] = the sum of the squares."""
    T.clear(sums)
    for i in T.unroll(x_local.shape[0]):
        for e in T.unroll(x_local.shape[1]):
            x_local[i, e] = row_scale * T.cast(raw_local[i, e], T.float32) * col_local[i, e]
            sums[0] = sums[0] + x_local[i, e] * x_local[i, e]
