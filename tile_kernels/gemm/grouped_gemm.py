"""Grouped matrix product: every row meets the matrix of its group.

    d[r, n] = sum_k a[r, k] * b[g, n, k]        for group_end[g - 1] <= r < group_end[g]

Rows of a group are neighbours; where the groups end is known to the device alone. Rows behind the last group give 0.

Compute bound for many rows; for few rows a group the floor is reading b once.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.op import op
from tile_kernels.gemm._groups import (
    DENSE,
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    WARPGROUP,
    WARPGROUP_ROLES,
    WARPGROUP_ROWS,
    Tiles,
    count_turns,
    free_last,
    load_rows,
    locate_tile,
    make_ring,
    next_free,
    next_full,
    silu,
    skip_steps,
    store_rows,
    swizzled,
    wastes_little,
)
from tile_kernels.gemm._operands import (
    SUMS,
    check_gradient,
    check_product,
    launch_product,
    product_flops,
    random_gradient,
    random_operands,
)
from tile_kernels.gemm.grouped_gemm_dw import grouped_gemm_dw_kernel
from tile_kernels.gemm.portable import portable_dw_kernel, portable_product_kernel

BLOCK_K = 64
BUSY_SMS = 132  # tiles it takes to keep a GPU busy
STAGED = 128  # columns of a result that wait in shared memory to be stored; more would cost a buffer of the ring

# Config -------------------------------------------------------------------------------------


def choose(n: int, k: int, num_groups: int, b_is_nk: bool, dtype: torch.dtype, num_rows: int) -> dict:
    """Wide tiles read each operand less often; with few rows a group, small ones waste fewer products."""
    if num_rows <= 64 * num_groups:  # the matrices are the traffic: short tiles keep more of them in flight
        return dict(block_m=64, block_n=128, ring=4)
    if num_groups == DENSE:
        if num_rows <= 64:
            return dict(block_m=64, block_n=64, ring=6)
        if -(-num_rows // 128) * -(-n // 256) < BUSY_SMS:
            return dict(block_m=128, block_n=128, ring=4)
    # the counts of tiles take room, too
    return dict(block_m=128, block_n=256 if wastes_little(n, 256) else 128, ring=4 if num_groups <= 256 else 3)


# Kernel -------------------------------------------------------------------------------------


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

    The last warpgroup loads, the others multiply 64 rows each; they hand over the `ring` buffers through barriers. With
    SwiGLU a thread block multiplies with `block_n` rows of the gate and the same of the up matrix.
    """
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(dtype)
    num_matrices = max(num_groups, 1)
    b_shape = (num_matrices, n, k) if b_is_nk else (num_matrices, k, n)
    b_tile = (block_n, BLOCK_K) if b_is_nk else (BLOCK_K, block_n)
    halves = (0, 1) if swiglu else (0,)
    width = n // len(halves)
    members = block_m // WARPGROUP_ROWS
    per_sm = 3 - members  # thread blocks of an SM; a small tile leaves room for two
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
                            locate_tile(tiles, following, tile)  # while the tensor cores work
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
def grouped_gemm_kernel(n: int, k: int, num_groups: int, b_is_nk: bool, dtype: torch.dtype, **config: int):
    """The product alone; see `build_product`."""
    return build_product(n, k, num_groups, b_is_nk, dtype, **config)


# Ops ----------------------------------------------------------------------------------------

PRODUCT = grouped_gemm_kernel, portable_product_kernel
DW = grouped_gemm_dw_kernel, portable_dw_kernel


@op(outputs='da db')
def grouped_gemm_bwd(dd: Tensor, a: Tensor, b: Tensor, group_end: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `grouped_gemm`: da[r] = dd[r] @ b[g] and db[g] = dd[rows of g].T @ a[rows of g].

    Args:
        dd: (num_rows, n) gradient of the result.
        a: as in `grouped_gemm`.
        b: as there.
        group_end: as there.

    Returns:
        Gradients of `a` and `b` in their dtype, summed in float32.
    """
    num_rows, num_groups, n, k = check_gradient(dd, a, b, group_end)
    if num_rows == 0:
        return torch.empty_like(a), torch.zeros_like(b)
    da, db = torch.empty_like(a), torch.empty_like(b)
    launch_product(PRODUCT, (k, n, num_groups, False, dd.dtype), dd, b, group_end, da)
    launch_product(DW, (n, k, num_groups, dd.dtype), dd, a, group_end, db, size=num_groups)
    return da, db


@op(outputs='d', backward=grouped_gemm_bwd)
def grouped_gemm(a: Tensor, b: Tensor, group_end: Tensor) -> Tensor:
    """The product of every row with the matrix of its group: d[r, n] = sum_k a[r, k] * b[g, n, k].

    Args:
        a: (num_rows, k) bfloat16 or float16, contiguous; rows of a group are neighbours.
        b: (num_groups, n, k) of a's dtype, contiguous; n and k are multiples of 8, and there are up to 4096 groups.
        group_end: (num_groups,) int32, never falling: group g is the rows from group_end[g - 1] (0 for the first) to
            group_end[g]. `RoutingMap.expert_end` is one.

    Returns:
        (num_rows, n) of a's dtype, summed in float32; 0 in rows behind the last group.
    """
    num_rows, num_groups, n, k = check_product(a, b, group_end)
    d = a.new_empty(num_rows, n)
    launch_product(PRODUCT, (n, k, num_groups, True, a.dtype), a, b, group_end, d)
    return d


# Cases --------------------------------------------------------------------------------------


BF16 = torch.bfloat16
SMOKE = (
    grid(num_rows=[0, 1, 150], n=[72], k=[72], num_groups=[3], dtype=[BF16])
    + grid(num_rows=[150], n=[136], k=[200], num_groups=[1, 5], dtype=[torch.float16], behind=[7])
    + grid(num_rows=[700], n=[64], k=[64], num_groups=[2], dtype=[BF16])
    + grid(num_rows=[256], n=[256], k=[64], num_groups=[2], dtype=[BF16], alignment=[128])
)
BENCH = (
    grid(num_rows=[8192], n=[4096], k=[7168], num_groups=[8, 32], dtype=[BF16], alignment=[128], whole=[True])
    + grid(num_rows=[24576], n=[2816], k=[2048], num_groups=[64], dtype=[BF16], alignment=[128], whole=[True])
    + grid(num_rows=[24001], n=[2048], k=[1408], num_groups=[64], dtype=[BF16], whole=[True])
    + grid(num_rows=[256], n=[4096], k=[7168], num_groups=[64], dtype=[BF16], even=[True])
)

grouped_gemm.cases(
    make=random_operands,
    match=SUMS,
    smoke=SMOKE,
    full=grid(num_rows=[4001], n=[576, 2048], k=[1088, 2048], num_groups=[1, 7, 64, 300], dtype=[BF16, torch.float16])
    + grid(num_rows=[150000], n=[16384], k=[64], num_groups=[3], dtype=[BF16]),  # past 2^31 elements
    bench=BENCH,
    flops=product_flops,
)
grouped_gemm_bwd.cases(
    make=random_gradient,
    match=SUMS,
    smoke=SMOKE,
    bench=BENCH,
    flops=lambda dd, **operands: 2 * product_flops(**operands),
)
