"""07 Matrix product with bias and ReLU.

    c[i, j] = max(sum over s of a[i, s] * b[s, j] + bias[j], 0)    for 0 <= i < m, 0 <= j < n, 0 <= s < k

`n` and `k` are known when the kernel is built and multiples of 8. `m` is known when it runs. Sum in float32 and round
once.

Check it with `tile-kernels learn check 7`.
"""

import tilelang.language as T


def linear(n: int, k: int):
    """Return a kernel for one linear layer; every block owns one tile of c."""
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
            # Replace the next line. Walk along k in steps of block_k.
            raise NotImplementedError(f'multiply along {k} numbers in steps of {block_k}')

    return kernel
