"""Operands of the products: what they must be, who multiplies them, and arguments for cases."""

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tile_kernels.core import check
from tile_kernels.core.gpus import arch_number, arch_of, num_sms_of
from tile_kernels.core.jit import Kernel
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import launch, state
from tile_kernels.gemm._groups import FP8, GROUP, HOPPER

HALVES = (torch.bfloat16, torch.float16)
MAX_GROUPS = 4096
NUM_SMS_WITHOUT_GPU = 3  # few, so that the interpreter sees a thread block take several tiles


def num_workers(x: Tensor) -> int:
    """Thread blocks that take the tiles by turns: one for each SM of the GPU of `x`. Results do not depend on it."""
    if not x.is_cuda or isinstance(x, FakeTensor):
        return NUM_SMS_WITHOUT_GPU
    return knobs.num_sms or num_sms_of(x.get_device())


def has_warpgroups(x: Tensor) -> bool:
    """Whether the GPU of `x` multiplies by warpgroups, as Hopper does; without a GPU it is `meant_for`, or Hopper."""
    if x.is_cuda and not isinstance(x, FakeTensor):
        return arch_number(arch_of(x.get_device())) == HOPPER
    return state.arch is None or arch_number(state.arch) == HOPPER


def launch_product(
    kernels: tuple[Kernel, Kernel], static: tuple, *operands: Tensor | None, size: int | None = None
) -> None:
    """Launch the first of two kernels where the GPU of the first operand has warpgroups, the portable one elsewhere."""
    if has_warpgroups(operands[0]):
        launch(kernels[0], static, *operands, num_workers(operands[0]), size=size)
    else:
        launch(kernels[1], static, *operands, size=size)


# Checks -------------------------------------------------------------------------------------


def check_operands(extents: tuple[int, ...], **operands: Tensor) -> None:
    """What the loads of a product need of its operands."""
    for name, x in operands.items():
        check.contiguous(x, name)
        for extent in extents:
            check.multiple(extent * x.element_size(), 16, f'the bytes of a row of {name}')
        if check.vector_bytes(x) < 16:
            check.fail(name, 'must begin at a multiple of 16 bytes', check.describe(x), hint=f'pass {name}.clone()')
    check.same_device(**operands)


def check_groups(group_end: Tensor, num_groups: int, a: Tensor) -> None:
    """Where the groups of the rows of `a` end."""
    check.at_most(num_groups, MAX_GROUPS, 'num_groups')
    check.shape(group_end, 'group_end', 'num_groups', dtype=torch.int32, num_groups=num_groups)
    check.contiguous(group_end, 'group_end')
    check.same_device(a=a, group_end=group_end)


def check_product(a: Tensor, b: Tensor, group_end: Tensor) -> tuple[int, int, int, int]:
    """The operands of a product in half precision; returns num_rows, num_groups, n, k."""
    num_rows, k = check.shape(a, 'a', 'num_rows k', dtype=HALVES)
    num_groups, n, _ = check.shape(b, 'b', 'num_groups n k', dtype=a.dtype, k=k)
    check_operands((n, k), a=a, b=b)
    check_groups(group_end, num_groups, a)
    return num_rows, num_groups, n, k


def check_gradient(dd: Tensor, a: Tensor, b: Tensor, group_end: Tensor) -> tuple[int, int, int, int]:
    """The same with the gradient of the result."""
    num_rows, n = check.shape(dd, 'dd', 'num_rows n', dtype=HALVES)
    _, k = check.shape(a, 'a', 'num_rows k', dtype=dd.dtype, num_rows=num_rows)
    num_groups, _, _ = check.shape(b, 'b', 'num_groups n k', dtype=dd.dtype, n=n, k=k)
    check_operands((n, k), dd=dd, a=a, b=b)
    check_groups(group_end, num_groups, a)
    return num_rows, num_groups, n, k


def check_fp8(
    a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor, multiple_of: int
) -> tuple[int, int, int, int]:
    """The operands of a product of fp8 codes; returns num_rows, num_groups, n (a multiple as given), k."""
    num_rows, k = check.shape(a, 'a', 'num_rows k', dtype=FP8)
    num_groups, n, _ = check.shape(b, 'b', 'num_groups n k', dtype=FP8, k=k)
    sf = dict(dtype=torch.float32, depth_groups=-(-k // GROUP))
    check.packed(a_sf, 'a_sf', 'num_rows depth_groups', num_rows=num_rows, **sf)
    check.packed(b_sf, 'b_sf', 'num_groups n_groups depth_groups', num_groups=num_groups, n_groups=-(-n // GROUP), **sf)
    check_operands((k,), a=a, b=b)
    check_groups(group_end, num_groups, a)
    check.same_device(a=a, a_sf=a_sf, b_sf=b_sf)
    check.multiple(n, multiple_of, 'the rows of a matrix of b')
    return num_rows, num_groups, n, k


# Arguments of cases -------------------------------------------------------------------------


def random_ends(
    num_rows: int, num_groups: int, alignment: int = 1, behind: int = 0, whole: bool = False, even: bool = False
) -> Tensor:
    """Ends of groups of random sizes, a third of them empty, or of `even` ones.

    `behind` rows or more follow the last group, none if `whole`.
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
    """Operations of a grouped product: every row of a group meets all of its matrix."""
    return 2 * int(group_end[-1]) * b.shape[1] * b.shape[2]


def random_operands(num_rows: int, n: int, k: int, num_groups: int, dtype: torch.dtype, **ends) -> dict:
    """Arguments of a product in half precision."""
    a, b = torch.randn(num_rows, k, dtype=dtype), torch.randn(num_groups, n, k, dtype=dtype) / k**0.5
    return dict(a=a, b=b, group_end=random_ends(num_rows, num_groups, **ends))


def random_gradient(**case) -> dict:
    """The same with the gradient of the result."""
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
    """The same for SwiGLU: scale factors of up large enough for those of the result to be told apart from 0."""
    made = random_fp8(**case)
    gate_sf, up_sf = made['b_sf'].chunk(2, dim=1)
    return made | dict(b_sf=torch.cat((gate_sf, up_sf * 4096), dim=1))


SUMS = dict(rtol=1e-2, atol=1e-2)  # float32 sums in another order, rounded to half precision
CODES = dict(rtol=0.13, atol=0.25)  # a neighbour is an eighth away; fp8 sums keep 14 bits of their largest term
