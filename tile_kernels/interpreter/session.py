"""The output of one `interpret` call: prints, findings, accesses, times, and the memory of a failing block."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tile_kernels.interpreter.errors import InterpreterError, Site

PRINTS_PER_LINE = 20


@dataclass(frozen=True)
class LineTime:
    """Time the interpreter spent on one source line.

    Attributes:
        file: Source file.
        line: Source line.
        seconds: Time, without that of nested statements.
        runs: How often it ran.
    """

    file: str
    line: int
    seconds: float
    runs: int


class Times:
    """Time by source line."""

    def __init__(self) -> None:
        self.spent: dict[Site, list[Any]] = {}
        self.inner = 0.0

    def lines(self) -> tuple[LineTime, ...]:
        """The slowest line first."""
        by_line: dict[tuple[str, int], list[Any]] = {}
        for site, (seconds, runs) in self.spent.items():
            row = by_line.setdefault((site.file, site.line), [0.0, 0])
            row[0] += seconds
            row[1] = max(row[1], runs)
        found = [LineTime(*where, seconds, runs) for where, (seconds, runs) in by_line.items() if where[1]]
        return tuple(sorted(found, key=lambda one: -one.seconds))


def timed(run: Callable[[Any], Any], site: Site) -> Callable[[Any], Any]:
    """A statement that also records its time, without that of nested statements."""
    if getattr(run, 'waits', False):
        return run

    def go(frame: Any) -> Any:
        times = frame.shared.session.times
        outer, times.inner = times.inner, 0.0
        started = time.perf_counter()
        try:
            return run(frame)
        finally:
            took = time.perf_counter() - started
            row = times.spent.setdefault(site, [0.0, 0])
            row[0] += took - times.inner
            row[1] += 1
            times.inner = outer + took

    for name in ('waits', 'escapes'):
        if hasattr(run, name):
            setattr(go, name, getattr(run, name))
    return go


@dataclass
class Session:
    """State of one `interpret` call besides the run itself.

    Attributes:
        collect: Findings are collected in `findings` instead of raised.
        strict: Accesses that TileLang's guards mask are findings.
        observer: What sees every access, or None.
        write: Where the lines of `T.print` go.
        looking: A print reads memory, which may be unwritten.
        unwritten: Lanes whose print has read unwritten memory, or None.
    """

    collect: bool = False
    strict: bool = False
    observer: Any = None
    write: Callable[[str], Any] = field(default_factory=lambda: sys.stdout.write)
    findings: dict[tuple[type, Site, str], InterpreterError] = field(default_factory=dict)
    prints: list[str] = field(default_factory=list)
    printed: dict[Site, int] = field(default_factory=dict)
    times: Times = field(default_factory=Times)
    looking: bool = False
    unwritten: Any = None

    def found(self, error: InterpreterError) -> None:
        """Raise a finding, or collect the first of its line and buffer and count the others."""
        if not self.collect:
            raise error
        key = (type(error), Site(error.kernel, error.filename, error.line), error.buffer)
        first = self.findings.setdefault(key, error)
        first.times += 1
        error.frame = None

    def show(self, frame: Any, site: Site, text: str, value: Callable[[Any], Any], mask: Any) -> None:
        """`T.print` of a value: to look at memory that nothing wrote is no finding."""
        self.print(frame, site, text, self.look(lambda: value(frame)), mask)
        self.unwritten = None

    def look(self, get: Callable[[], Any]) -> Any:
        """Get a value that is only printed."""
        self.looking = True
        try:
            return get()
        finally:
            self.looking = False

    def print(self, frame: Any, site: Site, text: str, value: Any, mask: Any) -> None:
        """`T.print`: one line for each active lane, up to a limit for each source line."""
        shape = _lane_shape(frame, value, mask)
        active = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
        before = self.printed.get(site, 0)
        self.printed[site] = before + int(active.sum())
        for flat in np.flatnonzero(active)[: max(0, PRINTS_PER_LINE - before)]:
            spot = np.unravel_index(flat, shape)
            block = tuple(int(ids[spot[0] if len(ids) > 1 else 0]) for ids in frame.block_ids)
            where = [f'block {block}'] + ([f'thread {int(spot[1])}'] if shape[1] > 1 else [])
            where += [f'iteration {tuple(int(part) for part in spot[2:])}'] if len(spot) > 2 else []
            shown = '' if value is None else f' = {_show(value, spot)}'
            if value is not None and self.unwritten is not None and _show(self.unwritten, spot) == 'True':
                shown = ' = not written'
            self._line(f'{site.kernel}: {text}{shown} ({", ".join(where)}), at {site}')

    def close(self) -> None:
        """Report how many lines were left out."""
        for site, count in self.printed.items():
            if count > PRINTS_PER_LINE:
                self._line(f'{site.kernel}: {count - PRINTS_PER_LINE} more prints, at {site}')

    def _line(self, text: str) -> None:
        self.prints.append(text)
        self.write(text + '\n')


def _lane_shape(frame: Any, value: Any, mask: Any) -> tuple[int, ...]:
    shapes = [np.shape(part) for part in (value if isinstance(value, tuple) else (value,)) if np.ndim(part)]
    shapes += [] if mask is None else [mask.shape]
    ndim = max([2 + len(frame.extents), *(len(one) for one in shapes)])
    shapes = [one + (1,) * (ndim - len(one)) for one in shapes]
    threads = frame.threads if ndim == 2 else 1
    return np.broadcast_shapes((frame.blocks, threads, *frame.extents), *shapes)


def _show(value: Any, spot: tuple[Any, ...]) -> str:
    if isinstance(value, tuple):
        return '(' + ', '.join(_show(part, spot) for part in value) + ')'
    if np.ndim(value):
        array = np.asarray(value)
        value = array[tuple(min(int(at), size - 1) for at, size in zip(spot, array.shape, strict=False))]
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    return f'{float(value):.9g}' if isinstance(value, (float, np.floating)) else str(int(value))


class PostMortem:
    """The memory of the block of a finding at the time of the failure.

    Arrays are masked at elements that were not written. The first axis of registers is the thread.

    Attributes:
        error: The finding.
        block: Coordinates of the block.
        shared: Shared buffers by name.
        fragment: Fragments by name.
        local: Registers by name.
        variables: Loop variables and other names bound at the time of the failure.
    """

    def __init__(self, error: InterpreterError, frame: Any, compiler: Any) -> None:
        self.error = error
        row = _row_of(frame, error.block)
        self.block = tuple(int(ids[row if len(ids) > 1 else 0]) for ids in frame.block_ids)
        self.shared: dict[str, np.ma.MaskedArray] = {}
        self.fragment: dict[str, np.ma.MaskedArray] = {}
        self.local: dict[str, np.ma.MaskedArray] = {}
        self.variables: dict[str, Any] = {}
        groups = {'shared': self.shared, 'fragment': self.fragment, 'local': self.local}
        for buffer in list(compiler.buffers.values()):
            if buffer.scope in groups and buffer.slot >= 0 and frame.memory[buffer.slot] is not None:
                found = _contents(buffer, frame, row)
                if found is not None:
                    groups[buffer.scope][buffer.name] = found
        for var, (slot, _) in compiler.slots.items():
            value = frame.env[slot] if slot < len(frame.env) else None
            if isinstance(value, np.ndarray) and value.ndim:
                value = value[row if value.shape[0] > 1 else 0].squeeze().copy()
            if isinstance(value, (int, float, np.generic, np.ndarray)):
                self.variables[str(var.name)] = value

    @property
    def names(self) -> dict[str, Any]:
        """Everything by name, as a debugger shows it."""
        return {**self.variables, **self.local, **self.fragment, **self.shared}

    def __repr__(self) -> str:
        parts = [f'{len(getattr(self, name))} {name}' for name in ('shared', 'fragment', 'local', 'variables')]
        return f'PostMortem(block={self.block}, {", ".join(parts)})'

    def debug(self) -> None:
        """Open pdb at the kernel's failing line; buffers and variables are names there."""
        import pdb

        code = compile('\n' * max(0, self.error.line - 1) + 'raise stop', self.error.filename or '<kernel>', 'exec')
        stop = InterpreterError(str(self.error))
        names = {**self.names, 'stop': stop, 'finding': self.error, 'post_mortem': self, 'np': np}
        try:
            exec(code, names)  # so that the debugger shows the kernel, not the interpreter
        except InterpreterError as error:
            trace = error.__traceback__
            pdb.post_mortem(None if trace is None else trace.tb_next)


