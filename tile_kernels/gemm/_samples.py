"""Inputs of the cases of matrix products, and the error bounds of their results."""

import torch
from torch import Tensor

from tile_kernels.core.flops import known
from tile_kernels.gemm._macros import FP8, GROUP
from tile_kernels.gemm.packed_weight import FORMATS

SUMS = dict(rtol=1e-2, atol=1e-2)  # float32 sums in another order, rounded to half precision
CODES = dict(rtol=0.13, atol=0.25)  # e4m3 codes differ by up to an eighth; fp8 sums keep 14 bits of their largest term


def random_ends(
    num_rows: int, num_groups: int, alignment: int = 1, behind: int = 0, whole: bool = False, even: bool = False
) -> Tensor:
    """Ends of groups of random sizes, a third of them empty, or of `even` sizes.

    At least `behind` rows follow the last group, none if `whole`.
    """
    if even:
        return (torch.arange(1, num_groups + 1) * num_rows // num_groups).int()
    cuts = torch.rand(num_groups).cumsum(0)
    ends = (cuts / cuts[-1:] * (max(num_rows - behind, 0) // alignment)).round().int() * alignment
    ends = torch.where(torch.arange(num_groups) % 3 == 1, ends.roll(1), ends).sort().values.int()
    if whole:
        ends[-1] = num_rows
    return ends


def product_flops(a: Tensor, b: Tensor, group_end: Tensor, **others: Tensor) -> int:
    """Operations of a grouped GEMM: every row is multiplied with the matrix of its group."""
    return 2 * rows_in_groups(a, group_end) * b.shape[1] * b.shape[2]


def rows_in_groups(a: Tensor, group_end: Tensor) -> int:
    """Rows that belong to a group; all rows if the ends cannot be read, in a dry run."""
    return int(group_end[-1]) if known(group_end) and group_end.numel() else a.shape[0]


def dense_flops(a: Tensor, b: Tensor, **others: Tensor) -> int:
    """Operations of a dense product."""
    return 2 * a.shape[0] * b.shape[0] * b.shape[1]


def random_operands(num_rows: int, n: int, k: int, num_groups: int, dtype: torch.dtype, **ends) -> dict:
    """Arguments of a product in half precision."""
    a, b = torch.randn(num_rows, k, dtype=dtype), torch.randn(num_groups, n, k, dtype=dtype) / k**0.5
    return dict(a=a, b=b, group_end=random_ends(num_rows, num_groups, **ends))


def random_gradient(**case) -> dict:
    """The same, with the gradient of the result."""
    made = random_operands(**case)
    return dict(dd=torch.randn(made['a'].shape[0], made['b'].shape[1], dtype=made['a'].dtype), **made)


def random_fp8(num_rows: int, n: int, k: int, num_groups: int, **ends) -> dict:
    """Arguments of a product of fp8 codes."""
    return dict(
        a=torch.randn(num_rows, k).to(FP8),
        a_sf=torch.rand(num_rows, -(-k // GROUP)) + 0.5,
        b=torch.randn(num_groups, n, k).to(FP8),
        b_sf=(torch.rand(num_groups, -(-n // GROUP), -(-k // GROUP)) + 0.5) / k**0.5,
        group_end=random_ends(num_rows, num_groups, **ends),
    )


def random_fp8_swiglu(**case) -> dict:
    """The same for SwiGLU; the scale factors of up are large enough to give results clearly above 0."""
    made = random_fp8(**case)
    gate_sf, up_sf = made['b_sf'].chunk(2, dim=1)
    return made | dict(b_sf=torch.cat((gate_sf, up_sf * 4096), dim=1))


def random_packed(n: int, k: int, fmt: str, scale_dtype: torch.dtype, with_zero: bool, lead: tuple = ()) -> dict:
    """Tensors of packed weights with random codes; numbers have a size of about 1 / sqrt(k)."""
    form = FORMATS[fmt]
    rows, cols = form.tiles(n, k)
    codes = torch.randint(-(2**31), 2**31 - 1, (*lead, rows, cols, 32, 4), dtype=torch.int32)
    if form.element == 'e4m3':
        codes = codes & 0x77777777  # no NaN
    shape = (*lead, *form.scale_shape(n, k))
    size = {'u4': 0.2, 's8': 1 / 64, 'e4m3': 1 / 64, 'e2m1': 0.4}[form.element] / k**0.5
    if form.factor == 'ue8m0':
        scale = torch.randint(118, 126, shape, dtype=torch.uint8)
    elif form.factor == 'e4m3':
        scale = (torch.rand(shape) + 0.5).to(FP8).view(torch.uint8)
    else:
        scale = ((torch.rand(shape) + 0.5) * size).to(scale_dtype if form.factor == 'any' else torch.float32)
    zero = torch.randint(16, shape, dtype=torch.int16) if with_zero else None
    whole = (torch.rand(lead or (1,)) + 0.5) * size if form.factor == 'e4m3' else None
    return dict(codes=codes, scale=scale, zero=zero, whole=whole)
