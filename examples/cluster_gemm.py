"""Matrix product by pairs of blocks: `c = a @ b.T`, where both blocks of a cluster receive the same tile of `b`.

The two blocks of a cluster compute tiles that lie below each other. They need different rows of `a` and the same rows
of `b`. So the first block loads each tile of `b` once, by a multicast that writes the shared memory of both blocks: L2
reads of `b` are halved. The rest is `ws_gemm`: threads 256-383 load, the two warpgroups before them multiply 64 rows
each.

A multicast needs a free buffer in both blocks. Every warp that has read a buffer therefore arrives at the barrier
`free` of both blocks: lane 0 at that of block 0, lane 1 at that of block 1. No block may end while the other still
arrives at its barriers. So the loading threads wait at last until all buffers are free.
"""

import tilelang.language as T
import torch
from _run import Example, main

PAIR = 2  # blocks of a cluster
MEMBERS = 2  # warpgroups that multiply
ROWS = 64  # rows of a warpgroup
WARPS = 4  # of a warpgroup
#: The barriers below order the warpgroups. A `__syncthreads` of all, as TileLang would insert it, never returns.
PASS_CONFIGS = {'tl.disable_thread_storage_sync': True, 'tl.disable_shared_memory_reuse': True}
BAND = 8  # pairs of tiles below each other that run at the same time, so that L2 serves their operands


def cluster_gemm_kernel(m: int, n: int, k: int, block_n: int = 256, ring: int = 4, num_sms: int = 132):
    """Build the kernel for one problem size: `m` a multiple of 256, `n` of `block_n`, `k` of 64; `num_sms` even."""
    block_m, block_k = MEMBERS * ROWS, 64
    pairs_m, tiles_n, steps = m // (PAIR * block_m), n // block_n, k // block_k
    clusters = min(num_sms // PAIR, pairs_m * tiles_n)
    staged = min(block_n, 128)  # columns of c that are written by one TMA store

    @T.prim_func
    def cluster_gemm(a: T.Tensor((m, k), 'bfloat16'), b: T.Tensor((n, k), 'bfloat16'), c: T.Tensor((m, n), 'bfloat16')):
        with T.Kernel(clusters * PAIR, threads=(MEMBERS + 1) * 128, cluster_dims=(PAIR, 1, 1)) as block:
            a_shared = T.alloc_shared((ring, block_m, block_k), 'bfloat16')
            b_shared = T.alloc_shared((ring, block_n, block_k), 'bfloat16')
            c_shared = T.alloc_shared((MEMBERS, ROWS, staged), 'bfloat16')
            full = T.alloc_barrier([128] * ring)
            free = T.alloc_cluster_barrier([PAIR * MEMBERS * WARPS] * ring)
            rank, cluster, thread = block % PAIR, block // PAIR, T.get_thread_binding()
            turns = T.ceildiv(pairs_m * tiles_n - cluster, clusters)
            used = T.alloc_var('int32', init=0)
            with T.ws(MEMBERS):
                T.dec_max_nreg(24)
                for turn in T.serial(turns):
                    tile = turn * clusters + cluster
                    first = tile // (BAND * tiles_n) * BAND
                    height = T.min(BAND, pairs_m - first)
                    inside = tile - first * tiles_n
                    row = ((first + inside % height) * PAIR + rank) * block_m
                    col = inside // height * block_n
                    for step in T.serial(steps):
                        slot, depth = used % ring, step * block_k
                        T.mbarrier_wait_parity(free[slot], (used // ring + 1) % 2)
                        T.tma_copy(
                            a[row : row + block_m, depth : depth + block_k], a_shared[slot, :, :], barrier=full[slot]
                        )
                        T.tma_copy(
                            b[col : col + block_n, depth : depth + block_k],
                            b_shared[slot, :, :],
                            barrier=full[slot],
                            cluster_mask=0b11,
                        )
                        T.barrier_arrive(full[slot])
                        used += 1
                for _ in T.serial(ring):
                    T.mbarrier_wait_parity(free[used % ring], (used // ring + 1) % 2)
                    used += 1
            for member in (0, 1):
                with T.ws(member):
                    T.inc_max_nreg(240)
                    c_frag = T.alloc_fragment((ROWS, block_n), 'float32')
                    for turn in T.serial(turns):
                        tile = turn * clusters + cluster
                        first = tile // (BAND * tiles_n) * BAND
                        height = T.min(BAND, pairs_m - first)
                        inside = tile - first * tiles_n
                        row = ((first + inside % height) * PAIR + rank) * block_m + member * ROWS
                        col = inside // height * block_n
                        for step in T.serial(steps):
                            T.mbarrier_wait_parity(full[used % ring], used // ring % 2)
                            T.wgmma_gemm(
                                a_shared[used % ring, member * ROWS : (member + 1) * ROWS, :],
                                b_shared[used % ring, :, :],
                                c_frag,
                                transpose_B=True,
                                clear_accum=step == 0,
                            )
                            T.wait_wgmma(1)
                            if step > 0 and thread % 32 < PAIR:
                                T.mbarrier_arrive(free[(used - 1) % ring], thread % 32)
                            used += 1
                        T.wait_wgmma(0)
                        if thread % 32 < PAIR:
                            T.mbarrier_arrive(free[(used - 1) % ring], thread % 32)
                        for part in T.unroll(block_n // staged):
                            T.tma_store_wait(0)
                            T.sync_threads(1 + member, 128)
                            T.copy(c_frag[:, part * staged : (part + 1) * staged], c_shared[member, :, :])
                            T.fence_proxy_async()
                            T.sync_threads(1 + member, 128)
                            T.tma_copy(
                                c_shared[member, :, :],
                                c[row : row + ROWS, col + part * staged : col + (part + 1) * staged],
                            )
                    T.tma_store_wait(0)

    return cluster_gemm


def example(m: int = 512, n: int = 128, k: int = 192) -> Example:
    """Small integers: sums are exact in float32, and bfloat16 rounds them as PyTorch does."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (m, k), generator=generator).to(torch.bfloat16)
    b = torch.randint(-4, 5, (n, k), generator=generator).to(torch.bfloat16)
    kernel = cluster_gemm_kernel(m, n, k, block_n=64, ring=2, num_sms=4)
    c, expected = torch.empty(m, n, dtype=torch.bfloat16), (a.float() @ b.float().T).bfloat16()
    return Example(kernel, (a, b), (c,), (expected,), pass_configs=PASS_CONFIGS)


if __name__ == '__main__':
    main('cluster_gemm', example())
