"""Kernels of the fp8 grouped GEMM: with wgmma on Hopper, with mma elsewhere. See `grouped_gemm_fp8`.

With wgmma, the tensor cores work for one warpgroup while another adds. Each group of rows of a is multiplied with two
groups of rows of b, which keeps the tensor cores busy. With mma, codes are widened to bfloat16 in shared memory. The
codes and their products are exact in bfloat16, so the kernel needs no fp8 tensor cores.
"""

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.gemm._macros import (
    AMAX_FLOOR,
    FALLBACK,
    FP8,
    FP8_MAX,
    GROUP,
    LOADING_REGISTERS,
    MMA_M,
    MULTIPLYING_REGISTERS,
    WARPGROUP,
    WARPGROUP_ROLES,
    WARPGROUP_ROWS,
    Tiles,
    count_turns,
    find_tile,
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
)

NUM_THREADS_FP8 = 256  # fewer threads lack the registers for two accumulators and a fresh sum

# Config -------------------------------------------------------------------------------------


def choose(n: int, k: int, num_groups: int, swiglu: bool, num_rows: int) -> dict:
    """With few rows per group, short tiles waste fewer products."""
    return dict(block_m=64 if num_rows <= 64 * max(num_groups, 1) else 128, ring=3)


# Kernels ------------------------------------------------------------------------------------


@macro
def multiply(a_shared, b_shared, part_frag):
    """Sum 128 products into fresh registers with an asynchronous wgmma."""
    T.wgmma_gemm(a_shared, b_shared, part_frag, transpose_B=True, clear_accum=True)


@macro
def add_scaled(part_frag, scale_frag, acc_frag):
    """Add `part`, times the scale factors of its rows, to `acc`."""
    for i, j in T.Parallel(WARPGROUP_ROWS, GROUP):
        acc_frag[i, j] += part_frag[i, j] * scale_frag[i]


@kernel(choose=choose, space=dict(block_m=(64, 128), ring=(3, 4)), **WARPGROUP_ROLES)
def grouped_gemm_fp8_kernel(n: int, k: int, num_groups: int, swiglu: bool, *, block_m: int, ring: int):
    """The last warpgroup loads; each of the others multiplies 64 rows with two groups of 128 rows of b.

    The two groups are adjacent, or with `swiglu` the same channels of gate and up. See `grouped_gemm_kernel`.
    """
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(FP8)
    steps = -(-k // GROUP)
    num_matrices = max(num_groups, 1)
    width = n // 2 if swiglu else n
    width_groups = -(-width // GROUP)
    last_group = -(-n // GROUP) - 1
    span = GROUP if swiglu else 2 * GROUP  # columns of d per tile
    second = width // GROUP if swiglu else 1  # distance from the first to the second group of rows of b
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
                                for i in T.Parallel(WARPGROUP_ROWS):  # overlaps with the tensor cores
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


@kernel(**FALLBACK)
def portable_fp8_kernel(n: int, k: int, num_groups: int, swiglu: bool):
    """A thread block owns 128 columns of d; with SwiGLU it uses those rows of both gate and up.

    Operands are widened to bfloat16. The kernel sums 128 products, scales the sum, and adds it in float32.
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
        num_blocks: T.int32,  # used by the other variant only
    ):
        with T.Kernel(most_tiles(num_rows, num_groups, tiles_n), threads=NUM_THREADS_FP8) as pid:
            a_shared = T.alloc_shared((MMA_M, GROUP), T.bfloat16)
            b_shared = T.alloc_shared((GROUP, GROUP), T.bfloat16)
            part_frag = T.alloc_fragment((MMA_M, GROUP), T.float32)
            acc_frag = [T.alloc_fragment((MMA_M, GROUP), T.float32) for _ in matrices]
            scale_frag = T.alloc_fragment((MMA_M,), T.float32)
            tile = T.alloc_local((5,), T.int32)
            find_tile(group_end, pid, num_rows, num_groups, tiles_n, tile)
            row, end, col = tile[1], tile[2], tile[4] * GROUP
            group = T.min(tile[0], num_matrices - 1)
            for matrix in matrices:
                T.clear(acc_frag[matrix])
            for step in T.serial(tile[3] * steps):
                depth = step * GROUP
                T.copy(a[row : row + MMA_M, depth : depth + GROUP], a_shared)
                for matrix in matrices:
                    b_row = col + matrix * width
                    T.copy(b[group, b_row : b_row + GROUP, depth : depth + GROUP], b_shared)
                    T.clear(part_frag)
                    T.gemm(a_shared, b_shared, part_frag, transpose_B=True)
                    for i in T.Parallel(MMA_M):
                        scale_frag[i] = (
                            a_sf[T.min(row + i, num_rows - 1), step]
                            * b_sf[group * -(-n // GROUP) + b_row // GROUP, step]
                        )
                    for i, j in T.Parallel(MMA_M, GROUP):
                        acc_frag[matrix][i, j] += part_frag[i, j] * scale_frag[i]
            if swiglu:
                for i, j in T.Parallel(MMA_M, GROUP):
                    acc_frag[0][i, j] = silu(acc_frag[0][i, j]) * acc_frag[1][i, j]
                T.reduce_absmax(acc_frag[0], scale_frag, dim=1)
                for i in T.Parallel(MMA_M):
                    scale_frag[i] = T.max(scale_frag[i], AMAX_FLOOR)
                    if row + i < end:
                        d_sf[row + i, tile[4]] = scale_frag[i] / FP8_MAX
                for i, j in T.Parallel(MMA_M, GROUP):
                    acc_frag[0][i, j] = acc_frag[0][i, j] * (FP8_MAX / scale_frag[i])
            store_tile(acc_frag[0], d, row, end, col, width)

    return portable_fp8


PRODUCT_FP8 = grouped_gemm_fp8_kernel, portable_fp8_kernel
