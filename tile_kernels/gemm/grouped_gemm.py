"""Grouped matrix product: every row is multiplied with the matrix of its group.

    d[r, n] = sum_k a[r, k] * b[g, n, k]        for group_end[g - 1] <= r < group_end[g]

The rows of a group are contiguous. Only the device knows the ends of the groups. Rows after the last group give 0.

Compute bound for many rows; with few rows per group the floor is reading b once. With up to 16 rows the sum over k is
split, and its parts are added in a fixed order.
"""

import torch
from torch import Tensor

from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch, num_workers
from tile_kernels.core.op import op
from tile_kernels.gemm._checks import check_gradient, check_product, launch_few_rows, splits_few_rows
from tile_kernels.gemm._samples import SUMS, product_flops, random_gradient, random_operands
from tile_kernels.gemm.grouped_gemm_bwd_kernels import DW
from tile_kernels.gemm.grouped_gemm_kernels import PRODUCT

# Ops ----------------------------------------------------------------------------------------


@op(outputs='da db')
def grouped_gemm_bwd(dd: Tensor, a: Tensor, b: Tensor, group_end: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `grouped_gemm`: da[r] = dd[r] @ b[g] and db[g] = dd[rows of g].T @ a[rows of g].

    Args:
        dd: (num_rows, n) gradient of the result.
        a: as in `grouped_gemm`.
        b: as in `grouped_gemm`.
        group_end: as in `grouped_gemm`.

    Returns:
        Gradients of `a` and `b` in their dtype, summed in float32.
    """
    num_rows, num_groups, n, k = check_gradient(dd, a, b, group_end)
    if num_rows == 0:
        return torch.empty_like(a), torch.zeros_like(b)
    da, db = torch.empty_like(a), torch.empty_like(b)
    launch(PRODUCT, (k, n, num_groups, False, dd.dtype), dd, b, group_end, da, num_workers(dd))
    launch(DW, (n, k, num_groups, dd.dtype), dd, a, group_end, db, num_workers(dd), size=num_groups)
    return da, db


@op(outputs='d', backward=grouped_gemm_bwd)
def grouped_gemm(a: Tensor, b: Tensor, group_end: Tensor) -> Tensor:
    """The product of every row with the matrix of its group: d[r, n] = sum_k a[r, k] * b[g, n, k].

    Args:
        a: (num_rows, k) bfloat16 or float16, contiguous; the rows of a group are contiguous.
        b: (num_groups, n, k) of a's dtype, contiguous; n and k are multiples of 8, and there are up to 4096 groups.
        group_end: (num_groups,) int32, non-decreasing: group g is the rows from group_end[g - 1] (0 for the first) to
            group_end[g]. `RoutingMap.expert_end` has this form. An end behind the last row counts as the last row. An
            end before that of an earlier group, or before row 0, gives an empty group.

    Returns:
        (num_rows, n) of a's dtype, summed in float32; 0 in rows after the last group.
    """
    num_rows, num_groups, n, k = check_product(a, b, group_end)
    d = a.new_empty(num_rows, n)
    if splits_few_rows(a, grouped=True):
        launch_few_rows(a, b, group_end, None, d)
        return d
    launch(PRODUCT, (n, k, num_groups, True, a.dtype), a, b, group_end, d, num_workers(a))
    return d


# Cases --------------------------------------------------------------------------------------


BF16 = torch.bfloat16
SMOKE = (
    grid(num_rows=[0, 1, 150], n=[72], k=[72], num_groups=[3], dtype=[BF16])
    + grid(num_rows=[0, 150], n=[144], k=[72], num_groups=[3], dtype=[BF16])
    + grid(num_rows=[150], n=[136], k=[200], num_groups=[1, 5], dtype=[torch.float16], behind=[7])
    + grid(num_rows=[700], n=[64], k=[64], num_groups=[2], dtype=[BF16])
    + grid(num_rows=[256], n=[256], k=[64], num_groups=[2], dtype=[BF16], alignment=[128])
)
BENCH = (
    grid(num_rows=[8192], n=[4096], k=[7168], num_groups=[8, 32], dtype=[BF16], alignment=[128], whole=[True])
    + grid(num_rows=[24576], n=[2816], k=[2048], num_groups=[64], dtype=[BF16], alignment=[128], whole=[True])
    + grid(num_rows=[24001], n=[2048], k=[1408], num_groups=[64], dtype=[BF16], whole=[True])
    + grid(num_rows=[256], n=[4096], k=[7168], num_groups=[64], dtype=[BF16], even=[True])
    + grid(num_rows=[8], n=[4096], k=[7168], num_groups=[64], dtype=[BF16], even=[True])
)

grouped_gemm.cases(
    make=random_operands,
    match=SUMS,
    smoke=SMOKE + grid(num_rows=[13], n=[24], k=[520], num_groups=[3], dtype=[BF16], behind=[3]),
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
