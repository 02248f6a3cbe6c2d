"""Operations of ops for `torch.utils.flop_counter.FlopCounterMode`, from the counts that ops declare with their cases.

Only matrix products count, as in PyTorch. Of attention, the pairs that the mask lets through count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry, register_flop_formula

from tile_kernels.core.operator import Operator


def register_flops(operator: Operator, count: Callable[..., int]) -> None:
    """Let `FlopCounterMode` count calls of an operator by a function of its arguments by name."""
    packet = operator.overload.overloadpacket
    if packet not in flop_registry:
        register_flop_formula(packet, get_raw=True)(functools.partial(_count, operator, count))


def _count(operator: Operator, count: Callable[..., int], *flat: Any, out_val: Any = None, **keywords: Any) -> int:
    with _disable_current_modes():  # the formulas compute with small tensors, which must not count
        return count(**operator.unflatten(flat, keywords))


def known(x: Tensor) -> bool:
    """Whether the values of an argument can be read: it is neither fake nor on the meta device."""
    return type(x) is Tensor and not x.is_meta
