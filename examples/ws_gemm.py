"""Matrix product by specialised warps: `c = a @ b.T`, loads and products in different threads.

Threads 128-255 only load (the producer), threads 0-127 only multiply (the consumer). They meet at two barriers per
buffer of the ring: `full` says that a buffer holds data, `free` says that it may be overwritten. A barrier counts
phases; waiting for parity `p` returns once the phase with that parity is over. The producer therefore waits for the
opposite parity first: in the initial phase every buffer is free. The tensor cores work asynchronously, so a buffer is
given back only after the product that reads it is known to be complete, one step later.
"""

import tilelang.language as T
import torch
from _run import Example, main


def ws_gemm_kernel(m: int, n: int, k: int, block_m: int = 64, block_n: int = 64, block_k: int = 64, ring: int = 2):
    """Build the kernel for one problem size, whose extents are multiples of the tile."""

    @T.prim_func
    def ws_gemm(a: T.Tensor((m, k), 'bfloat16'), b: T.Tensor((n, k), 'bfloat16'), c: T.Tensor((m, n), 'float32')):
        with T.Kernel(n // block_n, m // block_m, threads=256) as (pid_n, pid_m):
            a_shared = T.alloc_shared((ring, block_m, block_k), 'bfloat16')
            b_shared = T.alloc_shared((ring, block_n, block_k), 'bfloat16')
            c_frag = T.alloc_fragment((block_m, block_n), 'float32')
            full = T.alloc_barrier([128] * ring)
            free = T.alloc_barrier([128] * ring)
            row, col = pid_m * block_m, pid_n * block_n
            if T.get_thread_binding() >= 128:
                T.dec_max_nreg(24)
                for step in T.serial(k // block_k):
                    T.mbarrier_wait_parity(free[step % ring], (step // ring + 1) % 2)
                    depth = step * block_k
                    T.tma_copy(
                        a[row : row + block_m, depth : depth + block_k],
                        a_shared[step % ring, :, :],
                        barrier=full[step % ring],
                    )
                    T.tma_copy(
                        b[col : col + block_n, depth : depth + block_k],
                        b_shared[step % ring, :, :],
                        barrier=full[step % ring],
                    )
                    T.barrier_arrive(full[step % ring])
            else:
                T.inc_max_nreg(240)
                T.clear(c_frag)
                for step in T.serial(k // block_k):
                    T.mbarrier_wait_parity(full[step % ring], (step // ring) % 2)
                    T.wgmma_gemm(a_shared[step % ring, :, :], b_shared[step % ring, :, :], c_frag, transpose_B=True)
                    T.wait_wgmma(1)
                    if step > 0:
                        T.barrier_arrive(free[(step - 1) % ring])
                T.wait_wgmma(0)
                T.copy(c_frag, c[row, col])

    return ws_gemm


def example(m: int = 128, n: int = 64, k: int = 320) -> Example:
    """Small integers: every partial sum is exact in float32, so any order of summation gives the same bits."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (m, k), generator=generator).to(torch.bfloat16)
    b = torch.randint(-4, 5, (n, k), generator=generator).to(torch.bfloat16)
    return Example(ws_gemm_kernel(m, n, k), (a, b), (torch.empty(m, n),), (a.float() @ b.float().T,))


if __name__ == '__main__':
    main('ws_gemm', example())
