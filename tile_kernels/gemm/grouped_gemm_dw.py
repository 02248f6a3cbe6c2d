"""Gradient of the matrices of a grouped product: one product over the rows of each group.

    db[g, n, k] = sum_r dd[r, n] * a[r, k]        over group_end[g - 1] <= r < group_end[g]

A thread block owns a tile of one matrix and walks the rows of its group; a group without rows gives 0. The last step
of a group also loads rows of others behind its end: the multiplying warps clear them before they are used.
"""

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.gemm._groups import EXPLICIT_BARRIERS, WARPGROUP, swizzled

BLOCK_ROWS = 64

# Config -------------------------------------------------------------------------------------


def choose(n: int, k: int, num_groups: int, dtype: torch.dtype, num_groups_: int) -> dict:
    """Wide tiles read each operand less often."""
    return dict(block_n=128, block_k=256 if k % 256 == 0 else 128, ring=3)


# Kernel -------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(block_n=(64, 128), block_k=(128, 256), ring=(2, 3, 4)),
    pass_configs=EXPLICIT_BARRIERS,
    min_arch=90,
    max_arch=90,
)
def grouped_gemm_dw_kernel(
    n: int, k: int, num_groups: int, dtype: torch.dtype, *, block_n: int, block_k: int, ring: int
):
    """The last warpgroup loads, the others multiply 64 rows of the tile each."""
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(dtype)
    consumers = block_n // 64 * WARPGROUP

    @T.prim_func
    def grouped_gemm_dw(
        dd: T.Tensor((num_rows, n), elem),
        a: T.Tensor((num_rows, k), elem),
        group_end: T.Tensor((num_groups,), T.int32),
        db: T.Tensor((num_groups, n, k), elem),
    ):
        with T.Kernel(T.ceildiv(k, block_k), T.ceildiv(n, block_n), num_groups, threads=consumers + WARPGROUP) as (
            pid_k,
            pid_n,
            group,
        ):
            dd_shared = T.alloc_shared((ring, BLOCK_ROWS, block_n), elem)
            a_shared = T.alloc_shared((ring, BLOCK_ROWS, block_k), elem)
            db_shared = T.alloc_shared((block_n, block_k), elem)
            T.annotate_layout({db_shared: swizzled(db_shared)})
            acc_frag = T.alloc_fragment((block_n, block_k), T.float32)
            full = T.alloc_barrier([WARPGROUP] * ring)
            free = T.alloc_barrier([consumers] * ring)
            start = T.if_then_else(group > 0, group_end[T.max(group, 1) - 1], 0)
            end = T.min(group_end[group], num_rows)
            steps = T.ceildiv(T.max(end - start, 0), BLOCK_ROWS)

            if T.get_thread_binding() >= consumers:
                T.dec_max_nreg(24)
                for step in T.serial(steps):
                    slot = step % ring
                    row = start + step * BLOCK_ROWS
                    T.mbarrier_wait_parity(free[slot], (step // ring + 1) % 2)
                    T.tma_copy(
                        dd[row : row + BLOCK_ROWS, pid_n * block_n : pid_n * block_n + block_n],
                        dd_shared[slot, :, :],
                        barrier=full[slot],
                    )
                    T.tma_copy(
                        a[row : row + BLOCK_ROWS, pid_k * block_k : pid_k * block_k + block_k],
                        a_shared[slot, :, :],
                        barrier=full[slot],
                    )
                    T.barrier_arrive(full[slot])
            else:
                T.inc_max_nreg(240)
                T.clear(acc_frag)
                for step in T.serial(steps):
                    slot = step % ring
                    T.mbarrier_wait_parity(full[slot], step // ring % 2)
                    if start + (step + 1) * BLOCK_ROWS > end:
                        for i, j in T.Parallel(BLOCK_ROWS, block_n):
                            if start + step * BLOCK_ROWS + i >= end:
                                dd_shared[slot, i, j] = 0
                        for i, j in T.Parallel(BLOCK_ROWS, block_k):
                            if start + step * BLOCK_ROWS + i >= end:
                                a_shared[slot, i, j] = 0
                        T.fence_proxy_async()
                        T.sync_threads(8, consumers)
                    T.wgmma_gemm(
                        dd_shared[slot, :, :],
                        a_shared[slot, :, :],
                        acc_frag,
                        transpose_A=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    T.wait_wgmma(1)
                    if step > 0:
                        T.barrier_arrive(free[(step - 1) % ring])
                T.wait_wgmma(0)
                T.copy(acc_frag, db_shared)
                T.sync_threads(8, consumers)
                for i, j in T.Parallel(block_n, block_k):
                    if pid_n * block_n + i < n and pid_k * block_k + j < k:
                        db[T.cast(group, 'int64'), pid_n * block_n + i, pid_k * block_k + j] = db_shared[i, j]

    return grouped_gemm_dw
