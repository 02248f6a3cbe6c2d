"""step: right
words: outside

The guard lets one number too many pass.
"""

import tilelang.language as T


def copy():
    n = T.dynamic('n')
    tile = 1024

    @T.prim_func
    def kernel(x: T.Tensor((n,), 'float32'), y: T.Tensor((n,), 'float32')):
        with T.Kernel(T.ceildiv(n, tile), threads=128) as block:
            for i in T.Parallel(tile):
                if block * tile + i <= n:
                    y[block * tile + i] = x[block * tile + i]

    return kernel
