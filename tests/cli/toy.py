"""A tiny op outside the package, so that the tests of the command line depend on no family."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op


def choose(hidden: int, dtype: torch.dtype, size: int) -> dict:
    """Few rows: more blocks."""
    return dict(block_m=4 if size > 64 else 1, num_threads=64)


@kernel(choose=choose, space=dict(block_m=(1, 4), num_threads=(64, 128)))
def double_kernel(hidden: int, dtype: torch.dtype, *, block_m: int, num_threads: int):
    num_tokens = T.dynamic('num_tokens')
    element = T.dtype(dtype)

    @T.prim_func
    def double(x: T.Tensor((num_tokens, hidden), element), y: T.Tensor((num_tokens, hidden), element)):
        with T.Kernel(T.ceildiv(num_tokens, block_m), threads=num_threads) as pid:
            x_shared = T.alloc_shared((block_m, hidden), element)
            T.copy(x[pid * block_m, 0], x_shared)
            for i, j in T.Parallel(block_m, hidden):
                x_shared[i, j] = x_shared[i, j] * 2
            T.copy(x_shared, y[pid * block_m, 0])

    return double


@op(outputs='y', twin=lambda x: x * 2)
def double(x: Tensor) -> Tensor:
    """Twice the input.

    Args:
        x: (num_tokens, hidden) float32 or bfloat16, contiguous.
    """
    _, hidden = check.shape(x, 'x', 'num_tokens hidden', dtype=(torch.float32, torch.bfloat16))
    y = torch.empty_like(x)
    launch(double_kernel, (hidden, x.dtype), x, y)
    return y


double.cases(
    make=lambda num_tokens, hidden, dtype: dict(x=torch.randn(num_tokens, hidden, dtype=dtype)),
    match='bitwise',
    smoke=grid(num_tokens=[0, 5], hidden=[64], dtype=[torch.float32]),
    bench=grid(num_tokens=[64, 4096], hidden=[128], dtype=[torch.bfloat16]),
)
