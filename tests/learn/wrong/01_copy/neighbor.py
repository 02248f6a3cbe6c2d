"""step: right
words: expected

The tile of the last block is moved back, but only on one side.
"""

import tilelang.language as T


def copy():
    n = T.dynamic('n')
    tile = 1024

    @T.prim_func
    def kernel(x: T.Tensor((n,), 'float32'), y: T.Tensor((n,), 'float32')):
        with T.Kernel(T.ceildiv(n, tile), threads=128) as block:
            for i in T.Parallel(tile):
                if block * tile + i < n:
                    y[block * tile + i] = x[T.min(block * tile + i + 1, n - 1)]

    return kernel
