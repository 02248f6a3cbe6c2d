"""step: right
words: never written

The grid is rounded down, so the tail has no block.
"""

import tilelang.language as T


def copy():
    n = T.dynamic('n')
    tile = 1024

    @T.prim_func
    def kernel(x: T.Tensor((n,), 'float32'), y: T.Tensor((n,), 'float32')):
        with T.Kernel(T.max(n // tile, 1), threads=128) as block:
            for i in T.Parallel(tile):
                if block * tile + i < n:
                    y[block * tile + i] = x[block * tile + i]

    return kernel
