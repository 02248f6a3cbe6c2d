"""Kernels of the grouped GEMM: with wgmma and a ring of stages on Hopper, with mma elsewhere. See `grouped_gemm`."""

from typing import Any

import torch

from tile_kernels.core.gpus import Gpu
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.gemm._macros import (
    DENSE,
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
    Tiles,
    count_turns,
    find_tile,
    free_last,
    load_rows,
    locate_tile,
    make_ring,
    most_tiles,
    next_free,
    next_full,
    silu,
    skip_steps,
    store_rows,
    store_tile,
    swizzled,
    wastes_little,
)

BLOCK_K = 64
STAGED = 128  # columns of a result staged in shared memory for the store; more would cost a stage of the ring

# Config -------------------------------------------------------------------------------------


def choose(n: int, k: int, num_groups: int, b_is_nk: bool, dtype: torch.dtype, num_rows: int, gpu: Gpu) -> dict:
    """Wide tiles read each operand less often; with few rows per group, small ones waste fewer products."""
    if num_rows <= 64 * num_groups:  # reading b dominates: short tiles keep more of it in flight
        return dict(block_m=64, block_n=128, ring=4)
    if num_groups == DENSE:
        if num_rows <= 64:
            return dict(block_m=64, block_n=64, ring=6)
        if -(-num_rows // 128) * -(-n // 256) < gpu.sms:
            return dict(block_m=128, block_n=128, ring=4)
    # the tile counts also need shared memory
    return dict(block_m=128, block_n=256 if wastes_little(n, 256) else 128, ring=4 if num_groups <= 256 else 3)


# Kernels by wgmma ---------------------------------------------------------------------------


def build_product(
    n: int,
    k: int,
    num_groups: int,
    b_is_nk: bool,
    dtype: torch.dtype,
    swiglu: bool = False,
    *,
    block_m: int,
    block_n: int,
    ring: int,
) -> Any:
    """`b` is (num_groups, n, k) if `b_is_nk`, else (num_groups, k, n); a dense product has one, and no `group_end`.

    The last warpgroup loads; each of the others multiplies 64 rows. Barriers pass the `ring` stages between them. With
    SwiGLU a thread block uses `block_n` rows of the gate and the same rows of the up matrix.
    """
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(dtype)
    num_matrices = max(num_groups, 1)
    b_shape = (num_matrices, n, k) if b_is_nk else (num_matrices, k, n)
    b_tile = (block_n, BLOCK_K) if b_is_nk else (BLOCK_K, block_n)
    halves = (0, 1) if swiglu else (0,)
    width = n // len(halves)
    members = block_m // WARPGROUP_ROWS
    per_sm = 3 - members  # thread blocks per SM; two fit if the tile is small
    tiles_n, steps = -(-width // block_n), -(-k // BLOCK_K)

    @T.prim_func
    def grouped_gemm(
        a: T.Tensor((num_rows, k), elem),
        b: T.Tensor(b_shape, elem),
        group_end: T.Tensor((num_matrices,), T.int32),
        d: T.Tensor((num_rows, width), elem),
        num_sms: T.int32,
    ):
        with T.Kernel(num_sms * per_sm, threads=(members + 1) * WARPGROUP) as pid:
            T.annotate_min_blocks_per_sm(per_sm)
            num_blocks = num_sms * per_sm
            a_shared = T.alloc_shared((ring, members, WARPGROUP_ROWS, BLOCK_K), elem)
            b_shared = T.alloc_shared((len(halves), ring, *b_tile), elem)
            d_shared = [T.alloc_shared((WARPGROUP_ROWS, min(STAGED, block_n)), elem) for _ in range(members)]
            T.annotate_layout({buffer: swizzled(buffer) for buffer in d_shared})
            acc_frag = [
                [T.alloc_fragment((WARPGROUP_ROWS, block_n), T.float32) for _ in range(members)] for _ in halves
            ]
            first_shared = T.alloc_shared((num_groups + 1,), T.int32)
            buffers = make_ring(ring, members)
            tile = T.alloc_local((5,), T.int32)
            tiles = Tiles(group_end, first_shared, num_rows, num_groups, block_m, tiles_n)
            turns = count_turns(tiles, num_blocks, (members + 1) * WARPGROUP)

            with T.ws(members):
                if members > 1:
                    T.dec_max_nreg(LOADING_REGISTERS)
                for turn in T.serial(turns):
                    locate_tile(tiles, turn * num_blocks + pid, tile)
                    group, row, end, col = tile[0], tile[1], tile[2], tile[4] * block_n
                    for step in T.serial(tile[3] * steps):
                        slot, depth = next_free(buffers), step * BLOCK_K
                        load_rows(a, row, end, depth, a_shared, slot, buffers.full)
                        for half in halves:
                            b_row = half * width + col
                            if b_is_nk:
                                T.tma_copy(
                                    b[group, b_row : b_row + block_n, depth : depth + BLOCK_K],
                                    b_shared[half, slot, :, :],
                                    barrier=buffers.full[slot],
                                )
                            else:
                                T.tma_copy(
                                    b[group, depth : depth + BLOCK_K, b_row : b_row + block_n],
                                    b_shared[half, slot, :, :],
                                    barrier=buffers.full[slot],
                                )
                        T.barrier_arrive(buffers.full[slot])
                        buffers.used[0] += 1
            for member in (0, 1)[:members]:
                with T.ws(member):
                    if members > 1:
                        T.inc_max_nreg(MULTIPLYING_REGISTERS)
                    acc = [frags[member] for frags in acc_frag]
                    locate_tile(tiles, pid, tile)
                    for turn in T.serial(turns):
                        row, end, tile_n = tile[1] + member * WARPGROUP_ROWS, tile[2], tile[4]
                        depth, following = tile[3] * steps, (turn + 1) * num_blocks + pid
                        if row < end:
                            if depth == 0:
                                for half in halves:
                                    T.clear(acc[half])
                            for step in T.serial(depth):
                                slot = next_full(buffers)
                                for half in halves:
                                    T.wgmma_gemm(
                                        a_shared[slot, member, :, :],
                                        b_shared[half, slot, :, :],
                                        acc[half],
                                        transpose_B=b_is_nk,
                                        clear_accum=step == 0,
                                    )
                                T.wait_wgmma(len(halves))
                                if step > 0:
                                    free_last(buffers)
                                buffers.used[0] += 1
                            locate_tile(tiles, following, tile)  # overlaps with the tensor cores
                            T.wait_wgmma(0)
                            if depth > 0:
                                free_last(buffers)
                            if swiglu:
                                for i, j in T.Parallel(WARPGROUP_ROWS, block_n):
                                    acc[0][i, j] = silu(acc[0][i, j]) * acc[1][i, j]
                            store_rows(acc[0], d_shared[member], d, row, end, tile_n * block_n, width, member)
                        else:
                            skip_steps(buffers, depth)
                            locate_tile(tiles, following, tile)
                    T.tma_store_wait(0)

    return grouped_gemm


@kernel(choose=choose, space=dict(block_m=(64, 128), block_n=(64, 128, 256), ring=(3, 4, 6)), **WARPGROUP_ROLES)
def grouped_gemm_kernel(n: int, k: int, num_groups: int, b_is_nk: bool, dtype: torch.dtype, **config: Any):
    """The product alone; see `build_product`."""
    return build_product(n, k, num_groups, b_is_nk, dtype, **config)


# Kernels by mma -----------------------------------------------------------------------------


def build_mma_product(n: int, k: int, num_groups: int, b_is_nk: bool, dtype: torch.dtype, swiglu: bool = False) -> Any:
    """`b` is (num_groups, n, k) if `b_is_nk`, else (num_groups, k, n); a thread block owns a tile of d.

    With SwiGLU it multiplies its rows with the same rows of the gate and of the up matrix.
    """
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(dtype)
    halves = (0, 1) if swiglu else (0,)
    width = n // len(halves)
    num_matrices, tiles_n = max(num_groups, 1), -(-width // MMA_N)
    b_shape = (num_matrices, n, k) if b_is_nk else (num_matrices, k, n)
    b_tile = (MMA_N, MMA_K) if b_is_nk else (MMA_K, MMA_N)

    @T.prim_func
    def portable_product(
        a: T.Tensor((num_rows, k), elem),
        b: T.Tensor(b_shape, elem),
        group_end: T.Tensor((num_matrices,), T.int32),
        d: T.Tensor((num_rows, width), elem),
        num_blocks: T.int32,  # used by the other variant only
    ):
        with T.Kernel(most_tiles(num_rows, num_groups, tiles_n), threads=MMA_THREADS) as pid:
            a_shared = T.alloc_shared((MMA_M, MMA_K), elem)
            b_shared = [T.alloc_shared(b_tile, elem) for _ in halves]
            acc_frag = [T.alloc_fragment((MMA_M, MMA_N), T.float32) for _ in halves]
            tile = T.alloc_local((5,), T.int32)
            find_tile(group_end, pid, num_rows, num_groups, tiles_n, tile)
            row, col = tile[1], tile[4] * MMA_N
            group = T.min(tile[0], num_matrices - 1)
            for half in halves:
                T.clear(acc_frag[half])
            if tile[3] > 0:
                for step in T.Pipelined(T.ceildiv(k, MMA_K), num_stages=4 - len(halves)):
                    depth = step * MMA_K
                    T.copy(a[row : row + MMA_M, depth : depth + MMA_K], a_shared)
                    for half in halves:
                        b_row = half * width + col
                        if b_is_nk:
                            T.copy(b[group, b_row : b_row + MMA_N, depth : depth + MMA_K], b_shared[half])
                        else:
                            T.copy(b[group, depth : depth + MMA_K, b_row : b_row + MMA_N], b_shared[half])
                    for half in halves:
                        T.gemm(a_shared, b_shared[half], acc_frag[half], transpose_B=b_is_nk)
            if swiglu:
                for i, j in T.Parallel(MMA_M, MMA_N):
                    acc_frag[0][i, j] = silu(acc_frag[0][i, j]) * acc_frag[1][i, j]
            store_tile(acc_frag[0], d, row, tile[2], col, width)

    return portable_product


@kernel(**FALLBACK)
def portable_product_kernel(n: int, k: int, num_groups: int, b_is_nk: bool, dtype: torch.dtype):
    """The product alone."""
    return build_mma_product(n, k, num_groups, b_is_nk, dtype)


PRODUCT = grouped_gemm_kernel, portable_product_kernel
