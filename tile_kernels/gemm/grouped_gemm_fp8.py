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

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.gemm._groups import (
    EXPLICIT_BARRIERS,
    WARPGROUP,
    check_operands,
    locate_tile,
    num_tiles,
    random_ends,
    swizzled,
)

GROUP = 128  # channels that share a scale factor; also the rows of b that do, and a step of the sum
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
AMAX_FLOOR = 1e-4

# Config -------------------------------------------------------------------------------------


def choose(n: int, k: int, num_groups: int, swiglu: bool, num_rows: int) -> dict:
    """With few rows a group, short tiles waste fewer products."""
    return dict(block_m=64 if num_rows <= 64 * num_groups else 128, ring=4)


# Kernel -------------------------------------------------------------------------------------


@macro
def add_scaled(part_frag, scale_frag, acc_frag, block_m: int):
    """Add `part`, times the factors of its rows, to `acc`."""
    for i, j in T.Parallel(block_m, GROUP):
        acc_frag[i, j] += part_frag[i, j] * scale_frag[i]


@macro
def store_rows(d_shared, d, row, end, col, width: int, block_m: int):
    """Store the rows before `end` of a tile."""
    for i, j in T.Parallel(block_m, GROUP):
        if row + i < end and col + j < width:
            d[row + i, col + j] = d_shared[i, j]


