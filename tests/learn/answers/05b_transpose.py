"""05b: 32 rows need 32 different places for the same column, so all five bits of the row take part."""

import tilelang.language as T


def transpose():
    batch, rows, cols = (T.dynamic(name) for name in ('batch', 'rows', 'cols'))
    tile = 32

    @T.prim_func
    def kernel(x: T.Tensor((batch, rows, cols), 'float32'), y: T.Tensor((batch, cols, rows), 'float32')):
        with T.Kernel(T.ceildiv(cols, tile), T.ceildiv(rows, tile), batch, threads=256) as (col_tile, row_tile, matrix):
            staged = T.alloc_shared((tile, tile), 'float32')
            T.annotate_layout({staged: T.Layout((tile, tile), lambda i, j: [i, j ^ i])})
            for i, j in T.Parallel(tile, tile):
                staged[i, j] = x[matrix, row_tile * tile + i, col_tile * tile + j]
            for j, i in T.Parallel(tile, tile):
                y[matrix, col_tile * tile + j, row_tile * tile + i] = staged[i, j]

    return kernel
