"""14 Attention with a causal mask.

    s[i, j] = sum over c of q[i, c] * k[j, c] / sqrt(dim)    for keys j <= i, for every batch and head
    o[i, c] = sum over j of softmax(s[i, :])[j] * v[j, c]

seq is any number from 1 on; dim is a multiple of 16.

Check it with `tile-kernels learn check 14`.
"""

import tilelang.language as T


def attention(batch: int, heads: int, seq: int, dim: int):
    """Return a kernel in which a block owns a tile of queries of one head."""
    block = 64
    shape = (batch, heads, seq, dim)

    @T.prim_func
    def kernel(
        q: T.Tensor(shape, 'bfloat16'),
        k: T.Tensor(shape, 'bfloat16'),
        v: T.Tensor(shape, 'bfloat16'),
        o: T.Tensor(shape, 'bfloat16'),
    ):
        with T.Kernel(T.ceildiv(seq, block), heads, batch, threads=128) as (tile, head, b):
            # Replace the next line. The block owns the queries from tile * block on.
            raise NotImplementedError('attend to the keys that the queries may see')

    return kernel
