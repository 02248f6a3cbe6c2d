"""Grouped matrix product: every row meets the matrix of its group.

    d[r, n] = sum_k a[r, k] * b[g, n, k]        for group_end[g - 1] <= r < group_end[g]

Rows of a group are neighbours; where the groups end is known to the device alone. Rows behind the last group give 0.

Compute bound for many rows; for few rows a group the floor is reading b once.
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
    EXPLICIT_BARRIERS,
    WARPGROUP,
    check_operands,
    locate_tile,
    num_tiles,
    random_ends,
    swizzled,
)
from tile_kernels.gemm.grouped_gemm_dw import grouped_gemm_dw_kernel

DTYPES = (torch.bfloat16, torch.float16)
BLOCK_K = 64

# Config -------------------------------------------------------------------------------------


def choose(n: int, k: int, num_groups: int, b_is_nk: bool, dtype: torch.dtype, num_rows: int) -> dict:
    """Wide tiles read each operand less often; with few rows a group, small ones waste fewer products."""
    if num_rows <= 64 * num_groups:  # the matrices are the traffic: short tiles keep more of them in flight
        return dict(block_m=64, block_n=128, ring=4)
    return dict(block_m=128, block_n=256 if n % 256 == 0 else 128, ring=3)


# Kernel -------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(block_m=(64, 128), block_n=(128, 256), ring=(3, 4, 6)),
    pass_configs=EXPLICIT_BARRIERS,
    min_arch=90,
    max_arch=90,
)
def grouped_gemm_kernel(
    n: int, k: int, num_groups: int, b_is_nk: bool, dtype: torch.dtype, *, block_m: int, block_n: int, ring: int
):
    """`b` is (num_groups, n, k) if `b_is_nk`, else (num_groups, k, n).

    The last warpgroup loads, the others multiply 64 rows each; they hand over the `ring` buffers through barriers.
    """
    num_rows = T.dynamic('num_rows')
    elem = T.dtype(dtype)
    b_shape = (num_groups, n, k) if b_is_nk else (num_groups, k, n)
    b_tile = (block_n, BLOCK_K) if b_is_nk else (BLOCK_K, block_n)
    consumers = block_m // 64 * WARPGROUP

    @T.prim_func
    def grouped_gemm(
        a: T.Tensor((num_rows, k), elem),
        b: T.Tensor(b_shape, elem),
        group_end: T.Tensor((num_groups,), T.int32),
        d: T.Tensor((num_rows, n), elem),
    ):
        with T.Kernel(
            T.ceildiv(n, block_n), num_tiles(num_rows, num_groups, block_m), threads=consumers + WARPGROUP
        ) as (pid_n, pid_m):
            a_shared = T.alloc_shared((ring, block_m, BLOCK_K), elem)
            b_shared = T.alloc_shared((ring, *b_tile), elem)
            d_shared = T.alloc_shared((block_m, block_n), elem)
            T.annotate_layout({d_shared: swizzled(d_shared)})
            acc_frag = T.alloc_fragment((block_m, block_n), T.float32)
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
                    slot = step % ring
                    depth = step * BLOCK_K
                    T.mbarrier_wait_parity(free[slot], (step // ring + 1) % 2)
                    T.tma_copy(
                        a[row : row + block_m, depth : depth + BLOCK_K], a_shared[slot, :, :], barrier=full[slot]
                    )
                    if b_is_nk:
                        T.tma_copy(
                            b[group, col : col + block_n, depth : depth + BLOCK_K],
                            b_shared[slot, :, :],
                            barrier=full[slot],
                        )
                    else:
                        T.tma_copy(
                            b[group, depth : depth + BLOCK_K, col : col + block_n],
                            b_shared[slot, :, :],
                            barrier=full[slot],
                        )
                    T.barrier_arrive(full[slot])
            else:
                T.inc_max_nreg(240)
                T.clear(acc_frag)
                for step in T.serial(steps):
                    slot = step % ring
                    T.mbarrier_wait_parity(full[slot], step // ring % 2)
                    T.wgmma_gemm(
                        a_shared[slot, :, :],
                        b_shared[slot, :, :],
                        acc_frag,
                        transpose_B=b_is_nk,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    T.wait_wgmma(1)
                    if step > 0:
                        T.barrier_arrive(free[(step - 1) % ring])
                T.wait_wgmma(0)
                T.copy(acc_frag, d_shared)
                T.sync_threads(8, consumers)
                for i, j in T.Parallel(block_m, block_n):
                    if row + i < end and col + j < n:
                        d[row + i, col + j] = d_shared[i, j]

    return grouped_gemm


# Ops ----------------------------------------------------------------------------------------


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
    num_rows, n = check.shape(dd, 'dd', 'num_rows n', dtype=DTYPES)
    _, k = check.shape(a, 'a', 'num_rows k', dtype=dd.dtype, num_rows=num_rows)
    num_groups, _, _ = check.shape(b, 'b', 'num_groups n k', dtype=dd.dtype, n=n, k=k)
    check_operands(num_groups, group_end, (n, k), dd=dd, a=a, b=b)
    if num_rows == 0:
        return torch.empty_like(a), torch.zeros_like(b)
    da, db = torch.empty_like(a), torch.empty_like(b)
    launch(grouped_gemm_kernel, (k, n, num_groups, False, dd.dtype), dd, b, group_end, da)
    launch(grouped_gemm_dw_kernel, (n, k, num_groups, dd.dtype), dd, a, group_end, db, size=num_groups)
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
    num_rows, k = check.shape(a, 'a', 'num_rows k', dtype=DTYPES)
    num_groups, n, _ = check.shape(b, 'b', 'num_groups n k', dtype=a.dtype, k=k)
    check_operands(num_groups, group_end, (n, k), a=a, b=b)
    d = a.new_empty(num_rows, n)
    launch(grouped_gemm_kernel, (n, k, num_groups, True, a.dtype), a, b, group_end, d)
    return d


# Cases --------------------------------------------------------------------------------------


def _make(num_rows: int, n: int, k: int, num_groups: int, dtype: torch.dtype, **ends) -> dict:
    a, b = torch.randn(num_rows, k, dtype=dtype), torch.randn(num_groups, n, k, dtype=dtype) / k**0.5
    return dict(a=a, b=b, group_end=random_ends(num_rows, num_groups, **ends))


def _make_bwd(**case) -> dict:
    made = _make(**case)
    return dict(dd=torch.randn(made['a'].shape[0], made['b'].shape[1], dtype=made['a'].dtype), **made)


BF16 = torch.bfloat16
SUMS = dict(rtol=1e-2, atol=1e-2)  # float32 sums in another order, rounded to half precision
SMOKE = (
    grid(num_rows=[0, 1, 150], n=[72], k=[72], num_groups=[3], dtype=[BF16])
    + grid(num_rows=[150], n=[136], k=[200], num_groups=[1, 5], dtype=[torch.float16], behind=[7])
    + grid(num_rows=[700], n=[64], k=[64], num_groups=[2], dtype=[BF16])
    + grid(num_rows=[256], n=[256], k=[64], num_groups=[2], dtype=[BF16], alignment=[128])
)
BENCH = (
    grid(num_rows=[8192], n=[4096], k=[7168], num_groups=[8, 32], dtype=[BF16], alignment=[128])
    + grid(num_rows=[24576], n=[2816], k=[2048], num_groups=[64], dtype=[BF16], alignment=[128])
    + grid(num_rows=[24001], n=[2048], k=[1408], num_groups=[64], dtype=[BF16])
    + grid(num_rows=[256], n=[4096], k=[7168], num_groups=[64], dtype=[BF16])
)

grouped_gemm.cases(
    make=_make,
    match=SUMS,
    smoke=SMOKE,
    full=grid(num_rows=[4001], n=[576, 2048], k=[1088, 2048], num_groups=[1, 7, 64, 300], dtype=[BF16, torch.float16])
    + grid(num_rows=[150000], n=[16384], k=[64], num_groups=[3], dtype=[BF16]),  # past 2^31 elements
    bench=BENCH,
)
grouped_gemm_bwd.cases(make=_make_bwd, match=SUMS, smoke=SMOKE, bench=BENCH)
