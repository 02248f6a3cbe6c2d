"""RMS norm: divide every row by the root of its mean square, with an optional residual added first.

    z[t, h] = round(x[t, h] + residual[t, h])               to the dtype of x; x itself without a residual
    rstd[t] = 1 / sqrt(sum over h of z[t, h]^2 / H + eps)   float32, correctly rounded from the sum on
    y[t, h] = (z[t, h] * rstd[t]) * (weight[h] * out_scale) float32, left to right, rounded once

One pass: a row is read once and stays in registers until it is written. The order of the sum depends on H alone, so a
row has the same bits in any batch. Memory bound: the floor is reading x (and residual) and writing y (and z).
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Out, op
from tile_kernels.quant._norm_rows import check_like, check_rows, check_weight
from tile_kernels.quant.norm_backward import add_norm_backward, norm_backward
from tile_kernels.quant.norm_forward_kernels import norm_forward_kernel

# Ops ----------------------------------------------------------------------------------------


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, y: Tensor, z: Tensor | None, eps: float, out_scale: float
) -> Tensor:
    """Launch the kernel that fills y and z; returns rstd."""
    static = (
        x.shape[1],
        None,
        x.dtype,
        check_weight(x, weight),
        out_scale != 1.0,
        check.vector_bytes(x, residual, y, z),
    )
    static += (residual is not None, True, False, False)
    rstd = torch.empty(x.shape[:1], dtype=torch.float32, device=x.device)
    tensors = (x, residual, weight, y, z, rstd, None, None, None)
    launch(norm_forward_kernel, static, *tensors, eps, out_scale, 0.0, 1, 1)
    return rstd


@op(outputs='y rstd', backward=norm_backward)
def norm_forward(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, out_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """RMS norm of each row of `x`.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense, any row stride, any hidden up to 128 KiB.
        weight: (hidden,) bfloat16, float16 or float32 factor of each channel, or None.
        eps: added to the mean square.
        out_scale: factor of the result.

    Returns:
        y (num_tokens, hidden) in the dtype of x, and rstd (num_tokens,) float32.
    """
    num_tokens, hidden = check_rows(x)
    y = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    return y, _norm(x, None, weight, y, None, eps, out_scale)


@op(outputs='y rstd z', backward=add_norm_backward, same_gradient={'residual': 'x'})
def add_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, out_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of each row of `x + residual`; see `norm_forward`.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense, any row stride.
        residual: shape and dtype of x, any row stride.
        weight: (hidden,) factor of each channel, or None.
        eps: added to the mean square.
        out_scale: factor of the result.

    Returns:
        y (num_tokens, hidden), rstd (num_tokens,) float32, and the sum z that was normalised, in the dtype of x.
    """
    num_tokens, hidden = check_rows(x)
    check_like(x, residual=residual)
    y = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    z = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    return y, _norm(x, residual, weight, y, z, eps, out_scale), z


@op(outputs='rstd')
def norm_forward_(
    out: Out,
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    residual_out: Out | None = None,
    eps: float = 1e-6,
    out_scale: float = 1.0,
) -> Tensor:
    """RMS norm into memory of the caller; see `norm_forward` and `add_norm_forward`.

    Args:
        out: (num_tokens, hidden) in the dtype of x, any row stride; overwritten. May be x or residual itself.
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense, any row stride.
        weight: (hidden,) factor of each channel, or None.
        residual: shape and dtype of x, or None.
        residual_out: where the sum x + residual goes; comes with `residual`, and may be x or residual itself.
        eps: added to the mean square.
        out_scale: factor of the result.

    Returns:
        rstd (num_tokens,) float32.
    """
    check_rows(x)
    check_like(x, out=out, residual=residual, residual_out=residual_out)
    if (residual is None) != (residual_out is None):
        check.fail('residual_out', 'must come with residual', 'one of them')
    return _norm(x, residual, weight, out, residual_out, eps, out_scale)


# Cases --------------------------------------------------------------------------------------


