"""Post of one layer and the projection of the next in one kernel: the residual is read once and y written once.

    y[t, o, h]  = post_mix[t, o] x[t, h] + sum_i comb_mix[t, i, o] residual[t, i, h]       see `post`
    mul[t, j]   = sum_{o, h} y[t, o, h] fn[j, o hidden + h]                                see `norm_fn`
    square[t]   = sum_{o, h} y[t, o, h]^2

A block owns `block_m` tokens and a share of the channels. In a step it takes 64 channels of all streams: what it makes
of them goes from registers to y and to shared memory, where the tensor cores find it. y has the bits of `post`; the
sums run over the streams of 64 channels at a time, in another order than those of `norm_fn`. Memory bound: the floor is
reading x and residual and writing y.
"""

from torch import Tensor

from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import config_for, launch
from tile_kernels.mhc._rows import load_streams, load_vector, post_to_vector, store_vector
from tile_kernels.mhc.norm_fn_device import SPLITS, padded, split_fn

#: Channels of a step, elements of a vector.
CHANNELS, WIDTH = 64, 8

#: All accesses keep within their tensors, so guards would only cost.
PASS_CONFIGS = PLAIN_PRODUCTS | {'TL_DISABLE_SAFE_MEMORY_ACCESS': True}

# Config -------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, num_mixes: int, num_tokens: int) -> dict:
    """About five waves of three blocks on each SM, if every block has a step."""
    tiles = max(-(-num_tokens // 64), 1)
    wanted = max(1, 2048 // tiles)
    most = hidden // CHANNELS
    return dict(splits=max(n for n in SPLITS if n <= min(wanted, most)), num_threads=128, at_once=2, blocks_per_sm=3)


# Kernel -------------------------------------------------------------------------------------


@macro
def load_coefficients(mix, first, num_tokens, coef_shared, offset, num_threads):
    """The coefficients of a tile of tokens, those behind the last token 0."""
    count, block_m = mix.shape[1] * mix.shape[2], coef_shared.shape[0]
    for v in T.unroll(-(-block_m * count // num_threads)):
        index = v * num_threads + T.get_thread_binding()
        row, j = index // count, index % count
        if row < block_m:
            coef_shared[row, offset + j] = T.if_then_else(
                first + row < num_tokens,
                mix[T.min(first + row, num_tokens - 1), j // mix.shape[2], j % mix.shape[2]],
                0,
            )


@kernel(
    choose=choose,
    space=dict(splits=SPLITS, num_threads=(128, 256), at_once=(1, 2), blocks_per_sm=(1, 2, 3)),
    pass_configs=PASS_CONFIGS,
)
def post_project_kernel(
    hidden: int, num_streams: int, num_mixes: int, *, splits: int, num_threads: int, at_once: int, blocks_per_sm: int
):
    """Fn in two parts, then y, products and squares of 64 tokens over a share of the channels."""
    block_m, columns = 64, padded(num_mixes)
    row_threads = CHANNELS // WIDTH
    rows = num_threads // row_threads
    passes = block_m // rows
    steps = -(-hidden // (CHANNELS * splits))
    k = num_streams * hidden
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
        mul_parts: T.Tensor((splits, num_tokens, columns), T.float32),
        square_parts: T.Tensor((splits, num_tokens), T.float32),
    ):
        with T.Kernel(T.ceildiv(columns * (k // 8), num_threads), threads=num_threads) as pid:
            split_fn(fn, fn_parts, pid, num_mixes, num_threads)

        with T.Kernel(splits, T.ceildiv(num_tokens, block_m), threads=num_threads) as (pid_c, pid_m):
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            y_shared = T.alloc_shared((block_m, num_streams * CHANNELS), T.bfloat16)
            fn_shared = T.alloc_shared((2 * columns, num_streams * CHANNELS), T.bfloat16)
            coef_shared = T.alloc_shared((block_m, num_streams * (1 + num_streams)), T.float32)
            mul_frag = T.alloc_fragment((block_m, 2 * columns), T.float32)
            mul_shared = T.alloc_shared((block_m, 2 * columns), T.float32)
            x_local = T.alloc_local((at_once, WIDTH), T.bfloat16)
            residual_local = T.alloc_local((at_once * num_streams, WIDTH), T.bfloat16)
            y_local = T.alloc_local((num_streams, WIDTH), T.bfloat16)
            post_local = T.alloc_local((num_streams,), T.float32)
            comb_local = T.alloc_local((num_streams * num_streams,), T.float32)
            square_local = T.alloc_local((passes,), T.float32)
            tx = T.get_thread_binding()
            first, own, lane = pid_m * block_m, tx // row_threads, tx % row_threads

            load_coefficients(post_mix, first, num_tokens, coef_shared, 0, num_threads)
            load_coefficients(comb_mix, first, num_tokens, coef_shared, num_streams, num_threads)
            T.clear(mul_frag)
            T.clear(square_local)
            T.sync_threads()
            for step in T.serial(T.min(steps, T.max(hidden // CHANNELS - pid_c * steps, 0))):
                channel = (pid_c * steps + step) * CHANNELS
                vector = channel // WIDTH + lane
                for s in T.unroll(num_streams):
                    T.copy(
                        fn_parts[0 : 2 * columns, s * hidden + channel : s * hidden + channel + CHANNELS],
                        fn_shared[0 : 2 * columns, s * CHANNELS : (s + 1) * CHANNELS],
                    )
                for half in T.serial(passes // at_once):
                    for v in T.unroll(at_once):
                        token = T.min(first + (half * at_once + v) * rows + own, num_tokens - 1)
                        load_vector(x, token, 0, vector, x_local, v)
                        load_streams(residual, token, vector, residual_local, v * num_streams)
                    for v in T.unroll(at_once):
                        row = (half * at_once + v) * rows + own
                        for c in T.unroll(num_streams):
                            post_local[c] = coef_shared[row, c]
                        for c in T.unroll(num_streams * num_streams):
                            comb_local[c] = coef_shared[row, num_streams + c]
                        post_to_vector(x_local, v, residual_local, v * num_streams, post_local, comb_local, y_local)
                        square = T.alloc_var(T.float32)
                        square = 0.0
                        for s in T.unroll(num_streams):
                            if first + row < num_tokens:
                                store_vector(y_local, s, y, first + row, s, vector)
                            for e in T.vectorized(WIDTH):
                                y_shared[row, s * CHANNELS + lane * WIDTH + e] = y_local[s, e]
                            for e in T.unroll(WIDTH):
                                value = T.cast(y_local[s, e], T.float32)
                                square = T.ieee_fmaf(value, value, square)
                        for p in T.unroll(passes):  # registers have no index that is known only now
                            square_local[p] = square_local[p] + T.if_then_else(p == half * at_once + v, square, 0.0)
                T.gemm(y_shared, fn_shared, mul_frag, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

            T.copy(mul_frag, mul_shared)
            for i, j in T.Parallel(block_m, columns):
                if first + i < num_tokens:
                    mul_parts[pid_c, first + i, j] = mul_shared[i, j] + mul_shared[i, columns + j]
            for p in T.unroll(passes):
                total = T.alloc_var(T.float32)
                total = square_local[p]
                for distance in (4, 2, 1):
                    total = total + T.shfl_xor(total, distance)
                if lane == 0 and first + p * rows + own < num_tokens:
                    square_parts[pid_c, first + p * rows + own] = total

    return post_project


def post_project(
    x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, fn: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Write y, and return the parts of mul and of the sums of squares, as `project` of y does."""
    (num_tokens, num_streams, hidden), (num_mixes, k) = residual.shape, fn.shape
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
