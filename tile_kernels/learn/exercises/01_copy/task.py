"""01 Copy a vector of any length.

    y[i] = x[i]    for 0 <= i < n

The length `n` is known only when the kernel runs. It may be any number from 1 on.

Check it with `tile-kernels learn check 1`.
"""

import tilelang.language as T


def copy():
    """Return a kernel that copies x to y; every block copies one tile of 1024 numbers."""
    n = T.dynamic('n')
    tile = 1024

    @T.prim_func
    def kernel(x: T.Tensor((n,), 'float32'), y: T.Tensor((n,), 'float32')):
        with T.Kernel(T.ceildiv(n, tile), threads=128) as block:
            # Replace the next line. Block `block` copies the numbers from block * tile on.
            raise NotImplementedError('copy one tile')

    return kernel
