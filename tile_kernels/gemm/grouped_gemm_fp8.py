"""Grouped matrix product of fp8 operands with scale factors, plain or with SwiGLU and a cast behind it.

    d[r, n] = sum_s a_sf[r, s] * b_sf[g, n // 128, s] * sum_(k in group s of 128) a[r, k] * b[g, n, k]

for the group g of row r; see `grouped_gemm`. The tensor cores sum 128 products into fresh registers; that sum is scaled
and added in float32, so neither the scale factors nor the length of the sum are limited by the precision of the fp8
accumulator. While one warpgroup adds, the tensor cores work for the other; two
groups of rows of b for each group of rows of a give them enough to do.

With SwiGLU the rows of b hold the gate first and then up; a thread block owns the same 128 channels of both, which is
one group of the quantised result: y = silu(gate) * up, y_sf[r, s] = max(|y|) / 448 over the group, codes y / y_sf.
"""

import torch
from torch import Tensor

from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.op import op
from tile_kernels.gemm._groups import (
    AMAX_FLOOR,
    FP8,
    FP8_MAX,
    GROUP,
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    WARPGROUP,
    WARPGROUP_ROLES,
    WARPGROUP_ROWS,
    Tiles,
    count_turns,
    load_rows,
    locate_tile,
    make_ring,
    next_free,
    next_full,
    silu,
    skip_steps,
    store_rows,
    swizzled,
)
from tile_kernels.gemm._operands import (
    CODES,
    SUMS,
    check_fp8,
    launch_product,
    product_flops,
    random_fp8,
    random_fp8_swiglu,
)
from tile_kernels.gemm.portable import portable_fp8_kernel

# Config -------------------------------------------------------------------------------------


def choose(n: int, k: int, num_groups: int, swiglu: bool, num_rows: int) -> dict:
    """With few rows a group, short tiles waste fewer products."""
    return dict(block_m=64 if num_rows <= 64 * max(num_groups, 1) else 128, ring=3)


# Kernel -------------------------------------------------------------------------------------


@macro
def multiply(a_shared, b_shared, part_frag):
    """Sum 128 products into fresh registers; asynchronous."""
    T.wgmma_gemm(a_shared, b_shared, part_frag, transpose_B=True, clear_accum=True)


@macro
def add_scaled(part_frag, scale_frag, acc_frag):
    """Add `part`, times the factors of its rows, to `acc`."""
    for i, j in T.Parallel(WARPGROUP_ROWS, GROUP):
        acc_frag[i, j] += part_frag[i, j] * scale_frag[i]


