"""The two CUDA functions of `tile_kernels.scale`: signals between devices, at system scope.

A signal pad is an array of 64-bit words: a header, whose first word is the epoch, then (rows x world) cells.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from tile_kernels.interpreter.checks.flags import note_flags
from tile_kernels.interpreter.engine.frame import Frame, active_threads
from tile_kernels.interpreter.engine.roles import Waiting, wait_until
from tile_kernels.interpreter.engine.translate import Closure, Compiler, extern_construct
from tile_kernels.interpreter.errors import RemoteOutOfBounds, SignalReused, Site, UnsupportedConstruct
from tile_kernels.interpreter.meaning.statements import marked

HEADER = 4  # words of a pad before its cells


class _Cells:
    """The cells of a signal or wait, one for each active thread."""

    def __init__(self, frame: Frame, site: Site, pad: Any, parts: tuple[Any, ...]) -> None:
        if frame.shared.world is None:
            raise frame.error(UnsupportedConstruct, 'a signal needs several devices: use scale.simulate', site)
        active = active_threads(frame)
        self.rows, self.threads = np.nonzero(active)
        self.frame, self.site = frame, site

        def lanes(value: Any) -> np.ndarray:
            return np.broadcast_to(np.asarray(value), active.shape)[active].astype(np.int64)

        self.row, self.limit, self.width, self.rank, self.value = (lanes(part) for part in parts)
        self.pad = lanes(pad)
        self._require_inside(self.rank, self.width, 'rank')
        self._require_inside(self.row, self.limit, 'slot')
        self.address = self.pad + 8 * (HEADER + self.row * self.width + self.rank)
        self.words, self.start = frame.shared.world.words(frame, site, self.pad)

    def _require_inside(self, number: np.ndarray, limit: np.ndarray, what: str) -> None:
        bad = (number < 0) | (number >= limit)
        if bad.any():
            first = int(np.argmax(bad))
            text = f'{what} {int(number[first])} of a signal is outside 0 to {int(limit[first]) - 1}'
            lane = (int(self.rows[first]), int(self.threads[first]))
            raise self.frame.error(RemoteOutOfBounds, text, self.site, lane)

    def epoch(self, pad: np.ndarray) -> np.ndarray:
        """The epochs of some pads."""
        return self.words[(pad - self.start) // 8]

    @property
    def stored(self) -> np.ndarray:
        """What the cells hold."""
        return self.words[self.cells]

    @property
    def cells(self) -> np.ndarray:
        """The words of the cells."""
        return (self.address - self.start) // 8

    def lane(self, index: int) -> tuple[int, int]:
        """Block and thread of an entry."""
        return int(self.rows[index]), int(self.threads[index])

    def note(self, index: int, value: int, releases: bool) -> None:
        """Record the order that a signal or a wait for its value makes; a later value may come early by chance."""
        history = self.frame.shared.world.signaled.setdefault(int(self.address[index]), [])
        if releases:
            history.append(value)
        else:
            value = min(later for later in history if later >= value)
        place = (int(self.address[index]), value)
        note_flags(self.frame, [(int(self.rows[index]), place)], not releases, releases, ('system', self.frame.rank))

    def name(self, index: int) -> str:
        """A cell in words."""
        return f'slot {int(self.row[index])}'


@extern_construct('__threadfence_system')
def _system_fence(compiler: Compiler, call: Any) -> Closure:
    """A fence for all devices: between it and an atomic access of the same block, the access has system scope."""

    def run(frame: Frame) -> None:
        if frame.shared.world is not None and frame.clock is not None:
            for row in np.flatnonzero(active_threads(frame).any(axis=1)):
                frame.shared.flags.fence(frame.first_block + int(row))

    return run


@extern_construct('tk_scale_signal')
def _signal(compiler: Compiler, call: Any) -> Closure:
    """Release store of `epoch + value` into a cell of a device's pad."""
    own, peer, row, rows, world, rank, value = (compiler.expr(part) for part in call.args[1:])
    site = compiler.site

    def run(frame: Frame) -> None:
        cells = _Cells(frame, site, peer(frame), tuple(part(frame) for part in (row, rows, world, rank, value)))
        mine = np.broadcast_to(np.asarray(own(frame)), active_threads(frame).shape)[active_threads(frame)]
        value_now = cells.value + cells.epoch(mine.astype(np.int64))
        reused = (value_now <= cells.stored) | (cells.value < 1)
        if reused.any():
            first = int(np.argmax(reused))
            target = frame.shared.world.rank_at(int(cells.pad[first]))
            epoch = int(value_now[first] - cells.value[first])
            text = (
                f'value {int(cells.value[first])} is signaled to rank {target} in {cells.name(first)} after value '
                f'{max(0, int(cells.stored[first]) - epoch)}; values must grow'
            )
            frame.shared.session.found(frame.error(SignalReused, text, site, cells.lane(first), others=(target,)))
        if frame.clock is not None:
            for index in range(len(value_now)):
                cells.note(index, int(value_now[index]), releases=True)
        cells.words[cells.cells] = value_now
        frame.shared.events += 1

    return run


@extern_construct('tk_scale_wait')
def _wait(compiler: Compiler, call: Any) -> Closure:
    """Acquire loads of a cell of the own pad until it holds `epoch + value` or more."""
    own, row, rows, world, rank, value = (compiler.expr(part) for part in call.args[1:])
    site = compiler.site

    def run(frame: Frame) -> Generator[Waiting, None, None]:
        cells = _Cells(frame, site, own(frame), tuple(part(frame) for part in (row, rows, world, rank, value)))
        wanted = cells.value + cells.epoch(cells.pad)

        def what() -> str:
            first = int(np.argmax(cells.stored < wanted))
            found = max(0, int(cells.stored[first] - wanted[first] + cells.value[first]))
            return (
                f'value {int(cells.value[first])} from rank {int(cells.rank[first])} in {cells.name(first)}, '
                f'which holds {found}'
            )

        yield from wait_until(frame, lambda: bool((cells.stored >= wanted).all()), site, what)
        if frame.clock is not None:
            for index in range(len(wanted)):
                cells.note(index, int(wanted[index]), releases=False)

    compiler.spins = True
    return marked(run, waits_=True)
