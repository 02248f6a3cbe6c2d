"""step: right
words: whole tiles

Eight is not subtracted.
"""

import tilelang.language as T


def dequant_gemm(n: int, k: int, group: int = 32):
    m = T.dynamic('m')
    block_m, block_n, block_k = 16, 64, 128
    groups = block_k // group  # of a row of the tile; each is one load of a thread
    loads = block_n * groups // 128

    @T.prim_func
    def kernel(
        x: T.Tensor((m, k), 'float16'),
        packed: T.Tensor((n, k // 8), 'int32'),
        scales: T.Tensor((n, k // group), 'float16'),
        y: T.Tensor((m, n), 'float16'),
    ):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=128) as (block_of_n, block_of_m):
            thread = T.get_thread_binding()
            row, col = block_of_m * block_m, block_of_n * block_n
            x_shared = T.alloc_shared((block_m, block_k), 'float16')
            w_shared = T.alloc_shared((block_n, block_k), 'float16')
            y_frag = T.alloc_fragment((block_m, block_n), 'float32')
            words = T.alloc_local((loads, 4), 'int32')
            scale = T.alloc_local((loads,), 'float16')
            weights = T.alloc_local((8,), 'float16')
            T.clear(y_frag)
            for step in T.serial(T.ceildiv(k, block_k)):
                T.copy(x[row, step * block_k], x_shared)
                for load in T.unroll(loads):
                    i = load * (128 // groups) + thread // groups
                    g = step * groups + thread % groups
                    scale[load] = 0.0
                    for w in T.vectorized(4):
                        words[load, w] = 0
                    if col + i < n and g < k // group:
                        scale[load] = scales[col + i, g]
                        for w in T.vectorized(4):
                            words[load, w] = packed[col + i, g * 4 + w]
                for load in T.unroll(loads):
                    i = load * (128 // groups) + thread // groups
                    for w in T.unroll(4):
                        for j in T.unroll(8):
                            code = (words[load, w] >> (4 * j)) & 15
                            weights[j] = T.cast(code, 'float16') * scale[load]
                        for j in T.vectorized(8):
                            w_shared[i, thread % groups * group + w * 8 + j] = weights[j]
                T.gemm(x_shared, w_shared, y_frag, transpose_B=True)
            T.copy(y_frag, y[row, col])

    return kernel
