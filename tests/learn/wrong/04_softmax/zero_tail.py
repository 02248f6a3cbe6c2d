"""step: right
words: a tail in columns

The tail counts in the sum.
"""

import tilelang.language as T


def softmax(cols):
    rows = T.dynamic('rows')
    width = (cols + 1023) // 1024 * 1024
    threads = 128

    @T.prim_func
    def kernel(x: T.Tensor((rows, cols), 'float16'), y: T.Tensor((rows, cols), 'float16')):
        with T.Kernel(rows, threads=threads) as row:
            tile = T.alloc_fragment((1, width), 'float32')
            most = T.alloc_fragment((1,), 'float32')
            total = T.alloc_fragment((1,), 'float32')
            for i, j in T.Parallel(1, width):
                tile[i, j] = T.if_then_else(j < cols, T.cast(x[row, j], 'float32'), 0.0)
            T.reduce_max(tile, most, dim=1)
            for i, j in T.Parallel(1, width):
                tile[i, j] = T.exp(tile[i, j] - most[i])
            T.reduce_sum(tile, total, dim=1)
            for i, j in T.Parallel(1, width):
                if j < cols:
                    y[row, j] = tile[i, j] / total[i]

    return kernel