@kernel(
    choose=choose, space=dict(block_m=(64, 128), ring=(3, 4)), pass_configs=EXPLICIT_BARRIERS, min_arch=90, max_arch=90
)
def grouped_gemm_fp8_kernel(n: int, k: int, num_groups: int, swiglu: bool, *, block_m: int, ring: int):
    """The last warpgroup loads, the others multiply 64 rows each, with two times 128 rows of b.

    These are neighbours, or the same channels of gate and up if `swiglu`.
    """
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(FP8)
    depth_groups = -(-k // GROUP)
    width = n // 2 if swiglu else n
    width_groups = -(-width // GROUP)
    last_group = -(-n // GROUP) - 1
    span = GROUP if swiglu else 2 * GROUP  # columns of d that a thread block owns
    second = width // GROUP if swiglu else 1  # from its first to its second group of rows of b
    consumers = block_m // 64 * WARPGROUP
    out = elem if swiglu else T.bfloat16

    @T.prim_func
    def grouped_gemm_fp8(
        a: T.Tensor((num_rows, k), elem),
        a_sf: T.Tensor((num_rows, depth_groups), T.float32),
        b: T.Tensor((num_groups, n, k), elem),
        b_sf: T.Tensor((num_groups, last_group + 1, depth_groups), T.float32),
        group_end: T.Tensor((num_groups,), T.int32),
        d: T.Tensor((num_rows, width), out),
        d_sf: T.Tensor((num_rows, width_groups), T.float32),
    ):
        with T.Kernel(
            T.ceildiv(width, span), num_tiles(num_rows, num_groups, block_m), threads=consumers + WARPGROUP
        ) as (pid_n, pid_m):
            a_shared = T.alloc_shared((ring, block_m, GROUP), elem)
            b_shared = T.alloc_shared((2, ring, GROUP, GROUP), elem)
            d_shared = T.alloc_shared((block_m, GROUP), out)
            T.annotate_layout({d_shared: swizzled(d_shared)})
            part_frag = T.alloc_fragment((block_m, GROUP), T.float32)
            acc_frag = T.alloc_fragment((block_m, GROUP), T.float32)
            second_frag = T.alloc_fragment((block_m, GROUP), T.float32)
            scale_frag = T.alloc_fragment((block_m,), T.float32)
            second_scale_frag = T.alloc_fragment((block_m,), T.float32)
            amax_frag = T.alloc_fragment((block_m,), T.float32)
            full = T.alloc_barrier([WARPGROUP] * ring)
            free = T.alloc_barrier([consumers] * ring)
            tile = T.alloc_local((4,), T.int32)
            locate_tile(group_end, pid_m, num_rows, num_groups, block_m, tile)
            group, row, end = tile[0], tile[1], tile[2]
            steps = tile[3] * depth_groups
            col = pid_n * span
            b_group = pid_n * (span // GROUP)

            if T.get_thread_binding() >= consumers:
                T.dec_max_nreg(24)
                for step in T.serial(steps):
                    slot, depth = step % ring, step * GROUP
                    T.mbarrier_wait_parity(free[slot], (step // ring + 1) % 2)
                    T.tma_copy(a[row : row + block_m, depth : depth + GROUP], a_shared[slot, :, :], barrier=full[slot])
                    for half in (0, 1):
                        b_row = (b_group + half * second) * GROUP
                        T.tma_copy(
                            b[group, b_row : b_row + GROUP, depth : depth + GROUP],
                            b_shared[half, slot, :, :],
                            barrier=full[slot],
                        )
                    T.barrier_arrive(full[slot])
            else:
                T.inc_max_nreg(240)
                T.clear(acc_frag)
                T.clear(second_frag)
                for step in T.serial(steps):
                    slot = step % ring
                    for i in T.Parallel(block_m):
                        row_scale = a_sf[T.min(row + i, num_rows - 1), step]
                        scale_frag[i] = row_scale * b_sf[group, b_group, step]
                        second_scale_frag[i] = row_scale * b_sf[group, T.min(b_group + second, last_group), step]
                    T.mbarrier_wait_parity(full[slot], step // ring % 2)
                    T.wgmma_gemm(
                        a_shared[slot, :, :],
                        b_shared[0, slot, :, :],
                        part_frag,
                        transpose_B=True,
                        clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    T.wait_wgmma(0)
                    add_scaled(part_frag, scale_frag, acc_frag, block_m)
                    T.wgmma_gemm(
                        a_shared[slot, :, :],
                        b_shared[1, slot, :, :],
                        part_frag,
                        transpose_B=True,
                        clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[slot])
                    add_scaled(part_frag, second_scale_frag, second_frag, block_m)
                if swiglu:
                    for i, j in T.Parallel(block_m, GROUP):
                        acc_frag[i, j] = acc_frag[i, j] / (1.0 + T.exp(-acc_frag[i, j])) * second_frag[i, j]
                    T.reduce_absmax(acc_frag, amax_frag, dim=1)
                    for i in T.Parallel(block_m):
                        scale_frag[i] = T.max(amax_frag[i], AMAX_FLOOR) / FP8_MAX
                        if row + i < end:
                            d_sf[row + i, pid_n] = scale_frag[i]
                    for i, j in T.Parallel(block_m, GROUP):
                        acc_frag[i, j] = acc_frag[i, j] / scale_frag[i]
                T.copy(acc_frag, d_shared)
                T.sync_threads(8, consumers)
                store_rows(d_shared, d, row, end, col, width, block_m)
                if not swiglu:
                    T.sync_threads(8, consumers)
                    T.copy(second_frag, d_shared)
                    T.sync_threads(8, consumers)
                    store_rows(d_shared, d, row, end, col + GROUP, width, block_m)

    return grouped_gemm_fp8


# Ops ----------------------------------------------------------------------------------------


def _check(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor) -> tuple[int, int, int, int]:
    num_rows, k = check.shape(a, 'a', 'num_rows k', dtype=FP8)
    num_groups, n, _ = check.shape(b, 'b', 'num_groups n k', dtype=FP8, k=k)
    depth_groups = -(-k // GROUP)
    float32 = dict(dtype=torch.float32, depth_groups=depth_groups)
    check.shape(a_sf, 'a_sf', 'num_rows depth_groups', num_rows=num_rows, **float32)
    check.shape(
        b_sf, 'b_sf', 'num_groups n_groups depth_groups', num_groups=num_groups, n_groups=-(-n // GROUP), **float32
    )
    check_operands(num_groups, group_end, (k,), a=a, b=b)
    check.contiguous(a_sf, 'a_sf')
    check.contiguous(b_sf, 'b_sf')
    check.same_device(a=a, a_sf=a_sf, b_sf=b_sf)
    return num_rows, num_groups, n, k


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
    num_rows, num_groups, n, k = _check(a, a_sf, b, b_sf, group_end)
    check.multiple(n, 8, 'the rows of a matrix of b')
    d = torch.empty((num_rows, n), dtype=torch.bfloat16, device=a.device)
    launch(grouped_gemm_fp8_kernel, (n, k, num_groups, False), a, a_sf, b, b_sf, group_end, d, None)
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
    num_rows, num_groups, n, k = _check(a, a_sf, b, b_sf, group_end)
    check.multiple(n, 2 * GROUP, 'the rows of a matrix of b')
    d = a.new_empty(num_rows, n // 2)
    d_sf = a_sf.new_empty(num_rows, n // 2 // GROUP)
    launch(grouped_gemm_fp8_kernel, (n, k, num_groups, True), a, a_sf, b, b_sf, group_end, d, d_sf)
    return d, d_sf


# Cases --------------------------------------------------------------------------------------


def _make(num_rows: int, n: int, k: int, num_groups: int, **ends) -> dict:
    return dict(
        a=torch.randn(num_rows, k).to(FP8),
        a_sf=torch.rand(num_rows, -(-k // GROUP)) + 0.5,
        b=torch.randn(num_groups, n, k).to(FP8),
        b_sf=(torch.rand(num_groups, -(-n // GROUP), -(-k // GROUP)) + 0.5) / k**0.5,
        group_end=random_ends(num_rows, num_groups, **ends),
    )


def _make_swiglu(**case) -> dict:
    """Scale factors of up large enough for those of the result to be told apart from 0."""
    made = _make(**case)
    gate_sf, up_sf = made['b_sf'].chunk(2, dim=1)
    return made | dict(b_sf=torch.cat((gate_sf, up_sf * 4096), dim=1))


SMOKE = grid(num_rows=[0, 1, 150], n=[256], k=[144], num_groups=[3]) + grid(
    num_rows=[600], n=[256], k=[256], num_groups=[1, 5], behind=[7]
)
BENCH = (
    grid(num_rows=[8192], n=[4096], k=[7168], num_groups=[8], alignment=[128])
    + grid(num_rows=[24001], n=[2816], k=[2048], num_groups=[64])
    + grid(num_rows=[256], n=[4096], k=[7168], num_groups=[64])
)
grouped_gemm_fp8.cases(
    make=_make,
    match=dict(rtol=1e-2, atol=1e-2),
    smoke=[*SMOKE, *grid(num_rows=[20], n=[72], k=[80], num_groups=[2])],
    full=grid(num_rows=[4001], n=[576, 2048], k=[1088, 2048], num_groups=[1, 7, 64, 300]),
    bench=[*grid(num_rows=[8192], n=[2048], k=[7168], num_groups=[1, 8], alignment=[128]), *BENCH],
)
grouped_gemm_fp8_swiglu_cast.cases(
    make=_make_swiglu,
    match=dict(rtol=0.13, atol=0.13),  # codes: a neighbour is an eighth away, and fp8 products have 14 bits near 0
    smoke=SMOKE,
    full=grid(num_rows=[4001], n=[512, 2816], k=[1088, 2048], num_groups=[1, 7, 64, 300]),
    bench=BENCH,
)
