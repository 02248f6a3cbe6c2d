"""Cases: the inputs used to test, benchmark and precompile an op, declared once next to the op."""

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
    """Every combination of the given values as a list of cases; such lists can be added with `+`."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _word(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix('torch.')
    if isinstance(value, (tuple, list)):
        return 'x'.join(_word(v) for v in value)
    return str(value)


def case_id(case: Case) -> str:
    """`num_tokens=37-hidden=256-bfloat16`: numbers have their name in front, other values stand alone."""
    parts = []
    for name, value in case.items():
        named = isinstance(value, (bool, int, float)) or value is None
        parts.append(f'{name}={_word(value)}' if named else _word(value))
    return '-'.join(parts)


def case_seed(op_name: str, case: Case) -> int:
    """A seed computed from the case, so that a failing case can be reproduced alone."""
    digest = hashlib.sha256(f'{op_name}[{case_id(case)}]'.encode()).digest()
    return int.from_bytes(digest[:4], 'little')


def bounds_of(match: dict[str, Any], output: str, expected: Tensor) -> dict[str, float]:
    """`rtol` and `atol` for an output; an empty dict means the defaults of its dtype."""
    bounds = match.get(output, match)
    if 'rtol' not in bounds:
        return {}
    known = expected.double()[expected.isfinite()] if 'rms' in bounds else expected.new_empty(0)
    rms = known.square().mean().sqrt().item() if known.numel() else 0.0
    return dict(rtol=bounds['rtol'], atol=bounds.get('atol', 0.0) + bounds.get('rms', 0.0) * rms)


@dataclass(frozen=True)
class Cases:
    """The cases of one op: `make(**case)` gives its arguments, `match` says how it must agree with its twin.

    `match` is 'bitwise' or a set of bounds. With bounds, the difference from an expected value x may be `rtol` |x| +
    `atol` + `rms` times the root mean square of the tensor. Rounding errors of sums grow with this mean. An output may
    have its own bounds, under its name. `flops(**arguments)` counts the operations of an op that is limited by compute,
    not by memory.
    """

    make: Callable[..., dict[str, Any]]
    match: str | dict[str, Any] = 'bitwise'
    smoke: list[Case] = field(default_factory=list)
    full: list[Case] = field(default_factory=list)
    bench: list[Case] = field(default_factory=list)
    flops: Callable[..., int] | None = None

    def arguments(self, op_name: str, case: Case, device: str | torch.device = 'cpu') -> dict[str, Any]:
        """Build the arguments of a case on a device, using the seed of the case."""
        seed = case_seed(op_name, case)
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` records a stack trace for every kind of device
        if torch.device(device).type == 'cuda':
            torch.cuda.manual_seed_all(seed)
        with torch.device(device):
            return self.make(**case)
