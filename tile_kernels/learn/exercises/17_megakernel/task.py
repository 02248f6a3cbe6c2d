"""17 A whole mixture-of-experts block in one launch.

    z[t, :] = bfloat16(x[t, :] * gamma / sqrt(mean of x[t, :] ** 2 + 1e-6))        norm
    logits[t, e] = z[t, :] . router[e, :]                                         gate
    the k experts e of the largest logits, with weights softmax(their logits)
    act[e, t, i] = bfloat16(silu(g) * u),  g = z[t, :] . up[e * 2 * inter + i, :],
                                           u = z[t, :] . up[e * 2 * inter + inter + i, :]
    y[t, c] = sum over the chosen e of weight * (act[e, t, :] . down[e * hidden + c, :])

1 to 8 tokens. hidden is a multiple of 32, inter of 8. `logits` and `act` are workspaces: blocks hand over through them.
Rows of experts that no token chose are not read.

Check it with `tile-kernels learn check 17`.
"""

import tilelang.language as T


def moe_block(tokens: int, hidden: int, inter: int, experts: int, k: int, blocks: int):
    """Return one kernel of `blocks` persistent blocks, which meet at grid barriers."""

    @T.prim_func
    def kernel(
        x: T.Tensor((tokens, hidden), 'bfloat16'),
        gamma: T.Tensor((hidden,), 'float32'),
        router: T.Tensor((experts, hidden), 'bfloat16'),
        up: T.Tensor((experts * 2 * inter, hidden), 'bfloat16'),
        down: T.Tensor((experts * hidden, inter), 'bfloat16'),
        y: T.Tensor((tokens, hidden), 'bfloat16'),
        logits: T.Tensor((tokens, experts), 'float32'),
        act: T.Tensor((experts, tokens, inter), 'bfloat16'),
    ):
        with T.Kernel(blocks, threads=256) as block:
            # Replace the next line. Three phases, two calls of T.sync_grid().
            raise NotImplementedError('norm, gate, experts and sum in one launch')

    return kernel
