"""Post of one layer and the projection of the next in one kernel: the residual is read once and y written once.

    y[t, o, h]  = post_mix[t, o] x[t, h] + sum_i comb_mix[t, i, o] residual[t, i, h]       see `post`
    mul[t, j]   = sum_{o, h} y[t, o, h] fn[j, o hidden + h]                                see `norm_fn`
    square[t]   = sum_{o, h} y[t, o, h]^2

A block owns 64 tokens and a share of the channels. In a step it takes 64 channels of all streams from shared memory,
where they arrive a step ahead; y goes to memory and to where the tensor cores find it. y has the bits of `post`; the
sums run over the streams of 64 channels at a time, in another order than those of `norm_fn`. Memory bound: the floor is
reading x and residual and writing y.
"""

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import config_for, launch
from tile_kernels.mhc._rows import post_to_vector, store_vector
from tile_kernels.mhc.norm_fn import project
from tile_kernels.mhc.norm_fn_device import padded, split_fn, store_parts
from tile_kernels.mhc.post import post_

SPLITS = tuple(range(1, 65))

#: Tokens of a block, channels of a step, elements of a vector.
BLOCK_M, CHANNELS, WIDTH = 64, 64, 8

#: Most streams whose tiles fit into shared memory.
MAX_STREAMS = 4

#: Blocks that run at a time: one on each of 132 SMs. On other devices the choice is the same, and so are the results.
WAVE = 132

