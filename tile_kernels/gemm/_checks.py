"""Host code of matrix products: checks of their operands, and the launch of those with few rows."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import gpu_of, launch
from tile_kernels.gemm._macros import DENSE, FP8, GROUP
from tile_kernels.gemm.gemm_kernels import MOST_ROWS, few_rows_kernel, few_rows_splits, sum_splits_kernel

HALVES = (torch.bfloat16, torch.float16)
MAX_GROUPS = 4096


def check_operands(extents: tuple[int, ...], **operands: Tensor) -> None:
    """Check what the loads of a product require of its operands."""
    for name, x in operands.items():
        check.contiguous(x, name)
        for extent in extents:
            check.multiple(extent * x.element_size(), 16, f'the bytes of a row of {name}')
        if check.vector_bytes(x) < 16:
            check.fail(name, 'must begin at a multiple of 16 bytes', check.describe(x), hint=f'pass {name}.clone()')
    check.same_device(**operands)


def gathered(x: Tensor, name: str) -> Tensor:
    """The operand, copied if it is a slice; its vectors must be dense and begin at multiples of 16 bytes."""
    if x.is_contiguous():
        return x
    check.unit_stride(x, name)
    if check.vector_bytes(x) < 16:
        rule = 'must have a base and strides that are multiples of 16 bytes'
        check.fail(name, rule, check.describe(x), hint=f'pass {name}.clone()')
    return x.contiguous()


def check_groups(group_end: Tensor, num_groups: int, a: Tensor) -> None:
    """Check the ends of the groups of the rows of `a`."""
    check.at_most(num_groups, MAX_GROUPS, 'num_groups')
    check.shape(group_end, 'group_end', 'num_groups', dtype=torch.int32, num_groups=num_groups)
    check.contiguous(group_end, 'group_end')
    check.same_device(a=a, group_end=group_end)


def check_product(a: Tensor, b: Tensor, group_end: Tensor) -> tuple[int, int, int, int]:
    """Check the operands of a product in half precision; returns num_rows, num_groups, n, k."""
    num_rows, k = check.shape(a, 'a', 'num_rows k', dtype=HALVES)
    num_groups, n, _ = check.shape(b, 'b', 'num_groups n k', dtype=a.dtype, k=k)
    check_operands((n, k), a=a, b=b)
    check_groups(group_end, num_groups, a)
    return num_rows, num_groups, n, k


def check_gradient(dd: Tensor, a: Tensor, b: Tensor, group_end: Tensor) -> tuple[int, int, int, int]:
    """The same, with the gradient of the result."""
    num_rows, n = check.shape(dd, 'dd', 'num_rows n', dtype=HALVES)
    _, k = check.shape(a, 'a', 'num_rows k', dtype=dd.dtype, num_rows=num_rows)
    num_groups, _, _ = check.shape(b, 'b', 'num_groups n k', dtype=dd.dtype, n=n, k=k)
    check_operands((n, k), dd=dd, a=a, b=b)
    check_groups(group_end, num_groups, a)
    return num_rows, num_groups, n, k


def check_fp8(
    a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor, multiple_of: int
) -> tuple[int, int, int, int]:
    """Check the operands of an fp8 product; returns num_rows, num_groups, n (a multiple as given), k."""
    num_rows, k = check.shape(a, 'a', 'num_rows k', dtype=FP8)
    num_groups, n, _ = check.shape(b, 'b', 'num_groups n k', dtype=FP8, k=k)
    depth = dict(depth_groups=-(-k // GROUP))
    check.packed(a_sf, 'a_sf', 'num_rows depth_groups', torch.float32, num_rows=num_rows, **depth)
    blocks = dict(num_groups=num_groups, n_groups=-(-n // GROUP))
    check.packed(b_sf, 'b_sf', 'num_groups n_groups depth_groups', torch.float32, **blocks, **depth)
    check_operands((k,), a=a, b=b)
    check_groups(group_end, num_groups, a)
    check.same_device(a=a, a_sf=a_sf, b_sf=b_sf)
    check.multiple(n, multiple_of, 'the rows of a matrix of b')
    return num_rows, num_groups, n, k


def launch_few_rows(
    a: Tensor, b: Tensor, group_end: Tensor | None, sf: tuple[Tensor, Tensor] | None, d: Tensor
) -> None:
    """The product of up to 16 rows with matrices (num_groups, n, k); `sf` are the factors of fp8 operands."""
    num_matrices, n, k = b.shape
    splits = few_rows_splits(n, k, a.element_size())
    part = None if splits == 1 else torch.empty((splits, *d.shape), dtype=torch.float32, device=d.device)
    static = n, k, DENSE if group_end is None else num_matrices, a.dtype
    a_sf, b_sf = (None, None) if sf is None else sf
    launch(few_rows_kernel, static, a, b, group_end, a_sf, b_sf, d, part)
    if part is not None:
        launch(sum_splits_kernel, (n, d.dtype, None), part, None, d, size=d.shape[0])


def has_few_rows(a: Tensor) -> bool:
    """Whether kernels for few rows can take this product; they need fp8 tensor cores for fp8."""
    m = a.shape[0]
    return isinstance(m, int) and m <= MOST_ROWS and (a.dtype is not FP8 or gpu_of(a).arch >= 89)


def splits_few_rows(a: Tensor, grouped: bool = False) -> bool:
    """Whether a product of plain matrices uses the kernels for few rows.

    Unless it is set, only half precision without groups does: the other cases were not compared on a GPU.
    """
    wanted = not grouped and a.dtype is not FP8 if knobs.few_rows is None else knobs.few_rows
    return wanted and has_few_rows(a)
