"""Grouped matrix product with packed weights of 4 or 8 bits: every row is multiplied with the matrix of its group.

    d[r, n] = sum_k a[r, k] * W[g, n, k]        for group_end[g - 1] <= r < group_end[g]

Kernels and formats are those of `gemm_dequant`; groups are those of `grouped_gemm`. Rows after the last group give 0.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.op import op
from tile_kernels.gemm._checks import HALVES, check_groups
from tile_kernels.gemm._samples import SUMS, random_ends, random_packed, rows_in_groups
from tile_kernels.gemm.gemm_dequant import check_packed, check_rows, launch_gradient, launch_product
from tile_kernels.gemm.packed_weight import PackedWeight

# Ops ----------------------------------------------------------------------------------------


@op(outputs='da')
def grouped_gemm_dequant_bwd(
    dd: Tensor,
    a: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    whole: Tensor | None,
    group_end: Tensor,
    fmt: str,
    n: int,
) -> Tensor:
    """The gradient of `grouped_gemm_dequant` with respect to a, with the matrices in a buffer in half precision.

    Args:
        dd: (num_rows, n) gradient of the result.
        a: as in `grouped_gemm_dequant`; only its shape is used.
        codes: as there.
        scale: as there.
        zero: as there.
        whole: as there.
        group_end: as there.
        fmt: as there.
        n: as there.

    Returns:
        (num_rows, k) of a's dtype, summed in float32; 0 in rows after the last group.
    """
    num_rows, k = check.shape(a, 'a', 'num_rows k', dtype=HALVES)
    check.shape(dd, 'dd', 'num_rows n', dtype=a.dtype, num_rows=num_rows, n=n)
    check_packed(codes, scale, zero, whole, fmt, n, k, check.tensor(group_end, 'group_end').shape[0])
    check_groups(group_end, codes.shape[0], a)
    check.same_device(dd=dd, a=a, codes=codes, scale=scale, zero=zero, whole=whole)
    check.contiguous(dd, 'dd')
    da = torch.empty((num_rows, k), dtype=a.dtype, device=a.device)
    if num_rows > 0:
        launch_gradient(dd, [codes, scale, zero], whole, group_end, da, fmt)
    return da


@op(outputs='d', backward=grouped_gemm_dequant_bwd)
def _grouped_gemm_dequant(
    a: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    whole: Tensor | None,
    group_end: Tensor,
    fmt: str,
    n: int,
) -> Tensor:
    """The product of every row with the packed matrix of its group; see `grouped_gemm_dequant`.

    Args:
        a: (num_rows, k) bfloat16 or float16; rows may be strided.
        codes: tensors of a `PackedWeight` of (num_groups, n, k), as its attributes.
        scale: as above.
        zero: as above.
        whole: its `global_scale`.
        group_end: (num_groups,) int32, as in `grouped_gemm`.
        fmt: its format.
        n: rows of a matrix.

    Returns:
        (num_rows, n) of a's dtype, summed in float32; 0 in rows after the last group.
    """
    num_rows, k = check.shape(a, 'a', 'num_rows k', dtype=HALVES)
    check_rows(a)
    num_groups = check.tensor(group_end, 'group_end').shape[0]
    check.at_least(num_groups, 1, 'num_groups')
    check_packed(codes, scale, zero, whole, fmt, n, k, num_groups)
    check_groups(group_end, num_groups, a)
    check.same_device(a=a, codes=codes, scale=scale, zero=zero, whole=whole)
    d = torch.empty((num_rows, n), dtype=a.dtype, device=a.device)
    launch_product(a, [codes, scale, zero], whole, None, group_end, d, fmt)
    return d


# Public function ----------------------------------------------------------------------------


@_grouped_gemm_dequant.public
def grouped_gemm_dequant(a: Tensor, weight: PackedWeight, group_end: Tensor) -> Tensor:
    """The product of every row with the packed matrix of its group, summed in float32.

    Args:
        a: (num_rows, k) bfloat16 or float16; the rows of a group are contiguous.
        weight: a `PackedWeight` of (num_groups, n, k) without `perm`. It is a constant, without gradient.
        group_end: (num_groups,) int32, non-decreasing: group g is the rows from group_end[g - 1] (0 for the first) to
            group_end[g]. Other ends are treated as in `grouped_gemm`.

    Returns:
        (num_rows, n) of a's dtype; 0 in rows after the last group.
    """
    if not isinstance(weight, PackedWeight):
        check.fail('weight', 'must be a PackedWeight', check.describe(weight), hint='pack_weight makes one')
    if weight.codes.dim() != 5:
        check.fail('weight', 'must be (num_groups, n, k)', repr(weight), hint='gemm_dequant takes one matrix')
    if weight.perm is not None:
        check.fail('weight', 'must have no perm', 'one')
    if check.tensor(a, 'a').dim() != 2 or a.shape[1] != weight.k:
        check.fail('a', f'must be (num_rows, {weight.k})', check.describe(a))
    (a,) = autocast(a)
    parts = (weight.codes, weight.scale, weight.zero, weight.global_scale)
    return grouped_gemm_dequant.call(a, *parts, group_end, weight.fmt, weight.n)


# Cases --------------------------------------------------------------------------------------

BF16, F16 = torch.bfloat16, torch.float16


def _make(
    num_rows: int, n: int, k: int, num_groups: int, fmt: str, dtype: torch.dtype, zero: bool = False, **ends: int
) -> dict:
    return dict(
        a=torch.randn(num_rows, k, dtype=dtype),
        **random_packed(n, k, fmt, dtype, zero, (num_groups,)),
        group_end=random_ends(num_rows, num_groups, **ends),  # type: ignore[arg-type]
        fmt=fmt,
        n=n,
    )


def _make_bwd(**case: int) -> dict:
    made = _make(**case)  # type: ignore[arg-type]
    return dict(dd=torch.randn(made['a'].shape[0], made['n'], dtype=made['a'].dtype), **made)


def _flops(a: Tensor, n: int, group_end: Tensor, **others: Tensor) -> int:
    return 2 * rows_in_groups(a, group_end) * n * a.shape[1]


SMOKE = (
    grid(num_rows=[0, 13], n=[24], k=[64], num_groups=[5], fmt=['u4_1x64'], dtype=[BF16], zero=[True], behind=[2])
    + grid(num_rows=[9], n=[135], k=[1040], num_groups=[3], fmt=['e2m1_1x16_e4m3'], dtype=[F16])
    + grid(num_rows=[70], n=[72], k=[64], num_groups=[3], fmt=['e2m1_1x32_ue8m0', 's8_1xk'], dtype=[BF16], behind=[3])
    + grid(num_rows=[20], n=[136], k=[136], num_groups=[2], fmt=['e4m3_128x128_f32'], dtype=[BF16])
)
BENCH = grid(
    num_rows=[8, 256], n=[4096], k=[7168], num_groups=[64], fmt=['u4_1x128'], dtype=[BF16], even=[True]
) + grid(num_rows=[8192], n=[4096], k=[7168], num_groups=[32], fmt=['e2m1_1x32_ue8m0'], dtype=[BF16], whole=[True])
_grouped_gemm_dequant.cases(
    make=_make,
    match=SUMS,
    smoke=SMOKE,
    full=grid(num_rows=[16, 17, 4001], n=[577], k=[1152], num_groups=[7, 300], fmt=['u4_1x128'], dtype=[BF16, F16]),
    bench=BENCH,
    flops=_flops,
)
grouped_gemm_dequant_bwd.cases(
    make=_make_bwd, match=SUMS, smoke=SMOKE[:3], bench=BENCH[-1:], flops=lambda dd, **others: _flops(**others)
)
