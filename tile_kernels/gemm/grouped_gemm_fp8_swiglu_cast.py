"""Grouped matrix product of fp8 operands, followed by SwiGLU and a cast.

    y[r, n] = silu(gate[r, n]) * up[r, n],   y_sf[r, s] = max(|y|) / 448 over group s of 128 channels,   codes y / y_sf

where gate and up are the halves of a row of `grouped_gemm_fp8`. The rows of b are those of the gate, then those of up.
A thread block owns the same 128 channels of both, which form one group of the quantized result.
"""

from torch import Tensor

from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch, num_workers
from tile_kernels.core.op import op
from tile_kernels.gemm._checks import check_fp8
from tile_kernels.gemm._macros import GROUP
from tile_kernels.gemm._samples import CODES, product_flops, random_fp8_swiglu
from tile_kernels.gemm.grouped_gemm_fp8 import BENCH, SMOKE
from tile_kernels.gemm.grouped_gemm_fp8_kernels import PRODUCT_FP8

# Op -----------------------------------------------------------------------------------------


@op(outputs='d d_sf')
def grouped_gemm_fp8_swiglu_cast(
    a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor
) -> tuple[Tensor, Tensor]:
    """`grouped_gemm_fp8` followed by SwiGLU; the result is quantized from float32 in groups of 128 channels.

    Args:
        a: as in `grouped_gemm_fp8`.
        a_sf: as in `grouped_gemm_fp8`.
        b: (num_groups, 2 * width, k), the rows of the gate first; width is a multiple of 128.
        b_sf: as in `grouped_gemm_fp8`.
        group_end: as in `grouped_gemm_fp8`.

    Returns:
        (num_rows, width) float8_e4m3fn and its scale factors (num_rows, width / 128) float32; codes of rows after the
        last group are 0.
    """
    num_rows, num_groups, n, k = check_fp8(a, a_sf, b, b_sf, group_end, 2 * GROUP)
    d = a.new_empty(num_rows, n // 2)
    d_sf = a_sf.new_empty(num_rows, n // 2 // GROUP)
    operands = a, a_sf, b, b_sf.flatten(0, 1), group_end
    launch(PRODUCT_FP8, (n, k, num_groups, True), *operands, d, d_sf, num_workers(a))
    return d, d_sf


# Cases --------------------------------------------------------------------------------------

grouped_gemm_fp8_swiglu_cast.cases(
    make=random_fp8_swiglu,
    match=CODES,
    smoke=SMOKE,
    full=grid(num_rows=[4001], n=[512, 2816], k=[1088, 2048], num_groups=[1, 7, 64, 300]),
    bench=BENCH,
    flops=product_flops,
)
