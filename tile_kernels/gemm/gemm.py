"""Dense matrix product: a grouped GEMM of one group.

    d[m, n] = sum_k a[m, k] * b[n, k]        D = A @ B.T, as `nn.functional.linear` has it

The kernels are those of the grouped GEMMs. Thread blocks process tiles in bands, so that operands stay in the L2 cache.
With up to 16 rows the floor is reading b once. The sum over k is split, and its parts are added in a fixed order.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch, num_workers
from tile_kernels.core.op import op
from tile_kernels.gemm._checks import HALVES, check_operands, launch_few_rows, splits_few_rows
from tile_kernels.gemm._macros import DENSE
from tile_kernels.gemm._samples import SUMS, dense_flops
from tile_kernels.gemm.grouped_gemm_bwd_kernels import DW
from tile_kernels.gemm.grouped_gemm_kernels import PRODUCT

# Ops ----------------------------------------------------------------------------------------


@op(outputs='da db')
def gemm_bwd(dd: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gemm`: da = dd @ b and db = dd.T @ a.

    Args:
        dd: (m, n) gradient of the result.
        a: as in `gemm`.
        b: as in `gemm`.

    Returns:
        Gradients of `a` and `b` in their dtype, summed in float32.
    """
    m, n = check.shape(dd, 'dd', 'm n', dtype=HALVES)
    _, k = check.shape(a, 'a', 'm k', dtype=dd.dtype, m=m)
    check.shape(b, 'b', 'n k', dtype=dd.dtype, n=n, k=k)
    check_operands((n, k), dd=dd, a=a, b=b)
    if m == 0:
        return torch.empty_like(a), torch.zeros_like(b)
    da, db = torch.empty_like(a), torch.empty_like(b)
    launch(PRODUCT, (k, n, DENSE, False, dd.dtype), dd, b.view(1, n, k), None, da, num_workers(dd))
    launch(DW, (n, k, DENSE, dd.dtype), dd, a, None, db.view(1, n, k), num_workers(dd))
    return da, db


@op(outputs='d', backward=gemm_bwd)
def _gemm(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices; see the public function."""
    m, k = check.shape(a, 'a', 'm k', dtype=HALVES)
    n, _ = check.shape(b, 'b', 'n k', dtype=a.dtype, k=k)
    check_operands((n, k), a=a, b=b)
    d = a.new_empty(m, n)
    if splits_few_rows(a):
        launch_few_rows(a, b.view(1, n, k), None, None, d)
        return d
    launch(PRODUCT, (n, k, DENSE, True, a.dtype), a, b.view(1, n, k), None, d, num_workers(a))
    return d


@_gemm.public
def gemm(a: Tensor, b: Tensor) -> Tensor:
    """The product D = A @ B.T of matrices in half precision, summed in float32.

    Args:
        a: (m, k) bfloat16 or float16, contiguous. More leading dimensions are allowed; the result has them too.
        b: (n, k) of a's dtype, contiguous; n and k are multiples of 8.

    Returns:
        (m, n) of a's dtype. Autocast converts both operands to its dtype, as for `torch.matmul`.
    """
    a, b = autocast(check.tensor(a, 'a'), check.tensor(b, 'b'))
    if a.dim() <= 2:
        return gemm.call(a, b)
    return gemm.call(a.flatten(0, -2), b).unflatten(0, a.shape[:-1])


# Cases --------------------------------------------------------------------------------------


def _make(m: int, n: int, k: int, dtype: torch.dtype) -> dict:
    return dict(a=torch.randn(m, k, dtype=dtype), b=torch.randn(n, k, dtype=dtype) / k**0.5)


def _make_bwd(m: int, n: int, k: int, dtype: torch.dtype) -> dict:
    return dict(dd=torch.randn(m, n, dtype=dtype), **_make(m, n, k, dtype))


BF16 = torch.bfloat16
SMOKE = grid(m=[0, 1, 200], n=[136], k=[72], dtype=[BF16]) + grid(m=[200], n=[72], k=[136], dtype=[torch.float16])
FEW_ROWS = grid(m=[16], n=[24], k=[520], dtype=[BF16]) + grid(m=[9], n=[8], k=[8], dtype=[torch.float16])
BENCH = (
    grid(m=[8192], n=[8192], k=[8192], dtype=[BF16])
    + grid(m=[4096], n=[4096], k=[7168], dtype=[BF16])
    + grid(m=[4001], n=[2816], k=[2048], dtype=[BF16])
    + grid(m=[64], n=[7168], k=[2048], dtype=[BF16])
    + grid(m=[1, 16], n=[7168], k=[7168], dtype=[BF16])
)
FULL = grid(m=[1, 129, 4001], n=[8, 2568], k=[8, 1096], dtype=[BF16])
gemm.cases(make=_make, match=SUMS, smoke=SMOKE + FEW_ROWS, full=FULL, bench=BENCH, flops=dense_flops)
gemm_bwd.cases(
    make=_make_bwd, match=SUMS, smoke=SMOKE, bench=BENCH[1:3], flops=lambda dd, **operands: 2 * dense_flops(**operands)
)