def sample_rows(num_tokens: int, hidden: int, dtype: torch.dtype, pitch: int | None = None) -> Tensor:
    """Random rows whose squares add up without rounding, so that results do not depend on the order of the sum."""
    magnitude = torch.exp2(torch.randint(-5, 2, (num_tokens, 1))).to(dtype)
    return small_integers(num_tokens, hidden, 7, dtype, pitch).mul_(magnitude)


def small_integers(num_tokens: int, hidden: int, most: int, dtype: torch.dtype, pitch: int | None = None) -> Tensor:
    """Random rows of integers up to `most`; with a pitch they are strided."""
    integers = torch.randint(-most, most + 1, (num_tokens, hidden), dtype=torch.int8)
    return torch.empty(num_tokens, pitch or hidden, dtype=dtype).narrow(1, 0, hidden).copy_(integers)


def sample_weight(hidden: int, dtype: torch.dtype | None) -> Tensor | None:
    """Random weights around one, or None."""
    return None if dtype is None else (1 + 0.2 * torch.randn(hidden)).to(dtype)


def _make(
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    weight: torch.dtype | None = None,
    pitch: int | None = None,
    out_scale: float = 1.0,
) -> dict:
    x = sample_rows(num_tokens, hidden, dtype, pitch)
    return dict(x=x, weight=sample_weight(hidden, weight), eps=1e-5, out_scale=out_scale)


def _make_add(num_tokens: int, hidden: int, dtype: torch.dtype, pitch: int | None = None, **case) -> dict:
    """Rows and a residual of one magnitude, so that the squares of their sum add up without rounding as well."""
    x, residual = (small_integers(num_tokens, hidden, 3, dtype, pitch) for _ in range(2))
    return _make(num_tokens, hidden, dtype, **case) | dict(x=x, residual=residual)


def _make_into(residual: bool = False, **case) -> dict:
    made = (_make_add if residual else _make)(**case)
    made['out'] = torch.empty_like(made['x'])
    made['residual_out'] = torch.empty_like(made['x']) if residual else None
    return made


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
SMOKE = (
    grid(num_tokens=[0, 1, 5], hidden=[128], dtype=BF16, weight=BF16)  # several rows to a block
    + grid(num_tokens=[3], hidden=[1344], dtype=BF16, weight=F32, out_scale=[0.5])  # a shorter last vector
    + grid(num_tokens=[2], hidden=[99], dtype=F16, pitch=[101])  # odd rows, odd stride
    + grid(num_tokens=[2], hidden=[2304], dtype=F32, weight=BF16, pitch=[2400])
)
FULL = (
    grid(num_tokens=[4001], hidden=[576, 1024, 2560, 7168, 8192, 16384], dtype=BF16, weight=BF16)
    + grid(num_tokens=[257], hidden=[1, 99, 4100, 32768], dtype=F32, weight=F32)
    + grid(num_tokens=[3], hidden=[65536], dtype=F16, weight=[None])
    + grid(num_tokens=[300001], hidden=[7168], dtype=BF16, weight=BF16)  # more than 2^31 elements
    + grid(num_tokens=[300001], hidden=[136], dtype=BF16, weight=BF16, pitch=[8192])
)
BENCH = (
    grid(num_tokens=[64, 4096, 16384], hidden=[7168], dtype=BF16, weight=BF16)
    + grid(num_tokens=[8001], hidden=[1024, 2560, 4096, 16384], dtype=BF16, weight=BF16)
    + grid(num_tokens=[32001], hidden=[1344], dtype=BF16, weight=F32)
    + grid(num_tokens=[8001], hidden=[4096], dtype=F32, weight=F32)
)
norm_forward.cases(make=_make, match='bitwise', smoke=SMOKE, full=FULL, bench=BENCH)
add_norm_forward.cases(
    make=_make_add, match='bitwise', smoke=SMOKE, full=FULL[:8] + FULL[-1:], bench=BENCH[:3] + BENCH[4:8:3]
)
norm_forward_.cases(
    make=_make_into,
    match='bitwise',
    smoke=SMOKE[:2] + [case | dict(residual=True) for case in SMOKE[2:]],
    full=[FULL[3] | dict(residual=True)],
    bench=[BENCH[1], BENCH[1] | dict(residual=True)],
)
