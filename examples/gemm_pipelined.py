"""Matrix product with a software pipeline: `c = a @ b.T`.

`a` is `(m, k)`, `b` is `(n, k)`, both bfloat16, `c` is `(m, n)` float32. A block owns a `block_m x block_n` tile of `c`
and walks along `k`; `T.Pipelined` lets the loads of the next `num_stages` steps run under the product of this one.
Tiles may stick out of the matrices: what is loaded outside is zero, what is stored outside is dropped.
"""

import tilelang.language as T
import torch
from _run import Example, main


def gemm_kernel(m: int, n: int, k: int, block_m: int = 64, block_n: int = 64, block_k: int = 32, num_stages: int = 3):
    """Build the kernel for one problem size."""

    @T.prim_func
    def gemm(a: T.Tensor((m, k), 'bfloat16'), b: T.Tensor((n, k), 'bfloat16'), c: T.Tensor((m, n), 'float32')):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=128) as (pid_n, pid_m):
            a_shared = T.alloc_shared((block_m, block_k), 'bfloat16')
            b_shared = T.alloc_shared((block_n, block_k), 'bfloat16')
            c_frag = T.alloc_fragment((block_m, block_n), 'float32')
            T.clear(c_frag)
            for step in T.Pipelined(T.ceildiv(k, block_k), num_stages=num_stages):
                T.copy(a[pid_m * block_m, step * block_k], a_shared)
                T.copy(b[pid_n * block_n, step * block_k], b_shared)
                T.gemm(a_shared, b_shared, c_frag, transpose_B=True)
            T.copy(c_frag, c[pid_m * block_m, pid_n * block_n])

    return gemm


def example(m: int = 200, n: int = 136, k: int = 96) -> Example:
    """Small integers: every partial sum is exact in float32, so any order of summation gives the same bits."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (m, k), generator=generator).to(torch.bfloat16)
    b = torch.randint(-4, 5, (n, k), generator=generator).to(torch.bfloat16)
    return Example(gemm_kernel(m, n, k), (a, b), (torch.empty(m, n),), (a.float() @ b.float().T,))


if __name__ == '__main__':
    main('gemm_pipelined', example())
