"""Kernels of the product with 2:4 sparse weights, which expand tiles to shared memory. See `gemm_sparse24`.

The kernels read half of the weights but multiply all of them: sparse tensor cores are not used.
"""

import torch

from tile_kernels.core.cost import count_product
from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.gemm._macros import FP8

BLOCK_M, BLOCK_N, BLOCK_K = 64, 128, 64
THREADS = 128
LANES = 8  # channels of one byte of indices
MATRIX_THREADS = 256


@macro
def expand_lane(values, index, row, lane, kept_local, wide_local):
    """Eight channels of a row from four values and a byte of indices, two bits each."""
    for e in T.vectorized(4):
        kept_local[e] = values[row, lane * 4 + e]
    byte = T.cast(index[row, lane], T.int32)
    for e in (0, 1, 2, 3, 4, 5, 6, 7):
        first, second = byte >> (e // 4 * 4) & 3, byte >> (e // 4 * 4 + 2) & 3
        low, high = kept_local[e // 4 * 2], kept_local[e // 4 * 2 + 1]
        picked = T.if_then_else(second == e % 4, T.cast(high, wide_local.dtype), T.cast(0, wide_local.dtype))
        wide_local[e] = T.if_then_else(first == e % 4, T.cast(low, wide_local.dtype), picked)


@kernel(pass_configs=PLAIN_PRODUCTS, flops=count_product)
def sparse24_kernel(n: int, k: int, dtype: torch.dtype):
    """A block owns 64 x 128 of d; fp8 codes become bfloat16, which has all of their numbers."""
    given = T.dtype(dtype)
    elem = T.bfloat16 if dtype is FP8 else given
    num_rows = T.dynamic('num_rows')

    @T.prim_func
    def sparse24(
        a: T.Tensor((num_rows, k), given),
        values: T.Tensor((n, k // 2), given),
        index: T.Tensor((n, k // LANES), T.uint8),
        d: T.Tensor((num_rows, n), elem),
    ):
        with T.Kernel(T.ceildiv(n, BLOCK_N), T.ceildiv(num_rows, BLOCK_M), threads=THREADS) as (bx, by):
            a_shared = T.alloc_shared((BLOCK_M, BLOCK_K), elem)
            w_shared = T.alloc_shared((BLOCK_N, BLOCK_K), elem)
            acc_frag = T.alloc_fragment((BLOCK_M, BLOCK_N), T.float32)
            kept_local = T.alloc_local((4,), given)
            wide_local = T.alloc_local((LANES,), elem)
            thread = T.get_thread_binding()
            row, column = by * BLOCK_M, bx * BLOCK_N
            T.clear(acc_frag)
            for step in T.serial(T.ceildiv(k, BLOCK_K)):
                T.copy(a[row : row + BLOCK_M, step * BLOCK_K : (step + 1) * BLOCK_K], a_shared)
                for i in T.unroll(BLOCK_N * BLOCK_K // LANES // THREADS):
                    vector = i * THREADS + thread
                    line, lane = vector // (BLOCK_K // LANES), vector % (BLOCK_K // LANES)
                    place = T.min(step * (BLOCK_K // LANES) + lane, k // LANES - 1)  # behind k, a is 0
                    expand_lane(values, index, T.min(column + line, n - 1), place, kept_local, wide_local)
                    for e in T.vectorized(LANES):
                        w_shared[line, lane * LANES + e] = wide_local[e]
                T.gemm(a_shared, w_shared, acc_frag, transpose_B=True)
            for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                if row + i < num_rows and column + j < n:
                    d[row + i, column + j] = acc_frag[i, j]

    return sparse24


@kernel()
def expand24_kernel(n: int, k: int, dtype: torch.dtype):
    """Write the dense matrix, for the gradient; a thread expands eight channels."""
    given = T.dtype(dtype)
    elem = T.bfloat16 if dtype is FP8 else given

    @T.prim_func
    def expand24(
        values: T.Tensor((n, k // 2), given),
        index: T.Tensor((n, k // LANES), T.uint8),
        w: T.Tensor((n, k), elem),
    ):
        with T.Kernel(T.ceildiv(k // LANES, MATRIX_THREADS), n, threads=MATRIX_THREADS) as (bx, row):
            kept_local = T.alloc_local((4,), given)
            wide_local = T.alloc_local((LANES,), elem)
            lane = bx * MATRIX_THREADS + T.get_thread_binding()
            if lane < k // LANES:
                expand_lane(values, index, row, lane, kept_local, wide_local)
                for e in T.vectorized(LANES):
                    w[row, lane * LANES + e] = wide_local[e]

    return expand24
