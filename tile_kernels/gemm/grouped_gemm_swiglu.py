"""Grouped matrix product followed by SwiGLU; gate and up are never written to memory.

    d[r, n] = silu(gate[r, n]) * up[r, n]       gate = a[r] @ b[g, : width].T,  up = a[r] @ b[g, width :].T

for the group g of row r; see `grouped_gemm`. A thread block multiplies its rows with `block_n` rows of the gate and the
same rows of the up matrix. So both sums of an output are in the registers of one thread.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.launch import launch, num_workers
from tile_kernels.core.op import op
from tile_kernels.gemm._checks import check_product
from tile_kernels.gemm._macros import FALLBACK, WARPGROUP_ROLES
from tile_kernels.gemm._samples import SUMS, product_flops, random_operands
from tile_kernels.gemm.grouped_gemm_kernels import build_mma_product, build_product

# Config -------------------------------------------------------------------------------------


def choose(n: int, k: int, num_groups: int, dtype: torch.dtype, num_rows: int) -> dict:
    """Wide tiles read each operand less often; with few rows per group, small ones waste fewer products."""
    if num_rows <= 64 * num_groups:
        return dict(block_m=64, block_n=64, ring=4)
    return dict(block_m=128, block_n=128, ring=4 if num_groups <= 256 else 3)  # the tile counts also need shared memory


# Kernels ------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(block_m=(64, 128), block_n=(64, 128), ring=(3, 4, 6)), **WARPGROUP_ROLES)
def grouped_gemm_swiglu_kernel(n: int, k: int, num_groups: int, dtype: torch.dtype, **config: int):
    """See `build_product`."""
    product = build_product(n, k, num_groups, True, dtype, swiglu=True, **config)
    return product.with_attr('global_symbol', 'grouped_gemm_swiglu')


@kernel(**FALLBACK)
def portable_swiglu_kernel(n: int, k: int, num_groups: int, dtype: torch.dtype):
    """See `build_mma_product`."""
    return build_mma_product(n, k, num_groups, True, dtype, swiglu=True).with_attr('global_symbol', 'portable_swiglu')


# Op -----------------------------------------------------------------------------------------


@op(outputs='d', instead='gemm.grouped_gemm and activation.swiglu_forward')
def grouped_gemm_swiglu(a: Tensor, b: Tensor, group_end: Tensor) -> Tensor:
    """SwiGLU of the grouped matrix product, computed from float32 sums; not differentiable.

    Args:
        a: (num_rows, k) bfloat16 or float16, contiguous; the rows of a group are contiguous.
        b: (num_groups, 2 * width, k) of a's dtype, contiguous, the rows of the gate first; all extents multiples of 8.
        group_end: (num_groups,) int32, the end of the rows of each group; see `grouped_gemm`.

    Returns:
        (num_rows, width) of a's dtype; 0 in rows after the last group.
    """
    num_rows, num_groups, n, k = check_product(a, b, group_end)
    check.multiple(n, 16, 'the rows of a matrix of b')
    d = a.new_empty(num_rows, n // 2)
    kernels = grouped_gemm_swiglu_kernel, portable_swiglu_kernel
    launch(kernels, (n, k, num_groups, a.dtype), a, b, group_end, d, num_workers(a))
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
    + grid(num_rows=[256], n=[4096], k=[7168], num_groups=[64], dtype=[BF16], even=[True]),
    flops=product_flops,
)
