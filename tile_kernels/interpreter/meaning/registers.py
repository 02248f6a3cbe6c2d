"""Registers of a block: a warpgroup that requests more registers waits until others have released as many.

At the start, the warps of a block have equal parts of the registers of an SM. `T.dec_max_nreg` releases registers, and
`T.inc_max_nreg` waits for them. Both apply to all four warps of a warpgroup. The interpreter counts registers only
here, because a kernel that requests more than there are never ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.errors import Deadlock, Site

#: Registers of an SM, the most per thread, and their granularity.
REGISTERS, MOST, STEP = 65536, 255, 8

WARPGROUP = 128


class Budgets:
    """The requested registers of every thread of a batch; 0 means the initial number."""

    def __init__(self, frame: Frame) -> None:
        self.asked = np.zeros((frame.blocks, frame.threads), np.int64)
        self.site: Site | None = None

    def ask(self, frame: Frame, count: int, site: Site) -> None:
        """Set the registers of the active threads to `count`."""
        lanes = True if frame.mask is None else np.broadcast_to(frame.mask, self.asked.shape)
        self.asked[lanes] = count
        self.site = site

    def check(self, frame: Frame) -> None:
        """Raise if some warp would wait forever."""
        threads = self.asked.shape[1]
        for first in range(0, threads, WARPGROUP):
            part = self.asked[:, first : first + WARPGROUP]
            if (part != part[:, :1]).any():
                block = int(np.argwhere((part != part[:, :1]).any(1))[0, 0])
                found = sorted({int(count) for count in part[block]})
                words = ' and '.join(f'{count} registers' if count else 'none at all' for count in reversed(found))
                text = f'all warps of threads {first} to {first + part.shape[1] - 1} must ask for the same: {words}'
                frame.report(Deadlock, text, self.site or Site(''), (block, first))
        begun = min(MOST, REGISTERS // threads // STEP * STEP)
        wanted = np.where(self.asked > 0, self.asked, begun).sum(1)
        if (wanted > begun * threads).any():
            block = int(np.argmax(wanted))
            text = f'its warps ask for {int(wanted[block])} registers, and the block began with {begun * threads}'
            frame.report(Deadlock, text, self.site or Site(''), (block, 0))


@op('tl.set_max_nreg')
def _set_registers(compiler: Compiler, call: Any) -> Closure:
    """Request or release registers."""
    count, site = compiler.expr(call.args[0]), compiler.site

    def run(frame: Frame) -> None:
        if frame.registers is None:
            frame.registers = Budgets(frame)
        frame.registers.ask(frame, int(count(frame)), site)

    return run
