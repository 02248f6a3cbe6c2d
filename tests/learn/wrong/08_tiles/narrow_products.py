"""step: lean
words: a wgmma has 8 columns

176 columns leave no SM idle, but divide only into narrow instructions.
"""

import tilelang.language as T


def choose(m: int, n: int, k: int) -> dict[str, int]:
    return {'block_m': 128, 'block_n': 176, 'block_k': 64, 'num_stages': 3, 'threads': 256, 'band': 0}


def product(m, n, k, block_m, block_n, block_k, num_stages, threads, band):
    @T.prim_func
    def kernel(a: T.Tensor((m, k), 'bfloat16'), b: T.Tensor((n, k), 'bfloat16'), c: T.Tensor((m, n), 'bfloat16')):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=threads) as (x, y):
            T.use_swizzle(band, enable=band > 0)
            a_tile = T.alloc_shared((block_m, block_k), 'bfloat16')
            b_tile = T.alloc_shared((block_n, block_k), 'bfloat16')
            acc = T.alloc_fragment((block_m, block_n), 'float32')
            T.clear(acc)
            for s in T.Pipelined(T.ceildiv(k, block_k), num_stages=num_stages):
                T.copy(a[y * block_m, s * block_k], a_tile)
                T.copy(b[x * block_n, s * block_k], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)
            T.copy(acc, c[y * block_m, x * block_n])

    return kernel


def tiled(m: int, n: int, k: int):
    return product(m, n, k, **choose(m, n, k))
