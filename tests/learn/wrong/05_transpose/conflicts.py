"""step: lean
words: lanes that read staged meet 32-way in its banks

The tile has no padding.
"""

import tilelang.language as T


def transpose():
    batch, rows, cols = (T.dynamic(name) for name in ('batch', 'rows', 'cols'))
    tile = 32

    @T.prim_func
    def kernel(x: T.Tensor((batch, rows, cols), 'float32'), y: T.Tensor((batch, cols, rows), 'float32')):
        with T.Kernel(T.ceildiv(cols, tile), T.ceildiv(rows, tile), batch, threads=256) as (col_tile, row_tile, matrix):
            staged = T.alloc_shared((tile, tile), 'float32')
            row, col = row_tile * tile, col_tile * tile
            for i, j in T.Parallel(tile, tile):
                if row + i < rows and col + j < cols:
                    staged[i, j] = x[matrix, row + i, col + j]
            for j, i in T.Parallel(tile, tile):
                if row + i < rows and col + j < cols:
                    y[matrix, col + j, row + i] = staged[i, j]

    return kernel
