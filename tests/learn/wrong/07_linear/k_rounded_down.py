"""step: right
words: a tail in k

The last, incomplete step along k is left out.
"""

import tilelang.language as T


def linear(n: int, k: int):
    m = T.dynamic('m')
    block_m, block_n, block_k = 128, 128, 64

    @T.prim_func
    def kernel(
        a: T.Tensor((m, k), 'bfloat16'),
        b: T.Tensor((k, n), 'bfloat16'),
        bias: T.Tensor((n,), 'float32'),
        c: T.Tensor((m, n), 'bfloat16'),
    ):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=256) as (tile_n, tile_m):
            a_shared = T.alloc_shared((block_m, block_k), 'bfloat16')
            b_shared = T.alloc_shared((block_k, block_n), 'bfloat16')
            total = T.alloc_fragment((block_m, block_n), 'float32')
            T.clear(total)
            for step in T.Pipelined(T.max(k // block_k, 1), num_stages=3):
                T.copy(a[tile_m * block_m, step * block_k], a_shared)
                T.copy(b[step * block_k, tile_n * block_n], b_shared)
                T.gemm(a_shared, b_shared, total)
            for i, j in T.Parallel(block_m, block_n):
                if tile_n * block_n + j < n:
                    total[i, j] = T.max(total[i, j] + bias[tile_n * block_n + j], 0.0)
            T.copy(total, c[tile_m * block_m, tile_n * block_n])

    return kernel
