"""Cases: the inputs an op is tested, measured and precompiled with, declared once beside the op."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Case = dict[str, Any]


def grid(**axes: Sequence[Any]) -> list[Case]:
    """Every combination of the given values, as a list of cases; lists add up with `+`."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _word(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix('torch.')
    if isinstance(value, (tuple, list)):
        return 'x'.join(_word(v) for v in value)
    return str(value)


def case_id(case: Case) -> str:
    """`num_tokens=37-hidden=256-bfloat16`: numbers carry their name, names speak for themselves."""
    parts = []
    for name, value in case.items():
        named = isinstance(value, (bool, int, float)) or value is None
        parts.append(f'{name}={_word(value)}' if named else _word(value))
    return '-'.join(parts)


def case_seed(op_name: str, case: Case) -> int:
    """A seed fixed by the case, so that a failure reproduces alone."""
    digest = hashlib.sha256(f'{op_name}[{case_id(case)}]'.encode()).digest()
    return int.from_bytes(digest[:4], 'little')


def bounds_of(match: dict[str, Any], output: str, expected: Tensor) -> dict[str, float]:
    """`rtol` and `atol` that an output must keep; none if `match` has none, which means those of its dtype."""
    bounds = match.get(output, match)
    if 'rtol' not in bounds:
        return {}
    rms = expected.double().square().mean().sqrt().item() if 'rms' in bounds and expected.numel() else 0.0
    return dict(rtol=bounds['rtol'], atol=bounds.get('atol', 0.0) + bounds.get('rms', 0.0) * rms)


@dataclass(frozen=True)
class Cases:
    """The cases of one op: `make(**case)` gives its arguments, `match` says how it must agree with its twin.

    That is 'bitwise', or bounds of the difference from an expected x: `rtol` |x| + `atol` + `rms` times the root mean
    square of its tensor, which is how errors of sums grow. An output may have bounds of its own, under its name.
    `flops(**arguments)` counts the operations of an op that is bound by them rather than by memory.
    """

    make: Callable[..., dict[str, Any]]
    match: str | dict[str, Any] = 'bitwise'
    smoke: list[Case] = field(default_factory=list)
    full: list[Case] = field(default_factory=list)
    bench: list[Case] = field(default_factory=list)
    flops: Callable[..., int] | None = None

    def arguments(self, op_name: str, case: Case, device: str | torch.device = 'cpu') -> dict[str, Any]:
        """Build the arguments of a case on a device, with the seed of the case."""
        torch.manual_seed(case_seed(op_name, case))
        with torch.device(device):
            return self.make(**case)
