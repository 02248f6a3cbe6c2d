"""The grouped products for GPUs without the warpgroup instructions of Hopper: Ampere, Ada and Blackwell.

    d[r, n] = sum_k a[r, k] * b[g, n, k]        and what `grouped_gemm`, its backward, `_swiglu`, `_fp8` make of it

The same results by `T.gemm`, which every architecture has an instruction for, from operands that threads copy to shared
memory themselves. fp8 codes are widened to bfloat16 on their way, where they and their products are exact, so nothing
here needs fp8 tensor cores. The ops choose by the GPU of their arguments; those of this file are for tests and for
measuring. They are simple and right; none has been timed on the GPUs they are for.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.cost import count_product
from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.gemm._groups import AMAX_FLOOR, DENSE, FP8, FP8_MAX, GROUP, bound_group, find_rows, silu
from tile_kernels.gemm._operands import (
    CODES,
    SUMS,
    check_fp8,
    check_gradient,
    check_product,
    product_flops,
    random_fp8,
    random_fp8_swiglu,
    random_gradient,
    random_operands,
)

NUM_THREADS = 128
NUM_THREADS_FP8 = 256  # two accumulators beside a fresh sum do not fit into the registers of fewer
BLOCK_M, BLOCK_N, BLOCK_K = 64, 128, 32

# Kernels ------------------------------------------------------------------------------------


def most_tiles(num_rows: Any, num_groups: int, tiles_n: int) -> Any:
    """Numbers of tiles: group g owns those from group_end[g - 1] // BLOCK_M + g on, one more than it can need."""
    return (T.truncdiv(num_rows, BLOCK_M) + num_groups + 1) * tiles_n


@macro
def find_tile(group_end, index, num_rows, num_groups: int, tiles_n: int, tile):
    """The tile of a number, as `locate_tile` has it; a thread block with one tile to do does not count all of them."""
    tile[0] = 0
    tile_m = T.truncdiv(index, tiles_n)
    tile[4] = T.truncmod(index, tiles_n)
    if num_groups != DENSE:
        for step in T.unroll(num_groups.bit_length(), unroll_factor=1):
            later = tile[0] + (1 << (num_groups.bit_length() - 1 - step))
            first = T.truncdiv(group_end[T.min(later, num_groups) - 1], BLOCK_M) + later
            if later <= num_groups and first <= tile_m:
                tile[0] = later
    bound_group(group_end, num_rows, num_groups, tile)
    tile[1] += (tile_m - T.truncdiv(tile[1], BLOCK_M) - tile[0]) * BLOCK_M
    tile[3] = T.if_then_else(tile[0] < T.max(num_groups, 1) and tile[1] < tile[2], 1, 0)


@macro
def store_tile(acc_frag, d, row, end, col, width: int):
    """Store the rows before `end`."""
    for i, j in T.Parallel(BLOCK_M, BLOCK_N):
        if row + i < end and col + j < width:
            d[row + i, col + j] = acc_frag[i, j]


