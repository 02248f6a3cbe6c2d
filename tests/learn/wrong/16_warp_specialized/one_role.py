"""step: lean
words: barriers of all its threads

All threads load, wait and multiply in turn.
"""

import tilelang.language as T


def product(m: int, n: int, k: int):
    block_m, block_n, block_k = 128, 256, 64

    @T.prim_func
    def kernel(a: T.Tensor((m, k), 'bfloat16'), b: T.Tensor((n, k), 'bfloat16'), c: T.Tensor((m, n), 'bfloat16')):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=256) as (tile_n, tile_m):
            a_shared = T.alloc_shared((block_m, block_k), 'bfloat16')
            b_shared = T.alloc_shared((block_n, block_k), 'bfloat16')
            sums = T.alloc_fragment((block_m, block_n), 'float32')
            T.clear(sums)
            for step in T.serial(T.ceildiv(k, block_k)):
                T.copy(a[tile_m * block_m, step * block_k], a_shared)
                T.copy(b[tile_n * block_n, step * block_k], b_shared)
                T.gemm(a_shared, b_shared, sums, transpose_B=True)
            T.copy(sums, c[tile_m * block_m, tile_n * block_n])

    return kernel
