"""01: whole tiles need no guard, so their accesses are 16 bytes wide; only the last tile is guarded."""

import tilelang.language as T


def copy():
    """Return a kernel that copies x to y; every block copies one tile of 1024 numbers."""
    n = T.dynamic('n')
    tile = 1024

    @T.prim_func
    def kernel(x: T.Tensor((n,), 'float32'), y: T.Tensor((n,), 'float32')):
        with T.Kernel(T.ceildiv(n, tile), threads=128) as block:
            if (block + 1) * tile <= n:
                for i in T.Parallel(tile):
                    y[block * tile + i] = x[block * tile + i]
            else:
                for i in T.Parallel(tile):
                    if block * tile + i < n:
                        y[block * tile + i] = x[block * tile + i]

    return kernel
