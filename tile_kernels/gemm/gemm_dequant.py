"""Product with packed weights of 4 or 8 bits.

    d[m, n] = sum_k a[m, k] * W[n, k] (+ bias[n])
    W[n, k] = (code[n, k] - zero[n, k // group]) * scale[n, k // group]

`packed_weight` has the formats and the layout. With up to 16 rows the floor is reading the codes once. Warps convert
codes in registers, and the sum over k is split over warps and blocks in a fixed order. With more rows tiles of W are
converted to half precision in shared memory, and the product is compute bound.

The gradient of a is dd @ W: W is written to a buffer in half precision first. Weights are constants.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch, num_workers
from tile_kernels.core.op import empty, op
from tile_kernels.gemm._checks import HALVES, has_few_rows
from tile_kernels.gemm._macros import DENSE
from tile_kernels.gemm._samples import SUMS, random_packed
from tile_kernels.gemm.gemm_dequant_kernels import (
    TILES,
    dequant_matrix_kernel,
    dequant_rows_kernel,
    row_splits,
    strip_splits,
)
from tile_kernels.gemm.gemm_kernels import sum_splits_kernel
from tile_kernels.gemm.grouped_gemm_kernels import PRODUCT
from tile_kernels.gemm.packed_weight import FORMATS, SCALES, PackedWeight

# Checks -------------------------------------------------------------------------------------


def check_packed(
    codes: Tensor, scale: Tensor, zero: Tensor | None, whole: Tensor | None, fmt: str, n: int, k: int, num_matrices: int
) -> None:
    """Check tensors of packed weights, with a leading dimension of matrices unless it is 0."""
    check.one_of(fmt, FORMATS, 'fmt')
    form = FORMATS[fmt]
    check.at_least(n, 1, 'n')
    check.multiple(k, form.multiple, 'k')
    lead = (num_matrices,) if num_matrices else ()
    rows, cols = form.tiles(n, k)
    bytes_of = form.factor in ('ue8m0', 'e4m3')
    scales = (torch.uint8,) if bytes_of else (torch.float32,) if form.factor == 'f32' else SCALES
    shape = form.scale_shape(n, k)
    for name, x, wanted, dtypes in (
        ('codes', codes, (*lead, rows, cols, 32, 4), (torch.int32,)),
        ('scale', scale, (*lead, *shape), scales),
        ('zero', zero, (*lead, *shape), (torch.int16,)),
        ('whole', whole, lead or (1,), (torch.float32,)),
    ):
        if x is None:
            continue
        check.dtype(check.tensor(x, name), name, dtypes)
        if tuple(x.shape) != wanted:
            check.fail(name, f'must be {wanted} for {fmt} of ({n}, {k})', check.describe(x))
        check.contiguous(x, name)
        if check.vector_bytes(x.view(-1)) < 16 and x is not whole:
            check.fail(name, 'must begin at a multiple of 16 bytes', check.describe(x), hint=f'pass {name}.clone()')
    if zero is not None and form.element != 'u4':
        check.fail('zero', f'must be None for {fmt}', check.describe(zero))
    if (whole is not None) != (form.factor == 'e4m3'):
        check.fail('whole', f'must {"come with" if whole is None else "be None for"} {fmt}', check.describe(whole))


def check_rows(a: Tensor, name: str = 'a') -> None:
    """Rows may be strided, in multiples of 16 bytes."""
    check.unit_stride(a, name)
    check.multiple(a.shape[1] * a.element_size(), 16, f'the bytes of a row of {name}')
    if check.vector_bytes(a) < 16:
        check.fail(
            name, 'must have rows that begin at multiples of 16 bytes', check.describe(a), f'pass {name}.clone()'
        )


def launch_product(
    a: Tensor,
    parts: list[Tensor | None],
    whole: Tensor | None,
    bias: Tensor | None,
    group_end: Tensor | None,
    d: Tensor,
    fmt: str,
) -> None:
    """The product with codes, factors and zero points of (num_groups, n, k)."""
    n, k = d.shape[1], a.shape[1]
    _, scale, zero = parts
    num_groups = DENSE if group_end is None else group_end.shape[0]
    common = n, k, num_groups, fmt, a.dtype, scale.dtype, zero is not None  # type: ignore[union-attr]
    bias_dtype = None if bias is None else bias.dtype
    few = has_few_rows(a)
    splits = row_splits(n, k, FORMATS[fmt]) if few else strip_splits(n, k, a.shape[0], num_groups)
    part = None if splits == 1 else torch.empty((splits, *d.shape), dtype=torch.float32, device=d.device)
    added = (bias_dtype, bias) if part is None else (None, None)
    if few:
        launch(dequant_rows_kernel, (*common, added[0]), a, *parts, whole, added[1], group_end, d, part)
    else:
        launch(TILES, (*common, added[0], splits), a, *parts, whole, added[1], group_end, d, part, num_workers(a))
    if part is not None:
        launch(sum_splits_kernel, (n, a.dtype, bias_dtype), part, bias, d, size=d.shape[0])


def launch_gradient(
    dd: Tensor,
    parts: list[Tensor | None],
    whole: Tensor | None,
    group_end: Tensor | None,
    da: Tensor,
    fmt: str,
) -> None:
    """Da = dd @ W: W is written to a buffer in half precision, padded to whole tiles of rows."""
    (m, n), k = dd.shape, da.shape[1]
    codes, scale, zero = parts
    num_groups = DENSE if group_end is None else group_end.shape[0]
    rows = FORMATS[fmt].tiles(n, k)[0] * 16
    dd = dd if n == rows else torch.nn.functional.pad(dd, (0, rows - n))
    matrices = codes.shape[0]  # type: ignore[union-attr]
    w = torch.empty((matrices, rows, k), dtype=da.dtype, device=da.device)
    static = n, k, matrices, fmt, da.dtype, scale.dtype, zero is not None  # type: ignore[union-attr]
    launch(dequant_matrix_kernel, static, *parts, whole, w, size=m)  # type: ignore[arg-type]
    launch(PRODUCT, (k, rows, num_groups, False, da.dtype), dd, w, group_end, da, num_workers(dd))


# Ops ----------------------------------------------------------------------------------------


@op(outputs='da')
def gemm_dequant_bwd(
    dd: Tensor, a: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, whole: Tensor | None, fmt: str, n: int
) -> Tensor:
    """The gradient of `gemm_dequant` with respect to a: da = dd @ W, with W in a buffer in half precision.

    Args:
        dd: (m, n) gradient of the result.
        a: as in `gemm_dequant`; only its shape is used.
        codes: as there.
        scale: as there.
        zero: as there.
        whole: as there.
        fmt: as there.
        n: as there.

    Returns:
        (m, k) of a's dtype, summed in float32.
    """
    m, k = check.shape(a, 'a', 'm k', dtype=HALVES)
    check.shape(dd, 'dd', 'm n', dtype=a.dtype, m=m, n=n)
    check_packed(codes, scale, zero, whole, fmt, n, k, 0)
    check.same_device(dd=dd, a=a, codes=codes, scale=scale, zero=zero, whole=whole)
    check.contiguous(dd, 'dd')
    da = torch.empty((m, k), dtype=a.dtype, device=a.device)
    if m > 0:
        launch_gradient(dd, [None if x is None else x[None] for x in (codes, scale, zero)], whole, None, da, fmt)
    return da


@op(outputs='d', backward=gemm_dequant_bwd, out=True)
def _gemm_dequant(
    a: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    whole: Tensor | None,
    bias: Tensor | None,
    fmt: str,
    n: int,
) -> Tensor:
    """The product of a with packed weights; see `gemm_dequant`.

    Args:
        a: (m, k) bfloat16 or float16; rows may be strided.
        codes: tensors of a `PackedWeight` of (n, k), as its attributes.
        scale: as above.
        zero: as above.
        whole: its `global_scale`.
        bias: (n,) of a's dtype or float32.
        fmt: its format.
        n: rows of the weight.

    Returns:
        (m, n) of a's dtype, summed in float32.
    """
    m, k = check.shape(a, 'a', 'm k', dtype=HALVES)
    check_rows(a)
    check_packed(codes, scale, zero, whole, fmt, n, k, 0)
    if bias is not None:
        check.packed(bias, 'bias', 'n', (a.dtype, torch.float32), n=n)
    check.same_device(a=a, codes=codes, scale=scale, zero=zero, whole=whole, bias=bias)
    d = empty('d', (m, n), a.dtype, a.device)
    launch_product(a, [None if x is None else x[None] for x in (codes, scale, zero)], whole, bias, None, d, fmt)
    return d


# Public function ----------------------------------------------------------------------------


@_gemm_dequant.public
def gemm_dequant(a: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """The product a @ W.T (+ bias) with packed weights, summed in float32.

    Args:
        a: (m, k) bfloat16 or float16; rows may be strided by multiples of 16 bytes.
        weight: a `PackedWeight` of (n, k); see `pack_weight`. It is a constant, without gradient.
        bias: (n,) of a's dtype or float32.
        out: (m, n) of a's dtype, contiguous: where the result goes; without gradient.

    Returns:
        (m, n) of a's dtype. A weight with `perm` first permutes the channels of a by PyTorch.
    """
    if not isinstance(weight, PackedWeight):
        check.fail('weight', 'must be a PackedWeight', check.describe(weight), hint='pack_weight makes one')
    if weight.codes.dim() != 4:
        check.fail('weight', 'must be one matrix', repr(weight), hint='grouped_gemm_dequant takes several')
    if check.tensor(a, 'a').dim() != 2 or a.shape[1] != weight.k:
        check.fail('a', f'must be (m, {weight.k})', check.describe(a))
    a, bias = autocast(a, bias)
    if weight.perm is not None:
        a = a.index_select(1, weight.perm)
    given = (weight.codes, weight.scale, weight.zero, weight.global_scale)
    if out is not None:
        _gemm_dequant.out(a, *given, bias, weight.fmt, weight.n, d=out)
        return out
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        return gemm_dequant.call(a, *given, None, weight.fmt, weight.n) + bias
    return gemm_dequant.call(a, *given, bias, weight.fmt, weight.n)


# Cases --------------------------------------------------------------------------------------

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _make(
    m: int,
    n: int,
    k: int,
    fmt: str,
    dtype: torch.dtype,
    scale: torch.dtype = BF16,
    zero: bool = False,
    bias: bool = False,
) -> dict:
    return dict(
        a=torch.randn(m, k + 8, dtype=dtype)[:, :k],
        **random_packed(n, k, fmt, scale, zero),
        bias=torch.randn(n, dtype=dtype) if bias else None,
        fmt=fmt,
        n=n,
    )


def _make_bwd(**case: int) -> dict:
    made = _make(**case)  # type: ignore[arg-type]
    del made['bias']
    return dict(dd=torch.randn(made['a'].shape[0], made['n'], dtype=made['a'].dtype), **made)


SMOKE = (
    grid(m=[0, 1], n=[24], k=[128], fmt=['u4_1x64'], dtype=[BF16])
    + grid(m=[9], n=[13], k=[1152], fmt=['u4_1x128'], dtype=[BF16], zero=[True], bias=[True])
    + grid(m=[3], n=[136], k=[64], fmt=['u4_1x32'], dtype=[F16], scale=[F16], zero=[True])
    + grid(m=[2], n=[16], k=[72], fmt=['u4_1xk'], dtype=[BF16], scale=[F32], bias=[True])
    + grid(m=[2], n=[16], k=[72], fmt=['s8_1xk'], dtype=[F16], scale=[F32])
    + grid(m=[5], n=[24], k=[128], fmt=['s8_1x128', 'e2m1_1x32_ue8m0'], dtype=[BF16])
    + grid(m=[5], n=[24], k=[128], fmt=['e2m1_1x16_e4m3'], dtype=[F16])
    + grid(m=[5], n=[136], k=[200], fmt=['e4m3_128x128_f32'], dtype=[BF16])
    + grid(m=[5], n=[24], k=[200], fmt=['e4m3_1xk_f32'], dtype=[F16])
    + grid(m=[17], n=[24], k=[64], fmt=['u4_1x32'], dtype=[BF16, F16], zero=[True], bias=[True])
    + grid(m=[70], n=[135], k=[128], fmt=['s8_1x128', 'e2m1_1x32_ue8m0'], dtype=[BF16])
    + grid(m=[17], n=[24], k=[200], fmt=['e4m3_128x128_f32'], dtype=[F16])
    + grid(m=[17], n=[24], k=[80], fmt=['e2m1_1x16_e4m3'], dtype=[BF16], bias=[True])
)
SMOKE_BWD = (
    grid(m=[0, 3], n=[24], k=[128], fmt=['u4_1x64'], dtype=[BF16])
    + grid(m=[3], n=[13], k=[64], fmt=['e2m1_1x16_e4m3', 'e2m1_1x32_ue8m0'], dtype=[F16])
    + grid(m=[3], n=[13], k=[72], fmt=['s8_1xk', 'e4m3_128x128_f32', 'u4_1xk'], dtype=[BF16], scale=[F32])
)
BENCH = (
    grid(m=[1, 16, 64, 4096], n=[8192], k=[8192], fmt=['u4_1x128'], dtype=[BF16])
    + grid(m=[1], n=[8192], k=[16384], fmt=['u4_1x128'], dtype=[BF16])
    + grid(m=[1], n=[7168], k=[20480], fmt=['u4_1x128'], dtype=[BF16])
    + grid(m=[1, 4096], n=[8192], k=[8192], fmt=['s8_1x128', 'e2m1_1x32_ue8m0', 'e2m1_1x16_e4m3'], dtype=[BF16])
    + grid(m=[1], n=[8192], k=[8192], fmt=['e4m3_128x128_f32'], dtype=[BF16])
)
FULL = grid(
    m=[1, 7, 16, 17, 333], n=[8, 577, 2568], k=[2304], fmt=list(FORMATS), dtype=[BF16, F16], zero=[False]
) + grid(m=[1, 16, 100], n=[8192], k=[8192], fmt=['u4_1x128'], dtype=[BF16], zero=[True], bias=[True])


def _flops(a: Tensor, n: int, **others: Tensor) -> int:
    return 2 * a.shape[0] * n * a.shape[1]


_gemm_dequant.cases(make=_make, match=SUMS, smoke=SMOKE, full=FULL, bench=BENCH, flops=_flops)
gemm_dequant_bwd.cases(
    make=_make_bwd, match=SUMS, smoke=SMOKE_BWD, bench=BENCH[3:4], flops=lambda dd, **others: _flops(**others)
)
