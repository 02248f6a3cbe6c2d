"""Projection in slices: the products of all streams of a token with fn, while the tokens pass by, perhaps made here.

    mul[t, j] = sum_k x[t, k] fn[j, k]                      products as TF32 takes them, see `norm_fn`
    square[t] = sum_k x[t, k]^2                             x[t] all streams of a token, or post of them, see `post`

A block stays: it owns a slice of `SLICE` channels of every stream, keeps their part of fn in shared memory, and takes
every so many tiles of `TILE` tokens. A warp has 32 channels; a lane reads eight of them of every stream and nothing
else, as its share of tensor core products (16 x 16 x 8) and for post alike: which channel is which k of a product is
free as long as both sides agree. One more warp sums what the others have found and writes it. A kernel that follows may
take a token as soon as its parts are there, while the token still is in the L2 cache: where it looks, memory holds
`ABSENT` before, so no counter and no fence is needed. The sums over channels have one order, fixed by `hidden`. Memory
bound: the floor is reading x, or what it is made of.
"""

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.mhc._rows import WARP, post_to_vector

#: Channels of a warp, warps that compute, channels of a block, tokens of a tile.
CHANNELS, WARPS = 32, 8
SLICE, TILE = CHANNELS * WARPS, 16

#: Blocks that run at a time, one on each SM of an H200. On other devices results are the same.
WAVE = 132

#: Elements of an access: a lane has eight neighbouring channels.
WIDTH = 8

#: Bytes of shared memory of a block, and of fn in it: the rest is for tiles on their way.
MAX_SHARED, MAX_FN = 222 << 10, 100 << 10

#: The bits of a part that is not there yet: a NaN that no sum has.
ABSENT = 0xFFFFFFFF

#: d[16, 8] += a[16, 16] b[16, 8]: `low` and `high` are rows lane / 4 and lane / 4 + 8 of a, four elements each.
PRODUCT = """
static __device__ __forceinline__ void add_product(float *d, const void *low, const void *high, const void *b) {
  const unsigned *l = (const unsigned *)low, *h = (const unsigned *)high, *w = (const unsigned *)b;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(l[0]), "r"(h[0]), "r"(l[1]), "r"(h[1]), "r"(w[0]), "r"(w[1]));
}
"""


