"""16 A product in which some warps load and others multiply.

    c[i, j] = sum over d of a[i, d] * b[j, d]

m, n and k are any numbers from 1 on; n and k are multiples of 8. Sums are float32, c is bfloat16.

Check it with `tile-kernels learn check 16`.
"""

import tilelang.language as T


def product(m: int, n: int, k: int):
    """Return a kernel with one loading and two multiplying warpgroups, which meet at barriers of a ring of tiles."""
    block_m, block_n, block_k, ring = 128, 256, 64, 4

    @T.prim_func
    def kernel(a: T.Tensor((m, k), 'bfloat16'), b: T.Tensor((n, k), 'bfloat16'), c: T.Tensor((m, n), 'bfloat16')):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=384) as (tile_n, tile_m):
            # Replace the next line. Threads 256 to 383 load, threads 0 to 255 multiply.
            raise NotImplementedError('give loads and products to different warps')

    return kernel
