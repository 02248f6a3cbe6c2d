"""step: right
words: elements of y are wrong

The largest number is not the largest magnitude.
"""

import tilelang.language as T

GROUP = 128


def cast(hidden: int):
    tokens = T.dynamic('tokens')
    groups = -(-hidden // GROUP)
    rows = 16

    @T.prim_func
    def kernel(
        x: T.Tensor((tokens, hidden), 'bfloat16'),
        y: T.Tensor((tokens, hidden), 'float8_e4m3fn'),
        sf: T.Tensor((tokens, groups), 'float32'),
    ):
        with T.Kernel(groups, T.ceildiv(tokens, rows), threads=128) as (group, tile):
            values = T.alloc_fragment((rows, GROUP), 'float32')
            codes = T.alloc_fragment((rows, GROUP), 'float8_e4m3fn')
            scale = T.alloc_fragment((rows,), 'float32')
            T.copy(x[tile * rows, group * GROUP], values)
            T.reduce_max(values, scale, dim=1)
            for i in T.Parallel(rows):
                bits = T.reinterpret(T.max(scale[i], 1e-4) / 448.0, 'uint32')
                scale[i] = T.reinterpret((bits + T.uint32(0x007FFFFF)) & T.uint32(0xFF800000), 'float32')
            for i, j in T.Parallel(rows, GROUP):
                codes[i, j] = T.cast(values[i, j] / scale[i], 'float8_e4m3fn')
            T.copy(codes, y[tile * rows, group * GROUP])
            for i in T.Parallel(rows):
                if tile * rows + i < tokens:
                    sf[tile * rows + i, group] = scale[i]

    return kernel
