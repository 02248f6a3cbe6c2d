"""Convolution of NHWC images by implicit GEMM.

    y[b, i, j, n] = sum_(u, v, c) x[b, i * stride - padding + u * dilation, j ..., c] * weight[n, u, v, c] (+ bias[n])

Nothing is unfolded in memory: a thread block gathers its tiles of x for every tap (u, v). Compute bound.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.gpus import SUM_SMS
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.gemm._checks import HALVES, gathered
from tile_kernels.gemm._samples import SUMS
from tile_kernels.gemm.conv2d_kernels import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    conv2d_kernel,
    conv2d_sm90_kernel,
    conv2d_weight_kernel,
)
from tile_kernels.gemm.gemm_kernels import sum_splits_kernel

# Checks -------------------------------------------------------------------------------------


def out_size(size: Any, taps: int, stride: int, padding: int, dilation: int) -> Any:
    """Output pixels along a dimension."""
    return (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1


def check_vectors(operand: Tensor, name: str) -> None:
    """An operand is contiguous, and read 16 bytes at a time."""
    check.contiguous(operand, name)
    if check.vector_bytes(operand) < 16:
        check.fail(name, 'must begin at a multiple of 16 bytes', check.describe(operand), f'pass {name}.clone()')


def check_images(
    x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[int, int, int, int]:
    """Check the operands of a convolution; returns the extents of its result."""
    batch, height, width, channels = check.shape(x, 'x', 'batch height width channels', dtype=HALVES)
    n, kh, kw, _ = check.shape(weight, 'weight', 'n kh kw channels', dtype=x.dtype, channels=channels)
    for name, pair, least in (('stride', stride, 1), ('padding', padding, 0), ('dilation', dilation, 1)):
        if len(pair) != 2 or any(value < least for value in pair):
            check.fail(name, f'must be two integers of at least {least}', repr(tuple(pair)))
    check.multiple(channels, 8, 'channels')
    check.multiple(n, 8, 'n')
    for name, value in (('channels', channels), ('n', n), ('kh', kh), ('kw', kw)):
        check.at_least(value, 1, name)
    for name, operand in (('x', x), ('weight', weight)):
        check_vectors(operand, name)
    sizes = [
        out_size(size, taps, *rest)
        for size, taps, rest in zip((height, width), (kh, kw), zip(stride, padding, dilation, strict=True), strict=True)
    ]
    for name, value in zip(('height', 'width'), sizes, strict=True):
        check.at_least(value, 1, f'the {name} of the result')
    return batch, sizes[0], sizes[1], n


def launch_taps(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    y: Tensor,
    shape: tuple[int, int],
    numbers: tuple[int, ...],
) -> None:
    """The implicit GEMM with `taps` (kh, kw, n, channels)."""
    channels, n = x.shape[3], y.shape[3]
    static = channels, n, *shape, x.dtype, None if bias is None else bias.dtype, tuple(numbers[6:]) != (1, 1)
    launch(
        (conv2d_sm90_kernel, conv2d_kernel), static, x, taps.reshape(-1, channels), bias, y, *numbers, size=y.shape[0]
    )


# Ops ----------------------------------------------------------------------------------------


@op(outputs='dx dweight')
def conv2d_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Gradients of `conv2d` with respect to x and weight; deterministic.

    Args:
        dy: gradient of the result.
        x: as in `conv2d`.
        weight: as there.
        stride: as there.
        padding: as there.
        dilation: as there.

    Returns:
        Gradients of `x` and `weight` in their dtype, summed in float32.
    """
    batch, out_h, out_w, n = check_images(x, weight, stride, padding, dilation)
    check.packed(dy, 'dy', 'batch out_h out_w n', x.dtype, batch=batch, out_h=out_h, out_w=out_w, n=n)
    check_vectors(dy, 'dy')
    check.same_device(dy=dy, x=x, weight=weight)
    channels, (kh, kw) = x.shape[3], weight.shape[1:3]
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight)
    taps = weight.permute(1, 2, 3, 0).contiguous()
    numbers = (1, 1, *padding, -dilation[0], -dilation[1], *stride)
    launch_taps(dy, taps, None, dx, (kh, kw), numbers)
    blocks = -(-batch * out_h * out_w // BLOCK_M)
    tiles = kh * kw * -(-channels // BLOCK_K) * -(-n // BLOCK_N)
    splits = max(1, min(2 * SUM_SMS // tiles, blocks // 8)) if isinstance(blocks, int) else 1
    each = -(-blocks // splits)
    part = torch.empty((-(-blocks // each), n, kh * kw * channels), dtype=torch.float32, device=x.device)
    numbers = (*stride, -padding[0], -padding[1], *dilation, each)
    launch(conv2d_weight_kernel, (channels, n, kh, kw, x.dtype), dy, x, part, *numbers)
    flat = dweight.view(n, kh * kw * channels)
    launch(sum_splits_kernel, (kh * kw * channels, x.dtype, None), part, None, flat, size=n)
    return dx, dweight


@op(outputs='y', backward=conv2d_bwd)
def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Tensor:
    """The convolution of NHWC images; see `conv2d`.

    Args:
        x: (batch, height, width, channels) bfloat16 or float16, contiguous.
        weight: (n, kh, kw, channels) of x's dtype, contiguous.
        bias: (n,) of x's dtype or float32.
        stride: of both dimensions.
        padding: of both dimensions.
        dilation: of both dimensions.

    Returns:
        (batch, out_h, out_w, n) of x's dtype, summed in float32.
    """
    shape = check_images(x, weight, stride, padding, dilation)
    if bias is not None:
        check.packed(bias, 'bias', 'n', (x.dtype, torch.float32), n=shape[3])
    check.same_device(x=x, weight=weight, bias=bias)
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    taps = weight.permute(1, 2, 0, 3).contiguous()
    numbers = (*stride, -padding[0], -padding[1], *dilation, 1, 1)
    launch_taps(x, taps, bias, y, tuple(weight.shape[1:3]), numbers)  # type: ignore[arg-type]
    return y


# Public function ----------------------------------------------------------------------------


def both(value: int | tuple[int, int], name: str) -> tuple[int, int]:
    """An option of both dimensions."""
    pair = (value, value) if isinstance(value, int) else value
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(part, int) for part in pair):
        check.fail(name, 'must be an integer or two', repr(value))
    return pair[0], pair[1]


@_conv2d.public
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    """The convolution of NHWC images by implicit GEMM, summed in float32; groups are not offered.

    Args:
        x: (batch, height, width, channels) bfloat16 or float16, channels a multiple of 8; slices are copied.
        weight: (n, kh, kw, channels) of x's dtype, n a multiple of 8; slices are copied.
        bias: (n,) of x's dtype or float32.
        stride: of both dimensions, or of each.
        padding: zeros around the image.
        dilation: distance of the taps.

    Returns:
        (batch, out_h, out_w, n) of x's dtype.
    """
    options = both(stride, 'stride'), both(padding, 'padding'), both(dilation, 'dilation')
    x, weight, bias = autocast(check.tensor(x, 'x'), check.tensor(weight, 'weight'), bias)
    x, weight = gathered(x, 'x'), gathered(weight, 'weight')
    if bias is not None and check.tensor(bias, 'bias').requires_grad and torch.is_grad_enabled():
        return conv2d.call(x, weight, None, *options) + bias
    return conv2d.call(x, weight, bias, *options)


# Cases --------------------------------------------------------------------------------------

BF16, F16 = torch.bfloat16, torch.float16


def _make(
    x: tuple[int, int, int, int],
    n: int,
    taps: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    dtype: torch.dtype = BF16,
    bias: bool = False,
) -> dict:
    size = (taps[0] * taps[1] * x[3]) ** -0.5
    options = dict(stride=stride, padding=padding, dilation=dilation)
    return dict(
        x=torch.randn(x, dtype=dtype),
        weight=torch.randn(n, *taps, x[3], dtype=dtype) * size,
        bias=torch.randn(n, dtype=dtype) if bias else None,
        **options,
    )


def _make_bwd(**case: Any) -> dict:
    made = _make(**case)
    x, weight = made['x'], made['weight']
    del made['bias']
    rest = zip(made['stride'], made['padding'], made['dilation'], strict=True)
    sizes = [out_size(x.shape[1 + i], weight.shape[1 + i], *part) for i, part in enumerate(rest)]
    return dict(dy=torch.randn(x.shape[0], *sizes, weight.shape[0], dtype=x.dtype), **made)


def _flops(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, **others: Any) -> int:
    sizes = [out_size(x.shape[1 + i], weight.shape[1 + i], stride[i], padding[i], dilation[i]) for i in (0, 1)]
    return 2 * x.shape[0] * sizes[0] * sizes[1] * weight.numel()


SMOKE = (
    grid(x=[(0, 4, 4, 8)], n=[8], taps=[(3, 3)])
    + grid(x=[(1, 1, 1, 8)], n=[8], taps=[(1, 1)], bias=[True])
    + grid(x=[(2, 5, 7, 24)], n=[136], taps=[(3, 2)], stride=[(2, 1)], padding=[(1, 2)], dilation=[(1, 2)])
    + grid(x=[(1, 9, 8, 72)], n=[16], taps=[(3, 3)], stride=[(1, 3)], padding=[(2, 0)], dtype=[F16], bias=[True])
)
BENCH = (
    grid(x=[(32, 56, 56, 64), (32, 28, 28, 128), (32, 14, 14, 256)], n=[256], taps=[(3, 3)], padding=[(1, 1)])
    + grid(x=[(32, 56, 56, 256)], n=[128], taps=[(1, 1)], stride=[(2, 2)])
    + grid(x=[(2, 128, 128, 320), (2, 64, 64, 640)], n=[640], taps=[(3, 3)], padding=[(1, 1)])
)
_conv2d.cases(make=_make, match=SUMS, smoke=SMOKE, bench=BENCH, flops=_flops)
conv2d_bwd.cases(
    make=_make_bwd, match=SUMS, smoke=SMOKE, bench=BENCH[1:2], flops=lambda dy, **others: 2 * _flops(**others)
)
