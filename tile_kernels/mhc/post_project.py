"""Post of one layer and the projection of the next in one kernel: the residual is read once and y written once.

    y[t, o, h]  = post_mix[t, o] x[t, h] + sum_i comb_mix[t, i, o] residual[t, i, h]       see `post`
    mul[t, j]   = sum_{o, h} y[t, o, h] fn[j, o hidden + h]                                see `norm_fn`
    square[t]   = sum_{o, h} y[t, o, h]^2

A block owns 64 tokens and a share of the channels. One warpgroup loads 64 channels of all streams at a time, two others
take them by turns: y goes to memory and in the place of the residual, where the tensor cores find it. Blocks with the
same tokens take neighbouring channels at a time. y has the bits of `post`; the sums run over the streams of 64 channels
at a time, in another order than those of `norm_fn`. Memory bound: the floor is reading x and residual and writing y.
"""

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import config_for, launch
from tile_kernels.gemm._groups import (
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    WARPGROUP,
    WARPGROUP_ROLES,
    WARPGROUP_ROWS,
)
from tile_kernels.gemm._operands import has_warpgroups
from tile_kernels.mhc._rows import post_to_vector, store_vector
from tile_kernels.mhc.norm_fn import project
from tile_kernels.mhc.norm_fn_device import padded, split_fn
from tile_kernels.mhc.post import post_

SPLITS = tuple(range(1, 33))

#: Tokens of a block, channels of a step, elements of a vector.
BLOCK_M, CHANNELS, WIDTH = WARPGROUP_ROWS, 64, 8

#: Warpgroups that compute; each sums its own part.
MEMBERS = 2

#: Most streams whose tiles fit into shared memory, and most tokens that do not fill the GPU so.
MAX_STREAMS, FEW_TOKENS = 4, 256

#: Blocks that run at a time: one on each of 132 SMs. On other devices the choice is the same, and so are the results.
WAVE = 132

