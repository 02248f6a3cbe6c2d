"""The order that barriers create between the threads of a block and the blocks of a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, cluster_of, cluster_rank
from tile_kernels.interpreter.engine.lanes import Mask


class Clock:
    """The happens-before relation: barriers passed by blocks and warps, and what each warp has seen of the others.

    Every access of a warp has the current stamp of the warp. `seen[block, warp, other]` is a stamp of another agent:
    its last stamp that is ordered before the warp's next access. A block barrier, an mbarrier or a barrier of a role
    creates this order. For every block of the cluster, the other agents are its warps and the data sent to it. A warp
    that waits at the mbarrier of sent bytes has seen these bytes, and all that their senders did and saw before.
    """

    def __init__(self, frame: Frame, cluster_dims: tuple[int, ...]) -> None:
        warps = -(-frame.threads // 32)
        self.blocks = np.zeros(frame.blocks, np.int64)
        self.warps = np.zeros((frame.blocks, warps), np.int64)
        self.stamps = np.ones((frame.blocks, warps), np.int64)
        self.sent = np.ones(frame.blocks, np.int64)  # stamps of the data sent to a block
        self.cluster = cluster_of(frame, cluster_dims)
        self.rank = cluster_rank(frame, cluster_dims)
        self.others = warps + 1
        self.seen = np.zeros((frame.blocks, warps, int(np.prod(cluster_dims)) * self.others), np.int64)
        self.published: dict[Any, np.ndarray] = {}
        self.threads = frame.threads
        self.settling = False  # copies may overwrite data that was read, so reads must complete before arrivals
        self.period = np.zeros((frame.blocks, warps), np.int64)  # ends when its reads complete, or with an arrival
        self.ended = np.zeros((frame.blocks, warps, 16), np.int64)  # stamp of the arrival that ended a period, or 0
        self.fences = 0  # number of proxy fences so far
        self.fenced = np.zeros((frame.blocks, warps), np.int64)  # number of the last fence of each warp
        self.alone = False  # barriers surround the current statement, so only its own lanes can race

    def other(self, block: Any, warp: Any) -> Any:
        """The index of a warp of a block in `seen`; the index after the last warp is the data sent to the block."""
        return self.rank[block] * self.others + warp

    def settle(self, threads: np.ndarray | None) -> None:
        """The reads of these threads (blocks, threads) are complete, because their values were used."""
        if self.settling:
            self._end_period(self._active_warps(threads), 0)

    def fence(self, threads: np.ndarray | None) -> None:
        """Order the earlier accesses of these threads before the TMA copies and wgmma that follow."""
        self.settle(threads)
        self.fences += 1
        self.fenced[self._active_warps(threads)] = self.fences

    def _end_period(self, active: np.ndarray, stamps: Any) -> None:
        if int(self.period.max()) + 1 >= self.ended.shape[2]:
            self.ended = np.concatenate([self.ended, np.zeros_like(self.ended)], axis=2)
        block, warp = np.nonzero(active)
        ending = stamps if np.ndim(stamps) == 0 else stamps[block, warp]
        self.ended[block, warp, self.period[block, warp]] = ending
        self.period[block, warp] += 1

    def block_sync(self, mask: Mask) -> None:
        """A block barrier: everything before it is ordered before everything after."""
        if mask is None:
            self.blocks += 1
        else:
            self.blocks += np.broadcast_to(mask.any(axis=tuple(range(1, mask.ndim))), self.blocks.shape)
        if self.seen.shape[2] > self.others:  # between blocks, what others have seen matters
            self.role_sync(mask)

    def warp_sync(self, mask: Mask) -> None:
        """A warp barrier of each active warp."""
        self.warps += self._active_warps(mask)

    def role_sync(self, mask: Mask) -> None:
        """A barrier between the active warps only."""
        active = self._active_warps(mask)
        self._learn(active, self._knowledge(active))
        self.stamps = self.stamps + active

    def cluster_sync(self) -> None:
        """A cluster barrier."""
        active = self._active_warps(None)
        self._learn(active, self._of_cluster(self._knowledge(active)))
        self.stamps = self.stamps + active

    def release(self, barrier: Any, index: Any, mask: Mask) -> None:
        """The active warps publish what they did and have seen at a barrier."""
        for number, active in self._by_barrier(index, mask):
            self._publish((barrier, number), self._knowledge(active))
            if self.settling:
                self._end_period(active, self.stamps)
            self.stamps = self.stamps + active

    def acquire(self, barrier: Any, index: Any, mask: Mask) -> None:
        """The active warps take over what was published at a barrier."""
        for number, active in self._by_barrier(index, mask):
            known = self.published.get((barrier, number))
            if known is not None:
                self._learn(active, self._of_cluster(known) if barrier == 'cluster' else known)

    def send(self, barrier: Any, numbers: np.ndarray, senders: np.ndarray, warps: np.ndarray, to: np.ndarray) -> None:
        """Warps of the blocks `senders` have sent data to the blocks `to`, whose barriers count it."""
        for number in np.unique(numbers):
            here = numbers == number
            who = np.unique(np.stack([to[here], senders[here], warps[here]]), axis=1)
            target, sender, warp = who
            row = np.arange(len(target))
            known = self.seen[sender, warp]
            known[row, self.other(sender, warp)] = self.stamps[sender, warp]
            known[row, self.other(target, self.others - 1)] = self.sent[target]
            self._publish((barrier, int(number)), self._by_block(target, known))
        self.stamps[senders, warps] += 1  # once, however many lanes
        self.sent[to] += 1

    def _knowledge(self, active: np.ndarray) -> np.ndarray:
        """Per block, the last stamp of every agent that some active warp has made or seen."""
        block, warp = np.nonzero(active)
        known = self.seen[block, warp]
        known[np.arange(len(block)), self.other(block, warp)] = self.stamps[block, warp]
        return self._by_block(block, known)

    def _by_block(self, block: np.ndarray, known: np.ndarray) -> np.ndarray:
        """The maximum per block, whose rows are contiguous; 0 for blocks without a row."""
        latest = np.zeros((len(self.blocks), known.shape[1]), np.int64)
        if len(block):
            first = np.flatnonzero(np.diff(block, prepend=-1))
            latest[block[first]] = np.maximum.reduceat(known, first)
        return latest

    def _of_cluster(self, known: np.ndarray) -> np.ndarray:
        """For each block, the maximum over the blocks of its cluster."""
        order = np.argsort(self.cluster, kind='stable')
        latest = np.maximum.reduceat(known[order], np.flatnonzero(np.diff(self.cluster[order], prepend=-1)))
        return latest[self.cluster]

    def _learn(self, active: np.ndarray, known: np.ndarray) -> None:
        """The active warps have seen what is known in their blocks."""
        block, warp = np.nonzero(active)
        self.seen[block, warp] = np.maximum(self.seen[block, warp], known[block])

    def _publish(self, key: Any, known: np.ndarray) -> None:
        self.published[key] = np.maximum(self.published.get(key, 0), known)

    def _by_barrier(self, index: Any, mask: Mask) -> list[tuple[int, np.ndarray]]:
        """(barrier number, active warps) for every barrier that active threads address."""
        if not isinstance(index, np.ndarray):
            return [(int(index), self._active_warps(mask))]
        found = []
        for number in np.unique(index):
            here = index == number
            found.append((int(number), self._active_warps(here if mask is None else here & mask)))
        return found

    def _active_warps(self, mask: Mask) -> Any:
        if mask is None:
            return np.ones(self.warps.shape, bool)
        lanes = np.broadcast_to(mask, (len(self.blocks), self.threads))
        padded = np.zeros((len(self.blocks), self.warps.shape[1] * 32), bool)
        padded[:, : self.threads] = lanes
        return padded.reshape(len(self.blocks), -1, 32).any(axis=2)
