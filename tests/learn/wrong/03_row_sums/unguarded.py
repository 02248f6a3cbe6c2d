"""step: right
words: OutOfBounds

The last chunk reads beyond the end of its row.
"""

import tilelang.language as T


def row_sums(cols):
    rows = T.dynamic('rows')
    chunk, threads = 1024, 32

    @T.prim_func
    def kernel(x: T.Tensor((rows, cols), 'float16'), y: T.Tensor((rows,), 'float32')):
        with T.Kernel(rows, threads=threads) as row:
            part = T.alloc_fragment((1, chunk), 'float32')
            total = T.alloc_fragment((1,), 'float32')
            T.clear(part)
            for step in T.serial(T.ceildiv(cols, chunk)):
                for i, j in T.Parallel(1, chunk):
                    part[i, j] += T.cast(x[row, step * chunk + j], 'float32')
            T.reduce_sum(part, total, dim=1)
            for i in T.Parallel(1):
                y[row] = total[i]

    return kernel
