"""09 Cast every token to FP8, with a scale factor for every 128 channels.

    amax[t, g] = max over h in group g of |x[t, h]|, at least 1e-4    group g: 128 g <= h < min(128 (g + 1), hidden)
    sf[t, g]   = amax[t, g] / 448, rounded up to a power of two
    y[t, h]    = x[t, h] / sf[t, h // 128], rounded to the nearest e4m3 number

`hidden` is known when the kernel is built and a multiple of 8; the last group may be shorter. The number of tokens is
known when it runs. The division by 448 and the result must be exact in every bit. x is finite.

Check it with `tile-kernels learn check 9`.
"""

import tilelang.language as T

GROUP = 128


def cast(hidden: int):
    """Return a kernel that writes codes and scale factors; every block owns one group of 16 tokens."""
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
            # Replace the next line. The block owns the tokens from tile * rows and the channels from group * GROUP on.
            raise NotImplementedError(f'cast {rows} tokens of {hidden} channels')

    return kernel
