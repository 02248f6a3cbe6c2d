"""Kernels of `gate_logits` and its gradients."""

import math

from tile_kernels.core.cost import count_product
from tile_kernels.core.gpus import Gpu
from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T

MAX_PARTS = 16
BLOCK_K = 64
SUM_THREADS = 128

#: Up to this number of tokens, tiles are smallest.
FEW_TOKENS = 512
#: Bytes of the three tiles of a stage in the gradients.
GRADIENT_STAGE = 3 * 128 * BLOCK_K * 2
BF16 = 'bfloat16'

# Config -------------------------------------------------------------------------------------


def num_parts_for(num_tokens: int, hidden: int) -> int:
    """Parts of the sum over h, a power of two: enough blocks for all SMs, and at least four steps each."""
    if not isinstance(num_tokens, int) or num_tokens == 0:
        return 1  # no tokens, or a symbolic number of them in a trace
    if num_tokens > 2048:
        return 1
    wanted = 32 // -(-num_tokens // 64) if num_tokens <= FEW_TOKENS else 64 // -(-num_tokens // 128)
    parts = 1
    while 2 * parts <= min(wanted, MAX_PARTS) and hidden >= 8 * parts * BLOCK_K:
        parts *= 2
    return parts


def tiles(gpu: Gpu, block_m: int, block_n: int, block_k: int, num_stages: int) -> dict:
    """A config, with as many of the stages as the GPU has shared memory for."""
    num_stages = gpu.stages(num_stages, (block_m + block_n) * block_k * 2)
    return dict(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages)


def choose(num_experts: int, hidden: int, num_parts: int, packed: bool, size: int, gpu: Gpu) -> dict:
    """The largest tiles that still give every SM a block: large tiles read less per product."""
    if size <= FEW_TOKENS:
        return tiles(gpu, 64, 64, 128, 4)
    if 2048 < size <= 4096:
        return tiles(gpu, 64, 128, 64, 6)
    if size <= 8192 or num_experts <= 128:
        return tiles(gpu, 128, 128, 64, 4)
    return tiles(gpu, 128, 256, 64, 3)


def choose_unaligned(num_experts: int, hidden: int, num_parts: int, vec: int, size: int, gpu: Gpu) -> dict:
    """Tiles of 64 tokens until there are more tiles than SMs; then larger ones, which read less."""
    if size > 8192:
        return tiles(gpu, 128, 128, 64, 3)
    return tiles(gpu, 64, 128 if size > 512 else 64, 64, 4)


def choose_halve(size: int) -> dict:
    """One number per thread."""
    return dict(num_threads=256)


def choose_dhidden(num_experts: int, hidden: int, size: int, gpu: Gpu) -> dict:
    """One tile for all sizes, because the kernel writes more than it reads."""
    return dict(block_m=128, block_n=128, num_stages=gpu.stages(3, GRADIENT_STAGE))


def choose_dweight(num_experts: int, hidden: int, vec: int, packed: bool, size: int, gpu: Gpu) -> dict:
    """Long pipelined runs, or short ones for few tokens. The pipeline drains between runs."""
    num_stages, num_steps = gpu.stages(3, GRADIENT_STAGE), 4 if size <= 512 else 16
    return dict(block_m=128, block_n=128, num_stages=num_stages, num_steps=num_steps)


TILES = dict(block_m=(64, 128), block_n=(64, 128, 256), num_stages=(2, 3, 4, 5, 6))
TILES_K = dict(**TILES, block_k=(64, 128))

#: A producer warpgroup loads tiles by TMA and the others multiply, if the architecture has TMA.
TMA = {'TL_DISABLE_WARP_SPECIALIZED': False}

# Kernels ------------------------------------------------------------------------------------


