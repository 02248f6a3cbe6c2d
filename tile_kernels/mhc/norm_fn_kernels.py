"""Kernels of the normalized projection where a slice of fn does not fit into registers. See `norm_fn.py`."""

from tile_kernels.core.gpus import Gpu
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.mhc._macros import high_of, padded, round_to_tf32, rstd_from, sum_parts

#: Channels of k in a step of the projection.
BLOCK_K = 64

SPLITS = (1, 2, 4, 8, 16, 32, 64)

#: With at most SPREAD tokens the projection has up to MANY_PARTS parts or more, and a thread loads MANY_PARTS at once.
SPREAD, MANY_PARTS = 1024, 32

# Config ------------------------------------------------------------------------------------


def choose(k: int, num_mixes: int, num_tokens: int, gpu: Gpu) -> dict:
    """Large tiles of tokens read fn less often. Parts of k fill one wave of blocks and have at least two steps."""
    block_m, splits = next(
        (
            (m, n)
            for limit, m, n in ((256, 64, 64), (1024, 64, 16), (2112, 128, 16), (4224, 128, 8))
            if num_tokens <= limit
        ),
        (128, 4),
    )
    splits = min(splits, max(n for n in SPLITS if n <= k // BLOCK_K // 2))
    num_stages = gpu.stages(4, (block_m + 2 * padded(num_mixes)) * BLOCK_K * 2)
    return dict(block_m=block_m, splits=splits, num_stages=num_stages)


def choose_normalise(k: int, num_mixes: int, num_tokens: int) -> dict:
    """Fewer tokens have more parts; see `choose`."""
    return dict(num_threads=128, in_flight=MANY_PARTS if num_tokens <= SPREAD else 8)


# Kernels -----------------------------------------------------------------------------------


@macro
def split_fn(fn, fn_parts, pid, num_mixes, num_threads):
    """Split eight channels of a row of fn for each thread into a high and a low part; padding rows are 0."""
    columns, k = fn_parts.shape[0] // 2, fn_parts.shape[1]
    fn_local = T.alloc_local((8,), T.float32)
    high_local = T.alloc_local((8,), T.bfloat16)
    low_local = T.alloc_local((8,), T.bfloat16)
    index = pid * num_threads + T.get_thread_binding()
    row, first = index // (k // 8), index % (k // 8) * 8
    if row < columns:
        T.clear(fn_local)
        if row < num_mixes:
            for v in T.unroll(2):
                for e in T.vectorized(4):
                    fn_local[v * 4 + e] = fn[row, first + v * 4 + e]
        for e in T.unroll(8):
            value = round_to_tf32(fn_local[e])
            high_local[e] = T.cast(high_of(value), T.bfloat16)
            low_local[e] = T.cast(value - high_of(value), T.bfloat16)
        for e in T.vectorized(8):
            fn_parts[row, first + e] = high_local[e]
        for e in T.vectorized(8):
            fn_parts[columns + row, first + e] = low_local[e]


@macro
def store_parts(mul_shared, square_local, part, first, mul_parts, square_parts):
    """Store a part of the products and squares of the tokens from `first` on; eight neighboring threads own a token."""
    block_m, columns, num_tokens = mul_shared.shape[0], mul_parts.shape[2], mul_parts.shape[1]
    rows = block_m // square_local.shape[0]
    tx = T.get_thread_binding()
    for i, j in T.Parallel(block_m, columns):
        if first + i < num_tokens:
            mul_parts[part, first + i, j] = mul_shared[i, j] + mul_shared[i, columns + j]
    for r in T.unroll(square_local.shape[0]):
        total = T.alloc_var(T.float32)
        total = square_local[r]
        for distance in (4, 2, 1):
            total = total + T.shfl_xor(total, distance)
        token = first + r * rows + tx // 8
        if tx % 8 == 0 and token < num_tokens:
            square_parts[part, token] = total


@kernel(choose=choose, space=dict(block_m=(64, 128), splits=SPLITS, num_stages=(2, 3, 4, 5, 6)), fixed='splits')
def project_kernel(k: int, num_mixes: int, *, block_m: int, splits: int, num_stages: int):
    """Split fn, then compute the products and squares of `block_m` tokens over a part of k."""
    columns = padded(num_mixes)
    steps = -(-k // (BLOCK_K * splits))
    num_threads, row_threads = 128, BLOCK_K // 8
    rows = num_threads // row_threads
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def project(
        x: T.Tensor((num_tokens, k), T.bfloat16),
        fn: T.Tensor((num_mixes, k), T.float32),
        fn_parts: T.Tensor((2 * columns, k), T.bfloat16),
        mul_parts: T.Tensor((splits, num_tokens, columns), T.float32),
        square_parts: T.Tensor((splits, num_tokens), T.float32),
    ):
        with T.Kernel(T.ceildiv(columns * (k // 8), num_threads), threads=num_threads) as pid:
            split_fn(fn, fn_parts, pid, num_mixes, num_threads)

        with T.Kernel(splits, T.ceildiv(num_tokens, block_m), threads=num_threads) as (pid_k, pid_m):
            x_shared = T.alloc_shared((block_m, BLOCK_K), T.bfloat16)
            fn_shared = T.alloc_shared((2 * columns, BLOCK_K), T.bfloat16)
            mul_frag = T.alloc_fragment((block_m, 2 * columns), T.float32)
            mul_shared = T.alloc_shared((block_m, 2 * columns), T.float32)
            vector_local = T.alloc_local((8,), T.bfloat16)
            square_local = T.alloc_local((block_m // rows,), T.float32)
            tx = T.get_thread_binding()

            T.clear(mul_frag)
            T.clear(square_local)
            for step in T.Pipelined(steps, num_stages=num_stages):
                first = (step * splits + pid_k) * BLOCK_K  # blocks of the same tokens read neighboring channels
                T.copy(x[pid_m * block_m, first], x_shared)
                T.copy(fn_parts[0, first], fn_shared)
                for r in T.unroll(block_m // rows):
                    for e in T.vectorized(8):
                        vector_local[e] = x_shared[r * rows + tx // row_threads, tx % row_threads * 8 + e]
                    for e in T.unroll(8):
                        value = T.cast(vector_local[e], T.float32)
                        square_local[r] = T.ieee_fmaf(value, value, square_local[r])
                T.fence_proxy_async()  # TileLang omits it in the last steps, whose tiles also arrive by cp.async
                T.gemm(x_shared, fn_shared, mul_frag, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

            T.copy(mul_frag, mul_shared)
            store_parts(mul_shared, square_local, pid_k, pid_m * block_m, mul_parts, square_parts)

    return project


@kernel(choose=choose_normalise, space=dict(num_threads=(64, 128, 256), in_flight=(8, MANY_PARTS)))
def normalise_kernel(k: int, num_mixes: int, *, num_threads: int, in_flight: int):
    """Sum the parts and normalize; one thread for each mix."""
    num_tokens, splits = T.dynamic('num_tokens'), T.dynamic('splits')
    rows = num_threads // num_mixes

    @T.prim_func
    def normalise(
        mixes: T.Tensor((num_tokens, num_mixes), T.float32),
        mul_parts: T.Tensor((splits, num_tokens, padded(num_mixes)), T.float32),
        square_parts: T.Tensor((splits, num_tokens), T.float32),
        rstd: T.Tensor((num_tokens,), T.float32),
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, rows), threads=num_threads) as pid:
            tx = T.get_thread_binding()
            token, j = pid * rows + tx // num_mixes, tx % num_mixes
            if tx < rows * num_mixes and token < num_tokens:
                square = sum_parts(lambda s: square_parts[s, token], splits, in_flight)
                mul = sum_parts(lambda s: mul_parts[s, token, j], splits, in_flight)
                factor = rstd_from(square, T.float32(1.0 / k), eps)
                mixes[token, j] = T.ieee_mul(mul, factor)
                if j == 0:
                    rstd[token] = factor

    return normalise
