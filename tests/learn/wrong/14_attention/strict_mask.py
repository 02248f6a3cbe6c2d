"""step: right
words: o[0, 0, 0

A query does not see its own key.
"""

import math

import tilelang.language as T


def attention(batch: int, heads: int, seq: int, dim: int):
    block = 128 if seq >= 512 else 64
    threads = 2 * block
    rows = T.GemmWarpPolicy.FullRow  # a row of scores stays within a warp
    shape = (batch, heads, seq, dim)
    to_log2 = math.log2(math.e) / math.sqrt(dim)

    @T.prim_func
    def kernel(
        q: T.Tensor(shape, 'bfloat16'),
        k: T.Tensor(shape, 'bfloat16'),
        v: T.Tensor(shape, 'bfloat16'),
        o: T.Tensor(shape, 'bfloat16'),
    ):
        with T.Kernel(T.ceildiv(seq, block), heads, batch, threads=threads) as (tile, head, b):
            q_shared = T.alloc_shared((block, dim), 'bfloat16')
            k_shared = T.alloc_shared((block, dim), 'bfloat16')
            v_shared = T.alloc_shared((block, dim), 'bfloat16')
            scores = T.alloc_fragment((block, block), 'float32')
            p = T.alloc_fragment((block, block), 'bfloat16')
            out = T.alloc_fragment((block, dim), 'float32')
            peak = T.alloc_fragment((block,), 'float32')
            old_peak = T.alloc_fragment((block,), 'float32')
            total = T.alloc_fragment((block,), 'float32')
            tile_total = T.alloc_fragment((block,), 'float32')
            row = tile * block
            T.copy(q[b, head, row : row + block, 0:dim], q_shared)
            T.fill(peak, -T.infinity('float32'))
            T.clear(total)
            T.clear(out)
            for step in T.Pipelined(tile + 1, num_stages=2):
                col = step * block
                T.copy(k[b, head, col : col + block, 0:dim], k_shared)
                T.copy(v[b, head, col : col + block, 0:dim], v_shared)
                T.gemm(q_shared, k_shared, scores, transpose_B=True, clear_accum=True, policy=rows)
                for i, j in T.Parallel(block, block):
                    scores[i, j] = T.if_then_else(col + j < row + i, scores[i, j] * to_log2, -T.infinity('float32'))
                T.copy(peak, old_peak)
                T.reduce_max(scores, peak, dim=1, clear=False)
                for i in T.Parallel(block):
                    old_peak[i] = T.exp2(old_peak[i] - peak[i])
                for i, j in T.Parallel(block, block):
                    scores[i, j] = T.exp2(scores[i, j] - peak[i])
                T.reduce_sum(scores, tile_total, dim=1)
                for i in T.Parallel(block):
                    total[i] = total[i] * old_peak[i] + tile_total[i]
                for i, j in T.Parallel(block, dim):
                    out[i, j] *= old_peak[i]
                T.copy(scores, p)
                T.gemm(p, v_shared, out, policy=rows)
            for i, j in T.Parallel(block, dim):
                out[i, j] /= total[i]
            T.copy(out, o[b, head, row : row + block, 0:dim])

    return kernel
