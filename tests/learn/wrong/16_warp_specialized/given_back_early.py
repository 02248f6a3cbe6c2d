"""step: right
words: a_shared

A tile is given back while its product runs.
"""

import tilelang.language as T


def product(m: int, n: int, k: int):
    block_m, block_n, block_k, ring = 128, 256, 64, 4

    @T.prim_func
    def kernel(a: T.Tensor((m, k), 'bfloat16'), b: T.Tensor((n, k), 'bfloat16'), c: T.Tensor((m, n), 'bfloat16')):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=384) as (tile_n, tile_m):
            a_shared = T.alloc_shared((ring, block_m, block_k), 'bfloat16')
            b_shared = T.alloc_shared((ring, block_n, block_k), 'bfloat16')
            sums = T.alloc_fragment((block_m, block_n), 'float32')
            full = T.alloc_barrier([128] * ring)
            free = T.alloc_barrier([256] * ring)
            row, col = tile_m * block_m, tile_n * block_n
            if T.get_thread_binding() >= 256:
                T.dec_max_nreg(24)
                for step in T.serial(T.ceildiv(k, block_k)):
                    depth = step * block_k
                    T.mbarrier_wait_parity(free[step % ring], (step // ring + 1) % 2)
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
                T.clear(sums)
                for step in T.serial(T.ceildiv(k, block_k)):
                    T.mbarrier_wait_parity(full[step % ring], step // ring % 2)
                    T.wgmma_gemm(
                        a_shared[step % ring, :, :],
                        b_shared[step % ring, :, :],
                        sums,
                        transpose_B=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    T.barrier_arrive(free[step % ring])
                T.wait_wgmma(0)
                T.copy(sums, c[row, col])

    return kernel
