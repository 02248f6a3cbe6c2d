"""05 Transpose every matrix of a batch.

    y[b, n, m] = x[b, m, n]    for 0 <= b < batch, 0 <= m < rows, 0 <= n < cols

All three sizes are known only when the kernel runs. Each may be any number from 1 on.

Check it with `tile-kernels learn check 5`.
"""

import tilelang.language as T


def transpose():
    """Return a kernel that transposes; every block owns one tile of 32 x 32 numbers of one matrix."""
    batch, rows, cols = (T.dynamic(name) for name in ('batch', 'rows', 'cols'))
    tile = 32

    @T.prim_func
    def kernel(x: T.Tensor((batch, rows, cols), 'float32'), y: T.Tensor((batch, cols, rows), 'float32')):
        with T.Kernel(T.ceildiv(cols, tile), T.ceildiv(rows, tile), batch, threads=256) as (col_tile, row_tile, matrix):
            # Replace the next line. The tile begins at row row_tile * tile and column col_tile * tile of x[matrix].
            raise NotImplementedError('transpose one tile')

    return kernel
