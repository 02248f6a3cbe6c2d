"""11 Choose the k best of 256 experts for every token.

    experts[t, 0], ..., experts[t, k - 1]    the columns of the k largest logits[t, :], the largest first
    values[t, i] = logits[t, experts[t, i]]

Of equal logits the smaller column comes first; -0 equals +0. NaN comes after every number, after -inf, too.
k is at most 32. The number of tokens is known only when the kernel runs; experts need not be a multiple of 32.

Check it with `tile-kernels learn check 11`.
"""

import tilelang.language as T


def topk_gate(num_experts: int, k: int):
    """Return a kernel in which every warp chooses for one token, without shared memory."""
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def kernel(
        logits: T.Tensor((num_tokens, num_experts), 'float32'),
        experts: T.Tensor((num_tokens, k), 'int32'),
        values: T.Tensor((num_tokens, k), 'float32'),
    ):
        with T.Kernel(T.ceildiv(num_tokens, 4), threads=128) as block:
            # Replace the next line. Warp w of the block owns token block * 4 + w.
            raise NotImplementedError('choose k experts by one warp per token')

    return kernel
