"""Comparisons for tests: equal bits for exact arithmetic, otherwise at most twice the error of plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def assert_equal(
    x: Tensor, y: Tensor, check_dtype: bool = True, check_shape: bool = True, check_stride: bool = True
) -> None:
    """Assert that two tensors hold the same bytes; dtype, shape, stride and device must agree too.

    Bytes are compared, so -0.0 differs from 0.0 and one NaN pattern from another. Strides of empty tensors are ignored.

    Raises:
        AssertionError: names the difference; for values, the first differing index with both values and their bytes.
    """
    __tracebackhide__ = True
    if check_dtype and x.dtype != y.dtype:
        raise AssertionError(f'dtypes differ: {x.dtype} != {y.dtype}')
    if check_shape and x.shape != y.shape:
        raise AssertionError(f'shapes differ: {tuple(x.shape)} != {tuple(y.shape)}')
    if check_stride and x.numel() > 0 and x.stride() != y.stride():
        raise AssertionError(f'strides differ: {x.stride()} != {y.stride()} (shape {tuple(x.shape)})')
    if x.device != y.device:
        raise AssertionError(f'devices differ: {x.device} != {y.device}')

    x_bytes, y_bytes = _bytes(x), _bytes(y)
    if x_bytes.numel() != y_bytes.numel():
        raise AssertionError(f'sizes differ: {x_bytes.numel()} bytes != {y_bytes.numel()} bytes')
    if not torch.equal(x_bytes, y_bytes):
        raise AssertionError(_first_difference(x, y, x_bytes, y_bytes))


def _bytes(x: Tensor) -> Tensor:
    flat = x.detach().contiguous().as_strided((x.numel(),), (1,))  # reshape keeps odd strides of one-element tensors
    return flat.view(torch.uint8)


def _first_difference(x: Tensor, y: Tensor, x_bytes: Tensor, y_bytes: Tensor) -> str:
    """The error message for two tensors of equal size with different bytes."""
    itemsize = x.element_size()
    unequal = (x_bytes != y_bytes).view(-1, itemsize).any(dim=1)
    flat = int(unequal.to(torch.uint8).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), x.shape)]
    sides = []
    for side, side_bytes in ((x, x_bytes), (y, y_bytes)):
        raw = side_bytes[flat * itemsize : (flat + 1) * itemsize]
        value = f'{raw.view(side.dtype).item()} ' if side.element_size() == itemsize else ''
        sides.append(f'{value}(0x{bytes(reversed(raw.tolist())).hex()})')
    return f'{int(unequal.sum())} of {x.numel()} elements differ, the first at {index}: {sides[0]} != {sides[1]}'


def calc_diff(x: Tensor, y: Tensor) -> float:
    """Relative squared distance `sum((x - y)^2) / sum(x^2 + y^2)` in float64; 0 for two zero tensors."""
    if x.shape != y.shape:
        raise AssertionError(f'shapes differ: {tuple(x.shape)} != {tuple(y.shape)}')
    x, y = x.detach().double(), y.detach().double()
    denominator = (x * x + y * y).sum()
    return 0.0 if denominator == 0 else float(((x - y) ** 2).sum() / denominator)


def check_bias(x: Tensor, ref: Tensor) -> None:
    """Assert that rounding moved `x` below and above `ref` equally often.

    With unbiased rounding, each of the n elements is below its reference with probability 1/2. So the fraction below
    (ties count half) has mean 1/2 and a standard deviation of at most 1/(2 sqrt(n)). The limit 10/sqrt(n) is twenty
    deviations: unbiased rounding never reaches it, and a systematic bias soon does.
    """
    __tracebackhide__ = True
    count = x.numel()
    if count == 0:
        return
    x, ref = x.detach().double(), ref.detach().double()
    share = float(((x < ref).sum() + (x == ref).sum() / 2) / count)
    limit = 10 / math.sqrt(count)
    if not abs(share - 0.5) < limit:
        raise AssertionError(
            f'rounding is biased: {share:.4f} of {count} elements lie below, expected 0.5 +- {limit:.4f}'
        )


def count_bytes(*tensors: Any) -> int:
    """Bytes of all tensors in the arguments, including tuples, lists and dicts; other values count 0."""
    total = 0
    for item in tensors:
        if isinstance(item, Tensor):
            total += item.numel() * item.element_size()
        elif isinstance(item, Mapping):
            total += count_bytes(*item.values())
        elif isinstance(item, (tuple, list)):
            total += count_bytes(*item)
    return total


def max_error(x: Tensor, ref: Tensor) -> float:
    """Largest `|x - ref|` in float64. Equal infinities and NaN against NaN agree; a single NaN is infinite."""
    return float(_error(x, ref).max()) if x.numel() else 0.0


def rms_error(x: Tensor, ref: Tensor) -> float:
    """Root mean square of `|x - ref|`, with the conventions of `max_error`."""
    return float(_error(x, ref).square().mean().sqrt()) if x.numel() else 0.0


def _error(x: Tensor, ref: Tensor) -> Tensor:
    if x.shape != ref.shape:
        raise AssertionError(f'shapes differ: {tuple(x.shape)} != {tuple(ref.shape)}')
    wide = torch.complex128 if x.is_complex() or ref.is_complex() else torch.float64
    x, ref = x.detach().to(wide), ref.detach().to(wide)
    agree = (x == ref) | (x.isnan() & ref.isnan())
    return torch.where(agree, 0.0, (x - ref).abs().nan_to_num(nan=math.inf, posinf=math.inf))


def assert_within_twice(actual: Tensor, reference_lowp: Tensor, truth: Tensor) -> None:
    """Assert that the error of `actual` is at most twice that of the plain implementation in the same precision.

    Both the largest and the root mean square error count, so neither a single outlier nor a small systematic error
    passes. In addition, an error of half a unit in the last place of the largest (or typical) true value is allowed.
    Otherwise a reference that happens to be exact would require exactness.

    Args:
        actual: the result under test.
        reference_lowp: plain PyTorch in the precision of `actual`.
        truth: the same function in float64.
    """
    __tracebackhide__ = True
    finite = truth.detach().double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    half_ulp = torch.finfo(actual.dtype).eps / 2
    for name, error in (('largest', max_error), ('root mean square', rms_error)):
        limit = 2 * error(reference_lowp, truth) + half_ulp * error(finite, torch.zeros_like(finite))
        found = error(actual, truth)
        if not math.isfinite(limit):
            raise AssertionError(f'{name} error of the reference is {limit}: it bounds nothing')
        if not found <= limit:
            raise AssertionError(f'{name} error {found:.3e} exceeds {limit:.3e}, twice that of the reference')
