"""Roles: branches of a block that wait for each other run as coroutines.

The threads of a block run in lockstep. Roles (such as producer and consumer) follow different branches and wait for
each other. A wait that is not yet satisfied yields, and another branch continues. If no branch can continue, the kernel
deadlocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.lanes import Mask, both
from tile_kernels.interpreter.engine.translate import Closure
from tile_kernels.interpreter.errors import Deadlock, Site
from tile_kernels.interpreter.meaning.statements import Run, drive, nothing, waits

Waiting = tuple[Site, Callable[[], str]]  # the line at which a thread waits, and the awaited condition


def wait_until(
    frame: Frame, ready: Callable[[], bool], site: Site, what: Callable[[], str]
) -> Generator[Waiting, None, None]:
    """Let other roles run until a condition holds."""
    mask, looping = frame.mask, frame.looping
    while not ready():
        yield site, what
        frame.mask, frame.looping = mask, looping
    frame.shared.events += 1


def waiting_branch(condition: Closure, then: Run, otherwise: Run, ids: tuple[int, int]) -> Run:
    """A branch whose sides may wait for each other; if it splits a block, both sides run concurrently."""

    def sides(frame: Frame) -> list[tuple[Run, Mask]]:
        """The sides that have active lanes, with their masks."""
        taken = condition(frame)
        covered = frame.shared.covered
        if not isinstance(taken, np.ndarray):
            covered.add(ids[0] if taken else ids[1])
            return [(then if taken else otherwise, frame.mask)]
        found = []
        for side, lanes, number in ((then, taken, ids[0]), (otherwise, ~taken, ids[1])):
            inner = both(frame.mask, lanes)
            if inner.any():
                covered.add(number)
                if side is not nothing:  # a missing side needs no role, which would keep threads from a later branch
                    found.append((side, None if inner.all() else inner))
        return found

    def run(frame: Frame) -> Generator[Waiting, None, None]:
        yield from run_roles(frame, sides(frame))

    run.sides = sides  # type: ignore[attr-defined]
    return run


def concurrent_sequence(parts: list[Run]) -> Run:
    """A sequence with waits; neighbouring role branches (`with T.ws(1)`, `with T.ws(0)`) run concurrently."""
    groups: list[list[Run]] = []
    for part in parts:
        if groups and hasattr(part, 'sides') and hasattr(groups[-1][-1], 'sides'):
            groups[-1].append(part)
        else:
            groups.append([part])

    def run(frame: Frame) -> Generator[Waiting, None, None]:
        for group in groups:
            if len(group) == 1:
                yield from drive(group[0], frame)
            else:
                yield from run_roles(frame, _roles_of(group, frame))
            if any(getattr(part, 'escapes', False) for part in group):
                frame.mask = frame.refresh(frame.mask)
                if frame.mask is not None and not frame.mask.any():
                    return

    return run


def _roles_of(group: list[Run], frame: Frame) -> list[tuple[Run, Mask]]:
    """The roles of neighboring branches, with their threads.

    An earlier role may change what a later condition reads. So threads that are in one decide about a later branch when
    they reach it.
    """
    roles: list[tuple[Run, Mask]] = []
    for part in group:
        earlier = [_lanes(mask) for _, mask in roles]
        taken = np.zeros((1, 1), bool)
        for side, mask in part.sides(frame):  # type: ignore[attr-defined]
            if side is not nothing:
                lanes = _lanes(mask)
                again = any((lanes & other).any() for other in earlier)
                roles.append((part if again else side, mask))
                taken = taken | lanes
        for other in earlier:
            rest = other & ~taken
            if rest.any():
                roles.append((part, rest))
                taken = taken | rest
    return roles


def _lanes(mask: Mask) -> np.ndarray:
    """A mask as an array."""
    return np.ones((1, 1), bool) if mask is None else mask


def run_roles(frame: Frame, roles: list[tuple[Run, Mask]]) -> Generator[Waiting, None, None]:
    """Run branches of a block alternately; a branch starts when earlier ones with common threads have ended."""
    outer, looping = frame.mask, frame.looping
    tasks = [_Role(frame, run, mask) for run, mask in roles]
    while any(not task.done for task in tasks):
        before, frame.shared.spun = frame.shared.events, False
        blocked: Waiting | None = None
        for position, task in enumerate(tasks):
            if task.done or any(not other.done and task.meets(other) for other in tasks[:position]):
                continue
            blocked = task.advance(frame, looping) or blocked
        if blocked is not None and (frame.shared.events == before or frame.shared.spun):
            yield blocked
    frame.mask, frame.looping = outer, looping


class _Role:
    """One branch that some threads run."""

    def __init__(self, frame: Frame, run: Run, mask: Mask) -> None:
        self.mask = mask
        self.done = False
        self.steps = drive(run, frame)
        self.started = False

    def meets(self, other: _Role) -> bool:
        """Whether two branches have a thread in common."""
        if self.mask is None or other.mask is None:
            return True
        return bool((self.mask & other.mask).any())

    def advance(self, frame: Frame, looping: Mask) -> Waiting | None:
        """Continue until the end or the next unsatisfied wait, which is returned."""
        if not self.started:
            self.started = True
            frame.mask, frame.looping = self.mask, looping
            frame.shared.events += 1
        try:
            return next(self.steps)
        except StopIteration:
            self.done = True
            frame.shared.events += 1
            return None


def run_blocks(body: Run, frames: list[Frame]) -> None:
    """Run batches of blocks to the end, alternately if they wait."""
    if not waits(body):
        for frame in frames:
            body(frame)
        return
    running = [(frame, body(frame)) for frame in frames]
    while running:
        events = running[0][0].shared.events
        stuck = []
        for frame, steps in running:
            waiting = next(steps, None)
            if waiting is not None:
                stuck.append((frame, steps, waiting))
        if len(stuck) == len(running) and frames[0].shared.events == events:
            frame, _, (site, what) = stuck[0]
            lane = None
            if frame.mask is not None:
                active = np.broadcast_to(frame.mask, (frame.blocks, frame.threads))
                lane = tuple(int(part) for part in np.argwhere(active)[0])
            raise frame.error(Deadlock, f'every running thread waits, one of them for {what()}', site, lane)
        running = [(frame, steps) for frame, steps, _ in stuck]
