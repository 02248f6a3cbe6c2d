"""Grouped matrix product with SwiGLU behind it: gate and up never reach memory.

    d[r, n] = silu(gate[r, n]) * up[r, n]       gate = a[r] @ b[g, : width].T,  up = a[r] @ b[g, width :].T

for the group g of row r; see `grouped_gemm`. A thread block multiplies its rows with `block_n` rows of the gate and the
same of the up matrix, so both sums of an output meet in one register file.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.gemm._groups import (
    DENSE,
    EXPLICIT_BARRIERS,
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    SUMS,
    WARPGROUP,
    WARPGROUP_ROWS,
    check_product,
    count_tiles,
    has_warpgroups,
    locate_tile,
    num_tiles,
    num_turns,
    num_workers,
    product_flops,
    random_operands,
    silu,
    skip_steps,
    store_rows,
    swizzled,
)
from tile_kernels.gemm.grouped_gemm import BLOCK_K
from tile_kernels.gemm.portable import portable_swiglu_kernel

# Config -------------------------------------------------------------------------------------


def choose(width: int, k: int, num_groups: int, dtype: torch.dtype, num_rows: int) -> dict:
    """Wide tiles read each operand less often; with few rows a group, small ones waste fewer products."""
    if num_rows <= 64 * num_groups:
        return dict(block_m=64, block_n=64, ring=4)
    return dict(block_m=128, block_n=128, ring=4 if num_groups <= 256 else 3)  # the counts of tiles take room, too


# Kernel -------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(block_m=(64, 128), block_n=(64, 128), ring=(3, 4, 6)),
    pass_configs=EXPLICIT_BARRIERS,
    min_arch=90,
    max_arch=90,
)
def grouped_gemm_swiglu_kernel(
    width: int, k: int, num_groups: int, dtype: torch.dtype, *, block_m: int, block_n: int, ring: int
):
    """The last warpgroup loads, the others multiply 64 rows each; see `grouped_gemm_kernel`."""
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(dtype)
    members = block_m // WARPGROUP_ROWS
    per_sm = 3 - members  # thread blocks of an SM; a small tile leaves room for two
    tiles_n, steps = -(-width // block_n), -(-k // BLOCK_K)

    @T.prim_func
    def grouped_gemm_swiglu(
        a: T.Tensor((num_rows, k), elem),
        b: T.Tensor((num_groups, 2 * width, k), elem),
        group_end: T.Tensor((num_groups,), T.int32),
        d: T.Tensor((num_rows, width), elem),
        num_sms: T.int32,
    ):
        with T.Kernel(num_sms * per_sm, threads=(members + 1) * WARPGROUP) as pid:
            T.annotate_min_blocks_per_sm(per_sm)
            num_blocks = num_sms * per_sm
            a_shared = T.alloc_shared((ring, members, WARPGROUP_ROWS, BLOCK_K), elem)
            b_shared = T.alloc_shared((2, ring, block_n, BLOCK_K), elem)
            d_shared = [T.alloc_shared((WARPGROUP_ROWS, block_n), elem) for _ in range(members)]
            T.annotate_layout({buffer: swizzled(buffer) for buffer in d_shared})
            gate_frag = [T.alloc_fragment((WARPGROUP_ROWS, block_n), T.float32) for _ in range(members)]
            up_frag = [T.alloc_fragment((WARPGROUP_ROWS, block_n), T.float32) for _ in range(members)]
            first_shared = T.alloc_shared((num_groups + 1,), T.int32)
            full = T.alloc_barrier([WARPGROUP] * ring)
            free = T.alloc_barrier([members * WARPGROUP] * ring)
            tile = T.alloc_local((5,), T.int32)
            used = T.alloc_local((1,), T.int32)
            used[0] = 0
            if num_groups != DENSE:
                count_tiles(group_end, first_shared, num_rows, num_groups, block_m, (members + 1) * WARPGROUP)
            tiles = num_tiles(group_end, first_shared, num_rows, num_groups, block_m, tiles_n)
            turns = num_turns(tiles, num_blocks)

            with T.ws(members):
                if members > 1:
                    T.dec_max_nreg(LOADING_REGISTERS)
                for turn in T.serial(turns):
                    index = turn * num_blocks + pid
                    locate_tile(group_end, first_shared, index, num_rows, num_groups, block_m, tiles_n, tile)
                    group, row, col = tile[0], tile[1], tile[4] * block_n
                    for step in T.serial(tile[3] * steps):
                        slot, depth = T.truncmod(used[0], ring), step * BLOCK_K
                        T.mbarrier_wait_parity(free[slot], (T.truncdiv(used[0], ring) + 1) & 1)
                        for member in (0, 1)[:members]:
                            first = row + member * WARPGROUP_ROWS
                            T.tma_copy(
                                a[first : first + WARPGROUP_ROWS, depth : depth + BLOCK_K],
                                a_shared[slot, member, :, :],
                                barrier=full[slot],
                            )
                        for half in (0, 1):
                            b_row = half * width + col
                            T.tma_copy(
                                b[group, b_row : b_row + block_n, depth : depth + BLOCK_K],
                                b_shared[half, slot, :, :],
                                barrier=full[slot],
                            )
                        T.barrier_arrive(full[slot])
                        used[0] += 1
            for member in (0, 1)[:members]:
                with T.ws(member):
                    if members > 1:
                        T.inc_max_nreg(MULTIPLYING_REGISTERS)
                    for turn in T.serial(turns):
                        index = turn * num_blocks + pid
                        locate_tile(group_end, first_shared, index, num_rows, num_groups, block_m, tiles_n, tile)
                        row, end, col = tile[1] + member * WARPGROUP_ROWS, tile[2], tile[4] * block_n
                        gate, up = gate_frag[member], up_frag[member]
                        if row < end:
                            T.clear(gate)
                            T.clear(up)
                            for step in T.serial(tile[3] * steps):
                                slot = T.truncmod(used[0], ring)
                                T.mbarrier_wait_parity(full[slot], T.truncdiv(used[0], ring) & 1)
                                T.wgmma_gemm(
                                    a_shared[slot, member, :, :], b_shared[0, slot, :, :], gate, transpose_B=True
                                )
                                T.wgmma_gemm(
                                    a_shared[slot, member, :, :], b_shared[1, slot, :, :], up, transpose_B=True
                                )
                                T.wait_wgmma(2)
                                if step > 0:
                                    T.barrier_arrive(free[T.truncmod(used[0] - 1, ring)])
                                used[0] += 1
                            T.wait_wgmma(0)
                            if tile[3] > 0:
                                T.barrier_arrive(free[T.truncmod(used[0] - 1, ring)])
                            for i, j in T.Parallel(WARPGROUP_ROWS, block_n):
                                gate[i, j] = silu(gate[i, j]) * up[i, j]
                            store_rows(gate, d_shared[member], d, row, end, col, width, block_n, member)
                        else:
                            skip_steps(full, free, used, tile[3] * steps, ring)
                    T.tma_store_wait(0)

    return grouped_gemm_swiglu


# Op -----------------------------------------------------------------------------------------


@op(outputs='d')
def grouped_gemm_swiglu(a: Tensor, b: Tensor, group_end: Tensor) -> Tensor:
    """SwiGLU of the product of every row with the matrix of its group, from float32 sums; not differentiable.

    Args:
        a: (num_rows, k) bfloat16 or float16, contiguous; rows of a group are neighbours.
        b: (num_groups, 2 * width, k) of a's dtype, contiguous, the rows of the gate first; all extents multiples of 8.
        group_end: (num_groups,) int32, where the rows of each group end; see `grouped_gemm`.

    Returns:
        (num_rows, width) of a's dtype; 0 in rows behind the last group.
    """
    num_rows, num_groups, n, k = check_product(a, b, group_end)
    check.multiple(n, 16, 'the rows of a matrix of b')
    d = a.new_empty(num_rows, n // 2)
    if has_warpgroups(a):
        launch(grouped_gemm_swiglu_kernel, (n // 2, k, num_groups, a.dtype), a, b, group_end, d, num_workers(a))
    else:
        launch(portable_swiglu_kernel, (n // 2, k, num_groups, a.dtype), a, b, group_end, d)
    return d


# Cases --------------------------------------------------------------------------------------

BF16 = torch.bfloat16

grouped_gemm_swiglu.cases(
    make=random_operands,
    match=SUMS,
    smoke=grid(num_rows=[0, 1, 150], n=[144], k=[72], num_groups=[3], dtype=[BF16])
    + grid(num_rows=[600], n=[64], k=[200], num_groups=[1, 5], dtype=[torch.float16], behind=[7]),
    full=grid(num_rows=[4001], n=[576, 2816], k=[1088, 2048], num_groups=[1, 7, 64, 300], dtype=[BF16]),
    bench=grid(num_rows=[24576], n=[2816], k=[2048], num_groups=[64], dtype=[BF16], whole=[True])
    + grid(num_rows=[8192], n=[4096], k=[7168], num_groups=[8], dtype=[BF16], whole=[True])
    + grid(num_rows=[256], n=[4096], k=[7168], num_groups=[64], dtype=[BF16], whole=[True]),
    flops=product_flops,
)