# Config -------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, num_mixes: int, num_tokens: int) -> dict:
    """Equal shares of the channels that need the fewest rounds of steps; a block costs about two besides its own."""
    tiles, steps = max(-(-num_tokens // BLOCK_M), 1), hidden // CHANNELS

    def rounds(splits: int) -> int:
        return -(-tiles * splits // WAVE) * (steps // splits + 2)

    shares = [max(n for n in range(1, most + 1) if steps % n == 0) for most in (4, 8, 32)]
    return dict(splits=min(shares, key=rounds), ring=3)


# Kernel -------------------------------------------------------------------------------------


@macro
def load_coefficients(mix, first, num_tokens, coef_shared, offset, num_threads):
    """The coefficients of a tile of tokens, those behind the last token 0."""
    count = mix.shape[1] * mix.shape[2]
    for v in T.unroll(-(-BLOCK_M * count // num_threads)):
        index = v * num_threads + T.get_thread_binding()
        row, j = index // count, index % count
        if row < BLOCK_M:
            coef_shared[row, offset + j] = T.if_then_else(
                first + row < num_tokens,
                mix[T.min(first + row, num_tokens - 1), j // mix.shape[2], j % mix.shape[2]],
                0,
            )


@kernel(choose=choose, space=dict(splits=SPLITS, ring=(2, 3)), **WARPGROUP_ROLES)
def post_project_kernel(hidden: int, num_streams: int, num_mixes: int, *, splits: int, ring: int):
    """Fn in two parts, then y, products and squares of 64 tokens over a share of the channels."""
    columns, streams = padded(num_mixes), tuple(range(num_streams))
    members, num_threads = tuple(range(MEMBERS)), (MEMBERS + 1) * WARPGROUP
    row_threads = CHANNELS // WIDTH
    rows = WARPGROUP // row_threads
    steps = hidden // CHANNELS // splits
    k, coefs = num_streams * hidden, num_streams * (1 + num_streams)
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def post_project(
        x: T.Tensor((num_tokens, hidden), T.bfloat16),
        residual: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        post_mix: T.Tensor((num_tokens, num_streams, 1), T.float32),
        comb_mix: T.Tensor((num_tokens, num_streams, num_streams), T.float32),
        fn: T.Tensor((num_mixes, k), T.float32),
        fn_parts: T.Tensor((2 * columns, k), T.bfloat16),
        y: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        mul_parts: T.Tensor((MEMBERS * splits, num_tokens, columns), T.float32),
        square_parts: T.Tensor((MEMBERS * splits, num_tokens), T.float32),
    ):
        with T.Kernel(T.ceildiv(columns * (k // 8), num_threads), threads=num_threads) as pid:
            split_fn(fn, fn_parts, pid, num_mixes, num_threads)

        with T.Kernel(splits, T.ceildiv(num_tokens, BLOCK_M), threads=num_threads) as (pid_c, pid_m):
            x_shared = T.alloc_shared((ring, BLOCK_M, CHANNELS), T.bfloat16)
            streams_shared = T.alloc_shared((ring, num_streams, BLOCK_M, CHANNELS), T.bfloat16)  # residual, then y
            fn_shared = T.alloc_shared((ring, num_streams, 2 * columns, CHANNELS), T.bfloat16)
            coef_shared = T.alloc_shared((BLOCK_M, coefs), T.float32)
            mul_shared = T.alloc_shared((MEMBERS, BLOCK_M, 2 * columns), T.float32)
            mul_frag = [T.alloc_fragment((BLOCK_M, 2 * columns), T.float32) for _ in members]
            full, free = T.alloc_barrier([WARPGROUP] * ring), T.alloc_barrier([WARPGROUP] * ring)
            x_local = T.alloc_local((1, WIDTH), T.bfloat16)
            residual_local = T.alloc_local((num_streams, WIDTH), T.bfloat16)
            y_local = T.alloc_local((num_streams, WIDTH), T.bfloat16)
            post_local = T.alloc_local((num_streams,), T.float32)
            comb_local = T.alloc_local((num_streams * num_streams,), T.float32)
            square_local = T.alloc_local((BLOCK_M // rows,), T.float32)
            tx = T.get_thread_binding()
            first = pid_m * BLOCK_M

            load_coefficients(post_mix, first, num_tokens, coef_shared, 0, num_threads)
            load_coefficients(comb_mix, first, num_tokens, coef_shared, num_streams, num_threads)
            T.sync_threads()
            with T.ws(MEMBERS):
                T.dec_max_nreg(LOADING_REGISTERS)
                for step in T.serial(steps):
                    slot, channel = step % ring, (step * splits + pid_c) * CHANNELS
                    T.mbarrier_wait_parity(free[slot], (step // ring + 1) & 1)
                    T.tma_copy(
                        x[first : first + BLOCK_M, channel : channel + CHANNELS],
                        x_shared[slot, :, :],
                        barrier=full[slot],
                    )
                    for s in streams:
                        T.tma_copy(
                            residual[first : first + BLOCK_M, s, channel : channel + CHANNELS],
                            streams_shared[slot, s, :, :],
                            barrier=full[slot],
                        )
                        T.tma_copy(
                            fn_parts[0 : 2 * columns, s * hidden + channel : s * hidden + channel + CHANNELS],
                            fn_shared[slot, s, :, :],
                            barrier=full[slot],
                        )
                    T.barrier_arrive(full[slot])
            for member in members:
                with T.ws(member):
                    T.inc_max_nreg(MULTIPLYING_REGISTERS)
                    own, lane = tx % WARPGROUP // row_threads, tx % row_threads
                    T.clear(mul_frag[member])
                    T.clear(square_local)
                    for turn in T.serial((steps + 1 - member) // 2):
                        step = 2 * turn + member
                        slot, vector = step % ring, (step * splits + pid_c) * (CHANNELS // WIDTH) + lane
                        T.mbarrier_wait_parity(full[slot], step // ring & 1)
                        for p in T.unroll(BLOCK_M // rows):
                            row = p * rows + own
                            for e in T.vectorized(WIDTH):
                                x_local[0, e] = x_shared[slot, row, lane * WIDTH + e]
                            for s in T.unroll(num_streams):
                                for e in T.vectorized(WIDTH):
                                    residual_local[s, e] = streams_shared[slot, s, row, lane * WIDTH + e]
                            for c in T.unroll(num_streams):
                                post_local[c] = coef_shared[row, c]
                            for c in T.unroll(num_streams * num_streams):
                                comb_local[c] = coef_shared[row, num_streams + c]
                            post_to_vector(x_local, 0, residual_local, 0, post_local, comb_local, y_local)
                            for s in T.unroll(num_streams):
                                if first + row < num_tokens:
                                    store_vector(y_local, s, y, first + row, s, vector)
                                for e in T.vectorized(WIDTH):
                                    streams_shared[slot, s, row, lane * WIDTH + e] = y_local[s, e]
                                for e in T.unroll(WIDTH):
                                    value = T.cast(y_local[s, e], T.float32)
                                    square_local[p] = T.ieee_fmaf(value, value, square_local[p])
                        T.fence_proxy_async()
                        T.sync_threads(8 + member, WARPGROUP)
                        for s in streams:
                            T.wgmma_gemm(
                                streams_shared[slot, s, :, :],
                                fn_shared[slot, s, :, :],
                                mul_frag[member],
                                transpose_B=True,
                            )
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[slot])
                    T.copy(mul_frag[member], mul_shared[member, :, :])
                    T.sync_threads(8 + member, WARPGROUP)
                    for v in T.unroll(-(-BLOCK_M * columns // WARPGROUP)):
                        row, j = (v * WARPGROUP + tx % WARPGROUP) // columns, (v * WARPGROUP + tx % WARPGROUP) % columns
                        if row < BLOCK_M and first + row < num_tokens:
                            mul = mul_shared[member, row, j] + mul_shared[member, row, columns + j]
                            mul_parts[MEMBERS * pid_c + member, first + row, j] = mul
                    for p in T.unroll(BLOCK_M // rows):
                        square = T.alloc_var(T.float32)
                        square = square_local[p]
                        for distance in (4, 2, 1):
                            square = square + T.shfl_xor(square, distance)
                        if lane == 0 and first + p * rows + own < num_tokens:
                            square_parts[MEMBERS * pid_c + member, first + p * rows + own] = square

    return post_project


def post_project(
    x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, fn: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Write y, and return the parts of mul and of the sums of squares, as `project` of y does.

    By the kernels of both ops if tokens are few, the tiles do not fit, or the GPU cannot load or multiply them so.
    """
    (num_tokens, num_streams, hidden), (num_mixes, k) = residual.shape, fn.shape
    fits = num_streams <= MAX_STREAMS and has_warpgroups(residual) and check.vector_bytes(x, residual) == 16
    if num_tokens <= FEW_TOKENS or not fits:
        post_.fn(x, residual, post_mix, comb_mix, y)
        return project(y, fn)
    static = (hidden, num_streams, num_mixes)
    parts = MEMBERS * config_for(post_project_kernel, static, num_tokens)['splits']
    fn_parts = residual.new_empty(2 * padded(num_mixes), k)
    mul_parts, square_parts = fn.new_empty(parts, num_tokens, padded(num_mixes)), fn.new_empty(parts, num_tokens)
    launch(
        post_project_kernel,
        static,
        x,
        residual,
        post_mix,
        comb_mix,
        fn,
        fn_parts,
        y,
        mul_parts,
        square_parts,
        size=num_tokens,
    )
    return mul_parts, square_parts
