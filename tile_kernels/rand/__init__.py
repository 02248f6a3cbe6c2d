"""Normal random numbers that are the same on a CPU and on a GPU, for the same seed and the same order of calls.

A call takes the next numbers of one stream for the whole process. The stream is advanced by the host: a call captured
in a CUDA graph or traced by `torch.compile` gives the same numbers each time it is replayed.
"""

import math
import threading
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.rand.normal import normal_

__all__ = ['randn', 'randn_like', 'set_seed']


def __dir__() -> list[str]:
    return __all__


class _Stream:
    """The seed of the process and how many groups of four numbers have been taken."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seed: int | None = None
        self.taken = 0

    def take(self, count: int) -> tuple[int, int]:
        """Seed and offset of the next `count` numbers."""
        with self.lock:
            if self.seed is None:
                self.seed = torch.initial_seed()
            offset, self.taken = self.taken, self.taken + -(-count // 4)
            return self.seed, offset

    def restart(self, seed: int) -> None:
        with self.lock:
            self.seed, self.taken = seed, 0


_stream = _Stream()


def set_seed(seed: int) -> None:
    """Begin the stream of `seed`, here and in PyTorch's own generators (`torch.manual_seed`)."""
    torch.manual_seed(seed)
    _stream.restart(seed)


def randn(
    *size: int | tuple[int, ...], dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Tensor:
    """A tensor of independent normal numbers of mean 0 and variance 1.

    Args:
        size: extents, one by one or as a tuple.
        dtype: bfloat16, float16 or float32; PyTorch's default dtype if None.
        device: where to make them; a GPU if there is one and None is given.

    Returns:
        A contiguous tensor; its numbers depend on `set_seed` and on the calls since, not on the device. Without
        `set_seed` the stream is that of `torch.initial_seed()`.
    """
    shape: Any = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    place = device or ('cuda' if torch.cuda.is_available() else 'cpu')
    out = torch.empty(shape, dtype=dtype or torch.get_default_dtype(), device=place)
    normal_(out, *_stream.take(math.prod(shape)))
    return out


def randn_like(t: Tensor) -> Tensor:
    """`randn` in the shape and dtype and on the device of `t`."""
    check.tensor(t, 't')
    return randn(t.shape, dtype=t.dtype, device=t.device)