@kernel(choose=choose, space=dict(block_m=(64, 128), ring=(3, 4)), **WARPGROUP_ROLES)
def grouped_gemm_fp8_kernel(n: int, k: int, num_groups: int, swiglu: bool, *, block_m: int, ring: int):
    """The last warpgroup loads, the others multiply 64 rows each, with two times 128 rows of b.

    These are neighbours, or the same channels of gate and up if `swiglu`. See `grouped_gemm_kernel`.
    """
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(FP8)
    steps = -(-k // GROUP)
    num_matrices = max(num_groups, 1)
    width = n // 2 if swiglu else n
    width_groups = -(-width // GROUP)
    last_group = -(-n // GROUP) - 1
    span = GROUP if swiglu else 2 * GROUP  # columns of d that a tile owns
    second = width // GROUP if swiglu else 1  # from its first to its second group of rows of b
    members = block_m // WARPGROUP_ROWS
    tiles_n = -(-width // span)
    out = elem if swiglu else T.bfloat16

    @T.prim_func
    def grouped_gemm_fp8(
        a: T.Tensor((num_rows, k), elem),
        a_sf: T.Tensor((num_rows, steps), T.float32),
        b: T.Tensor((num_matrices, n, k), elem),
        b_sf: T.Tensor((num_matrices * (last_group + 1), steps), T.float32),
        group_end: T.Tensor((num_matrices,), T.int32),
        d: T.Tensor((num_rows, width), out),
        d_sf: T.Tensor((num_rows, width_groups), T.float32),
        num_blocks: T.int32,
    ):
        with T.Kernel(num_blocks, threads=(members + 1) * WARPGROUP) as pid:
            a_shared = T.alloc_shared((ring, members, WARPGROUP_ROWS, GROUP), elem)
            b_shared = T.alloc_shared((2, ring, GROUP, GROUP), elem)
            sf_shared = T.alloc_shared((ring, block_m), T.float32)
            d_shared = [T.alloc_shared((WARPGROUP_ROWS, GROUP), out) for _ in range(members)]
            T.annotate_layout({buffer: swizzled(buffer) for buffer in d_shared})
            part_frag = [T.alloc_fragment((WARPGROUP_ROWS, GROUP), T.float32) for _ in range(members)]
            acc_frag = [T.alloc_fragment((WARPGROUP_ROWS, GROUP), T.float32) for _ in range(members)]
            second_frag = [T.alloc_fragment((WARPGROUP_ROWS, GROUP), T.float32) for _ in range(members)]
            scale_frag = [T.alloc_fragment((WARPGROUP_ROWS,), T.float32) for _ in range(members)]
            amax_frag = [T.alloc_fragment((WARPGROUP_ROWS,), T.float32) for _ in range(members)]
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
                    group, row, b_group = tile[0], tile[1], tile[4] * (span // GROUP)
                    for step in T.serial(tile[3] * steps):
                        slot, depth = next_free(buffers), step * GROUP
                        load_rows(a, row, tile[2], depth, a_shared, slot, buffers.full)
                        for half in (0, 1):
                            b_row = (b_group + half * second) * GROUP
                            T.tma_copy(
                                b[group, b_row : b_row + GROUP, depth : depth + GROUP],
                                b_shared[half, slot, :, :],
                                barrier=buffers.full[slot],
                            )
                        for i in T.Parallel(block_m):
                            sf_shared[slot, i] = a_sf[T.min(row + i, num_rows - 1), step]
                        T.barrier_arrive(buffers.full[slot])
                        buffers.used[0] += 1
            for member in (0, 1)[:members]:
                with T.ws(member):
                    if members > 1:
                        T.inc_max_nreg(MULTIPLYING_REGISTERS)
                    part, acc, other = part_frag[member], acc_frag[member], second_frag[member]
                    scale, amax = scale_frag[member], amax_frag[member]
                    for turn in T.serial(turns):
                        locate_tile(tiles, turn * num_blocks + pid, tile)
                        row, end = tile[1] + member * WARPGROUP_ROWS, tile[2]
                        pid_n = tile[4]
                        b_group = pid_n * (span // GROUP)
                        b_sf_row = tile[0] * (last_group + 1) + b_group
                        second_sf_row = b_sf_row + T.min(second, last_group - b_group)
                        if row < end:
                            T.clear(acc)
                            T.clear(other)
                            for step in T.serial(tile[3] * steps):
                                slot = next_full(buffers)
                                multiply(a_shared[slot, member, :, :], b_shared[0, slot, :, :], part)
                                for i in T.Parallel(WARPGROUP_ROWS):  # while the tensor cores work
                                    scale[i] = sf_shared[slot, member * WARPGROUP_ROWS + i] * b_sf[b_sf_row, step]
                                T.wait_wgmma(0)
                                add_scaled(part, scale, acc)
                                multiply(a_shared[slot, member, :, :], b_shared[1, slot, :, :], part)
                                for i in T.Parallel(WARPGROUP_ROWS):
                                    scale[i] = sf_shared[slot, member * WARPGROUP_ROWS + i] * b_sf[second_sf_row, step]
                                T.wait_wgmma(0)
                                T.barrier_arrive(buffers.free[slot])
                                add_scaled(part, scale, other)
                                buffers.used[0] += 1
                            if swiglu:
                                for i, j in T.Parallel(WARPGROUP_ROWS, GROUP):
                                    acc[i, j] = silu(acc[i, j]) * other[i, j]
                                T.reduce_absmax(acc, amax, dim=1)
                                for i in T.Parallel(WARPGROUP_ROWS):
                                    amax[i] = T.max(amax[i], AMAX_FLOOR)
                                    scale[i] = FP8_MAX / amax[i]
                                    if row + i < end:
                                        d_sf[row + i, pid_n] = amax[i] / FP8_MAX
                                for i, j in T.Parallel(WARPGROUP_ROWS, GROUP):
                                    acc[i, j] = acc[i, j] * scale[i]
                            store_rows(acc, d_shared[member], d, row, end, b_group * GROUP, width, member)
                            if not swiglu and (b_group + 1) * GROUP < width:
                                store_rows(other, d_shared[member], d, row, end, (b_group + 1) * GROUP, width, member)
                        else:
                            skip_steps(buffers, tile[3] * steps)
                    T.tma_store_wait(0)

    return grouped_gemm_fp8


# Ops ----------------------------------------------------------------------------------------

PRODUCT_FP8 = grouped_gemm_fp8_kernel, portable_fp8_kernel


@op(outputs='d')
def grouped_gemm_fp8(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor) -> Tensor:
    """The product of every row with the matrix of its group, of e4m3 operands with scale factors.

    Args:
        a: (num_rows, k) float8_e4m3fn, contiguous, k a multiple of 16; rows of a group are neighbours.
        a_sf: (num_rows, ceil(k / 128)) float32; `per_token_cast(x, 'e4m3_1x128_f32')` gives both.
        b: (num_groups, n, k) float8_e4m3fn, contiguous, n a multiple of 8.
        b_sf: (num_groups, ceil(n / 128), ceil(k / 128)) float32, one for each block of 128 x 128.
        group_end: (num_groups,) int32, where the rows of each group end; see `grouped_gemm`.

    Returns:
        (num_rows, n) bfloat16, summed in float32; 0 in rows behind the last group.
    """
    num_rows, num_groups, n, k = check_fp8(a, a_sf, b, b_sf, group_end, 8)
    d = torch.empty((num_rows, n), dtype=torch.bfloat16, device=a.device)
    launch_product(PRODUCT_FP8, (n, k, num_groups, False), a, a_sf, b, b_sf.flatten(0, 1), group_end, d, None)
    return d


@op(outputs='d d_sf')
def grouped_gemm_fp8_swiglu_cast(
    a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor
) -> tuple[Tensor, Tensor]:
    """`grouped_gemm_fp8` with SwiGLU behind it, quantised from float32 in groups of 128 channels.

    Args:
        a: as in `grouped_gemm_fp8`.
        a_sf: as there.
        b: (num_groups, 2 * width, k), the rows of the gate first; width is a multiple of 128.
        b_sf: as there.
        group_end: as there.

    Returns:
        (num_rows, width) float8_e4m3fn and its scale factors (num_rows, width / 128) float32; codes of rows behind the
        last group are 0.
    """
    num_rows, num_groups, n, k = check_fp8(a, a_sf, b, b_sf, group_end, 2 * GROUP)
    d = a.new_empty(num_rows, n // 2)
    d_sf = a_sf.new_empty(num_rows, n // 2 // GROUP)
    launch_product(PRODUCT_FP8, (n, k, num_groups, True), a, a_sf, b, b_sf.flatten(0, 1), group_end, d, d_sf)
    return d, d_sf


# Cases --------------------------------------------------------------------------------------


SMOKE = grid(num_rows=[0, 1, 150], n=[256], k=[144], num_groups=[3]) + grid(
    num_rows=[600], n=[256], k=[256], num_groups=[1, 5], behind=[7]
)
BENCH = (
    grid(num_rows=[8192], n=[4096], k=[7168], num_groups=[8], alignment=[128], whole=[True])
    + grid(num_rows=[24001], n=[2816], k=[2048], num_groups=[64], whole=[True])
    + grid(num_rows=[256], n=[4096], k=[7168], num_groups=[64], even=[True])
)
grouped_gemm_fp8.cases(
    make=random_fp8,
    match=SUMS,
    smoke=[*SMOKE, *grid(num_rows=[20], n=[72], k=[80], num_groups=[2])],
    full=grid(num_rows=[4001], n=[576, 2048], k=[1088, 2048], num_groups=[1, 7, 64, 300]),
    bench=[*grid(num_rows=[8192], n=[2048], k=[7168], num_groups=[1, 8], alignment=[128], whole=[True]), *BENCH],
    flops=product_flops,
)
grouped_gemm_fp8_swiglu_cast.cases(
    make=random_fp8_swiglu,
    match=CODES,
    smoke=SMOKE,
    full=grid(num_rows=[4001], n=[512, 2816], k=[1088, 2048], num_groups=[1, 7, 64, 300]),
    bench=BENCH,
    flops=product_flops,
)