def build_product(n: int, k: int, num_groups: int, b_is_nk: bool, dtype: torch.dtype, swiglu: bool = False) -> Any:
    """`b` is (num_groups, n, k) if `b_is_nk`, else (num_groups, k, n); a thread block owns a tile of d.

    With SwiGLU it multiplies its rows with the same rows of the gate and of the up matrix.
    """
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(dtype)
    halves = (0, 1) if swiglu else (0,)
    width = n // len(halves)
    num_matrices, tiles_n = max(num_groups, 1), -(-width // BLOCK_N)
    b_shape = (num_matrices, n, k) if b_is_nk else (num_matrices, k, n)
    b_tile = (BLOCK_N, BLOCK_K) if b_is_nk else (BLOCK_K, BLOCK_N)

    @T.prim_func
    def portable_product(
        a: T.Tensor((num_rows, k), elem),
        b: T.Tensor(b_shape, elem),
        group_end: T.Tensor((num_matrices,), T.int32),
        d: T.Tensor((num_rows, width), elem),
    ):
        with T.Kernel(most_tiles(num_rows, num_groups, tiles_n), threads=NUM_THREADS) as pid:
            a_shared = T.alloc_shared((BLOCK_M, BLOCK_K), elem)
            b_shared = [T.alloc_shared(b_tile, elem) for _ in halves]
            acc_frag = [T.alloc_fragment((BLOCK_M, BLOCK_N), T.float32) for _ in halves]
            tile = T.alloc_local((5,), T.int32)
            find_tile(group_end, pid, num_rows, num_groups, tiles_n, tile)
            row, col = tile[1], tile[4] * BLOCK_N
            group = T.min(tile[0], num_matrices - 1)
            for half in halves:
                T.clear(acc_frag[half])
            if tile[3] > 0:
                for step in T.Pipelined(T.ceildiv(k, BLOCK_K), num_stages=4 - len(halves)):
                    depth = step * BLOCK_K
                    T.copy(a[row : row + BLOCK_M, depth : depth + BLOCK_K], a_shared)
                    for half in halves:
                        b_row = half * width + col
                        if b_is_nk:
                            T.copy(b[group, b_row : b_row + BLOCK_N, depth : depth + BLOCK_K], b_shared[half])
                        else:
                            T.copy(b[group, depth : depth + BLOCK_K, b_row : b_row + BLOCK_N], b_shared[half])
                    for half in halves:
                        T.gemm(a_shared, b_shared[half], acc_frag[half], transpose_B=b_is_nk)
            if swiglu:
                for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                    acc_frag[0][i, j] = silu(acc_frag[0][i, j]) * acc_frag[1][i, j]
            store_tile(acc_frag[0], d, row, tile[2], col, width)

    return portable_product


@kernel(pass_configs=PLAIN_PRODUCTS, flops=count_product)
def portable_product_kernel(n: int, k: int, num_groups: int, b_is_nk: bool, dtype: torch.dtype):
    """The product alone."""
    return build_product(n, k, num_groups, b_is_nk, dtype)


@kernel(pass_configs=PLAIN_PRODUCTS, flops=count_product)
def portable_swiglu_kernel(n: int, k: int, num_groups: int, dtype: torch.dtype):
    """The product with SwiGLU behind it."""
    return build_product(n, k, num_groups, True, dtype, swiglu=True).with_attr('global_symbol', 'portable_swiglu')


@kernel(pass_configs=PLAIN_PRODUCTS, flops=count_product)
def portable_dw_kernel(n: int, k: int, num_groups: int, dtype: torch.dtype):
    """A thread block owns a tile of one matrix and walks the rows of its group; rows of others count as 0."""
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(dtype)
    num_matrices = max(num_groups, 1)

    @T.prim_func
    def portable_dw(
        dd: T.Tensor((num_rows, n), elem),
        a: T.Tensor((num_rows, k), elem),
        group_end: T.Tensor((num_matrices,), T.int32),
        db: T.Tensor((num_matrices, n, k), elem),
    ):
        with T.Kernel(T.ceildiv(k, BLOCK_N), T.ceildiv(n, BLOCK_M), num_matrices, threads=NUM_THREADS) as (
            pid_k,
            pid_n,
            group,
        ):
            dd_shared = T.alloc_shared((BLOCK_K, BLOCK_M), elem)
            a_shared = T.alloc_shared((BLOCK_K, BLOCK_N), elem)
            acc_frag = T.alloc_fragment((BLOCK_M, BLOCK_N), T.float32)
            rows = T.alloc_local((2,), T.int32)
            find_rows(group_end, group, num_rows, num_groups, rows)
            start, end = rows[0], rows[1]
            row_n, row_k = pid_n * BLOCK_M, pid_k * BLOCK_N
            T.clear(acc_frag)
            for step in T.serial(T.ceildiv(end - start, BLOCK_K)):
                row = start + step * BLOCK_K
                for i, j in T.Parallel(BLOCK_K, BLOCK_M):
                    dd_shared[i, j] = T.if_then_else(row + i < end and row_n + j < n, dd[row + i, row_n + j], 0)
                for i, j in T.Parallel(BLOCK_K, BLOCK_N):
                    a_shared[i, j] = T.if_then_else(row + i < end and row_k + j < k, a[row + i, row_k + j], 0)
                T.gemm(dd_shared, a_shared, acc_frag, transpose_A=True)
            for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                if row_n + i < n and row_k + j < k:
                    db[T.cast(group, 'int64'), row_n + i, row_k + j] = acc_frag[i, j]

    return portable_dw


@kernel(pass_configs=PLAIN_PRODUCTS, flops=count_product)
def portable_fp8_kernel(n: int, k: int, num_groups: int, swiglu: bool):
    """A thread block owns 128 columns of d; with SwiGLU it multiplies with those rows of gate and of up.

    Operands are widened to bfloat16. 128 products are summed, scaled, and added in float32.
    """
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(FP8)
    steps = -(-k // GROUP)
    width = n // 2 if swiglu else n
    num_matrices, tiles_n = max(num_groups, 1), -(-width // GROUP)
    matrices = (0, 1) if swiglu else (0,)
    out = elem if swiglu else T.bfloat16

    @T.prim_func
    def portable_fp8(
        a: T.Tensor((num_rows, k), elem),
        a_sf: T.Tensor((num_rows, steps), T.float32),
        b: T.Tensor((num_matrices, n, k), elem),
        b_sf: T.Tensor((num_matrices * -(-n // GROUP), steps), T.float32),
        group_end: T.Tensor((num_matrices,), T.int32),
        d: T.Tensor((num_rows, width), out),
        d_sf: T.Tensor((num_rows, -(-width // GROUP)), T.float32),
    ):
        with T.Kernel(most_tiles(num_rows, num_groups, tiles_n), threads=NUM_THREADS_FP8) as pid:
            a_shared = T.alloc_shared((BLOCK_M, GROUP), T.bfloat16)
            b_shared = T.alloc_shared((GROUP, GROUP), T.bfloat16)
            part_frag = T.alloc_fragment((BLOCK_M, GROUP), T.float32)
            acc_frag = [T.alloc_fragment((BLOCK_M, GROUP), T.float32) for _ in matrices]
            scale_frag = T.alloc_fragment((BLOCK_M,), T.float32)
            tile = T.alloc_local((5,), T.int32)
            find_tile(group_end, pid, num_rows, num_groups, tiles_n, tile)
            row, end, col = tile[1], tile[2], tile[4] * GROUP
            group = T.min(tile[0], num_matrices - 1)
            for matrix in matrices:
                T.clear(acc_frag[matrix])
            for step in T.serial(tile[3] * steps):
                depth = step * GROUP
                T.copy(a[row : row + BLOCK_M, depth : depth + GROUP], a_shared)
                for matrix in matrices:
                    b_row = col + matrix * width
                    T.copy(b[group, b_row : b_row + GROUP, depth : depth + GROUP], b_shared)
                    T.clear(part_frag)
                    T.gemm(a_shared, b_shared, part_frag, transpose_B=True)
                    for i in T.Parallel(BLOCK_M):
                        scale_frag[i] = (
                            a_sf[T.min(row + i, num_rows - 1), step]
                            * b_sf[group * -(-n // GROUP) + b_row // GROUP, step]
                        )
                    for i, j in T.Parallel(BLOCK_M, GROUP):
                        acc_frag[matrix][i, j] += part_frag[i, j] * scale_frag[i]
            if swiglu:
                for i, j in T.Parallel(BLOCK_M, GROUP):
                    acc_frag[0][i, j] = silu(acc_frag[0][i, j]) * acc_frag[1][i, j]
                T.reduce_absmax(acc_frag[0], scale_frag, dim=1)
                for i in T.Parallel(BLOCK_M):
                    scale_frag[i] = T.max(scale_frag[i], AMAX_FLOOR)
                    if row + i < end:
                        d_sf[row + i, tile[4]] = scale_frag[i] / FP8_MAX
                for i, j in T.Parallel(BLOCK_M, GROUP):
                    acc_frag[0][i, j] = acc_frag[0][i, j] * (FP8_MAX / scale_frag[i])
            store_tile(acc_frag[0], d, row, end, col, width)

    return portable_fp8


# Ops ----------------------------------------------------------------------------------------


@op(outputs='da db', twin='grouped_gemm_bwd')
def portable_grouped_gemm_bwd(dd: Tensor, a: Tensor, b: Tensor, group_end: Tensor) -> tuple[Tensor, Tensor]:
    """`grouped_gemm_bwd` by kernels for any architecture; takes and returns what that does."""
    num_rows, num_groups, n, k = check_gradient(dd, a, b, group_end)
    if num_rows == 0:
        return torch.empty_like(a), torch.zeros_like(b)
    da, db = torch.empty_like(a), torch.empty_like(b)
    launch(portable_product_kernel, (k, n, num_groups, False, dd.dtype), dd, b, group_end, da)
    launch(portable_dw_kernel, (n, k, num_groups, dd.dtype), dd, a, group_end, db, size=num_groups)
    return da, db


@op(outputs='d', backward=portable_grouped_gemm_bwd, twin='grouped_gemm')
def portable_grouped_gemm(a: Tensor, b: Tensor, group_end: Tensor) -> Tensor:
    """`grouped_gemm` by a kernel for any architecture; takes and returns what that does."""
    num_rows, num_groups, n, k = check_product(a, b, group_end)
    d = a.new_empty(num_rows, n)
    launch(portable_product_kernel, (n, k, num_groups, True, a.dtype), a, b, group_end, d)
    return d


@op(outputs='d', twin='grouped_gemm_swiglu')
def portable_grouped_gemm_swiglu(a: Tensor, b: Tensor, group_end: Tensor) -> Tensor:
    """`grouped_gemm_swiglu` by a kernel for any architecture; takes and returns what that does."""
    num_rows, num_groups, n, k = check_product(a, b, group_end)
    check.multiple(n, 16, 'the rows of a matrix of b')
    d = a.new_empty(num_rows, n // 2)
    launch(portable_swiglu_kernel, (n, k, num_groups, a.dtype), a, b, group_end, d)
    return d


@op(outputs='d', twin='grouped_gemm_fp8')
def portable_grouped_gemm_fp8(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor) -> Tensor:
    """`grouped_gemm_fp8` by a kernel for any architecture; takes and returns what that does."""
    num_rows, num_groups, n, k = check_fp8(a, a_sf, b, b_sf, group_end, 8)
    d = torch.empty((num_rows, n), dtype=torch.bfloat16, device=a.device)
    launch(portable_fp8_kernel, (n, k, num_groups, False), a, a_sf, b, b_sf.flatten(0, 1), group_end, d, None)
    return d


@op(outputs='d d_sf', twin='grouped_gemm_fp8_swiglu_cast')
def portable_grouped_gemm_fp8_swiglu_cast(
    a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor
) -> tuple[Tensor, Tensor]:
    """`grouped_gemm_fp8_swiglu_cast` by a kernel for any architecture; takes and returns what that does."""
    num_rows, num_groups, n, k = check_fp8(a, a_sf, b, b_sf, group_end, 2 * GROUP)
    d = a.new_empty(num_rows, n // 2)
    d_sf = a_sf.new_empty(num_rows, n // 2 // GROUP)
    launch(portable_fp8_kernel, (n, k, num_groups, True), a, a_sf, b, b_sf.flatten(0, 1), group_end, d, d_sf)
    return d, d_sf


# Cases --------------------------------------------------------------------------------------

BF16 = torch.bfloat16
SMOKE = grid(num_rows=[0, 150], n=[144], k=[72], num_groups=[3], dtype=[BF16])
BENCH = grid(num_rows=[24001], n=[2816], k=[2048], num_groups=[64], dtype=[BF16], whole=[True])
FP8_SMOKE = grid(num_rows=[0, 150], n=[256], k=[144], num_groups=[3])
FP8_BENCH = grid(num_rows=[24001], n=[2816], k=[2048], num_groups=[64], whole=[True])

portable_grouped_gemm.cases(make=random_operands, match=SUMS, smoke=SMOKE, bench=BENCH, flops=product_flops)
portable_grouped_gemm_bwd.cases(make=random_gradient, match=SUMS, smoke=SMOKE, bench=BENCH)
portable_grouped_gemm_swiglu.cases(make=random_operands, match=SUMS, smoke=SMOKE, bench=BENCH, flops=product_flops)
portable_grouped_gemm_fp8.cases(make=random_fp8, match=SUMS, smoke=FP8_SMOKE, bench=FP8_BENCH, flops=product_flops)
portable_grouped_gemm_fp8_swiglu_cast.cases(
    make=random_fp8_swiglu, match=CODES, smoke=FP8_SMOKE, bench=FP8_BENCH, flops=product_flops
)
