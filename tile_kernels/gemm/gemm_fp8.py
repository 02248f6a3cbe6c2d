"""Dense matrix product of fp8 operands with scale factors: a grouped GEMM of one group.

    d[m, n] = sum_s a_sf[m, s] * b_sf[n // 128, s] * sum_(k in group s of 128) a[m, k] * b[n, k]

The kernels are those of `grouped_gemm_fp8`. With up to 16 rows the sum over k is split, as in `gemm`.
"""

from typing import cast

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantTensor
from tile_kernels.core.launch import launch, num_workers
from tile_kernels.core.op import op
from tile_kernels.gemm._checks import check_operands, launch_few_rows, splits_few_rows
from tile_kernels.gemm._macros import DENSE, FP8, GROUP
from tile_kernels.gemm._samples import SUMS, dense_flops
from tile_kernels.gemm.grouped_gemm_fp8_kernels import PRODUCT_FP8

# Op -----------------------------------------------------------------------------------------


@op(outputs='d', instead='gemm.gemm')
def _gemm_fp8(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor) -> Tensor:
    """The product of codes and factors; see the public function."""
    m, k = check.shape(a, 'a', 'm k', dtype=FP8)
    n, _ = check.shape(b, 'b', 'n k', dtype=FP8, k=k)
    k_groups = -(-k // GROUP)
    check.packed(a_sf, 'a_sf', 'm k_groups', dtype=torch.float32, m=m, k_groups=k_groups)
    check.packed(b_sf, 'b_sf', 'n_groups k_groups', dtype=torch.float32, n_groups=-(-n // GROUP), k_groups=k_groups)
    check_operands((k,), a=a, b=b)
    check.same_device(a=a, a_sf=a_sf, b_sf=b_sf)
    check.multiple(n, 8, 'the rows of b')
    d = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    if splits_few_rows(a):
        launch_few_rows(a, b.view(1, n, k), None, (a_sf, b_sf), d)
        return d
    operands = a, a_sf, b.view(1, n, k), b_sf
    launch(PRODUCT_FP8, (n, k, DENSE, False), *operands, None, d, None, num_workers(a))
    return d


@_gemm_fp8.public
def gemm_fp8(
    a: Tensor | QuantTensor, a_sf: Tensor | QuantTensor, b: Tensor | None = None, b_sf: Tensor | None = None
) -> Tensor:
    """The product D = A @ B.T of e4m3 codes with scale factors; groups of 128 are summed in float32.

    `gemm_fp8(qa, qb)` takes two quantized tensors, and `gemm_fp8(a, a_sf, b, b_sf)` their parts.

    Args:
        a: (m, k) float8_e4m3fn, contiguous, k a multiple of 16; or `per_token_cast(x, 'e4m3_1x128_f32')`. More leading
            dimensions are allowed; the result has them too.
        a_sf: (m, ceil(k / 128)) float32; or, after a quantized `a`, `per_block_cast(w, 'e4m3_128x128_f32')`.
        b: (n, k) float8_e4m3fn, contiguous, n a multiple of 8.
        b_sf: (ceil(n / 128), ceil(k / 128)) float32.

    Returns:
        (m, n) bfloat16.
    """
    if isinstance(a, QuantTensor):
        if not isinstance(a_sf, QuantTensor) or b is not None or b_sf is not None:
            check.fail('a_sf', 'must be the other quantized tensor, alone, after a quantized a', check.describe(a_sf))
        for name, q, fmt in (('a', a, 'e4m3_1x128_f32'), ('a_sf', a_sf, 'e4m3_128x128_f32')):
            if q.fmt.name.replace('f32p2', 'f32') != fmt:
                check.fail(name, f'must have the format {fmt}', str(q.fmt))
        (a, a_sf), (b, b_sf) = a, a_sf
    codes, factors, matrix, blocks = (cast('Tensor', x) for x in (a, a_sf, b, b_sf))
    if check.tensor(codes, 'a').dim() <= 2:
        return gemm_fp8.call(codes, factors, matrix, blocks)
    d = gemm_fp8.call(codes.flatten(0, -2), check.tensor(factors, 'a_sf').flatten(0, -2), matrix, blocks)
    return d.unflatten(0, codes.shape[:-1])


# Cases --------------------------------------------------------------------------------------


def _make(m: int, n: int, k: int) -> dict:
    return dict(
        a=torch.randn(m, k).to(FP8),
        a_sf=torch.rand(m, -(-k // GROUP)) + 0.5,
        b=torch.randn(n, k).to(FP8),
        b_sf=(torch.rand(-(-n // GROUP), -(-k // GROUP)) + 0.5) / k**0.5,
    )


gemm_fp8.cases(
    make=_make,
    match=SUMS,
    smoke=grid(m=[0, 1, 200], n=[136], k=[144]) + grid(m=[11], n=[136], k=[2192]),
    full=grid(m=[1, 129, 4001], n=[8, 2568], k=[16, 1104]),
    bench=grid(m=[8192], n=[2048], k=[7168])
    + grid(m=[8192], n=[8192], k=[8192])
    + grid(m=[64], n=[7168], k=[2048])
    + grid(m=[16], n=[7168], k=[7168]),
    flops=dense_flops,
)
