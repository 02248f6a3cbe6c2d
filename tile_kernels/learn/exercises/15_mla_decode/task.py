"""15 One new token attends to a long cache of latents.

    s[b, h, j] = scale * sum over c of q[b, h, c] * cache[b, j, c]              for j < lengths[b]
    o[b, h, c] = sum over j of softmax(s[b, h, :])[j] * cache[b, j, c]          for c < latent

All heads share one cache row per token: its first `latent` numbers are key and value, the last `rope` are key only.
A sequence of length 0 gives zeros. Rows of the cache after the length are old: finite, but meaningless.

Two launches: `split` lets every block read a part of the keys, `merge` joins the parts. Split s hands over two things.
`parts[b, s, h, :]` is the output of its keys alone. `lse[b, s, h]` is the base-2 logarithm of the sum of their
exponentials, and -inf if there are none.

Check it with `tile-kernels learn check 15`.
"""

import tilelang.language as T


def mla_decode(heads: int, latent: int, rope: int, splits: int, scale: float):
    """Return two kernels: partial attention over a split of the keys, and the merge of the splits."""
    batch, seq = T.dynamic('batch'), T.dynamic('seq')
    dim = latent + rope
    block_h = 16 if heads <= 16 else 64  # heads of a block

    @T.prim_func
    def split(
        q: T.Tensor((batch, heads, dim), 'bfloat16'),
        cache: T.Tensor((batch, seq, dim), 'bfloat16'),
        lengths: T.Tensor((batch,), 'int32'),
        parts: T.Tensor((batch, splits, heads, latent), 'float32'),
        lse: T.Tensor((batch, splits, heads), 'float32'),
    ):
        with T.Kernel(splits, T.ceildiv(heads, block_h), batch, threads=128) as (s, head_tile, b):
            # Replace the next line. The block owns `block_h` heads and one of `splits` parts of the keys.
            raise NotImplementedError('attend to the keys of a split')

    @T.prim_func
    def merge(
        parts: T.Tensor((batch, splits, heads, latent), 'float32'),
        lse: T.Tensor((batch, splits, heads), 'float32'),
        o: T.Tensor((batch, heads, latent), 'bfloat16'),
    ):
        with T.Kernel(heads, batch, threads=128) as (head, b):
            # Replace the next line. The block owns one row of o.
            raise NotImplementedError('weigh the parts')

    return split, merge
