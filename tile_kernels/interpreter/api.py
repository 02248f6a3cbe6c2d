"""Run kernels: `interpret`, its report, and the objects it accepts as a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tile_kernels.interpreter.errors import InterpreterError, Site, UnsupportedConstruct
from tile_kernels.interpreter.observe import Observer, Several, Touch, Watcher
from tile_kernels.interpreter.session import LineTime, PostMortem, Session

CHECKS = ('none', 'memory', 'races', 'all', 'collect')
ON_ERROR = ('raise', 'pdb')


@dataclass(frozen=True)
class Branch:
    """One side of an `if` of the kernel."""

    file: str
    line: int
    side: str
    ran: bool


@dataclass(frozen=True)
class Report:
    """The results of a run of a kernel.

    Attributes:
        kernel: Name of the kernel.
        seconds: Time the run took.
        branches: Every side of every `if`, and whether any lane took it.
        guarded: (line, buffer) of accesses that needed TileLang's bounds guard.
        errors: Findings of `checks='collect'`, one per exception type, line and buffer; `error.times` counts them.
        prints: The lines that `T.print` wrote.
        lines: Time spent per source line, the slowest first, if `profile` was given.
    """

    kernel: str
    seconds: float
    branches: tuple[Branch, ...] = ()
    guarded: tuple[tuple[int, str], ...] = ()
    errors: tuple[InterpreterError, ...] = ()
    prints: tuple[str, ...] = ()
    lines: tuple[LineTime, ...] = ()

    @property
    def findings(self) -> tuple[str, ...]:
        """One sentence each: first the collected findings, then notes about legal but unusual behavior."""
        return tuple(str(error) for error in self.errors) + tuple(
            f'{self.kernel}: {buffer} is accessed outside its shape at line {line}, where its guard steps in'
            for line, buffer in self.guarded
        )

    @property
    def uncovered(self) -> tuple[Branch, ...]:
        """Branches that no lane took."""
        return tuple(branch for branch in self.branches if not branch.ran)


def interpret(
    kernel: Any,
    *tensors: Any,
    checks: str = 'memory',
    pass_configs: dict[Any, Any] | None = None,
    lower: bool | str = False,
    strict: bool = False,
    watch: Callable[[Touch], Any] | None = None,
    at: int | str | Iterable[int | str] | None = None,
    observer: Observer | None = None,
    on_error: str = 'raise',
    profile: bool = False,
) -> Report:
    """Run a TileLang kernel on CPU tensors, from its own source.

    Args:
        kernel: A PrimFunc, or an object with a `prim_func` attribute (a compiled kernel).
        *tensors: The kernel's arguments in order, outputs included; outputs are written in place. A tensor that the
            kernel does not access may be None.
        checks: 'none', 'memory' (bounds, uninitialized reads, waits), 'races' (memory checks and races), 'all' (also
            unwritten outputs), or 'collect'. The last is like 'all', but the report collects findings and the kernel
            continues.
        pass_configs: Compiler switches of the kernel that change its semantics.
        lower: Also lower the kernel, for sm_90a or the architecture named here, and report what TileLang rejects.
        strict: Whether an access outside a tensor is a finding even if TileLang guards it.
        watch: Called with a `Touch` for every element that is loaded or stored; `breakpoint()` in it works.
        at: Source lines and names of buffers for `watch`; all if not given.
        observer: An `Observer`, which receives every access with its lanes, addresses, banks and sectors.
        on_error: 'raise', or 'pdb' to open the debugger at the failing line first.
        profile: Whether to record the time of every source line in `report.lines`.

    Returns:
        A report: time, branch coverage, necessary guards, findings, prints.

    Raises:
        InterpreterError: The kernel has an error; the subclass names it. `error.post_mortem` holds the shared, fragment
            and local contents of the failing block.
    """
    from tile_kernels.interpreter.engine.program import compiled

    if checks not in CHECKS:
        raise ValueError(f'interpret: checks must be one of {CHECKS}, got {checks!r}')
    if on_error not in ON_ERROR:
        raise ValueError(f'interpret: on_error must be one of {ON_ERROR}, got {on_error!r}')
    if at is not None and watch is None:
        raise ValueError('interpret: at chooses what watch is called for, and watch is not given')
    prim_func = getattr(kernel, 'prim_func', kernel)
    if not hasattr(prim_func, 'buffer_map'):
        words = getattr(kernel, '__name__', None) or type(kernel).__name__
        hint = ', which may build one' if callable(kernel) else ''
        raise TypeError(f'interpret: kernel must be a T.prim_func or a compiled kernel, got {words}{hint}')
    if lower:
        from tile_kernels.interpreter.checks.resources import check_lowering

        arch = 'sm_90a' if lower is True else str(lower)
        check_lowering(prim_func, _switches(kernel, prim_func, pass_configs), arch)
    options = options_of(kernel, pass_configs, checks)
    session = Session(checks == 'collect', strict, _one_observer(watch, at, observer))
    try:
        program = compiled(prim_func, replace(options, timed=True) if profile else options)
    except InterpreterError as error:
        if isinstance(error, UnsupportedConstruct):
            raise
        session.found(error)
        return Report(error.kernel, 0.0, (), (), (error,), (), ())
    shared, seconds = _run(program, tensors, session, on_error)
    branches = tuple(
        Branch(site.file, site.line, side, number in shared.covered)
        for number, (site, side) in enumerate(program.branches)
    )
    guarded = tuple(sorted({(_line(site), buffer) for site, buffer in shared.guarded}))
    errors = tuple(session.findings.values())
    return Report(program.name, seconds, branches, guarded, errors, tuple(session.prints), session.times.lines())


def _run(program: Any, tensors: tuple[Any, ...], session: Session, on_error: str) -> tuple[Any, float]:
    """Run the program; a finding gets the memory contents of its block."""
    from tile_kernels.interpreter.engine.program import Shared

    shared = Shared(session)
    try:
        return shared, program.run(tensors, shared)
    except InterpreterError as error:
        frame, error.frame = error.frame, None
        if frame is not None and frame.block_ids:
            error.post_mortem = PostMortem(error, frame, program.compiler)
        if session.collect and not isinstance(error, UnsupportedConstruct):  # the kernel cannot go on after it
            session.found(error)
            return shared, 0.0
        if on_error == 'pdb' and error.post_mortem is not None:
            error.post_mortem.debug()
        raise
    finally:
        session.close()


def _one_observer(watch: Any, at: Any, observer: Observer | None) -> Observer | None:
    if watch is None:
        return observer
    watcher = Watcher(watch, at)
    return watcher if observer is None else Several([watcher, observer])


def options_of(kernel: Any, pass_configs: dict[Any, Any] | None, checks: str) -> Any:
    """The compile options of a kernel: the checks, and the compiler switches that change its semantics."""
    from tile_kernels.interpreter.engine.translate import Options

    prim_func = getattr(kernel, 'prim_func', kernel)
    switches = _switches(kernel, prim_func, pass_configs)
    attrs = getattr(prim_func, 'attrs', None) or {}
    declared = tuple(int(index) for index in attrs['tilelang_out_idx']) if 'tilelang_out_idx' in attrs else ()
    return Options(
        checks='all' if checks == 'collect' else checks,
        guards=not switches.get('tl.disable_safe_memory_legalize', False),
        auto_sync=not switches.get('tl.disable_thread_storage_sync', False),
        outputs=declared or tuple(getattr(kernel, 'out_idx', None) or ()),
    )


def _line(site: Site) -> int:
    return site.line


def _switches(kernel: Any, prim_func: Any, given: dict[Any, Any] | None) -> dict[str, Any]:
    """Compiler switches by name, from the kernel, its attributes and the caller."""
    attrs = prim_func.attrs if getattr(prim_func, 'attrs', None) is not None else {}
    stored = attrs.get('tilelang_pass_configs', {})
    merged: dict[str, Any] = {}
    for source in (stored, getattr(kernel, 'pass_configs', None) or {}, given or {}):
        for key, value in source.items():
            merged[str(getattr(key, 'value', key))] = bool(value) if isinstance(value, (bool, int)) else value
    return merged
