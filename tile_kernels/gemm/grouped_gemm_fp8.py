"""Grouped matrix product of fp8 operands with scale factors.

    d[r, n] = sum_s a_sf[r, s] * b_sf[g, n // 128, s] * sum_(k in group s of 128) a[r, k] * b[g, n, k]

for the group g of row r; see `grouped_gemm`. The tensor cores sum 128 products into fresh registers. That sum is scaled
and added in float32. So the precision of the fp8 accumulator limits neither the scale factors nor the length of the
sum.
"""

import torch
from torch import Tensor

from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch, num_workers
from tile_kernels.core.op import op
from tile_kernels.gemm._checks import check_fp8
from tile_kernels.gemm._samples import SUMS, product_flops, random_fp8
from tile_kernels.gemm.grouped_gemm_fp8_kernels import PRODUCT_FP8

# Op -----------------------------------------------------------------------------------------


@op(outputs='d', instead='gemm.grouped_gemm')
def grouped_gemm_fp8(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor) -> Tensor:
    """The product of every row with the matrix of its group, of e4m3 operands with scale factors.

    Args:
        a: (num_rows, k) float8_e4m3fn, contiguous, k a multiple of 16; the rows of a group are contiguous.
        a_sf: (num_rows, ceil(k / 128)) float32; `per_token_cast(x, 'e4m3_1x128_f32')` gives both.
        b: (num_groups, n, k) float8_e4m3fn, contiguous, n a multiple of 8.
        b_sf: (num_groups, ceil(n / 128), ceil(k / 128)) float32, one for each block of 128 x 128.
        group_end: (num_groups,) int32, the end of the rows of each group; see `grouped_gemm`.

    Returns:
        (num_rows, n) bfloat16, summed in float32; 0 in rows after the last group.
    """
    num_rows, num_groups, n, k = check_fp8(a, a_sf, b, b_sf, group_end, 8)
    d = torch.empty((num_rows, n), dtype=torch.bfloat16, device=a.device)
    operands = a, a_sf, b, b_sf.flatten(0, 1), group_end
    launch(PRODUCT_FP8, (n, k, num_groups, False), *operands, d, None, num_workers(a))
    return d


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
