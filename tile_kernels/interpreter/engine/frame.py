"""The state of a running batch of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.lanes import Mask, both
from tile_kernels.interpreter.errors import InterpreterError, Site


class Frame:
    """All state that changes while a batch of blocks runs.

    Attributes:
        env: Values of bound variables, by slot.
        memory: Memory of each buffer, by slot.
        mask: Active lanes at the current statement.
        live: Lanes that have not returned from the kernel (None: all).
        looping: Lanes that have not left the innermost loop by `break` (None: all).
        blocks: Number of blocks in the batch.
        threads: Number of threads of a block.
        extents: Extents of the enclosing parallel loops, outermost first.
        block_ids: Coordinates (x, y, z) of each block of the batch.
        shared: State common to all batches of one `interpret` call.
        rank: Rank of the device, if several are simulated.
    """

    __slots__ = (
        'async_groups',
        'barriers',
        'block_ids',
        'blocks',
        'clock',
        'early',
        'env',
        'extents',
        'first_block',
        'grid',
        'live',
        'looping',
        'mask',
        'memory',
        'rank',
        'registers',
        'shared',
        'threads',
    )

    def __init__(self, num_slots: int, num_memories: int, shared: Any) -> None:
        self.env: list[Any] = [None] * num_slots
        self.memory: list[Any] = [None] * num_memories
        self.mask: Mask = None
        self.live: Mask = None
        self.looping: Mask = None
        self.blocks = 1
        self.first_block = 0  # number of the batch's first block within the grid
        self.grid: list[int] = []  # number of blocks along x, y and z
        self.threads = 1
        self.extents: list[int] = []
        self.block_ids: tuple[np.ndarray, ...] = ()
        self.shared = shared
        self.async_groups: Any = None
        self.barriers: Any = None
        self.clock: Any = None
        self.early: Mask = None  # threads that have not yet waited for the previous kernel (None: none has to)
        self.registers: Any = None
        self.rank: int | None = None

    def refresh(self, mask: Mask) -> Mask:
        """The lanes of `mask` that have neither returned nor left their loop."""
        return both(both(mask, _reach(self.live, mask)), _reach(self.looping, mask))

    def batch_for(self, num_slots: int, num_memories: int) -> Frame:
        """A frame for the blocks of a launch, with the variables and tensors of the host."""
        frame = Frame(num_slots, num_memories, self.shared)
        frame.env[: len(self.env)] = self.env
        frame.memory[: len(self.memory)] = self.memory
        frame.rank = self.rank
        return frame

    def error(
        self,
        kind: type[InterpreterError],
        message: str,
        site: Site,
        lane: tuple[int, ...] | None = None,
        buffer: str = '',
        index: tuple[int, ...] | None = None,
        others: tuple[int, ...] = (),
    ) -> InterpreterError:
        """Build a finding with the block and thread of the failing lane."""
        block = thread = None
        if self.block_ids:
            position = lane[0] if lane else 0
            block = tuple(int(ids[position if len(ids) > 1 else 0]) for ids in self.block_ids)
        if lane is not None and len(lane) > 1 and self.threads > 1 and lane[1] >= 0:
            thread = lane[1]
        ranks = () if self.rank is None else (self.rank, *others)
        found = kind(message, site, buffer=buffer, index=index, block=block, thread=thread, ranks=ranks)
        found.frame = self
        return found

    def report(self, *args: Any, **kwargs: Any) -> None:
        """Raise a finding (with the arguments of `error`), or collect it."""
        self.shared.session.found(self.error(*args, **kwargs))


def _reach(mask: Mask, like: Mask) -> Mask:
    if mask is None or like is None or mask.ndim >= like.ndim:
        return mask
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim))


def active_threads(frame: Frame) -> np.ndarray:
    """Active threads of every block."""
    mask = np.ones((1, 1), bool) if frame.mask is None else frame.mask
    if mask.ndim > 2:
        mask = mask.any(axis=tuple(range(2, mask.ndim)))
    return np.broadcast_to(mask, (frame.blocks, frame.threads))


def first_thread(frame: Frame) -> np.ndarray:
    """Per block, the first active thread."""
    return np.argmax(active_threads(frame), axis=1)


def agreed(frame: Frame, value: Any) -> Any:
    """A value on which threads of a collective operation agree, read from the first of them."""
    if not isinstance(value, np.ndarray) or value.ndim < 2 or value.shape[1] == 1:
        return value
    spread = np.broadcast_to(value, (frame.blocks, *value.shape[1:]))
    return spread[np.arange(frame.blocks), first_thread(frame)][:, None]


def cluster_rank(frame: Frame, dims: tuple[int, ...]) -> np.ndarray:
    """Rank of every block of the batch within its cluster."""
    rank = np.zeros(frame.blocks, np.int32)
    scale = 1
    for ids, extent in zip(frame.block_ids, dims, strict=False):
        rank += (ids % extent * scale).astype(np.int32)
        scale *= extent
    return rank


def cluster_distance(frame: Frame, dims: tuple[int, ...], rank: Any) -> np.ndarray:
    """Number of rows from every block of the batch to the block of a given rank in its cluster."""
    rank = np.asarray(rank)
    away = np.zeros((1, 1), np.intp)
    row = 1
    for ids, extent, count in zip(frame.block_ids, dims, frame.grid, strict=False):
        away = away + (rank % extent - (ids % extent).reshape(-1, 1)) * row
        rank = rank // extent
        row *= count
    return away


def cluster_of(frame: Frame, dims: tuple[int, ...]) -> np.ndarray:
    """Number of the cluster of every block of the batch."""
    places = np.stack([ids // extent for ids, extent in zip(frame.block_ids, dims, strict=False)])
    return np.unique(places.reshape(len(places), -1), axis=1, return_inverse=True)[1].reshape(-1)
