"""Stochastic rounding in plain PyTorch: random bits that are a hash of the numbers, and how they decide."""

from __future__ import annotations

import torch
from torch import Tensor

#: Mantissa bits, least positive and largest number of what can be rounded to.
ELEMENTS = {
    'bf16': (7, 2.0**-133, float('inf')),
    'e4m3': (3, 2.0**-9, 448.0),
    'e5m2': (2, 2.0**-16, 57344.0),
    'e2m1': (1, 2.0**-1, 6.0),
}


def random_words(v: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit hashes (as int64) of each four numbers of a row and of their place in it."""
    mask = 0xFFFFFFFF
    bits = torch.nn.functional.pad(v, (0, -v.shape[-1] % 4)).view(torch.int32).long().unflatten(-1, (-1, 4)) & mask
    factors = (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D)
    products = sum(_times(bits[..., i], factor) for i, factor in enumerate(factors))
    h = (products + torch.arange(bits.shape[-2], device=v.device)) & mask
    h = _times(h ^ (h >> 23), 0x7FEB352D)
    h = _times(h ^ (h >> 16), 0x846CA68B)
    second = _times(h, 0xD35A2D97)
    return h ^ (h >> 11), second ^ (second >> 11)


def _times(a: Tensor, b: int) -> Tensor:
    """Product of 32-bit numbers modulo 2^32; the halves of `a` keep int64 from overflowing."""
    return ((a & 0xFFFF) * b + (((a >> 16) * b & 0xFFFF) << 16)) & 0xFFFFFFFF


def round_at_random(v: Tensor, element: str) -> Tensor:
    """Each number of float32 rows, rounded up or down to one of `element`; what is not finite stays as it is.

    It goes up from the number below |v| if what is above it, as a part of a step, and a random fraction reach 1. A step
    has as many parts as a float32 just below 1 has in it; of smaller numbers only whole parts count, to nearest even.
    """
    mantissa, least, largest = ELEMENTS[element]
    parts = 2.0 ** (23 - mantissa)
    first, second = random_words(v)
    if element == 'bf16':
        random = torch.stack((first >> 16, first & 0xFFFF, second >> 16, second & 0xFFFF), -1)
    else:
        turned = [((first << 8 * e | first >> (32 - 8 * e)) & 0xFFFFFFFF) >> (9 + mantissa) for e in range(4)]
        random = torch.stack(turned, -1)
    fraction = random.flatten(-2)[..., : v.shape[-1]].double() / parts
    magnitude = v.abs().double()
    exponent = torch.frexp(magnitude.clamp(min=2.0**-200)).exponent - 1
    step = torch.ldexp(torch.ones_like(magnitude), exponent - mantissa).clamp(min=least)
    magnitude = (magnitude / step * parts).round() / parts  # in steps; nothing is lost unless the step is the least
    below = magnitude.floor()
    rounded = ((below + (magnitude - below + fraction >= 1)) * step).clamp(max=largest).float().copysign(v)
    return torch.where(v.isfinite(), rounded, v)
