"""06 RMS norm and its gradient, in three launches.

    forward      rstd[t]    = 1 / sqrt(sum over h of x[t, h]^2 / hidden + EPS)
                 y[t, h]    = x[t, h] * rstd[t] * w[h]

    backward     n[t, h]    = x[t, h] * rstd[t]
                 g[t, h]    = dy[t, h] * w[h]
                 c[t]       = sum over h of g[t, h] * n[t, h] / hidden
                 dx[t, h]   = (g[t, h] - n[t, h] * c[t]) * rstd[t]
                 parts[p, h] = sum over t = p, p + NUM_PARTS, p + 2 NUM_PARTS, ... of dy[t, h] * n[t, h]

    add_parts    dw[h]      = sum over p of parts[p, h]

`hidden` is known when the kernel is built, and a multiple of 8. The number of tokens is known when it runs; it may be
smaller than NUM_PARTS. Compute in float32.

Check it with `tile-kernels learn check 6`.
"""

import tilelang.language as T

EPS = 1e-6
NUM_PARTS = 256


def rms_norm(hidden: int):
    """Return the three kernels in launch order."""
    tokens = T.dynamic('tokens')

    @T.prim_func
    def forward(
        x: T.Tensor((tokens, hidden), 'bfloat16'),
        w: T.Tensor((hidden,), 'float32'),
        y: T.Tensor((tokens, hidden), 'bfloat16'),
        rstd: T.Tensor((tokens,), 'float32'),
    ):
        with T.Kernel(tokens, threads=128) as t:
            # Replace the next line. Block t owns row t.
            raise NotImplementedError(f'normalize one row of {hidden} numbers')

    @T.prim_func
    def backward(
        dy: T.Tensor((tokens, hidden), 'bfloat16'),
        x: T.Tensor((tokens, hidden), 'bfloat16'),
        w: T.Tensor((hidden,), 'float32'),
        rstd: T.Tensor((tokens,), 'float32'),
        dx: T.Tensor((tokens, hidden), 'bfloat16'),
        parts: T.Tensor((NUM_PARTS, hidden), 'float32'),
    ):
        with T.Kernel(NUM_PARTS, threads=128) as part:
            # Replace the next line. Block `part` owns the rows part, part + NUM_PARTS, ... and the row parts[part].
            raise NotImplementedError(f'the gradient of rows of {hidden} numbers')

    @T.prim_func
    def add_parts(parts: T.Tensor((NUM_PARTS, hidden), 'float32'), dw: T.Tensor((hidden,), 'float32')):
        with T.Kernel(T.ceildiv(hidden, 32), threads=256) as tile:
            # Replace the next line. Block `tile` owns 32 columns.
            raise NotImplementedError('add the parts')

    return forward, backward, add_parts
