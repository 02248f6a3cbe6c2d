"""What the threads of a block, and the blocks of a cluster, know of each other: the order that barriers make."""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, cluster_of, cluster_rank
from tile_kernels.interpreter.engine.lanes import Mask


class Clock:
    """What is ordered before what: barriers of blocks and warps passed, and what each warp knows of the others.

    Every access of a warp carries the warp's current stamp; `seen[block, warp, other]` is the last stamp of another
    that a barrier, an mbarrier or a barrier of its role has ordered before the warp's next access. The others are, for
    every block of the cluster, its warps and all that is sent to it: who waits at the mbarrier that counts the bytes
    has seen that, and what those who sent it had done and seen.
    """

    def __init__(self, frame: Frame, cluster_dims: tuple[int, ...]) -> None:
        warps = -(-frame.threads // 32)
        self.blocks = np.zeros(frame.blocks, np.int64)
        self.warps = np.zeros((frame.blocks, warps), np.int64)
        self.stamps = np.ones((frame.blocks, warps), np.int64)
        self.sent = np.ones(frame.blocks, np.int64)  # stamps of what is sent to a block
        self.cluster = cluster_of(frame, cluster_dims)
        self.rank = cluster_rank(frame, cluster_dims)
        self.others = warps + 1
        self.seen = np.zeros((frame.blocks, warps, int(np.prod(cluster_dims)) * self.others), np.int64)
        self.published: dict[Any, np.ndarray] = {}
        self.threads = frame.threads
        self.settling = False  # copies may overwrite what was read: arrivals behind reads matter
        self.period = np.zeros((frame.blocks, warps), np.int64)  # ends when reads have come, or with an arrival
        self.ended = np.zeros((frame.blocks, warps, 16), np.int64)  # stamp of the arrival that ended a period, or 0
        self.fences = 0  # fences of memory proxies so far
        self.fenced = np.zeros((frame.blocks, warps), np.int64)  # number of the last one of each warp
        self.alone = False  # barriers surround the current statement, so only its own lanes can race

    def other(self, block: Any, warp: Any) -> Any:
        """Where `seen` has a warp of a block; behind the last warp, what is sent to the block."""
        return self.rank[block] * self.others + warp

    def settle(self, threads: np.ndarray | None) -> None:
        """What these threads (blocks, threads) have read has come: they used it for what cannot move."""
        if self.settling:
            self._end_period(self._active_warps(threads), 0)

    def fence(self, threads: np.ndarray | None) -> None:
        """These threads put what they did before the copies and products that follow."""
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
        """A barrier of the block: everything before it is ordered before everything after."""
        if mask is None:
            self.blocks += 1
        else:
            self.blocks += np.broadcast_to(mask.any(axis=tuple(range(1, mask.ndim))), self.blocks.shape)
        if self.seen.shape[2] > self.others:  # what others have seen matters between blocks
            self.role_sync(mask)

    def warp_sync(self, mask: Mask) -> None:
        """A barrier of each active warp."""
        self.warps += self._active_warps(mask)

    def role_sync(self, mask: Mask) -> None:
        """A barrier of the active warps among themselves."""
        active = self._active_warps(mask)
        self._learn(active, self._knowledge(active))
        self.stamps = self.stamps + active

    def cluster_sync(self) -> None:
        """A barrier of the blocks of each cluster."""
        active = self._active_warps(None)
        self._learn(active, self._of_cluster(self._knowledge(active)))
        self.stamps = self.stamps + active

    def release(self, barrier: Any, index: Any, mask: Mask) -> None:
        """The active warps publish what they did and know at a barrier."""
        for number, active in self._by_barrier(index, mask):
            self._publish((barrier, number), self._knowledge(active))
            if self.settling:
                self._end_period(active, self.stamps)
            self.stamps = self.stamps + active

    def acquire(self, barrier: Any, index: Any, mask: Mask) -> None:
        """The active warps learn what was published at a barrier."""
        for number, active in self._by_barrier(index, mask):
            known = self.published.get((barrier, number))
            if known is not None:
                self._learn(active, self._of_cluster(known) if barrier == 'cluster' else known)

    def send(self, barrier: Any, numbers: np.ndarray, senders: np.ndarray, warps: np.ndarray, to: np.ndarray) -> None:
        """Warps of the blocks `senders` have sent something to the blocks `to`, whose barriers count it."""
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
        """Per block, the last stamp of every other that some active warp has made or seen."""
        block, warp = np.nonzero(active)
        known = self.seen[block, warp]
        known[np.arange(len(block)), self.other(block, warp)] = self.stamps[block, warp]
        return self._by_block(block, known)

    def _by_block(self, block: np.ndarray, known: np.ndarray) -> np.ndarray:
        """The latest of each block, whose rows lie together; of blocks without any nothing is known."""
        latest = np.zeros((len(self.blocks), known.shape[1]), np.int64)
        if len(block):
            first = np.flatnonzero(np.diff(block, prepend=-1))
            latest[block[first]] = np.maximum.reduceat(known, first)
        return latest

    def _of_cluster(self, known: np.ndarray) -> np.ndarray:
        """What the blocks of a cluster know together, for each of them."""
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
