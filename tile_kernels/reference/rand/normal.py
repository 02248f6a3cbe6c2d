"""What the random numbers are, in plain PyTorch: words as int64, every float32 operation rounded by itself."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Upper and lower word of a product of two words, found in parts that int64 can hold."""
    low, high = word * (factor & 0xFFFF), word * (factor >> 16)
    middle = high + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF


def _philox(counter: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32 with ten rounds: four random words for each counter."""
    a, b = counter & WORD, counter >> 32 & WORD
    c, d = torch.zeros_like(counter), torch.zeros_like(counter)
    for step in range(10):
        first, second = (seed + 0x9E3779B9 * step) & WORD, ((seed >> 32) + 0xBB67AE85 * step) & WORD
        (a_high, a_low), (c_high, c_low) = _product(a, 0xD2511F53), _product(c, 0xCD9E8D57)
        a, b, c, d = c_high ^ b ^ first, c_low, a_high ^ d ^ second, a_low
    return a, b, c, d


def _polynomial(x: Tensor, *coefficients: float) -> Tensor:
    """Horner's rule, lowest power first."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def _log(word: Tensor) -> Tensor:
    """Natural logarithm of word * 2^-32, of a word between 1 and 2^32."""
    factor, exponent = torch.frexp(word.float())
    small = factor < torch.tensor(0x3F3504F3, dtype=torch.int32).view(torch.float32).item()
    factor, exponent = torch.where(small, 2 * factor, factor), torch.where(small, exponent - 1, exponent)
    f = factor - 1
    tail = _polynomial(
        f,
        0.33333316445350647,
        -0.2500079572200775,
        0.20002281665802002,
        -0.16624966263771057,
        0.14181438088417053,
        -0.13125349581241608,
        0.12879090011119843,
        -0.07865164428949356,
    )
    return f * f * f * tail + f * f * -0.5 + f + (exponent - 32).float() * 0.6931471824645996


def _pair(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Box and Muller: a radius from one word, a direction from the other."""
    radius = (_log(first | 1) * -2.0).clamp(min=0.0).double().sqrt().float()  # rounds right; a float32 root may not
    quarter, rest = second >> 30, (second << 2) & WORD
    angle = torch.where(rest >= 1 << 31, rest - (1 << 32), rest).float() * (torch.pi / 2**33)
    square = angle * angle
    sin_tail = _polynomial(
        square, -0.1666666716337204, 0.008333403617143631, -0.0001987083232961595, 3.0557675927411765e-06
    )
    cos_tail = _polynomial(square, -0.5, 0.04166701063513756, -0.0013902996433898807, 2.6117166271433234e-05)
    sin, cos = angle + angle * (square * sin_tail), 1.0 + square * cos_tail
    odd, sign = quarter % 2 == 1, 1.0 - 2.0 * (quarter >= 2).float()
    return radius * (torch.where(odd, -sin, cos) * sign), radius * (torch.where(odd, cos, sin) * sign)


def normal_(out: Tensor, seed: int, offset: int = 0) -> None:
    """Fill `out` with normal numbers."""
    counter = torch.arange(-(-out.numel() // 4), device=out.device) + offset
    words = _philox(counter, seed)
    numbers = torch.stack((*_pair(*words[:2]), *_pair(*words[2:])), dim=-1)
    out.copy_(numbers.flatten()[: out.numel()].view(out.shape))
