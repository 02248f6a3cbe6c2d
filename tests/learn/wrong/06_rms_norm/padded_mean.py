"""step: right
words: elements of y are wrong

The mean is taken over the padded width.
"""

import tilelang.language as T

EPS = 1e-6
NUM_PARTS = 256


def rms_norm(hidden: int):
    tokens = T.dynamic('tokens')
    threads = 128
    width = -(-hidden // (8 * threads)) * 8 * threads

    @T.prim_func
    def forward(
        x: T.Tensor((tokens, hidden), 'bfloat16'),
        w: T.Tensor((hidden,), 'float32'),
        y: T.Tensor((tokens, hidden), 'bfloat16'),
        rstd: T.Tensor((tokens,), 'float32'),
    ):
        with T.Kernel(tokens, threads=threads) as t:
            row = T.alloc_fragment((width,), 'float32')
            square = T.alloc_fragment((width,), 'float32')
            total = T.alloc_fragment((1,), 'float32')
            for h in T.Parallel(width):
                row[h] = T.if_then_else(h < hidden, x[t, h], 0.0)
            for h in T.Parallel(width):
                square[h] = row[h] * row[h]
            T.reduce_sum(square, total, dim=0)
            total[0] = T.rsqrt(total[0] / width + EPS)
            rstd[t] = total[0]
            for h in T.Parallel(width):
                if h < hidden:
                    y[t, h] = row[h] * total[0] * w[h]

    @T.prim_func
    def backward(
        dy: T.Tensor((tokens, hidden), 'bfloat16'),
        x: T.Tensor((tokens, hidden), 'bfloat16'),
        w: T.Tensor((hidden,), 'float32'),
        rstd: T.Tensor((tokens,), 'float32'),
        dx: T.Tensor((tokens, hidden), 'bfloat16'),
        parts: T.Tensor((NUM_PARTS, hidden), 'float32'),
    ):
        with T.Kernel(NUM_PARTS, threads=threads) as part:
            n = T.alloc_fragment((width,), 'float32')
            g = T.alloc_fragment((width,), 'float32')
            product = T.alloc_fragment((width,), 'float32')
            dw = T.alloc_fragment((width,), 'float32')
            mean = T.alloc_fragment((1,), 'float32')
            T.clear(dw)
            for step in T.serial(T.ceildiv(tokens - part, NUM_PARTS)):
                t = part + step * NUM_PARTS
                for h in T.Parallel(width):
                    n[h] = T.if_then_else(h < hidden, x[t, h], 0.0)
                for h in T.Parallel(width):
                    g[h] = T.if_then_else(h < hidden, dy[t, h], 0.0)
                for h in T.Parallel(width):
                    n[h] = n[h] * rstd[t]
                    dw[h] += g[h] * n[h]
                    g[h] = g[h] * T.if_then_else(h < hidden, w[h], 0.0)
                    product[h] = g[h] * n[h]
                T.reduce_sum(product, mean, dim=0)
                for h in T.Parallel(width):
                    if h < hidden:
                        dx[t, h] = (g[h] - n[h] * (mean[0] / hidden)) * rstd[t]
            for h in T.Parallel(width):
                if h < hidden:
                    parts[part, h] = dw[h]

    @T.prim_func
    def add_parts(parts: T.Tensor((NUM_PARTS, hidden), 'float32'), dw: T.Tensor((hidden,), 'float32')):
        with T.Kernel(T.ceildiv(hidden, 32), threads=256) as tile:
            column = T.alloc_fragment((NUM_PARTS, 32), 'float32')
            total = T.alloc_fragment((32,), 'float32')
            for p, h in T.Parallel(NUM_PARTS, 32):
                column[p, h] = T.if_then_else(tile * 32 + h < hidden, parts[p, tile * 32 + h], 0.0)
            T.reduce_sum(column, total, dim=0)
            for h in T.Parallel(32):
                if tile * 32 + h < hidden:
                    dw[tile * 32 + h] = total[h]

    return forward, backward, add_parts
