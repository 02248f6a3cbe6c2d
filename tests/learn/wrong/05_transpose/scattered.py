"""step: lean
words: warps write 8 times the sectors that y needs

One loop, no shared memory: the writes go down the columns of y.
"""

import tilelang.language as T


def transpose():
    batch, rows, cols = (T.dynamic(name) for name in ('batch', 'rows', 'cols'))
    tile = 32

    @T.prim_func
    def kernel(x: T.Tensor((batch, rows, cols), 'float32'), y: T.Tensor((batch, cols, rows), 'float32')):
        with T.Kernel(T.ceildiv(cols, tile), T.ceildiv(rows, tile), batch, threads=256) as (col_tile, row_tile, matrix):
            row, col = row_tile * tile, col_tile * tile
            for i, j in T.Parallel(tile, tile):
                if row + i < rows and col + j < cols:
                    y[matrix, col + j, row + i] = x[matrix, row + i, col + j]

    return kernel
