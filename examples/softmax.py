"""Row softmax: `y[t, h] = exp(x[t, h] - max_h x[t]) / sum_h exp(x[t, h] - max_h x[t])`.

One block owns one row and keeps it in registers, so `x` is read once and `y` is written once. The number of rows is
dynamic: one build serves every batch. A fragment must divide evenly over the threads, so the row is padded with minus
infinity, which adds nothing to the sum.
"""

import tilelang.language as T
import torch
from _run import Example, main


def softmax_kernel(hidden: int, num_threads: int = 128):
    """Build the kernel for one row length."""
    num_tokens = T.dynamic('num_tokens')
    padded = -(-hidden // (8 * num_threads)) * 8 * num_threads

    @T.prim_func
    def softmax(x: T.Tensor((num_tokens, hidden), 'float32'), y: T.Tensor((num_tokens, hidden), 'float32')):
        with T.Kernel(num_tokens, threads=num_threads) as token_idx:
            x_frag = T.alloc_fragment((padded,), 'float32')
            max_frag = T.alloc_fragment((1,), 'float32')
            sum_frag = T.alloc_fragment((1,), 'float32')
            for h in T.Parallel(padded):
                x_frag[h] = T.if_then_else(h < hidden, x[token_idx, h], -T.infinity('float32'))
            T.reduce_max(x_frag, max_frag, dim=0)
            for h in T.Parallel(padded):
                x_frag[h] = T.exp(x_frag[h] - max_frag[0])
            T.reduce_sum(x_frag, sum_frag, dim=0)
            for h in T.Parallel(padded):
                if h < hidden:
                    y[token_idx, h] = x_frag[h] / sum_frag[0]

    return softmax


def example(num_tokens: int = 37, hidden: int = 1000) -> Example:
    """Rows of random numbers, one of them large enough to overflow a softmax that forgets the maximum."""
    x = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(0))
    x[0] += 200
    expected = x.double().softmax(-1).float()
    return Example(softmax_kernel(hidden), (x,), (torch.empty_like(x),), (expected,), tolerance=1e-6)


if __name__ == '__main__':
    main('softmax', example())
