"""Sinkhorn normalisation: turn each matrix of scores into a nearly doubly stochastic one.

Start from `p = exp(x - max)`, then repeat: divide every row by its sum, divide every column by its sum. The result is
the fixed point's approximation after `num_iters` rounds; its columns sum to one exactly up to rounding. One block owns
one matrix and keeps it in registers for all rounds, so global memory is touched twice only.
"""

import tilelang.language as T
import torch
from _run import Example, main


def sinkhorn_kernel(size: int, num_iters: int, eps: float = 1e-6, num_threads: int = 128):
    """Build the kernel for one matrix size."""
    num_matrices = T.dynamic('num_matrices')

    @T.prim_func
    def sinkhorn(
        x: T.Tensor((num_matrices, size, size), 'float32'), p: T.Tensor((num_matrices, size, size), 'float32')
    ):
        with T.Kernel(num_matrices, threads=num_threads) as pid:
            p_frag = T.alloc_fragment((size, size), 'float32')
            max_frag = T.alloc_fragment((size,), 'float32')
            row_frag = T.alloc_fragment((size,), 'float32')
            col_frag = T.alloc_fragment((size,), 'float32')
            T.copy(x[pid, 0:size, 0:size], p_frag)
            T.reduce_max(p_frag, max_frag, dim=1)
            for i, j in T.Parallel(size, size):
                p_frag[i, j] = T.exp(p_frag[i, j] - max_frag[i])
            for _ in T.serial(num_iters):
                T.reduce_sum(p_frag, row_frag, dim=1)
                for i, j in T.Parallel(size, size):
                    p_frag[i, j] /= row_frag[i] + eps
                T.reduce_sum(p_frag, col_frag, dim=0)
                for i, j in T.Parallel(size, size):
                    p_frag[i, j] /= col_frag[j] + eps
            T.copy(p_frag, p[pid, 0:size, 0:size])

    return sinkhorn


def example(num_matrices: int = 6, size: int = 32, num_iters: int = 10) -> Example:
    """The reference iterates in float64."""
    x = torch.randn(num_matrices, size, size, generator=torch.Generator().manual_seed(0))
    p = (x - x.amax(-1, keepdim=True)).double().exp()
    for _ in range(num_iters):
        p = p / (p.sum(-1, keepdim=True) + 1e-6)
        p = p / (p.sum(-2, keepdim=True) + 1e-6)
    return Example(sinkhorn_kernel(size, num_iters), (x,), (torch.empty_like(x),), (p.float(),), tolerance=1e-5)


if __name__ == '__main__':
    main('sinkhorn', example())