def _row_of(frame: Any, block: tuple[int, ...] | None) -> int:
    if block is None:
        return 0
    for row in range(frame.blocks):
        if all(int(ids[row if len(ids) > 1 else 0]) == part for ids, part in zip(frame.block_ids, block, strict=False)):
            return row
    return 0


def _contents(buffer: Any, frame: Any, row: int) -> np.ma.MaskedArray | None:
    from tile_kernels.interpreter.memory.buffers import Place

    memory = frame.memory[buffer.slot]
    shape, strides = buffer.layout(frame)
    if buffer.offset is not None or buffer.dtype.lanes > 1:
        return None
    place = Place(0, shape, strides)
    if buffer.scope == 'local':
        return _registers(memory, buffer, frame, row, shape)
    values = np.asarray(memory.read(place, buffer.dtype))[row if memory.per_block else 0, 0].copy()
    missing = memory.unwritten(place, buffer.dtype)
    return np.ma.array(values, mask=False if missing is None else missing[row if memory.per_block else 0, 0].copy())


def _registers(memory: Any, buffer: Any, frame: Any, row: int, shape: tuple[int, ...]) -> np.ma.MaskedArray | None:
    if memory.unit_bits:
        return None
    size = int(np.prod(shape))
    kind = buffer.dtype.value
    found = np.ma.masked_all((frame.threads, size), kind)
    for element, value in enumerate(memory.values[:size]):
        if value is None:
            continue
        array = np.asarray(value)
        if array.ndim > 2:
            array = array.reshape(array.shape[0], array.shape[1], -1)[:, :, -1]
        lane = array if array.ndim < 2 else array[row if array.shape[0] > 1 else 0]
        found[:, element] = np.broadcast_to(np.asarray(lane, kind).reshape(-1), (frame.threads,))
    return found.reshape(frame.threads, *shape)
