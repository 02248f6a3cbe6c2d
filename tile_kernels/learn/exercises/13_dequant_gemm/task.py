"""13 Multiply by weights of 4 bits.

    y[t, r] = sum over c of x[t, c] * w[r, c]
    w[r, c] = (code[r, c] - 8) * scales[r, c // group]

    code[r, c] = bits 4 * (c % 8) to 4 * (c % 8) + 3 of packed[r, c // 8]

Eight codes lie in an int32, the first in the lowest bits. k is a multiple of group, which is 32. The number of tokens m
is known only when the kernel runs.

Check it with `tile-kernels learn check 13`.
"""

import tilelang.language as T


def dequant_gemm(n: int, k: int, group: int = 32):
    """Return a kernel that unpacks weights in registers and multiplies on tensor cores."""
    m = T.dynamic('m')
    block_m, block_n, block_k = 16, 64, 128

    @T.prim_func
    def kernel(
        x: T.Tensor((m, k), 'float16'),
        packed: T.Tensor((n, k // 8), 'int32'),
        scales: T.Tensor((n, k // group), 'float16'),
        y: T.Tensor((m, n), 'float16'),
    ):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=128) as (block_of_n, block_of_m):
            # Replace the next line. Unpack a tile of block_n x block_k weights at a time.
            raise NotImplementedError('multiply by packed weights')

    return kernel
