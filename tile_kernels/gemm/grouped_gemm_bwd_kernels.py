"""Kernels of the weight gradient of a grouped GEMM: one product over the rows of each group.

    db[g, n, k] = sum_r dd[r, n] * a[r, k]        over group_end[g - 1] <= r < group_end[g]

A thread block owns a tile of one matrix and loops over the rows of its group; an empty group gives 0. The last step of
a group also loads rows of the next group. The multiplying warps set these rows to zero first.
"""

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.gemm._macros import (
    FALLBACK,
    LOADING_REGISTERS,
    MMA_K,
    MMA_M,
    MMA_N,
    MMA_THREADS,
    MULTIPLYING_REGISTERS,
    WARPGROUP,
    WARPGROUP_ROLES,
    WARPGROUP_ROWS,
    find_rows,
    free_last,
    make_ring,
    next_free,
    next_full,
    num_turns,
    stage,
    swizzled,
    wastes_little,
)

BLOCK_ROWS = 64

# Config -------------------------------------------------------------------------------------


def choose(n: int, k: int, num_groups: int, dtype: torch.dtype, size: int) -> dict:
    """Wide tiles read each operand less often."""
    return dict(block_n=128, block_k=256 if wastes_little(k, 256) else 128, ring=3)


# Kernels ------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(block_n=(64, 128), block_k=(128, 256), ring=(2, 3, 4)), **WARPGROUP_ROLES)
def grouped_gemm_dw_kernel(
    n: int, k: int, num_groups: int, dtype: torch.dtype, *, block_n: int, block_k: int, ring: int
):
    """The last warpgroup loads; each of the others multiplies 64 rows of the tile. See `grouped_gemm_kernel`."""
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(dtype)
    members, num_matrices = block_n // WARPGROUP_ROWS, max(num_groups, 1)
    tiles_k, tiles_n = -(-k // block_k), -(-n // block_n)
    share = block_k // members  # columns of a that each multiplying warpgroup clears

    @T.prim_func
    def grouped_gemm_dw(
        dd: T.Tensor((num_rows, n), elem),
        a: T.Tensor((num_rows, k), elem),
        group_end: T.Tensor((num_matrices,), T.int32),
        db: T.Tensor((num_matrices, n, k), elem),
        num_blocks: T.int32,
    ):
        with T.Kernel(num_blocks, threads=(members + 1) * WARPGROUP) as pid:
            dd_shared = T.alloc_shared((ring, members, BLOCK_ROWS, WARPGROUP_ROWS), elem)
            a_shared = T.alloc_shared((ring, BLOCK_ROWS, block_k), elem)
            db_shared = [T.alloc_shared((WARPGROUP_ROWS, block_k), elem) for _ in range(members)]
            T.annotate_layout({buffer: swizzled(buffer) for buffer in db_shared})
            acc_frag = [T.alloc_fragment((WARPGROUP_ROWS, block_k), T.float32) for _ in range(members)]
            buffers = make_ring(ring, members)
            rows = T.alloc_local((2,), T.int32)

            with T.ws(members):
                if members > 1:
                    T.dec_max_nreg(LOADING_REGISTERS)
                for turn in T.serial(num_turns(num_matrices * tiles_n * tiles_k, num_blocks)):
                    index = turn * num_blocks + pid
                    find_rows(group_end, T.truncdiv(index, tiles_n * tiles_k), num_rows, num_groups, rows)
                    n_start = T.truncmod(T.truncdiv(index, tiles_k), tiles_n) * block_n
                    k_start = T.truncmod(index, tiles_k) * block_k
                    for step in T.serial(T.ceildiv(rows[1] - rows[0], BLOCK_ROWS)):
                        row = rows[0] + step * BLOCK_ROWS
                        slot = next_free(buffers)
                        for member in (0, 1)[:members]:
                            first = n_start + member * WARPGROUP_ROWS
                            T.tma_copy(
                                dd[row : row + BLOCK_ROWS, first : first + WARPGROUP_ROWS],
                                dd_shared[slot, member, :, :],
                                barrier=buffers.full[slot],
                            )
                        T.tma_copy(
                            a[row : row + BLOCK_ROWS, k_start : k_start + block_k],
                            a_shared[slot, :, :],
                            barrier=buffers.full[slot],
                        )
                        T.barrier_arrive(buffers.full[slot])
                        buffers.used[0] += 1
            for member in (0, 1)[:members]:
                with T.ws(member):
                    if members > 1:
                        T.inc_max_nreg(MULTIPLYING_REGISTERS)
                    for turn in T.serial(num_turns(num_matrices * tiles_n * tiles_k, num_blocks)):
                        index = turn * num_blocks + pid
                        group = T.truncdiv(index, tiles_n * tiles_k)
                        find_rows(group_end, group, num_rows, num_groups, rows)
                        n_start = T.truncmod(T.truncdiv(index, tiles_k), tiles_n) * block_n + member * WARPGROUP_ROWS
                        k_start = T.truncmod(index, tiles_k) * block_k
                        T.clear(acc_frag[member])
                        for step in T.serial(T.ceildiv(rows[1] - rows[0], BLOCK_ROWS)):
                            behind = rows[1] - rows[0] - step * BLOCK_ROWS  # first row of this step after the group
                            slot = next_full(buffers)
                            if behind < BLOCK_ROWS:
                                for i, j in T.Parallel(BLOCK_ROWS, WARPGROUP_ROWS):
                                    if i >= behind:
                                        dd_shared[slot, member, i, j] = 0
                                for i, j in T.Parallel(BLOCK_ROWS, share):
                                    if i >= behind:
                                        a_shared[slot, i, member * share + j] = 0
                                T.fence_proxy_async()
                                T.sync_threads(10, members * WARPGROUP)
                            T.wgmma_gemm(
                                dd_shared[slot, member, :, :], a_shared[slot, :, :], acc_frag[member], transpose_A=True
                            )
                            T.wait_wgmma(1)
                            if step > 0:
                                free_last(buffers)
                            buffers.used[0] += 1
                        T.wait_wgmma(0)
                        if rows[1] > rows[0]:
                            free_last(buffers)
                        if group < num_matrices:
                            stage(acc_frag[member], 0, db_shared[member], member)
                            T.tma_copy(
                                db_shared[member],
                                db[group, n_start : n_start + WARPGROUP_ROWS, k_start : k_start + block_k],
                            )
                    T.tma_store_wait(0)

    return grouped_gemm_dw


@kernel(**FALLBACK)
def portable_dw_kernel(n: int, k: int, num_groups: int, dtype: torch.dtype):
    """A thread block owns a tile of one matrix and loops over the rows of its group; other rows count as 0."""
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(dtype)
    num_matrices = max(num_groups, 1)

    @T.prim_func
    def portable_dw(
        dd: T.Tensor((num_rows, n), elem),
        a: T.Tensor((num_rows, k), elem),
        group_end: T.Tensor((num_matrices,), T.int32),
        db: T.Tensor((num_matrices, n, k), elem),
        num_blocks: T.int32,  # used by the other variant only
    ):
        with T.Kernel(T.ceildiv(k, MMA_N), T.ceildiv(n, MMA_M), num_matrices, threads=MMA_THREADS) as (
            pid_k,
            pid_n,
            group,
        ):
            dd_shared = T.alloc_shared((MMA_K, MMA_M), elem)
            a_shared = T.alloc_shared((MMA_K, MMA_N), elem)
            acc_frag = T.alloc_fragment((MMA_M, MMA_N), T.float32)
            rows = T.alloc_local((2,), T.int32)
            find_rows(group_end, group, num_rows, num_groups, rows)
            start, end = rows[0], rows[1]
            row_n, row_k = pid_n * MMA_M, pid_k * MMA_N
            T.clear(acc_frag)
            for step in T.serial(T.ceildiv(end - start, MMA_K)):
                row = start + step * MMA_K
                for i, j in T.Parallel(MMA_K, MMA_M):
                    dd_shared[i, j] = T.if_then_else(row + i < end and row_n + j < n, dd[row + i, row_n + j], 0)
                for i, j in T.Parallel(MMA_K, MMA_N):
                    a_shared[i, j] = T.if_then_else(row + i < end and row_k + j < k, a[row + i, row_k + j], 0)
                T.gemm(dd_shared, a_shared, acc_frag, transpose_A=True)
            for i, j in T.Parallel(MMA_M, MMA_N):
                if row_n + i < n and row_k + j < k:
                    db[T.cast(group, 'int64'), row_n + i, row_k + j] = acc_frag[i, j]

    return portable_dw


DW = grouped_gemm_dw_kernel, portable_dw_kernel
