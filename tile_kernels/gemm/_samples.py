"""Inputs of the cases of matrix products, and the error bounds of their results."""

import torch
from torch import Tensor

from tile_kernels.gemm._macros import FP8, GROUP

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
    ends = (cuts / cuts[-1:] * ((num_rows - behind) // alignment)).round().int() * alignment
    ends = torch.where(torch.arange(num_groups) % 3 == 1, ends.roll(1), ends).sort().values.int()
    if whole:
        ends[-1] = num_rows
    return ends


def product_flops(a: Tensor, b: Tensor, group_end: Tensor, **others: Tensor) -> int:
    """Operations of a grouped GEMM: every row is multiplied with the matrix of its group."""
    return 2 * int(group_end[-1]) * b.shape[1] * b.shape[2]


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
