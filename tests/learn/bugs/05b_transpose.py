"""05b Find the bug: this transpose is right, but it is slow.

The author did not want to waste a column of shared memory. The layout below keeps the tile at 32 x 32 numbers. It
stores column j of row i at place j ^ (i % 8) of the row, where ^ is the bitwise exclusive or. The check counts more
passes through shared memory than the bytes need.

Look at the banks that the lanes of a warp meet. `line` is the line that reads the tile:

    from tile_kernels.sight import plot_layout
    print(plot_layout(transpose, batch=1, rows=32, cols=32, buffer='staged', access=line))

Then correct this file. Check it with `tile-kernels learn check 5b`.
"""

import tilelang.language as T


def transpose():
    """Return a kernel that transposes; every block owns one tile of 32 x 32 numbers of one matrix."""
    batch, rows, cols = (T.dynamic(name) for name in ('batch', 'rows', 'cols'))
    tile = 32

    @T.prim_func
    def kernel(x: T.Tensor((batch, rows, cols), 'float32'), y: T.Tensor((batch, cols, rows), 'float32')):
        with T.Kernel(T.ceildiv(cols, tile), T.ceildiv(rows, tile), batch, threads=256) as (col_tile, row_tile, matrix):
            staged = T.alloc_shared((tile, tile), 'float32')
            T.annotate_layout({staged: T.Layout((tile, tile), lambda i, j: [i, j ^ (i % 8)])})
            for i, j in T.Parallel(tile, tile):
                staged[i, j] = x[matrix, row_tile * tile + i, col_tile * tile + j]
            for j, i in T.Parallel(tile, tile):
                y[matrix, col_tile * tile + j, row_tile * tile + i] = staged[i, j]

    return kernel
