"""08 Choose the tiles of a matrix product.

    c[i, j] = sum over s of a[i, s] * b[j, s]    for 0 <= i < m, 0 <= j < n, 0 <= s < k

The kernel is written. You write `choose`, which returns its tuning values for a problem:

    block_m, block_n    the tile of c that a block owns; block_m is a multiple of 64, block_n of 16
    block_k             numbers along k in one step; 32 or 64
    num_stages          steps in flight
    threads             128, 256 or 384; a warpgroup of 128 threads takes 64 rows of the tile at a time
    band                how many tiles wide a band of `T.use_swizzle` is; 0 for no bands

The problem that counts has 4096 tokens, n = 2112 and k = 7168, on an H200 with 132 SMs. No GPU is needed.

Check it with `tile-kernels learn check 8`.
"""

import tilelang.language as T


def choose(m: int, n: int, k: int) -> dict[str, int]:
    """Return block_m, block_n, block_k, num_stages, threads and band."""
    raise NotImplementedError('choose the tuning values')


def product(m, n, k, block_m, block_n, block_k, num_stages, threads, band):
    """The kernel; there is nothing to change here."""

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
    """Return the kernel with the values that `choose` picks."""
    return product(m, n, k, **choose(m, n, k))