def build_gate_logits(
    num_experts: int,
    hidden: int,
    num_parts: int,
    vec: int,
    packed: bool,
    block_m: int,
    block_n: int,
    block_k: int,
    num_stages: int,
):
    """A part of the sum for a tile of tokens and experts; then the sum of the parts, if there are several."""
    num_threads = 128 if block_m == 64 else 256
    num_steps = -(-hidden // (block_k * num_parts))
    sum_width = math.gcd(num_experts, 4)
    num_tokens = T.dynamic('num_tokens')
    row_stride = hidden if packed else T.dynamic('row_stride')

    @T.prim_func
    def gate_logits(
        x: T.StridedTensor((num_tokens, hidden), (row_stride, 1), BF16),
        gate_weight: T.Tensor((num_experts, hidden), BF16),
        parts: T.Tensor((num_parts, num_tokens, num_experts), 'float32'),
        logits: T.Tensor((num_tokens, num_experts), 'float32'),
    ):
        with T.Kernel(
            T.ceildiv(num_experts, block_n), T.ceildiv(num_tokens, block_m), num_parts, threads=num_threads
        ) as (pid_n, pid_m, pid_part):
            T.assume(row_stride % vec == 0)
            x_shared = T.alloc_shared((block_m, block_k), BF16)
            weight_shared = T.alloc_shared((block_n, block_k), BF16)
            sum_frag = T.alloc_fragment((block_m, block_n), 'float32')
            row, col = pid_m * block_m, pid_n * block_n

            if num_parts > 1:
                T.pdl_trigger()
            T.clear(sum_frag)
            for i in T.Pipelined(num_steps, num_stages=num_stages):
                k = (pid_part * num_steps + i) * block_k
                T.copy(x[row : row + block_m, k : k + block_k], x_shared)
                T.copy(gate_weight[col : col + block_n, k : k + block_k], weight_shared)
                T.gemm(x_shared, weight_shared, sum_frag, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            if num_parts > 1:
                T.copy(sum_frag, parts[pid_part, row : row + block_m, col : col + block_n])
            else:
                T.copy(sum_frag, logits[row : row + block_m, col : col + block_n])

        if num_parts > 1:
            with T.Kernel(T.ceildiv(num_tokens * num_experts, SUM_THREADS * sum_width), threads=SUM_THREADS) as pid:
                part_local = T.alloc_local((num_parts, sum_width), 'float32')
                sum_local = T.alloc_local((sum_width,), 'float32')
                first = (pid * SUM_THREADS + T.get_thread_binding()) * sum_width
                T.pdl_sync()
                if first < num_tokens * num_experts:
                    token, expert = first // num_experts, first % num_experts
                    for p in T.unroll(num_parts):
                        for e in T.vectorized(sum_width):
                            part_local[p, e] = parts[p, token, expert + e]
                    T.clear(sum_local)
                    for p in T.unroll(num_parts):
                        for e in T.unroll(sum_width):
                            sum_local[e] = sum_local[e] + part_local[p, e]
                    for e in T.vectorized(sum_width):
                        logits[token, expert + e] = sum_local[e]

    return gate_logits


@kernel(choose=choose, space=TILES_K, pass_configs=TMA, flops=count_product, fixed='block_k')
def gate_logits_kernel(
    num_experts: int,
    hidden: int,
    num_parts: int,
    packed: bool,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    num_stages: int,
):
    """Rows begin at multiples of 16 bytes."""
    return build_gate_logits(num_experts, hidden, num_parts, 8, packed, block_m, block_n, block_k, num_stages)


@kernel(choose=choose_unaligned, space=TILES_K, pass_configs=PLAIN_PRODUCTS, flops=count_product, fixed='block_k')
def gate_logits_unaligned_kernel(
    num_experts: int,
    hidden: int,
    num_parts: int,
    vec: int,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    num_stages: int,
):
    """Rows begin at multiples of `vec` elements."""
    made = build_gate_logits(num_experts, hidden, num_parts, vec, False, block_m, block_n, block_k, num_stages)
    return made.with_attr('global_symbol', 'gate_logits_unaligned')


@kernel(choose=choose_halve, space=dict(num_threads=(128, 256)))
def gate_logits_halve_kernel(*, num_threads: int):
    """Every gradient as the sum of two bfloat16 numbers: the nearest one, and the nearest to the remainder."""
    num_logits = T.dynamic('num_logits')

    @T.prim_func
    def gate_logits_halve(
        dlogits: T.Tensor((num_logits,), 'float32'),
        upper: T.Tensor((num_logits,), BF16),
        lower: T.Tensor((num_logits,), BF16),
    ):
        with T.Kernel(T.ceildiv(num_logits, num_threads), threads=num_threads) as pid:
            i = pid * num_threads + T.get_thread_binding()
            if i < num_logits:
                nearest = T.cast(dlogits[i], BF16)
                upper[i] = nearest
                lower[i] = T.cast(dlogits[i] - T.cast(nearest, 'float32'), BF16)

    return gate_logits_halve


@kernel(
    choose=choose_dhidden,
    space=TILES,
    pass_configs=PLAIN_PRODUCTS,
    flops=count_product,
)
def gate_logits_dhidden_kernel(num_experts: int, hidden: int, *, block_m: int, block_n: int, num_stages: int):
    """A tile of tokens and channels, summed over experts."""
    num_threads = 128 if block_m == 64 else 256
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def gate_logits_dhidden(
        upper: T.Tensor((num_tokens, num_experts), BF16),
        lower: T.Tensor((num_tokens, num_experts), BF16),
        gate_weight: T.Tensor((num_experts, hidden), BF16),
        dhidden: T.Tensor((num_tokens, hidden), BF16),
    ):
        with T.Kernel(T.ceildiv(hidden, block_n), T.ceildiv(num_tokens, block_m), threads=num_threads) as (
            pid_n,
            pid_m,
        ):
            upper_shared = T.alloc_shared((block_m, BLOCK_K), BF16)
            lower_shared = T.alloc_shared((block_m, BLOCK_K), BF16)
            weight_shared = T.alloc_shared((BLOCK_K, block_n), BF16)
            sum_frag = T.alloc_fragment((block_m, block_n), 'float32')
            row, col = pid_m * block_m, pid_n * block_n

            T.clear(sum_frag)
            for i in T.Pipelined(T.ceildiv(num_experts, BLOCK_K), num_stages=num_stages):
                k = i * BLOCK_K
                T.copy(upper[row : row + block_m, k : k + BLOCK_K], upper_shared)
                T.copy(lower[row : row + block_m, k : k + BLOCK_K], lower_shared)
                T.copy(gate_weight[k : k + BLOCK_K, col : col + block_n], weight_shared)
                T.gemm(upper_shared, weight_shared, sum_frag)
                T.gemm(lower_shared, weight_shared, sum_frag)
            T.copy(sum_frag, dhidden[row : row + block_m, col : col + block_n])

    return gate_logits_dhidden


@kernel(
    choose=choose_dweight,
    space=dict(**TILES, num_steps=(4, 16)),
    pass_configs=PLAIN_PRODUCTS,
    flops=count_product,
)
def gate_logits_dweight_kernel(
    num_experts: int,
    hidden: int,
    vec: int,
    packed: bool,
    *,
    block_m: int,
    block_n: int,
    num_stages: int,
    num_steps: int,
):
    """A tile of experts and channels, summed over tokens; TileLang pipelines only a constant number of steps."""
    num_threads = 128 if block_m == 64 else 256
    num_tokens = T.dynamic('num_tokens')
    row_stride = hidden if packed else T.dynamic('row_stride')

    @T.prim_func
    def gate_logits_dweight(
        x: T.StridedTensor((num_tokens, hidden), (row_stride, 1), BF16),
        upper: T.Tensor((num_tokens, num_experts), BF16),
        lower: T.Tensor((num_tokens, num_experts), BF16),
        dgate_weight: T.Tensor((num_experts, hidden), BF16),
    ):
        with T.Kernel(T.ceildiv(hidden, block_n), T.ceildiv(num_experts, block_m), threads=num_threads) as (
            pid_n,
            pid_m,
        ):
            T.assume(row_stride % vec == 0)
            upper_shared = T.alloc_shared((BLOCK_K, block_m), BF16)
            lower_shared = T.alloc_shared((BLOCK_K, block_m), BF16)
            x_shared = T.alloc_shared((BLOCK_K, block_n), BF16)
            sum_frag = T.alloc_fragment((block_m, block_n), 'float32')
            row, col = pid_m * block_m, pid_n * block_n

            T.clear(sum_frag)
            for run in T.serial(T.ceildiv(num_tokens, num_steps * BLOCK_K)):
                for i in T.Pipelined(num_steps, num_stages=num_stages):
                    k = (run * num_steps + i) * BLOCK_K
                    T.copy(upper[k : k + BLOCK_K, row : row + block_m], upper_shared)
                    T.copy(lower[k : k + BLOCK_K, row : row + block_m], lower_shared)
                    T.copy(x[k : k + BLOCK_K, col : col + block_n], x_shared)
                    T.gemm(upper_shared, x_shared, sum_frag, transpose_A=True)
                    T.gemm(lower_shared, x_shared, sum_frag, transpose_A=True)
            T.copy(sum_frag, dgate_weight[row : row + block_m, col : col + block_n])

    return gate_logits_dweight
