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
from tile_kernels.gemm._groups import EXPLICIT_BARRIERS, WARPGROUP, check_operands, locate_tile, num_tiles, swizzled
from tile_kernels.gemm.grouped_gemm import BLOCK_K, DTYPES, SUMS, _make

# Config -------------------------------------------------------------------------------------


def choose(width: int, k: int, num_groups: int, dtype: torch.dtype, num_rows: int) -> dict:
    """Wide tiles read each operand less often; with few rows a group, small ones waste fewer products."""
    if num_rows <= 64 * num_groups:
        return dict(block_m=64, block_n=64, ring=4)
    return dict(block_m=128, block_n=128, ring=4)


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
    """The last warpgroup loads, the others multiply 64 rows each."""
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(dtype)
    consumers = block_m // 64 * WARPGROUP

    @T.prim_func
    def grouped_gemm_swiglu(
        a: T.Tensor((num_rows, k), elem),
        b: T.Tensor((num_groups, 2 * width, k), elem),
        group_end: T.Tensor((num_groups,), T.int32),
        d: T.Tensor((num_rows, width), elem),
    ):
        with T.Kernel(
            T.ceildiv(width, block_n), num_tiles(num_rows, num_groups, block_m), threads=consumers + WARPGROUP
        ) as (pid_n, pid_m):
            a_shared = T.alloc_shared((ring, block_m, BLOCK_K), elem)
            gate_shared = T.alloc_shared((ring, block_n, BLOCK_K), elem)
            up_shared = T.alloc_shared((ring, block_n, BLOCK_K), elem)
            d_shared = T.alloc_shared((block_m, block_n), elem)
            T.annotate_layout({d_shared: swizzled(d_shared)})
            gate_frag = T.alloc_fragment((block_m, block_n), T.float32)
            up_frag = T.alloc_fragment((block_m, block_n), T.float32)
            full = T.alloc_barrier([WARPGROUP] * ring)
            free = T.alloc_barrier([consumers] * ring)
            tile = T.alloc_local((4,), T.int32)
            locate_tile(group_end, pid_m, num_rows, num_groups, block_m, tile)
            group, row, end = tile[0], tile[1], tile[2]
            steps = tile[3] * T.ceildiv(k, BLOCK_K)
            col = pid_n * block_n

            if T.get_thread_binding() >= consumers:
                T.dec_max_nreg(24)
                for step in T.serial(steps):
                    slot, depth = step % ring, step * BLOCK_K
                    T.mbarrier_wait_parity(free[slot], (step // ring + 1) % 2)
                    T.tma_copy(
                        a[row : row + block_m, depth : depth + BLOCK_K], a_shared[slot, :, :], barrier=full[slot]
                    )
                    T.tma_copy(
                        b[group, col : col + block_n, depth : depth + BLOCK_K],
                        gate_shared[slot, :, :],
                        barrier=full[slot],
                    )
                    T.tma_copy(
                        b[group, width + col : width + col + block_n, depth : depth + BLOCK_K],
                        up_shared[slot, :, :],
                        barrier=full[slot],
                    )
                    T.barrier_arrive(full[slot])
            else:
                T.inc_max_nreg(240)
                T.clear(gate_frag)
                T.clear(up_frag)
                for step in T.serial(steps):
                    slot = step % ring
                    T.mbarrier_wait_parity(full[slot], step // ring % 2)
                    T.wgmma_gemm(
                        a_shared[slot, :, :],
                        gate_shared[slot, :, :],
                        gate_frag,
                        transpose_B=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    T.wgmma_gemm(
                        a_shared[slot, :, :],
                        up_shared[slot, :, :],
                        up_frag,
                        transpose_B=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    T.wait_wgmma(2)
                    if step > 0:
                        T.barrier_arrive(free[(step - 1) % ring])
                T.wait_wgmma(0)
                for i, j in T.Parallel(block_m, block_n):
                    gate_frag[i, j] = gate_frag[i, j] / (1.0 + T.exp(-gate_frag[i, j])) * up_frag[i, j]
                T.copy(gate_frag, d_shared)
                T.sync_threads(8, consumers)
                for i, j in T.Parallel(block_m, block_n):
                    if row + i < end and col + j < width:
                        d[row + i, col + j] = d_shared[i, j]

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
    num_rows, k = check.shape(a, 'a', 'num_rows k', dtype=DTYPES)
    num_groups, n, _ = check.shape(b, 'b', 'num_groups n k', dtype=a.dtype, k=k)
    check.multiple(n, 16, 'the rows of a matrix of b')
    check_operands(num_groups, group_end, (k,), a=a, b=b)
    d = a.new_empty(num_rows, n // 2)
    launch(grouped_gemm_swiglu_kernel, (n // 2, k, num_groups, a.dtype), a, b, group_end, d)
    return d


# Cases --------------------------------------------------------------------------------------

BF16 = torch.bfloat16

grouped_gemm_swiglu.cases(
    make=_make,
    match=SUMS,
    smoke=grid(num_rows=[0, 1, 150], n=[144], k=[72], num_groups=[3], dtype=[BF16])
    + grid(num_rows=[600], n=[64], k=[200], num_groups=[1, 5], dtype=[torch.float16], behind=[7]),
    full=grid(num_rows=[4001], n=[576, 2816], k=[1088, 2048], num_groups=[1, 7, 64, 300], dtype=[BF16]),
    bench=grid(num_rows=[24576], n=[2816], k=[2048], num_groups=[64], dtype=[BF16])
    + grid(num_rows=[8192], n=[4096], k=[7168], num_groups=[8], dtype=[BF16])
    + grid(num_rows=[256], n=[4096], k=[7168], num_groups=[64], dtype=[BF16]),
)