def padded(num_mixes: int) -> int:
    """Columns of a tile of mixes: tensor cores take multiples of eight."""
    return -(-num_mixes // 8) * 8


def slices_of(hidden: int) -> int:
    """Slices of a token."""
    return -(-hidden // SLICE)


def fits(num_streams: int, num_mixes: int) -> bool:
    """Whether a block can keep its part of fn."""
    return WARPS * CHANNELS * num_streams * 2 * padded(num_mixes) * 2 <= MAX_FN


@macro
def round_to_tf32(value):
    """The nearest number of 11 significant bits, halves away from zero."""
    bits = T.reinterpret(value, T.uint32)
    return T.reinterpret((bits + T.uint32(0x1000)) & T.uint32(0xFFFFE000), T.float32)


@macro
def high_of(value):
    """The first 8 significant bits."""
    return T.reinterpret(T.reinterpret(value, T.uint32) & T.uint32(0xFFFF0000), T.float32)


@macro
def arrange_fn(fn, fn_frags, pid, num_streams, num_threads):
    """Four channels of a row of fn for each thread, as a high and a low part, where a lane will look for them."""
    num_mixes, hidden = fn.shape[0], fn.shape[1] // num_streams
    slices, _, steps, pairs, _, _ = fn_frags.shape
    fn_local = T.alloc_local((4,), T.float32)
    part_local = T.alloc_local((8,), T.bfloat16)
    index = pid * num_threads + T.get_thread_binding()
    lane, pair, step = index % WARP, index // WARP % pairs, index // (WARP * pairs) % steps
    warp = index // (WARP * pairs * steps) % WARPS
    part = index // (WARP * pairs * steps * WARPS)
    row = pair * 8 + lane // 4
    channel = part * SLICE + warp * CHANNELS + lane % 4 * 8 + step % 2 * 4
    if part < slices:
        T.clear(fn_local)
        if row < num_mixes and channel < hidden:
            for e in T.vectorized(4):
                fn_local[e] = fn[row, step // 2 * hidden + channel + e]
        for e in T.unroll(4):
            value = round_to_tf32(fn_local[e])
            part_local[e] = T.cast(high_of(value), T.bfloat16)
            part_local[4 + e] = T.cast(value - high_of(value), T.bfloat16)
        for e in T.vectorized(8):
            fn_frags[part, warp, step, pair, lane, e] = part_local[e]


@macro
def request_tile(x, tile, channel, x_shared, stage, first):
    """Ask for eight channels of every stream of tokens lane / 4 and lane / 4 + 8, the last token for those behind it.

    Nobody but the thread that asks will read `x_shared[stage, first + 2 c + r]`, so there is nobody to wait for.
    """
    num_tokens, hidden = x.shape[0], x.shape[-1]
    tx = T.get_thread_binding()
    if channel < hidden:
        for r in T.unroll(2):
            token = T.min(tile * TILE + r * 8 + tx % WARP // 4, num_tokens - 1)
            for c in T.unroll(x.shape[1] if len(x.shape) == 3 else 1):
                T.ptx_cp_async(
                    T.access_ptr(x_shared[stage, first + 2 * c + r, tx, 0], 'w', WIDTH),
                    T.access_ptr(x[token, c, channel] if len(x.shape) == 3 else x[token, channel], 'r', WIDTH),
                    WIDTH,
                )


@macro
def post_tile(x_shared, stage, coef_shared, slot, y, tile, channel):
    """Replace the streams by post of them, and write it; `coef_shared[slot]` has post and comb of every token."""
    num_tokens, num_streams, hidden = y.shape
    tx = T.get_thread_binding()
    post_local = T.alloc_local((num_streams,), T.float32)
    comb_local = T.alloc_local((num_streams * num_streams,), T.float32)
    residual_local = T.alloc_local((num_streams, WIDTH), T.bfloat16)
    output_local = T.alloc_local((1, WIDTH), T.bfloat16)
    y_local = T.alloc_local((num_streams, WIDTH), T.bfloat16)
    if channel < hidden:
        for r in T.unroll(2, unroll_factor=1):
            row = r * 8 + tx % WARP // 4
            for v in T.unroll(num_streams // 2):
                for e in T.vectorized(2):
                    post_local[2 * v + e] = coef_shared[slot, row, 2 * v + e]
            for v in T.unroll(num_streams * num_streams // 2):
                for e in T.vectorized(2):
                    comb_local[2 * v + e] = coef_shared[slot, row, num_streams + 2 * v + e]
            for c in T.unroll(num_streams):
                for e in T.vectorized(WIDTH):
                    residual_local[c, e] = x_shared[stage, 2 * c + r, tx, e]
            for e in T.vectorized(WIDTH):
                output_local[0, e] = x_shared[stage, 2 * num_streams + r, tx, e]
            post_to_vector(output_local, 0, residual_local, 0, post_local, comb_local, y_local)
            for c in T.unroll(num_streams):
                for e in T.vectorized(WIDTH):
                    x_shared[stage, 2 * c + r, tx, e] = y_local[c, e]
            if tile * TILE + row < num_tokens:
                for c in T.unroll(num_streams):
                    for e in T.vectorized(WIDTH):
                        y[tile * TILE + row, c, channel + e] = y_local[c, e]


@macro
def multiply_tile(x_shared, stage, fn_shared, warp, part_shared, slot, hidden, channel):
    """What a warp finds of a tile: products in `part_shared[slot, warp]`, and behind them the sums of squares.

    The loop over streams is not unrolled: registers are for the kernel that follows, which runs beside this one.
    """
    _, steps, pairs, _, _ = fn_shared.shape
    columns = part_shared.shape[3] - 2
    tx = T.get_thread_binding()
    lane = tx % WARP
    x_local = T.alloc_local((2, WIDTH), T.bfloat16)
    fn_local = T.alloc_local((2 * pairs, 8), T.bfloat16)
    mul_local = T.alloc_local((2 * pairs, 4), T.float32)
    square_local = T.alloc_local((2,), T.float32)
    T.clear(mul_local)
    T.clear(square_local)
    if channel < hidden:
        for c in T.unroll(steps // 2, unroll_factor=1):
            for r in T.unroll(2):
                for e in T.vectorized(WIDTH):
                    x_local[r, e] = x_shared[stage, 2 * c + r, tx, e]
            for p in T.unroll(2 * pairs):
                for e in T.vectorized(8):
                    fn_local[p, e] = fn_shared[warp, 2 * c + p // pairs, p % pairs, lane, e]
            for p in T.unroll(2 * pairs):
                for half in T.unroll(2):
                    T.call_extern(
                        'handle',
                        'add_product',
                        T.address_of(mul_local[half * pairs + p % pairs, 0]),
                        T.address_of(x_local[0, p // pairs * 4]),
                        T.address_of(x_local[1, p // pairs * 4]),
                        T.address_of(fn_local[p, half * 4]),
                    )
            for r in T.unroll(2):
                for e in T.unroll(WIDTH):
                    value = T.cast(x_local[r, e], T.float32)
                    square_local[r] = T.ieee_fmaf(value, value, square_local[r])
    for p in T.unroll(pairs):
        for r in T.unroll(2):
            for e in T.vectorized(2):
                part_shared[slot, warp, r * 8 + lane // 4, p * 8 + lane % 4 * 2 + e] = (
                    mul_local[p, r * 2 + e] + mul_local[pairs + p, r * 2 + e]
                )
    for r in T.unroll(2):
        square_local[r] = square_local[r] + T.shfl_xor(square_local[r], 2)
        square_local[r] = square_local[r] + T.shfl_xor(square_local[r], 1)
        if lane % 4 == 0:
            part_shared[slot, warp, r * 8 + lane // 4, columns] = square_local[r]


@macro
def sum_parts(part_shared, slot, tile, slice_idx, mul_parts, square_parts):
    """One warp sums what the others have left, in ascending order."""
    columns, num_tokens = mul_parts.shape[2], mul_parts.shape[1]
    lane = T.get_thread_binding() % WARP
    for step in T.unroll(T.ceildiv(TILE * (columns + 1), WARP), unroll_factor=4):
        index = step * WARP + lane
        row, column = index // (columns + 1), index % (columns + 1)
        if row < TILE and tile * TILE + row < num_tokens:
            total = T.alloc_var(T.float32, init=0.0)
            for w in T.unroll(WARPS):
                total = total + part_shared[slot, w, row, column]
            if column < columns:
                mul_parts[slice_idx, tile * TILE + row, column] = total
            else:
                square_parts[slice_idx, tile * TILE + row] = total


@macro
def take_coefficients(post_mix, comb_mix, tile, coef_shared, slot):
    """One warp brings post and comb of the tokens of a tile to shared memory."""
    num_tokens, num_streams, _ = post_mix.shape
    lane = T.get_thread_binding() % WARP
    width = num_streams + num_streams * num_streams
    for step in T.unroll(T.ceildiv(TILE * width, WARP), unroll_factor=5):
        index = step * WARP + lane
        row, column = index // width, index % width
        token = T.min(tile * TILE + row, num_tokens - 1)
        if row < TILE:
            if column < num_streams:
                coef_shared[slot, row, column] = post_mix[token, column, 0]
            else:
                pair = column - num_streams
                coef_shared[slot, row, column] = comb_mix[token, pair // num_streams, pair % num_streams]


def choose(hidden: int, num_streams: int, num_mixes: int, with_post: bool, followed: bool, num_tokens: int) -> dict:
    """As many tiles on their way as there is memory for."""
    stage = WARPS * WARP * 2 * (num_streams + with_post) * 16
    held = WARPS * CHANNELS * num_streams * 2 * padded(num_mixes) * 2 + 2 * WARPS * TILE * (padded(num_mixes) + 2) * 4
    return dict(num_stages=max(2, min(4, (MAX_SHARED - held) // stage)))


@kernel(
    choose=choose,
    space=dict(num_stages=(2, 3, 4)),
    pass_configs={
        'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
        'TL_DISABLE_THREAD_STORAGE_SYNC': True,
        'TL_DISABLE_SHARED_MEMORY_REUSE': True,
        'TL_ENABLE_LOWER_LDGSTG': True,
    },
)
def project_slices_kernel(
    hidden: int, num_streams: int, num_mixes: int, with_post: bool, followed: bool, *, num_stages: int
):
    """Fn as the lanes need it, then the blocks that stay; with `with_post` they make x of output and residual, in y.

    With `followed` the first `num_streams` products of a part and the sum of squares are `ABSENT` before.
    """
    columns, steps = padded(num_mixes), 2 * num_streams
    pairs, slices = columns // 8, slices_of(hidden)
    num_threads, arrange_threads = (WARPS + 1) * WARP, 128
    arranged = slices * WARPS * steps * pairs * WARP
    width = num_streams + num_streams * num_streams
    slots = 2 * num_streams + (2 if with_post else 0)
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def project_slices(
        residual: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        fn: T.Tensor((num_mixes, num_streams * hidden), T.float32),
        fn_frags: T.Tensor((slices, WARPS, steps, pairs, WARP, 8), T.bfloat16),
        mul_parts: T.Tensor((slices, num_tokens, columns), T.float32),
        square_parts: T.Tensor((slices, num_tokens), T.float32),
        output: T.Tensor((num_tokens, hidden), T.bfloat16),
        post_mix: T.Tensor((num_tokens, num_streams, 1), T.float32),
        comb_mix: T.Tensor((num_tokens, num_streams, num_streams), T.float32),
        y: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
    ):
        num_tiles = T.ceildiv(num_tokens, TILE)
        num_parts = slices * num_tokens if followed else 0
        with T.Kernel(T.ceildiv(T.max(arranged, num_parts), arrange_threads), threads=arrange_threads) as pid:
            T.pdl_trigger()
            index = pid * arrange_threads + T.get_thread_binding()
            if followed:  # noqa: SIM102 - known when the kernel is built
                if index < num_parts:
                    absent = T.reinterpret(T.uint32(ABSENT), T.float32)
                    square_parts[index // num_tokens, index % num_tokens] = absent
                    for c in T.unroll(num_streams):
                        mul_parts[index // num_tokens, index % num_tokens, c] = absent
            arrange_fn(fn, fn_frags, pid, num_streams, arrange_threads)

        groups = T.min(num_tiles, max(1, WAVE // slices))
        with T.Kernel(slices, groups, threads=num_threads) as (slice_idx, group):
            T.import_source(PRODUCT)
            fn_shared = T.alloc_shared((WARPS, steps, pairs, WARP, 8), T.bfloat16)
            x_shared = T.alloc_shared((num_stages, slots, WARPS * WARP, WIDTH), T.bfloat16)
            part_shared = T.alloc_shared((2, WARPS, TILE, columns + 2), T.float32)
            coef_shared = T.alloc_shared((2, TILE, width) if with_post else (1, 1, 1), T.float32)
            tx = T.get_thread_binding()
            lane, warp = tx % WARP, tx // WARP
            channel = slice_idx * SLICE + warp * CHANNELS + lane % 4 * WIDTH
            own_tiles = (num_tiles - group + groups - 1) // groups

            if warp < WARPS:
                for stage in T.unroll(num_stages - 1):
                    if stage < own_tiles:
                        request_tile(residual, group + stage * groups, channel, x_shared, stage, 0)
                        if with_post:
                            request_tile(output, group + stage * groups, channel, x_shared, stage, 2 * num_streams)
                    T.ptx_commit_group()
            else:
                if with_post:
                    take_coefficients(post_mix, comb_mix, group, coef_shared, 0)
            T.pdl_sync()
            T.pdl_trigger()
            if warp < WARPS:
                for step in T.unroll(steps):
                    for p in T.unroll(pairs):
                        T.ptx_cp_async(
                            T.access_ptr(fn_shared[warp, step, p, lane, 0], 'w', 8),
                            T.access_ptr(fn_frags[slice_idx, warp, step, p, lane, 0], 'r', 8),
                            8,
                        )
                T.ptx_commit_group()
                T.ptx_wait_group(0)
            T.sync_threads()

            for step in T.serial(own_tiles + 1):
                tile = group + step * groups
                if warp < WARPS:
                    if step < own_tiles:
                        T.ptx_wait_group(num_stages - 2)
                        if step + num_stages - 1 < own_tiles:
                            later = tile + (num_stages - 1) * groups
                            free = (step + num_stages - 1) % num_stages
                            request_tile(residual, later, channel, x_shared, free, 0)
                            if with_post:
                                request_tile(output, later, channel, x_shared, free, 2 * num_streams)
                        T.ptx_commit_group()
                        stage = step % num_stages
                        if with_post:
                            post_tile(x_shared, stage, coef_shared, step % 2, y, tile, channel)
                        multiply_tile(x_shared, stage, fn_shared, warp, part_shared, step % 2, hidden, channel)
                else:
                    if with_post:  # noqa: SIM102 - known when the kernel is built
                        if step + 1 < own_tiles:
                            take_coefficients(post_mix, comb_mix, tile + groups, coef_shared, (step + 1) % 2)
                    if step > 0:
                        sum_parts(part_shared, (step - 1) % 2, tile - groups, slice_idx, mul_parts, square_parts)
                T.sync_threads()

    return project_slices
