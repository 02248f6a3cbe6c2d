"""Rows of a mixture of experts sent by the ranks themselves: each writes into the memory of the rank it sends to."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tile_kernels.core.errors import ArgumentError, UnsupportedError


class SymmetricRows:
    """An all-to-all of rows through buffers that the ranks of one node share.

    The result is that of `torch.distributed.all_to_all_single`. A call waits on the host until the rows have come.

    Args:
        group: The process group.
        capacity: Most rows that a rank can receive at once.
    """

    def __init__(self, group: dist.ProcessGroup, capacity: int) -> None:
        self.group, self.capacity = group, capacity
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._buffers: dict[tuple[int, torch.dtype], tuple[Any, Tensor, Tensor]] = {}

    def exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send rows and return those received, in the order of ranks.

        Args:
            rows: (sum of `send`, hidden) rows in the order of their targets.
            send: Number of rows for each rank.
            receive: Number of rows from each rank.
        """
        from tile_kernels import scale

        kernel, buffer, table = self._prepared(rows.shape[1], rows.dtype)
        counts = torch.tensor(send, dtype=torch.int32, device=rows.device)
        needed = torch.empty_like(counts)
        scale.run(kernel, self.group, rows.contiguous(), counts, buffer, table, needed, None, self.rank)
        most = needed.tolist()
        if max(most) > self.capacity:  # every rank knows all numbers: all of them raise
            raise ArgumentError(
                f'MoEDistributed: max_tokens allows {self.capacity} rows on a rank, rank {most.index(max(most))} would '
                f'get {max(most)}; raise max_tokens'
            )
        return buffer[: sum(receive)].clone()

    def _prepared(self, hidden: int, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
        """The kernel and the buffers for rows of a size, made at the first exchange."""
        from tile_kernels import scale
        from tile_kernels.scale import programs

        key = hidden, dtype
        if key not in self._buffers:
            name = str(dtype).removeprefix('torch.')
            kernel = programs.all_to_all(self.capacity, hidden, self.world_size, name)
            buffer = scale.empty(self.capacity, hidden, dtype=dtype, group=self.group)
            table = scale.empty(self.world_size, self.world_size, dtype=torch.int32, group=self.group)
            self._buffers[key] = kernel, buffer, table
        return self._buffers[key]


def shared_rows(group: dist.ProcessGroup, capacity: int) -> SymmetricRows | None:
    """An exchange through shared memory; None, with one warning, if some rank cannot take part."""
    from tile_kernels import scale

    reason = ''
    try:
        scale.empty(1, dtype=torch.int32, group=group)
    except UnsupportedError as error:
        reason = str(error)
    reasons: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)  # all ranks must take the same way
    found = next((reason for reason in reasons if reason), None)
    if found is None:
        return SymmetricRows(group, capacity)
    _warn_once(found)
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"MoEDistributed: strategy 'symmetric' falls back to 'alltoall': {reason}", stacklevel=4)