# Config -------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, num_mixes: int, num_tokens: int) -> dict:
    """Equal shares of the channels that need the fewest rounds of steps; a block costs about two besides its own.

    At least two where they are equal: blocks of the same tokens read neighbours at a time.
    """
    tiles, steps = max(-(-num_tokens // BLOCK_M), 1), hidden // CHANNELS

    def rounds(splits: int) -> int:
        return -(-tiles * splits // WAVE) * (steps // splits + 2)

    shares = [max(n for n in range(1, most + 1) if steps % n == 0) for most in (2, 4, 8, 16, 64)]
    return dict(splits=min(shares, key=rounds), num_stages=2)


# Kernel -------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(splits=SPLITS, num_stages=(2, 3)), pass_configs=PLAIN_PRODUCTS)
def post_project_kernel(hidden: int, num_streams: int, num_mixes: int, *, splits: int, num_stages: int):
    """Fn in two parts, then y, products and squares of 64 tokens over a share of the channels."""
    columns, num_threads = padded(num_mixes), 256
    row_threads = CHANNELS // WIDTH
    rows = num_threads // row_threads
    passes = BLOCK_M // rows
    steps = hidden // CHANNELS // splits
    if steps * splits * CHANNELS != hidden:
        raise ArgumentError(f'post_project_kernel: splits must divide {hidden // CHANNELS} steps, got {splits}')
    k, step_k, streams = num_streams * hidden, num_streams * CHANNELS, tuple(range(num_streams))
    num_tokens = T.dynamic('num_tokens')

    def place(index):
        """Where a channel of a stream lies: the streams of a step side by side."""
        stream, channel = index // hidden, index % hidden
        return channel // CHANNELS * step_k + stream * CHANNELS + channel % CHANNELS

    @T.prim_func
    def post_project(
        x: T.Tensor((num_tokens, hidden), T.bfloat16),
        residual: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        post_mix: T.Tensor((num_tokens, num_streams, 1), T.float32),
        comb_mix: T.Tensor((num_tokens, num_streams, num_streams), T.float32),
        fn: T.Tensor((num_mixes, k), T.float32),
        fn_parts: T.Tensor((2 * columns, k), T.bfloat16),
        y: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        mul_parts: T.Tensor((splits, num_tokens, columns), T.float32),
        square_parts: T.Tensor((splits, num_tokens), T.float32),
    ):
        with T.Kernel(T.ceildiv(columns * (k // 8), num_threads), threads=num_threads) as pid:
            split_fn(fn, fn_parts, pid, num_mixes, num_threads, place)

        with T.Kernel(splits, T.ceildiv(num_tokens, BLOCK_M), threads=num_threads) as (pid_c, pid_m):
            x_shared = T.alloc_shared((BLOCK_M, CHANNELS), T.bfloat16)
            residual_shared = T.alloc_shared((BLOCK_M, step_k), T.bfloat16)
            y_shared = T.alloc_shared((BLOCK_M, step_k), T.bfloat16)
            fn_shared = T.alloc_shared((2 * columns, step_k), T.bfloat16)
            mul_frag = T.alloc_fragment((BLOCK_M, 2 * columns), T.float32)
            mul_shared = T.alloc_shared((BLOCK_M, 2 * columns), T.float32)
            x_local = T.alloc_local((1, WIDTH), T.bfloat16)
            residual_local = T.alloc_local((num_streams, WIDTH), T.bfloat16)
            y_local = T.alloc_local((num_streams, WIDTH), T.bfloat16)
            posts_local = T.alloc_local((passes, num_streams), T.float32)
            combs_local = T.alloc_local((passes, num_streams * num_streams), T.float32)
            post_local = T.alloc_local((num_streams,), T.float32)
            comb_local = T.alloc_local((num_streams * num_streams,), T.float32)
            square_local = T.alloc_local((passes,), T.float32)
            tx = T.get_thread_binding()
            first, own, lane = pid_m * BLOCK_M, tx // row_threads, tx % row_threads

            for p in T.unroll(passes):
                token = T.min(first + p * rows + own, num_tokens - 1)
                for c in T.unroll(num_streams):
                    posts_local[p, c] = post_mix[token, c, 0]
                for c in T.unroll(num_streams * num_streams):
                    combs_local[p, c] = comb_mix[token, c // num_streams, c % num_streams]
            T.clear(mul_frag)
            T.clear(square_local)
            for step in T.Pipelined(steps, num_stages=num_stages):
                tile = step * splits + pid_c  # blocks of the same tokens read neighbours at a time
                channel = tile * CHANNELS
                for s in streams:
                    T.copy(
                        residual[first : first + BLOCK_M, s, channel : channel + CHANNELS],
                        residual_shared[0:BLOCK_M, s * CHANNELS : (s + 1) * CHANNELS],
                    )
                T.copy(x[first : first + BLOCK_M, channel : channel + CHANNELS], x_shared)
                T.copy(fn_parts[0, tile * step_k], fn_shared)
                for p in T.unroll(passes):
                    row = p * rows + own
                    for e in T.vectorized(WIDTH):
                        x_local[0, e] = x_shared[row, lane * WIDTH + e]
                    for s in T.unroll(num_streams):
                        for e in T.vectorized(WIDTH):
                            residual_local[s, e] = residual_shared[row, s * CHANNELS + lane * WIDTH + e]
                    for c in T.unroll(num_streams):
                        post_local[c] = posts_local[p, c]
                    for c in T.unroll(num_streams * num_streams):
                        comb_local[c] = combs_local[p, c]
                    post_to_vector(x_local, 0, residual_local, 0, post_local, comb_local, y_local)
                    for s in T.unroll(num_streams):
                        if first + row < num_tokens:
                            store_vector(y_local, s, y, first + row, s, channel // WIDTH + lane)
                        for e in T.vectorized(WIDTH):
                            y_shared[row, s * CHANNELS + lane * WIDTH + e] = y_local[s, e]
                        for e in T.unroll(WIDTH):
                            value = T.cast(y_local[s, e], T.float32)
                            square_local[p] = T.ieee_fmaf(value, value, square_local[p])
                T.gemm(y_shared, fn_shared, mul_frag, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

            T.copy(mul_frag, mul_shared)
            store_parts(mul_shared, square_local, pid_c, first, mul_parts, square_parts)

    return post_project


def post_project(
    x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, fn: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Write y, and return the parts of mul and of the sums of squares, as `project` of y does.

    By the kernels of both ops where the tiles do not fit, or x or residual is a misaligned view.
    """
    (num_tokens, num_streams, hidden), (num_mixes, k) = residual.shape, fn.shape
    if num_streams > MAX_STREAMS or check.vector_bytes(x, residual) < 16:
        post_.fn(x, residual, post_mix, comb_mix, y)
        return project(y, fn)
    static = (hidden, num_streams, num_mixes)
    splits = config_for(post_project_kernel, static, num_tokens)['splits']
    fn_parts = residual.new_empty(2 * padded(num_mixes), k)
    mul_parts, square_parts = fn.new_empty(splits, num_tokens, padded(num_mixes)), fn.new_empty(splits, num_tokens)
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
