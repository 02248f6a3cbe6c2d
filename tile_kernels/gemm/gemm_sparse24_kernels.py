"""Kernels of the product with 2:4 sparse weights. See `gemm_sparse24`.

On Hopper sparse wgmma multiplies only what was kept. It takes the sparse matrix as its first operand, so a tile of the
result is computed transposed. In other cases few rows expand tiles to shared memory, and many rows the whole matrix.
"""

from typing import Any

import torch

from tile_kernels.core.cost import count_product
from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.gemm._macros import (
    DENSE,
    FP8,
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    WARPGROUP,
    WARPGROUP_ROLES,
    WARPGROUP_ROWS,
    Tiles,
    count_turns,
    free_last,
    locate_tile,
    make_ring,
    next_free,
    next_full,
)

BLOCK_M, BLOCK_N, BLOCK_K = 64, 128, 64
THREADS = 128
LANES = 8  # channels of one byte of indices
MATRIX_THREADS = 256


@macro
def expand_lane(values, index, row, lane, kept_local, wide_local):
    """Eight channels of a row from four values and a byte of indices, two bits each."""
    for e in T.vectorized(4):
        kept_local[e] = values[row, lane * 4 + e]
    byte = T.cast(index[row, lane], T.int32)
    for e in (0, 1, 2, 3, 4, 5, 6, 7):
        first, second = byte >> (e // 4 * 4) & 3, byte >> (e // 4 * 4 + 2) & 3
        low, high = kept_local[e // 4 * 2], kept_local[e // 4 * 2 + 1]
        picked = T.if_then_else(second == e % 4, T.cast(high, wide_local.dtype), T.cast(0, wide_local.dtype))
        wide_local[e] = T.if_then_else(first == e % 4, T.cast(low, wide_local.dtype), picked)


@kernel(pass_configs=PLAIN_PRODUCTS, flops=count_product)
def sparse24_kernel(n: int, k: int, dtype: torch.dtype):
    """A block owns 64 x 128 of d; fp8 codes become bfloat16, which has all of their numbers."""
    given = T.dtype(dtype)
    elem = T.bfloat16 if dtype is FP8 else given
    num_rows = T.dynamic('num_rows')

    @T.prim_func
    def sparse24(
        a: T.Tensor((num_rows, k), given),
        values: T.Tensor((n, k // 2), given),
        index: T.Tensor((n, k // LANES), T.uint8),
        d: T.Tensor((num_rows, n), elem),
    ):
        with T.Kernel(T.ceildiv(n, BLOCK_N), T.ceildiv(num_rows, BLOCK_M), threads=THREADS) as (bx, by):
            a_shared = T.alloc_shared((BLOCK_M, BLOCK_K), elem)
            w_shared = T.alloc_shared((BLOCK_N, BLOCK_K), elem)
            acc_frag = T.alloc_fragment((BLOCK_M, BLOCK_N), T.float32)
            kept_local = T.alloc_local((4,), given)
            wide_local = T.alloc_local((LANES,), elem)
            thread = T.get_thread_binding()
            row, column = by * BLOCK_M, bx * BLOCK_N
            T.clear(acc_frag)
            for step in T.serial(T.ceildiv(k, BLOCK_K)):
                T.copy(a[row : row + BLOCK_M, step * BLOCK_K : (step + 1) * BLOCK_K], a_shared)
                for i in T.unroll(BLOCK_N * BLOCK_K // LANES // THREADS):
                    vector = i * THREADS + thread
                    line, lane = vector // (BLOCK_K // LANES), vector % (BLOCK_K // LANES)
                    place = T.min(step * (BLOCK_K // LANES) + lane, k // LANES - 1)  # behind k, a is 0
                    expand_lane(values, index, T.min(column + line, n - 1), place, kept_local, wide_local)
                    for e in T.vectorized(LANES):
                        w_shared[line, lane * LANES + e] = wide_local[e]
                T.gemm(a_shared, w_shared, acc_frag, transpose_B=True)
            for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                if row + i < num_rows and column + j < n:
                    d[row + i, column + j] = acc_frag[i, j]

    return sparse24


# Sparse wgmma -------------------------------------------------------------------------------

MEMBERS = 2  # warpgroups that multiply
SPARSE_N = MEMBERS * WARPGROUP_ROWS  # rows of the sparse matrix in a tile
STEP = 64  # channels of a stage
STAGES = 4
#: Channels and stages of indices. TMA copies at least 16 bytes of a row, which are those of two steps.
INDEX_CHANNELS, INDEX_STAGES = 128, 3


def serves(static: Any, gpu: Any) -> bool:
    """Half precision and whole stages of indices, on Hopper. TileLang 0.1.15 has no sparse product of e4m3fn."""
    return gpu.has_wgmma and static.dtype is not FP8 and static.k % INDEX_CHANNELS == 0


def choose_tokens(n: int, k: int, dtype: torch.dtype, num_rows: int) -> dict:
    """Tiles no larger than the rows of a."""
    return dict(tokens=64 if num_rows <= 64 else 128 if num_rows <= 1024 else 256)


@kernel(choose=choose_tokens, space=dict(tokens=(64, 128, 256)), **(WARPGROUP_ROLES | dict(serves=serves)))
def sparse24_wgmma_kernel(n: int, k: int, dtype: torch.dtype, *, tokens: int):
    """A block computes tiles of 128 rows of the sparse matrix and `tokens` rows of a."""
    elem = T.dtype(dtype)
    num_rows = T.dynamic('num_rows')
    shared = INDEX_CHANNELS // STEP  # steps with one stage of indices
    steps, tiles_n = k // STEP, -(-n // SPARSE_N)

    @T.prim_func
    def sparse24_wgmma(
        a: T.Tensor((num_rows, k), elem),
        values: T.Tensor((n, k // 2), elem),
        index: T.Tensor((n, k // 16), T.int16),
        d: T.Tensor((num_rows, n), elem),
        num_sms: T.int32,
    ):
        with T.Kernel(num_sms, threads=(MEMBERS + 1) * WARPGROUP) as pid:
            a_shared = T.alloc_shared((STAGES, tokens, STEP), elem)
            value_shared = T.alloc_shared((STAGES, MEMBERS, WARPGROUP_ROWS, STEP // 2), elem)
            index_shared = T.alloc_shared((INDEX_STAGES, MEMBERS, WARPGROUP_ROWS, INDEX_CHANNELS // 16), T.int16)
            # The padding spreads the columns of the transposed result over the banks.
            d_shared = T.alloc_shared((MEMBERS, WARPGROUP_ROWS, WARPGROUP_ROWS + 8), elem)
            acc_frag = [T.alloc_fragment((WARPGROUP_ROWS, tokens), T.float32) for _ in range(MEMBERS)]
            buffers = make_ring(STAGES, MEMBERS)
            tile = T.alloc_local((5,), T.int32)
            tiles = Tiles(None, None, num_rows, DENSE, tokens, tiles_n)
            turns = count_turns(tiles, num_sms, (MEMBERS + 1) * WARPGROUP)

            with T.ws(MEMBERS):
                T.dec_max_nreg(LOADING_REGISTERS)
                for turn in T.serial(turns):
                    locate_tile(tiles, turn * num_sms + pid, tile)
                    row, col = tile[1], tile[4] * SPARSE_N
                    for step in T.serial(tile[3] * steps):
                        slot, depth = next_free(buffers), step * STEP
                        T.tma_copy(
                            a[row : row + tokens, depth : depth + STEP],
                            a_shared[slot, :, :],
                            barrier=buffers.full[slot],
                        )
                        for member in T.unroll(MEMBERS):
                            first = col + member * WARPGROUP_ROWS
                            T.tma_copy(
                                values[first : first + WARPGROUP_ROWS, depth // 2 : depth // 2 + STEP // 2],
                                value_shared[slot, member, :, :],
                                barrier=buffers.full[slot],
                            )
                            if step % shared == 0:  # the steps that used this stage of indices before it are complete
                                T.tma_copy(
                                    index[
                                        first : first + WARPGROUP_ROWS, depth // 16 : depth // 16 + INDEX_CHANNELS // 16
                                    ],
                                    index_shared[buffers.used[0] // shared % INDEX_STAGES, member, :, :],
                                    barrier=buffers.full[slot],
                                )
                        T.barrier_arrive(buffers.full[slot])
                        buffers.used[0] += 1
            for member in (0, 1):
                with T.ws(member):
                    T.inc_max_nreg(MULTIPLYING_REGISTERS)
                    acc = acc_frag[member]
                    for turn in T.serial(turns):
                        locate_tile(tiles, turn * num_sms + pid, tile)
                        row, end, col = tile[1], tile[2], tile[4] * SPARSE_N + member * WARPGROUP_ROWS
                        for step in T.serial(tile[3] * steps):
                            slot = next_full(buffers)
                            word = step % shared * (STEP // 16)
                            T.gemm_sp(
                                value_shared[slot, member, :, :],
                                index_shared[
                                    buffers.used[0] // shared % INDEX_STAGES, member, :, word : word + STEP // 16
                                ],
                                a_shared[slot, :, :],
                                acc,
                                transpose_B=True,
                                clear_accum=step == 0,
                                wg_wait=-1,
                            )
                            T.wait_wgmma(1)
                            if step > 0:
                                free_last(buffers)
                            buffers.used[0] += 1
                        if tile[3] != 0:
                            T.wait_wgmma(0)
                            free_last(buffers)
                            for part in T.unroll(tokens // WARPGROUP_ROWS):
                                first = part * WARPGROUP_ROWS
                                T.sync_threads(8 + member, WARPGROUP)
                                for i, j in T.Parallel(WARPGROUP_ROWS, WARPGROUP_ROWS):
                                    d_shared[member, j, i] = acc[i, first + j]
                                T.sync_threads(8 + member, WARPGROUP)
                                for j, i in T.Parallel(WARPGROUP_ROWS, WARPGROUP_ROWS):
                                    if row + first + j < end and col + T.truncdiv(i, LANES) * LANES < n:
                                        d[row + first + j, col + i] = d_shared[member, j, i]

    return sparse24_wgmma


# The dense matrix ---------------------------------------------------------------------------


@kernel()
def expand24_kernel(n: int, k: int, dtype: torch.dtype):
    """Write the dense matrix, for the gradient; a thread expands eight channels."""
    given = T.dtype(dtype)
    elem = T.bfloat16 if dtype is FP8 else given

    @T.prim_func
    def expand24(
        values: T.Tensor((n, k // 2), given),
        index: T.Tensor((n, k // LANES), T.uint8),
        w: T.Tensor((n, k), elem),
    ):
        with T.Kernel(T.ceildiv(k // LANES, MATRIX_THREADS), n, threads=MATRIX_THREADS) as (bx, row):
            kept_local = T.alloc_local((4,), given)
            wide_local = T.alloc_local((LANES,), elem)
            lane = bx * MATRIX_THREADS + T.get_thread_binding()
            if lane < k // LANES:
                expand_lane(values, index, row, lane, kept_local, wide_local)
                for e in T.vectorized(LANES):
                    w[row, lane * LANES + e] = wide_local[e]

    return expand24
