"""FP8 matrix product with scale factors: `c = (a * a_sf) @ (b * b_sf).T`.

`a` is `(m, k)` and `b` is `(n, k)` in float8_e4m3fn. Each row of `a` has one scale factor per 128 channels, each
128 x 128 block of `b` has one:

    c[i, j] = sum_g a_sf[i, g] * b_sf[j // 128, g] * sum_(k in group g) a[i, k] * b[j, k]

The tensor cores sum one group into a fresh accumulator, then the scaled group is added in float32: scale factors apply
once per 128 products, and the float32 sum is not limited by the precision of the FP8 accumulator.
"""

import tilelang.language as T
import torch
from _run import Example, main

GROUP = 128


def fp8_gemm_kernel(m: int, n: int, k: int, block_m: int = 64, num_stages: int = 2):
    """Build the kernel for one problem size; `k` is a multiple of the group."""

    @T.prim_func
    def fp8_gemm(
        a: T.Tensor((m, k), 'float8_e4m3fn'),
        a_sf: T.Tensor((m, k // GROUP), 'float32'),
        b: T.Tensor((n, k), 'float8_e4m3fn'),
        b_sf: T.Tensor((-(-n // GROUP), k // GROUP), 'float32'),
        c: T.Tensor((m, n), 'bfloat16'),
    ):
        with T.Kernel(T.ceildiv(n, GROUP), T.ceildiv(m, block_m), threads=128) as (pid_n, pid_m):
            a_shared = T.alloc_shared((block_m, GROUP), 'float8_e4m3fn')
            b_shared = T.alloc_shared((GROUP, GROUP), 'float8_e4m3fn')
            group_frag = T.alloc_fragment((block_m, GROUP), 'float32')
            c_frag = T.alloc_fragment((block_m, GROUP), 'float32')
            T.clear(c_frag)
            for g in T.Pipelined(k // GROUP, num_stages=num_stages):
                T.copy(a[pid_m * block_m, g * GROUP], a_shared)
                T.copy(b[pid_n * GROUP, g * GROUP], b_shared)
                T.gemm(a_shared, b_shared, group_frag, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(block_m, GROUP):
                    c_frag[i, j] += group_frag[i, j] * (a_sf[pid_m * block_m + i, g] * b_sf[pid_n, g])
            T.copy(c_frag, c[pid_m * block_m, pid_n * GROUP])

    return fp8_gemm


def example(m: int = 72, n: int = 160, k: int = 256) -> Example:
    """Small integers and powers of two: all sums are exact and only the cast to bfloat16 rounds."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, (rows, k), generator=generator).float() for rows in (m, n))
    a_sf, b_sf = (
        torch.randint(-3, 3, (rows, k // GROUP), generator=generator).float().exp2() for rows in (m, -(-n // GROUP))
    )
    a_full = a * a_sf.repeat_interleave(GROUP, dim=1)
    b_full = b * b_sf.repeat_interleave(GROUP, dim=0)[:n].repeat_interleave(GROUP, dim=1)
    expected = (a_full @ b_full.T).to(torch.bfloat16)
    inputs = (a.to(torch.float8_e4m3fn), a_sf, b.to(torch.float8_e4m3fn), b_sf)
    return Example(fp8_gemm_kernel(m, n, k), inputs, (torch.empty(m, n, dtype=torch.bfloat16),), (expected,))


if __name__ == '__main__':
    main('fp8_gemm', example())
