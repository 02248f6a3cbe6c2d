"""Dense matrix product: a grouped product of one group.

    d[m, n] = sum_k a[m, k] * b[n, k]        D = A @ B.T, as `nn.functional.linear` has it

The kernels are those of the grouped products; tiles are taken in bands, so that operands stay in the L2 cache. The sum
over k is never split: a product with few rows and few columns leaves SMs idle.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.op import op
from tile_kernels.gemm._groups import DENSE, FP8, GROUP
from tile_kernels.gemm._operands import HALVES, SUMS, check_operands, launch_product
from tile_kernels.gemm.grouped_gemm import DW, PRODUCT
from tile_kernels.gemm.grouped_gemm_fp8 import PRODUCT_FP8


@op(outputs='da db')
def gemm_bwd(dd: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gemm`: da = dd @ b and db = dd.T @ a.

    Args:
        dd: (m, n) gradient of the result.
        a: as in `gemm`.
        b: as there.

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
    launch_product(PRODUCT, (k, n, DENSE, False, dd.dtype), dd, b.view(1, n, k), None, da)
    launch_product(DW, (n, k, DENSE, dd.dtype), dd, a, None, db.view(1, n, k))
    return da, db


@op(outputs='d', backward=gemm_bwd)
def gemm(a: Tensor, b: Tensor) -> Tensor:
    """The product D = A @ B.T of matrices in half precision, summed in float32.

    Args:
        a: (m, k) bfloat16 or float16, contiguous.
        b: (n, k) of a's dtype, contiguous; n and k are multiples of 8.

    Returns:
        (m, n) of a's dtype.
    """
    m, k = check.shape(a, 'a', 'm k', dtype=HALVES)
    n, _ = check.shape(b, 'b', 'n k', dtype=a.dtype, k=k)
    check_operands((n, k), a=a, b=b)
    d = a.new_empty(m, n)
    launch_product(PRODUCT, (n, k, DENSE, True, a.dtype), a, b.view(1, n, k), None, d)
    return d


@op(outputs='d')
def gemm_fp8(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor) -> Tensor:
    """The product D = A @ B.T of e4m3 codes with scale factors, in groups of 128 summed in float32.

    Args:
        a: (m, k) float8_e4m3fn, contiguous, k a multiple of 16.
        a_sf: (m, ceil(k / 128)) float32; `per_token_cast(x, 'e4m3_1x128_f32')` gives both.
        b: (n, k) float8_e4m3fn, contiguous, n a multiple of 8.
        b_sf: (ceil(n / 128), ceil(k / 128)) float32; `per_block_cast(w, 'e4m3_128x128_f32')` gives both.

    Returns:
        (m, n) bfloat16.
    """
    m, k = check.shape(a, 'a', 'm k', dtype=FP8)
    n, _ = check.shape(b, 'b', 'n k', dtype=FP8, k=k)
    k_groups = -(-k // GROUP)
    check.packed(a_sf, 'a_sf', 'm k_groups', dtype=torch.float32, m=m, k_groups=k_groups)
    check.packed(b_sf, 'b_sf', 'n_groups k_groups', dtype=torch.float32, n_groups=-(-n // GROUP), k_groups=k_groups)
    check_operands((k,), a=a, b=b)
    check.same_device(a=a, a_sf=a_sf, b_sf=b_sf)
    check.multiple(n, 8, 'the rows of b')
    d = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    launch_product(PRODUCT_FP8, (n, k, DENSE, False), a, a_sf, b.view(1, n, k), b_sf, None, d, None)
    return d


# Cases --------------------------------------------------------------------------------------


def _make(m: int, n: int, k: int, dtype: torch.dtype) -> dict:
    return dict(a=torch.randn(m, k, dtype=dtype), b=torch.randn(n, k, dtype=dtype) / k**0.5)


def _make_bwd(m: int, n: int, k: int, dtype: torch.dtype) -> dict:
    return dict(dd=torch.randn(m, n, dtype=dtype), **_make(m, n, k, dtype))


def _make_fp8(m: int, n: int, k: int) -> dict:
    return dict(
        a=torch.randn(m, k).to(FP8),
        a_sf=torch.rand(m, -(-k // GROUP)) + 0.5,
        b=torch.randn(n, k).to(FP8),
        b_sf=(torch.rand(-(-n // GROUP), -(-k // GROUP)) + 0.5) / k**0.5,
    )


def _flops(a: Tensor, b: Tensor, **others: Tensor) -> int:
    return 2 * a.shape[0] * b.shape[0] * b.shape[1]


BF16 = torch.bfloat16
SMOKE = grid(m=[0, 1, 200], n=[136], k=[72], dtype=[BF16]) + grid(m=[200], n=[72], k=[136], dtype=[torch.float16])
BENCH = (
    grid(m=[8192], n=[8192], k=[8192], dtype=[BF16])
    + grid(m=[4096], n=[4096], k=[7168], dtype=[BF16])
    + grid(m=[4001], n=[2816], k=[2048], dtype=[BF16])
    + grid(m=[64], n=[7168], k=[2048], dtype=[BF16])
)
FULL = grid(m=[1, 129, 4001], n=[8, 2568], k=[8, 1096], dtype=[BF16])
gemm.cases(make=_make, match=SUMS, smoke=SMOKE, full=FULL, bench=BENCH, flops=_flops)
gemm_bwd.cases(
    make=_make_bwd, match=SUMS, smoke=SMOKE, bench=BENCH[1:3], flops=lambda dd, **operands: 2 * _flops(**operands)
)
gemm_fp8.cases(
    make=_make_fp8,
    match=SUMS,
    smoke=grid(m=[0, 1, 200], n=[136], k=[144]),
    full=grid(m=[1, 129, 4001], n=[8, 2568], k=[16, 1104]),
    bench=grid(m=[8192], n=[2048], k=[7168]) + grid(m=[8192], n=[8192], k=[8192]) + grid(m=[64], n=[7168], k=[2048]),
    flops=_flops,
)
