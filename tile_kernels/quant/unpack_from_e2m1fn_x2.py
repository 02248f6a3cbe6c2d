"""Unpack fp4: the numbers of bytes that hold two e2m1 codes each, by the kernel of `cast`."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.quant.cast import DTYPES, convert_kernel

# Op -----------------------------------------------------------------------------------------


@op(outputs='y')
def unpack_from_e2m1fn_x2(x: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of packed fp4.

    Args:
        x: (..., n) int8 or uint8, contiguous, two codes to a byte.
        out_dtype: bfloat16, float16, float32, float8_e4m3fn or float8_e5m2, which all hold every fp4 number.

    Returns:
        (..., 2 n), contiguous; the lower nibble of a byte comes first.
    """
    check.dtype(x, 'x', (torch.int8, torch.uint8))
    check.one_of(out_dtype, DTYPES, 'out_dtype')
    if x.dim() == 0:
        check.fail('x', 'must have at least one dimension', check.describe(x))
    check.contiguous(x, 'x')
    y = torch.empty((*x.shape[:-1], 2 * x.shape[-1]), dtype=out_dtype, device=x.device)
    flat = x.view(-1).view(torch.uint8)
    launch(convert_kernel, ('e2m1', out_dtype, check.vector_bytes(flat), False), flat, y.view(-1))
    return y


# Cases --------------------------------------------------------------------------------------


unpack_from_e2m1fn_x2.cases(
    make=lambda shape, dtype, target: dict(
        x=torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype), out_dtype=target
    ),
    match='bitwise',
    smoke=grid(shape=[(3, 67), (0, 8), (16,)], dtype=[torch.int8], target=[torch.float32, torch.bfloat16])
    + grid(shape=[(2, 5, 3)], dtype=[torch.uint8], target=[torch.float8_e4m3fn]),
    full=grid(shape=[(4001, 1091)], dtype=[torch.int8], target=DTYPES),
    bench=grid(shape=[(4096, 3584)], dtype=[torch.int8], target=[torch.float32, torch.bfloat16]),
)
