"""Findings of the interpreter: one exception class for each type of error in a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Site:
    """The position of a construct in the user's source."""

    kernel: str
    file: str = ''
    line: int = 0

    def __str__(self) -> str:
        return f'{self.file}:{self.line}' if self.line else 'unknown line'


class InterpreterError(RuntimeError):
    """Base of everything the interpreter raises about a kernel.

    Attributes:
        kernel: Name of the kernel.
        buffer: Name of the buffer concerned, or an empty string.
        index: Index of the first offending element, if there is one.
        block: Block coordinates (x, y, z) of the first failing lane, if known.
        thread: Thread number of the first failing lane, if known.
        ranks: Ranks of the devices concerned, if several were simulated; first the one whose block fails.
        filename: Source file of the failing statement.
        line: Source line of the failing statement (0 if unknown).
        times: How often it was found, if findings are collected.
        post_mortem: Memory contents of the failing block (`session.PostMortem`), if `interpret` raised the error.
    """

    post_mortem: Any = None

    def __init__(
        self,
        message: str,
        site: Site | None = None,
        *,
        buffer: str = '',
        index: tuple[int, ...] | None = None,
        block: tuple[int, ...] | None = None,
        thread: int | None = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        site = site or Site('')
        where = [f'rank {ranks[0]}'] if ranks else []
        where += [f'block {block}'] if block is not None else []
        where += [f'thread {thread}'] if thread is not None else []
        place = f' ({", ".join(where)})' if where else ''
        prefix = f'{site.kernel}: ' if site.kernel else ''
        suffix = f', at {site}' if site.line else ''
        super().__init__(f'{prefix}{message}{place}{suffix}')
        self.kernel, self.filename, self.line = site.kernel, site.file, site.line
        self.buffer, self.index, self.block, self.thread = buffer, index, block, thread
        self.ranks = ranks
        self.times = 0
        self.frame: Any = None  # the state of the run; `interpret` clears it


class UnsupportedConstruct(InterpreterError):
    """The kernel uses something that the interpreter does not model; the interpreter never guesses."""


class OutOfBounds(InterpreterError):
    """An access outside its buffer that the compiler does not guard."""


class LayoutDependent(InterpreterError):
    """Threads hold different values of a fragment, and the layout decides which value is used."""


class UninitializedRead(InterpreterError):
    """A read of memory that was never written."""


class DataRace(InterpreterError):
    """Two threads, or two blocks, access one element without an order between them."""


class RemoteRace(DataRace):
    """Blocks of two devices access one element of a symmetric tensor, and no signal or barrier orders them."""


class StaleRead(RemoteRace):
    """A block reads what another device writes, and does not wait for its signal: it may see the old value."""


class RemoteOutOfBounds(OutOfBounds):
    """An access outside a symmetric tensor of any device, or to a device that does not exist."""


class SignalReused(InterpreterError):
    """A signal whose value is not larger than the last one, so that a wait may take the old one for the new one."""


class UnwrittenOutput(InterpreterError):
    """An element of an output tensor that no thread wrote."""


class AsyncReadBeforeWait(InterpreterError):
    """Data of an asynchronous copy or wgmma used before its wait."""


class BarrierDivergence(InterpreterError):
    """A block-wide barrier reached by only some of the threads it waits for."""


class Deadlock(InterpreterError):
    """Every thread that is still running waits for a barrier that cannot complete."""


class ReducerMisuse(InterpreterError):
    """A reducer that is updated before its start, read before its end, or never finalized."""


class MisalignedAccess(InterpreterError):
    """A vector access at an address that is not a multiple of the vector's bytes."""


class TypeMismatch(InterpreterError):
    """Operands of types that no instruction takes together."""


class ResourceLimit(InterpreterError):
    """More threads or shared memory than a GPU has."""


class LoweringFailed(InterpreterError):
    """TileLang cannot lower the kernel for the target."""


class AssertionFailed(InterpreterError):
    """A `T.assume` or `T.device_assert` of the kernel does not hold."""
