"""Registers of a block: who asks for more waits until others have given up as many.

The warps of a block begin with equal parts of what an SM has. `T.dec_max_nreg` gives registers back, `T.inc_max_nreg`
waits for them, and both are for all four warps of a warpgroup. Nothing else here counts registers; but a kernel that
asks for more than there are never ends, so this is found.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.errors import Deadlock, Site

#: Registers of an SM, those a thread may have, and the steps they come in.
REGISTERS, MOST, STEP = 65536, 255, 8

WARPGROUP = 128


class Budgets:
    """What every thread of a batch has asked for, 0 for what it began with."""

    def __init__(self, frame: Frame) -> None:
        self.asked = np.zeros((frame.blocks, frame.threads), np.int64)
        self.site: Site | None = None

    def ask(self, frame: Frame, count: int, site: Site) -> None:
        """The active threads will have `count` registers."""
        lanes = True if frame.mask is None else np.broadcast_to(frame.mask, self.asked.shape)
        self.asked[lanes] = count
        self.site = site

    def check(self, frame: Frame) -> None:
        """Raise if somebody would wait for ever."""
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
    """Ask for registers, or give some back."""
    count, site = compiler.expr(call.args[0]), compiler.site

    def run(frame: Frame) -> None:
        if frame.registers is None:
            frame.registers = Budgets(frame)
        frame.registers.ask(frame, int(count(frame)), site)

    return run
