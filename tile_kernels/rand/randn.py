"""Normal random numbers that are the same on a CPU and on a GPU, for the same seed and the same order of calls.

A call takes the next numbers of one stream for the whole process, also inside `torch.compile`. The host advances the
stream, so a call captured in a CUDA graph gives the same numbers in each replay.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.rand.normal import DTYPES, normal_, signed


class _Stream:
    """The seed of the process, and the number of groups of four numbers taken so far."""

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
            return signed(self.seed), signed(offset)  # an operator takes signed integers

    def restart(self, seed: int) -> None:
        with self.lock:
            self.seed, self.taken = seed, 0


_stream = _Stream()


def set_seed(seed: int) -> None:
    """Start the stream of `seed`, here and in PyTorch's own generators (`torch.manual_seed`)."""
    check.integer(seed, 'seed')
    if not -(1 << 63) <= seed < 1 << 64:
        check.fail('seed', 'must have at most 64 bits', str(seed))
    torch.manual_seed(seed)
    _stream.restart(seed)


def randn(
    *size: int | tuple[int, ...], dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> Tensor:
    """A tensor of independent normal numbers of mean 0 and variance 1.

    Args:
        size: extents, one by one or as a tuple.
        dtype: bfloat16, float16 or float32; PyTorch's default dtype if None.
        device: device of the tensor; None means the GPU if there is one.

    Returns:
        A contiguous tensor; its numbers depend on `set_seed` and on the calls since, not on the device. Without
        `set_seed` the stream is that of `torch.initial_seed()`.
    """
    shape: Any = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    for extent in shape:
        check.integer(extent, 'size', 0)
    dtype = torch.get_default_dtype() if dtype is None else check.to_dtype(dtype, 'dtype')
    check.one_of(dtype, DTYPES, 'dtype')
    place = torch.device(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    return (_traced_draw if torch.compiler.is_compiling() else _draw)(shape, dtype, place)


def _draw(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The next numbers of the stream."""
    out = torch.empty(size, dtype=dtype, device=device)
    normal_(out, *_stream.take(math.prod(size)))
    return out


#: `_draw` as an operator: a compiled graph calls it in each run, so the stream advances.
_traced_draw = torch.library.custom_op(
    'tile_kernels::rand_draw', _draw, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)


@_traced_draw.register_fake
def _(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def randn_like(t: Tensor) -> Tensor:
    """`randn` with the shape, dtype and device of `t`."""
    check.dtype(t, 't', DTYPES)
    return randn(t.shape, dtype=t.dtype, device=t.device)
